"""Tools of all kinds that know something or do something: weather, clocks, shops, messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from checkpoints.recipe.draw import Draw
from checkpoints.recipe.script import Script
from checkpoints.recipe.topics.tools import tool
from checkpoints.recipe.topics.words import CITIES, LANGUAGES, NAMES, NOUNS, SKIES, WEEKDAYS

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Service:
    """A tool: what it takes and gives, and how one asks and answers.

    `takes` and `gives` name kinds of values; the questions name arguments, the answer both.
    """

    name: str
    description: str
    takes: dict[str, str]
    gives: dict[str, str]
    questions: tuple[str, ...]
    answer: str


SERVICES = (
    Service(
        "get_weather",
        "Returns the weather in a city.",
        {"city": "city"},
        {"temperature": "degrees", "sky": "sky"},
        (
            "what is the weather in {city}?",
            "how is the weather in {city} today?",
            "is it warm in {city}?",
            "do I need warm clothes in {city}?",
            "weather in {city}?",
            "is it cold outside in {city}?",
            "what is the weather like in {city}?",
            "how is it outside in {city}?",
            "fetch me the weather in {city}.",
            "what is it like outside in {city}?",
        ),
        "In {city} it is {sky} and {temperature} degrees.",
    ),
    Service(
        "get_time",
        "Returns the time in a city.",
        {"city": "city"},
        {"time": "clock"},
        (
            "what time is it in {city}?",
            "how late is it in {city}?",
            "tell me the time in {city}.",
            "what hour is it now in {city}?",
            "what is the hour in {city}?",
            "which time is it now in {city}?",
            "what hour do they have in {city}?",
            "which hour is it in {city}?",
        ),
        "In {city} it is {time}.",
    ),
    Service(
        "get_population",
        "Returns how many people live in a city.",
        {"city": "city"},
        {"population": "number"},
        (
            "how many people live in {city}?",
            "what is the population of {city}?",
            "how large is {city}?",
            "what is the number of inhabitants of {city}?",
            "count the inhabitants of {city}.",
            "how many people does {city} have?",
            "how many inhabitants are there in {city}?",
            "how many inhabitants does {city} have?",
        ),
        "{population} people live in {city}.",
    ),
    Service(
        "get_price",
        "Returns the price of a product.",
        {"product": "noun"},
        {"price": "number"},
        (
            "what does a {product} cost?",
            "how much is the {product}?",
            "find the price of the {product}.",
            "is a {product} expensive?",
            "how expensive would one {product} be?",
            "fetch the price of a {product}.",
            "tell me whether the {product} is expensive.",
            "how expensive is a {product}?",
        ),
        "The {product} costs {price}.",
    ),
    Service(
        "get_stock",
        "Returns how many pieces of a product there are.",
        {"product": "noun"},
        {"pieces": "number"},
        (
            "how many pieces of {product} are in stock?",
            "is there any {product} left in stock?",
            "check the stock of {product}.",
            "is there still any {product}?",
            "how much {product} do we have in stock?",
            "do we have any {product} left?",
            "are there still pieces of {product}?",
            "do we still have {product}?",
        ),
        "There are {pieces} pieces of {product}.",
    ),
    Service(
        "get_age",
        "Returns the age of a person.",
        {"person": "name"},
        {"age": "age"},
        (
            "how old is {person}?",
            "what is the age of {person}?",
            "tell me how old {person} is.",
            "give me the age of {person}.",
            "what age is {person}?",
            "find the age of {person}.",
            "tell me the age of {person}.",
        ),
        "{person} is {age} years old.",
    ),
    Service(
        "translate",
        "Translates a word into a language.",
        {"word": "noun", "language": "language"},
        {"translation": "made up"},
        (
            "translate {word} into {language}.",
            "what is {word} in {language}?",
            "how do you say {word} in {language}?",
            "what is the {language} word for {word}?",
            "give me {word} in {language}.",
            "which {language} word means {word}?",
            "give me a translation of {word} into {language}.",
            "give me the {language} word for {word}.",
        ),
        "{word} in {language} is {translation}.",
    ),
    Service(
        "get_distance",
        "Returns the distance between two cities in kilometres.",
        {"start": "city", "end": "city"},
        {"kilometres": "number"},
        (
            "how far is it from {start} to {end}?",
            "what is the distance from {start} to {end}?",
            "how many kilometres is {end} from {start}?",
            "how long is the journey from {start} to {end}?",
            "how far away is {end} from {start}?",
            "what is the way from {start} to {end} in kilometres?",
            "from {start} to {end}, how long is the trip?",
            "how long is the way from {start} to {end}?",
        ),
        "From {start} to {end} it is {kilometres} kilometres.",
    ),
    Service(
        "set_timer",
        "Starts a timer.",
        {"minutes": "age"},
        {"timer": "code"},
        (
            "set a timer for {minutes} minutes.",
            "wake me in {minutes} minutes.",
            "start a timer of {minutes} minutes.",
            "please remind me after {minutes} minutes.",
            "I need a timer for {minutes} minutes.",
            "when {minutes} minutes are over, remind me.",
            "count {minutes} minutes for me.",
            "remind me in {minutes} minutes.",
        ),
        "Timer {timer} runs for {minutes} minutes.",
    ),
    Service(
        "book_table",
        "Books a table in a restaurant.",
        {"people": "few", "day": "day"},
        {"booking": "code"},
        (
            "book a table for {people} on {day}.",
            "reserve a table for {people} people on {day}.",
            "I want to eat out on {day}, we are {people}.",
            "on {day} we need a table for {people}.",
            "we are {people} people and want a table on {day}.",
            "can you book a table on {day} for {people}?",
            "we are {people}: please reserve for {day}.",
            "we are {people} and need a table on {day}.",
        ),
        "The table for {people} on {day} is booked: {booking}.",
    ),
    Service(
        "send_message",
        "Sends a message to a person.",
        {"to": "name", "text": "words"},
        {"message": "code"},
        (
            'send {to} the message "{text}".',
            'write to {to}: "{text}".',
            'tell {to} "{text}".',
            'let {to} have this message: "{text}".',
            'I want {to} to know "{text}".',
            '{to} must know this: "{text}".',
            'please let {to} hear "{text}".',
            'let {to} know: "{text}".',
        ),
        "Message {message} was sent to {to}.",
    ),
    Service(
        "get_user",
        "Returns the name of the user with an id.",
        {"id": "number"},
        {"name": "name"},
        (
            "who is user {id}?",
            "what is the name of user {id}?",
            "find the user with the id {id}.",
            "which user is it with the id {id}?",
            "what is the user with id {id} called?",
            "the id {id} is of which user?",
            "who has the id {id}?",
            "which user has id {id}?",
        ),
        "User {id} is {name}.",
    ),
)
VERBS = {"get": ("get_", "find_", "read_", "current_", "show_", "", "fetch_")}
"""How the names of tools begin; the last way is for held-out conversations."""
ALIASES = {
    "city": ("city", "place", "location", "town"),
    "product": ("product", "item", "article", "thing"),
    "person": ("person", "name", "who"),
    "id": ("id", "user", "user_id"),
    "to": ("to", "person", "receiver"),
    "text": ("text", "message", "content"),
    "word": ("word", "text"),
    "start": ("start", "a"),
    "end": ("end", "b"),
}
"""Other names of parameters."""
FAILURES = 0.07  # of the calls
FAULTS = ("not available", "no connection", "timeout", "no such entry", "try again later")
TYPES = {"number": "number", "age": "number", "few": "number"}  # of arguments; others are strings


def drawn(draw: Draw, kind: str) -> str | int:
    """A value of a kind, of this side where its list is split."""
    lists = {"city": CITIES, "noun": NOUNS, "name": NAMES}
    if kind in lists:
        return draw.item(lists[kind])
    if kind == "number":
        return draw.number(5)
    if kind == "clock":
        return f"{draw.whole(0, 23):02}:{draw.whole(0, 59):02}"
    if kind == "code":
        return f"{draw.any('ABCDEFGHKLMNPRSTUVWXYZ')}{draw.whole(100, 9999)}"
    if kind == "words":
        return " ".join(draw.item(NOUNS) for _ in range(draw.whole(1, 4)))
    if kind == "made up":
        return draw.made_up()
    if kind in ("degrees", "age", "few"):
        return draw.whole(*{"degrees": (-20, 40), "age": (1, 99), "few": (2, 12)}[kind])
    return draw.any({"sky": SKIES, "language": LANGUAGES, "day": WEEKDAYS}[kind])


@dataclass(frozen=True)
class Offer:
    """A service as one conversation has it: its name and those of its parameters vary."""

    service: Service
    name: str
    keys: dict[str, str]

    def declaration(self) -> dict[str, Any]:
        """OpenAI's declaration of it."""
        kinds = self.service.takes.items()
        types = {self.keys[key]: TYPES.get(kind, "string") for key, kind in kinds}
        return tool(self.name, self.service.description, **types)

    def call(self, given: Arguments) -> tuple[str, Arguments]:
        """A call with arguments by the service's own names."""
        return self.name, {self.keys[key]: value for key, value in given.items()}


