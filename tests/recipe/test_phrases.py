"""Ways to say a thing: the last of every list is held out, and its words are taught elsewhere."""

import re

import pytest

from checkpoints.recipe.conversations import TOPICS, conversation
from checkpoints.recipe.draw import Draw
from checkpoints.recipe.forms import INSTRUCTIONS
from checkpoints.recipe.topics.coding import PYTHON_QUESTIONS, SNIPPET_QUESTIONS
from checkpoints.recipe.topics.facts import ABOUT_ITSELF, MANNERS, TOOL_QUESTIONS, UNKNOWN
from checkpoints.recipe.topics.lookup import TABLES
from checkpoints.recipe.topics.operations import OPERATIONS
from checkpoints.recipe.topics.services import SERVICES
from checkpoints.recipe.topics.strings import WORKS

SHORT = 3  # letters of a word that need not be taught
EACH = 100  # conversations of a kind, enough to draw from every list


class Listening(Draw):
    """A draw that keeps every list of phrases that it is asked for."""

    def __init__(self, seed, lists):
        super().__init__(seed, held=True)
        self.lists = lists

    def phrase(self, phrases):
        self.lists.add(tuple(phrases))
        return super().phrase(phrases)


def drawn_lists():
    """Every list of phrases that conversations of all kinds are drawn from."""
    lists = set()
    for kind in TOPICS:
        for number in range(EACH):
            conversation(Listening(f"{kind} {number}", lists), kind)
    return sorted(lists)


LISTS = drawn_lists()


def words(phrase):
    """The words of a phrase, without what is filled in."""
    found = re.findall(r"[a-z]+", re.sub(r"\{.*?\}", " ", phrase.lower()))
    return {word for word in found if len(word) > SHORT}


def plain(phrase):
    """A phrase in small letters, its fields without names."""
    return re.sub(r"\{.*?\}", "{}", phrase.lower()).strip()


TRAINED = {phrase for phrases in LISTS for phrase in phrases[:-1]}
TAUGHT = set().union(*map(words, TRAINED))


def test_every_list_is_found():
    known = [operation.questions for operation in OPERATIONS]
    known += [operation.stories for operation in OPERATIONS]
    known += [each.questions for each in (*TABLES, *WORKS, *SERVICES)]
    known += [questions for questions, _, _ in (*ABOUT_ITSELF, *MANNERS)]
    known += [UNKNOWN, TOOL_QUESTIONS, PYTHON_QUESTIONS, SNIPPET_QUESTIONS]
    known += map(tuple, INSTRUCTIONS.values())
    assert not set(known) - set(LISTS)


@pytest.mark.parametrize("phrases", LISTS, ids=lambda phrases: phrases[-1].strip())
def test_the_words_of_a_held_out_phrase_are_taught_in_others(phrases):
    assert words(phrases[-1]) - TAUGHT == set()


@pytest.mark.parametrize("phrases", LISTS, ids=lambda phrases: phrases[-1].strip())
def test_no_held_out_phrase_is_trained_on(phrases):
    assert plain(phrases[-1]) not in set(map(plain, TRAINED))


@pytest.mark.parametrize("phrases", LISTS, ids=lambda phrases: phrases[-1].strip())
def test_a_thing_is_said_in_at_least_five_ways_that_are_trained_on(phrases):
    assert len(set(phrases[:-1])) >= 5
