"""Work on words: through tools, and by copying."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from checkpoints.recipe.draw import Draw
from checkpoints.recipe.script import Script
from checkpoints.recipe.topics.tools import result, tool
from checkpoints.recipe.topics.words import NOUNS


@dataclass(frozen=True)
class Work:
    """What a tool does to a text: its declaration, the work, and how people ask for it."""

    name: str
    description: str
    run: Callable[[str], Any]
    questions: tuple[str, ...]


WORKS = (
    Work(
        "reverse_text",
        "Returns a text backwards.",
        lambda text: text[::-1],
        (
            'reverse the text "{}".',
            'write "{}" backwards.',
            'what is "{}" spelled backwards?',
            "turn the word {} around.",
            'read "{}" from its end.',
            'spell "{}" from the last letter to the first.',
            "write {} from end to start.",
            'start at the end and write "{}" backwards.',
            'say "{}" backwards.',
            'say "{}" from the end to the start.',
        ),
    ),
    Work(
        "text_length",
        "Counts the characters of a text.",
        len,
        (
            'how long is "{}"?',
            'how many characters does "{}" have?',
            "count the letters of {}.",
            'what is the length of "{}"?',
            'how many letters is "{}" made of?',
            'of how many letters does "{}" consist?',
            "the word {} is made of how many characters?",
            'how many characters are there in "{}"?',
            'of how many characters is "{}" made?',
        ),
    ),
    Work(
        "sort_letters",
        "Sorts the letters of a text.",
        lambda text: "".join(sorted(text)),
        (
            'sort the letters of "{}".',
            "put the letters of {} into alphabetical order.",
            'which text do the sorted letters of "{}" give?',
            'order the letters in "{}" by the alphabet.',
            'sort "{}" from a to z.',
            "bring the letters of {} into order.",
            "from a to z, what are the letters of {}?",
            "order the letters of {} from a to z.",
        ),
    ),
    Work(
        "to_upper",
        "Writes a text in capital letters.",
        str.upper,
        (
            'write "{}" in capitals.',
            "make {} upper case.",
            'what is "{}" in capital letters?',
            "convert {} into capitals.",
            'change "{}" to capital letters.',
            'convert the word "{}" to big letters.',
            'put "{}" in upper case.',
            'convert "{}" to upper case.',
        ),
    ),
)


def drawn_word(draw: Draw) -> str:
    """A word of this side, half of the time one that does not exist."""
    return draw.made_up() if draw.chance(0.5) else draw.item(NOUNS)


def work_on_text(script: Script) -> None:
    """One of the tools on a word."""
    draw, word, work = script.draw, drawn_word(script.draw), script.draw.any(WORKS)
    script.ask(draw.phrase(work.questions).format(word))
    others = [other for other in WORKS if other is not work]
    declared = draw.some([work, *draw.some(others, draw.whole(0, 2))])
    script.declare(*(tool(each.name, each.description, text="string") for each in declared))
    value = work.run(word)
    thought = [f"The text is {word}.", f"I call {work.name}."]
    script.call(thought, [(work.name, {"text": word})], [result(draw, value)])
    sentence = draw.any([f"It is {value}.", f"The result is {value}.", f"The answer: {value}"])
    script.answer([f"The tool gave {value}."], sentence, value)


def count_letter(script: Script) -> None:
    """How often a letter stands in a word."""
    draw, word = script.draw, drawn_word(script.draw)
    letter = draw.any(word) if draw.chance(0.8) else draw.any("abcdefghijklmnopqrstuvwxyz")
    question = draw.phrase(
        [
            'how many times does {letter} occur in "{word}"?',
            "how often is the letter {letter} in the word {word}?",
            'count the letter {letter} in "{word}".',
            "how many {letter} are there in {word}?",
            'in the word "{word}", how many times is there a {letter}?',
            "look at the word {word}: how often do you see {letter}?",
            "the word is {word}. Count the letter {letter}.",
            'here is a word: "{word}". How often does {letter} occur?',
            "how many times do you find {letter} in {word}?",
            'the word is "{word}". How many times do you see {letter}?',
        ]
    )
    script.ask(question.format(letter=letter, word=word))
    script.declare(
        tool("count_letter", "Counts a letter in a text.", text="string", letter="string")
    )
    count = word.count(letter)
    thought = [f"The text is {word}, the letter {letter}.", "I call count_letter."]
    calls = [("count_letter", {"text": word, "letter": letter})]
    script.call(thought, calls, [result(draw, count, "count")])
    sentence = draw.any([f"I count {count}.", f"The count is {count}.", f"There are {count}."])
    script.answer([f"The result is {count}."], sentence, count)


def copy(script: Script) -> None:
    """Say a word, or find one in a list, without a tool."""
    draw = script.draw
    words = [drawn_word(draw) for _ in range(draw.whole(2, 5))]
    place, phrases = draw.any(
        [
            (0, ["what is the first word of: {}?", "say the first of these words: {}."]),
            (-1, ["what is the last word of: {}?", "say the last of these words: {}."]),
            (0, ["which word comes first here: {}?", "give me the word at the start of: {}."]),
            (-1, ["which word comes last here: {}?", "give me the word at the end of: {}."]),
        ]
    )
    script.ask(draw.any(phrases).format(" ".join(words)))
    word = words[place]
    which = "first" if place == 0 else "last"
    sentence = draw.any([f"The {which} word is {word}.", f"It is {word}.", f"{word}"])
    script.answer([f"The {which} word is {word}."], sentence, word)


def repeat(script: Script) -> None:
    """Say exactly what was asked for."""
    draw = script.draw
    text = " ".join(drawn_word(draw) for _ in range(draw.whole(1, 4)))
    question = draw.phrase(
        [
            "repeat after me: {}",
            'say "{}".',
            "write exactly this: {}",
            "repeat these words: {}",
            "copy these words: {}",
            "please copy: {}",
            "write this text: {}",
            "say this text again: {}",
            "copy this text: {}",
        ]
    )
    script.user(question.format(text).capitalize() if draw.chance(0.5) else question.format(text))
    script.answer([f"I say {text}."], text, text)