def offered(script: Script, service: Service) -> Offer:
    """The names that a service has in this conversation."""
    draw, (verb, _, rest) = script.draw, service.name.partition("_")

    def choose() -> Offer:
        name = f"{draw.phrase(VERBS[verb])}{rest}" if verb in VERBS else service.name
        keys = {key: draw.any(ALIASES.get(key, (key,))) for key in service.takes}
        return Offer(service, name, keys)

    return script.once(service.name, choose)


def declare(script: Script, services: Sequence[Service]) -> None:
    """Declare services, in any order."""
    offers = [offered(script, service) for service in script.draw.some(services)]
    script.declare(*(offer.declaration() for offer in offers))


def declare_among_others(script: Script, service: Service) -> None:
    """Declare a service, sometimes among others."""
    others = [other for other in SERVICES if other is not service]
    declare(script, [service, *script.draw.some(others, script.draw.any([0, 0, 1, 2]))])


def ask_a_service(script: Script) -> None:
    """A question that one of the tools answers."""
    draw, service = script.draw, script.draw.any(SERVICES)
    given = {key: drawn(draw, kind) for key, kind in service.takes.items()}
    found = {key: drawn(draw, kind) for key, kind in service.gives.items()}
    script.ask(draw.phrase(service.questions).format(**given))
    declare_among_others(script, service)
    offer = offered(script, service)
    about = " and ".join(map(str, given.values()))
    thought = [f"This is about {about}.", f"I call {offer.name}."]
    if draw.chance(FAILURES):
        fault = draw.any(FAULTS)
        script.call(thought, [offer.call(given)], [f"error: {fault}"])
        script.say([f"The tool failed: {fault}."], f"The tool gave an error: {fault}.", fault)
        return
    script.call(thought, [offer.call(given)], [_text(draw, found)])
    values = " and ".join(map(str, found.values()))
    parts = [str(value) for value in found.values()]
    script.say([f"The tool says {values}."], service.answer.format(**given, **found), *parts)


