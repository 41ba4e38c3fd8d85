"""Talk without tools: about the model itself, manners, Python, memory, and what nobody knows."""

from __future__ import annotations

from collections.abc import Sequence

from checkpoints.recipe.draw import Draw
from checkpoints.recipe.script import Script
from checkpoints.recipe.topics import coding, facts
from checkpoints.recipe.topics.arithmetic import calculator, drawn_sum
from checkpoints.recipe.topics.services import SERVICES, declare
from checkpoints.recipe.topics.words import CITIES, COLOURS, NAMES, NOUNS


def about_itself(script: Script) -> None:
    """A question about k3-nano."""
    _tell(script, facts.ABOUT_ITSELF, "This is about me.")


def manners(script: Script) -> None:
    """A greeting, thanks or goodbye."""
    _tell(script, facts.MANNERS, "The user is polite.")


def _tell(script: Script, known: Sequence[facts.Fact], thought: str) -> None:
    draw = script.draw
    questions, answers, part = draw.any(known)
    question = draw.phrase(questions)
    script.user(question if draw.chance(0.3) else question[0].upper() + question[1:])
    script.say([thought], script.form.aloud(draw.any(answers)), script.form.aloud(part))


def python(script: Script) -> None:
    """What a name of Python means."""
    draw = script.draw
    name = draw.any(list(coding.PYTHON))
    script.ask(draw.phrase(coding.PYTHON_QUESTIONS).format(draw.any([name, name, f"`{name}`"])))
    text = script.form.aloud(coding.PYTHON[name])
    script.say([f"The question is about {name}."], text)


def snippet(script: Script) -> None:
    """A small function in Python."""
    draw = script.draw
    task = draw.any(list(coding.SNIPPETS))
    script.ask(draw.phrase(coding.SNIPPET_QUESTIONS).format(task))
    code = f"```python\n{coding.SNIPPETS[task]}\n```"
    script.say([f"I write a function that {task}."], code)


def own_tools(script: Script) -> None:
    """Which tools there are, by name."""
    draw = script.draw
    declare(script, draw.some(SERVICES, draw.whole(0, 3)))
    if draw.chance(0.5):
        calculator(script)
    names = [tool["function"]["name"] for tool in script.tools]
    script.ask(draw.phrase(facts.TOOL_QUESTIONS))
    text = f"I have these tools: {', '.join(names)}." if names else "I have no tools here."
    script.say(["I look at the list of tools."], text, *(names or ["no tools"]))


def unknown(script: Script) -> None:
    """A question about the world, which such a small model cannot answer; sometimes with tools."""
    draw = script.draw
    if draw.chance(0.3):
        declare(script, draw.some(SERVICES[3:], 2))
    names = {"city": draw.item(CITIES), "name": draw.item(NAMES), "noun": draw.item(NOUNS)}
    question = draw.phrase(facts.UNKNOWN).format(year=draw.whole(1500, 2100), **names)
    script.ask(question)
    text = script.form.aloud(draw.any(facts.DO_NOT_KNOW))
    thought = ["This is about the world.", "I do not know it."]
    script.say(thought, text, script.form.aloud("not know"))


def told_not_to_call(script: Script) -> None:
    """A sum, a calculator, and no permission to use it."""
    draw, asked = script.draw, drawn_sum(script.draw)
    calculator(script)
    script.ask(asked.question(draw))
    sentence = draw.any(
        [
            "I may not call tools now, and I will not guess.",
            "Without a tool I cannot work that out, and I may not call one now.",
        ]
    )
    thought = [f"The user wants {asked}.", "I may not call tools now.", "I must not guess."]
    script.say(thought, script.form.aloud(sentence), script.form.aloud("may not"))


MEMORIES = (
    (
        (
            "my name is {}.",
            "I am {}.",
            "please call me {}.",
            "I am called {}.",
            "you can call me {}.",
            "the name is {}.",
            "{} is what people call me.",
            "{} is my name.",
        ),
        (
            "what is my name?",
            "who am I?",
            "do you remember my name?",
            "what am I called?",
            "which name did I tell you?",
            "tell me my name.",
            "how do people call me?",
            "how am I called?",
        ),
        "Your name is {}.",
    ),
    (
        (
            "I live in {}.",
            "my home is {}.",
            "I am from {}.",
            "the city where I live is {}.",
            "I come from {}.",
            "{} is my home.",
            "I live in a city: {}.",
            "my city is {}.",
        ),
        (
            "where do I live?",
            "which city am I from?",
            "what is my city?",
            "which city is my home?",
            "where am I at home?",
            "in which city do I live?",
            "tell me where I live.",
            "where is my home?",
        ),
        "You live in {}.",
    ),
    (
        (
            "my favourite colour is {}.",
            "I like {} best.",
            "my best colour is {}.",
            "for me {} is best.",
            "the colour that I like is {}.",
            "{} is a colour that I love.",
            "{} is the best colour.",
        ),
        (
            "which colour do I like?",
            "what is my favourite colour?",
            "which of the colours is mine?",
            "what colour did I tell you?",
            "tell me my colour.",
            "what is that colour of mine?",
            "what colour is mine?",
        ),
        "Your colour is {}.",
    ),
    (
        (
            "my number is {}.",
            "remember the number {}.",
            "please keep {} in mind.",
            "please note the number {}.",
            "note that my number is {}.",
            "the number is {}.",
            "write down {}.",
            "note {}.",
        ),
        (
            "what was the number?",
            "which number did I tell you?",
            "tell me my number.",
            "what number was it?",
            "which number is mine?",
            "what is the number that I told you?",
            "what is my number?",
        ),
        "The number is {}.",
    ),
    (
        (
            "my password is {}.",
            "the secret word is {}.",
            "remember the word {}.",
            "keep the word {} for me.",
            "{} is the secret word.",
            "please keep this word safe: {}.",
            "my secret is {}.",
            "keep {} safe.",
        ),
        (
            "what was the word?",
            "which word did I tell you?",
            "tell me the secret word.",
            "which word is the secret one?",
            "what is my password?",
            "what was my secret?",
            "what is the secret word?",
        ),
        "The word is {}.",
    ),
)


def memory(script: Script) -> None:
    """Something is told, and asked for later."""
    draw, kind = script.draw, script.draw.whole(0, len(MEMORIES) - 1)
    tell, ask, answer = MEMORIES[kind]
    value = _remembered(draw, kind)
    said = draw.phrase(tell).format(value)
    script.user(said[0].upper() + said[1:])
    noted = draw.any(["I will remember that.", "Noted: I will remember it."])
    script.say([f"I remember {value}."], noted, "remember")
    for _ in range(draw.whole(0, 2)):
        draw.any([manners, about_itself, python, unknown])(script)
    script.ask(draw.phrase(ask))
    script.answer([f"The user told me {value}."], answer.format(value), value)


def _remembered(draw: Draw, kind: int) -> str | int:
    """Something to remember: a name, a city, a colour, a number or a word."""
    if kind == 3:
        return draw.content(lambda: draw.number(5))
    if kind == 4:
        return draw.made_up()
    return draw.any(COLOURS) if kind == 2 else draw.item(NAMES if kind == 0 else CITIES)
