"""Dates: days of the week, days between, days on; always through a tool."""

from __future__ import annotations

from datetime import date, timedelta

from checkpoints.recipe.draw import Draw
from checkpoints.recipe.script import Script
from checkpoints.recipe.topics.tools import result, tool
from checkpoints.recipe.topics.words import MONTHS, WEEKDAYS

WEEKDAY = tool("weekday", "Returns the day of the week of a date (YYYY-MM-DD).", date="string")
ADD_DAYS = tool("add_days", "Adds days to a date (YYYY-MM-DD).", date="string", days="number")
DAYS_BETWEEN = tool(
    "days_between", "Counts the days from one date to another.", start="string", end="string"
)
TOOLS = (WEEKDAY, ADD_DAYS, DAYS_BETWEEN)


def drawn_date(draw: Draw) -> date:
    """A day of this side between 1950 and 2049."""
    return draw.content(lambda: date(1950, 1, 1) + timedelta(draw.whole(0, 36_524)))


def written(draw: Draw, day: date) -> str:
    """A date as people write it."""
    month = MONTHS[day.month - 1]
    return draw.any(
        [
            day.isoformat(),
            day.isoformat(),
            f"{day.day} {month} {day.year}",
            f"{month} {day.day}, {day.year}",
        ]
    )


def declare(script: Script, needed: dict) -> None:
    """Declare the tool that is needed, alone or among the others."""
    script.declare(*(script.draw.some(TOOLS) if script.draw.chance(0.4) else [needed]))


def day_of_week(script: Script) -> None:
    """Which day of the week a date is."""
    draw, day = script.draw, drawn_date(script.draw)
    question = draw.phrase(
        [
            "what day of the week is {}?",
            "which weekday is {}?",
            "on which day of the week does {} fall?",
            "what weekday was or will be {}?",
            "tell me the weekday of {}.",
            "is {} a Sunday or a Monday, or which day?",
            "does {} fall on a Tuesday, on a Friday, or when?",
            "is {} a Saturday?",
            "was {} a Monday, or what day was it?",
            "is {} a Monday, a Tuesday, or what?",
        ]
    )
    script.ask(question.format(written(draw, day)))
    declare(script, WEEKDAY)
    name = WEEKDAYS[day.weekday()]
    thought = [f"The date is {day}.", "I call weekday."]
    script.call(thought, [("weekday", {"date": day.isoformat()})], [result(draw, name, "weekday")])
    sentence = draw.any([f"{day} is a {name}.", f"It is a {name}.", f"That day is a {name}."])
    script.answer([f"The tool says {name}."], sentence, name)


def days_on(script: Script) -> None:
    """The date some days after or before another."""
    draw, day, count = script.draw, drawn_date(script.draw), script.draw.whole(1, 500)
    after = draw.chance(0.65)
    phrases = [
        "which date is {count} days {side} {day}?",
        "what is the date {count} days {side} {day}?",
        "{count} days {side} {day}: which day is that?",
        "find the date {count} days {side} {day}.",
        "tell me the day that comes {count} days {side} {day}.",
        "what day is it {count} days {side} {day}?",
        "{count} days {side} {day} is which date?",
        "find out what is {count} days {side} {day}.",
        "find the day that is {count} days {side} {day}.",
    ]
    side = "after" if after else "before"
    question = draw.phrase(phrases).format(count=count, side=side, day=written(draw, day))
    script.ask(question)
    declare(script, ADD_DAYS)
    days = count if after else -count
    found = (day + timedelta(days)).isoformat()
    thought = [f"The date is {day}, and {side} means {days} days.", "I call add_days."]
    calls = [("add_days", {"date": day.isoformat(), "days": days})]
    script.call(thought, calls, [result(draw, found, "date")])
    sentence = draw.any([f"It is {found}.", f"The date is {found}.", f"That day is {found}."])
    script.answer([f"The tool says {found}."], sentence, found)


def days_apart(script: Script) -> None:
    """How many days lie between two dates."""
    draw, start = script.draw, drawn_date(script.draw)
    end = start + timedelta(draw.whole(1, 3000))
    question = draw.phrase(
        [
            "how many days are there between {} and {}?",
            "how many days are there from {} to {}?",
            "count the days from {} to {}.",
            "how far apart are {} and {}, in days?",
            "how many days pass from {} to {}?",
            "from {} to {}, how many days pass?",
            "how many days lie between {} and {}?",
            "what is the number of days between {} and {}?",
            "how many days pass between {} and {}?",
        ]
    )
    script.ask(question.format(written(draw, start), written(draw, end)))
    declare(script, DAYS_BETWEEN)
    count = (end - start).days
    thought = [f"From {start} to {end}.", "I call days_between."]
    calls = [("days_between", {"start": start.isoformat(), "end": end.isoformat()})]
    script.call(thought, calls, [result(draw, count, "days")])
    sentence = draw.any(
        [f"It is {count} days.", f"There are {count} days between them.", f"{count} days."]
    )
    script.answer([f"The result is {count}."], sentence, count)


def no_calendar(script: Script) -> None:
    """A weekday is asked for, and there is no tool for it."""
    draw, day = script.draw, drawn_date(script.draw)
    question = draw.phrase(
        [
            "what day of the week is {}?",
            "which weekday is {}?",
            "on which weekday will {} fall?",
            "what weekday is {}?",
            "tell me which day of the week {} is.",
            "which day of the week will {} be?",
            "what weekday will be {}?",
        ]
    )
    script.ask(question.format(written(draw, day)))
    sentence = draw.any(
        [
            "I cannot tell without a calendar tool.",
            "I have no calendar tool here, and I will not guess.",
            "For that I need a calendar tool, which I do not have here.",
        ]
    )
    thought = [f"The date is {day}.", "I have no calendar here.", "I must not guess."]
    script.say(thought, script.form.aloud(sentence), script.form.aloud("calendar"))