def ask_for_two(script: Script) -> None:
    """The same question about two things: two calls at once."""
    draw = script.draw
    service = draw.any([service for service in SERVICES if len(service.takes) == 1])
    ((parameter, kind),) = service.takes.items()
    first = second = drawn(draw, kind)
    while second == first:
        second = drawn(draw, kind)
    script.ask(draw.phrase(service.questions).format(**{parameter: f"{first} and {second}"}))
    declare_among_others(script, service)
    both = [{parameter: value} for value in (first, second)]
    found = [{key: drawn(draw, kind) for key, kind in service.gives.items()} for _ in both]
    offer = offered(script, service)
    thought = [f"This is about {first} and {second}.", f"I call {offer.name} for both."]
    script.call(
        thought, [offer.call(given) for given in both], [_text(draw, each) for each in found]
    )
    pairs = zip(both, found, strict=True)
    sentences = [service.answer.format(**given, **each) for given, each in pairs]
    parts = [str(value) for each in found for value in each.values()]
    script.say(["Both results are there."], " ".join(sentences), *parts)


def no_service(script: Script) -> None:
    """A question about the world, and no tool for it."""
    draw, service = script.draw, script.draw.any(SERVICES[:3])
    given = {key: drawn(draw, kind) for key, kind in service.takes.items()}
    script.ask(draw.phrase(service.questions).format(**given))
    sentence = draw.any(
        [
            "I cannot look that up: I have no tool for it here.",
            "I do not know, and I have no tool to look it up.",
            "Without a tool I cannot know that.",
        ]
    )
    thought = ["This is about the world.", "I have no tool for it.", "I must not guess."]
    script.say(thought, script.form.aloud(sentence), script.form.aloud("tool"))


def _text(draw: Draw, found: Arguments) -> str:
    """What a service returns: JSON, or words."""
    if draw.chance(0.6):
        return json.dumps(found, ensure_ascii=False)
    return ", ".join(f"{key}: {value}" for key, value in found.items())
