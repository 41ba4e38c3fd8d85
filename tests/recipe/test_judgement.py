"""What judges a checkpoint, on models that are made up: every number is known beforehand."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from checkpoints.recipe.arrays import Split
from checkpoints.recipe.batches import evenly
from checkpoints.recipe.card import card
from checkpoints.recipe.judge_chat import Reply, judge, questions, share
from checkpoints.recipe.judge_speed import Prompts, agreement, measure
from checkpoints.recipe.judge_text import Loss, bits_per_byte, head, held_loss, windows
from checkpoints.recipe.model import SHAPES, model_config
from checkpoints.recipe.table import table
from k3jax.chat import encode
from k3jax.request import Delta
from k3jax.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(Path(__file__).parents[2] / "checkpoints" / "k3-tiny")
VOCABULARY = 8
LENGTHS = [1, 5, 16, 17, 40]
SPLIT = Split.of([([n % VOCABULARY for n in range(size)], [True] * size, size) for size in LENGTHS])
EVEN = SimpleNamespace(logits=lambda ids: np.zeros((len(ids), VOCABULARY), np.float32))


def test_windows_predict_each_token_once_from_half_a_window_or_more():
    for begin, end in zip(SPLIT.starts, SPLIT.ends, strict=True):
        predicted = []
        for piece, skipped in windows(SPLIT, 16):
            if begin <= piece.start < end:
                places = range(piece.targets.start, piece.targets.stop)[skipped:]
                assert piece.stop - piece.start <= 16
                assert all(place - piece.start >= min(8, place - begin) for place in places)
                predicted += places
        assert predicted == list(range(begin + 1, end))


def test_losses_of_a_model_that_knows_nothing():
    bits = math.log2(VOCABULARY)
    learned = len(SPLIT.tokens) - len(LENGTHS)
    assert bits_per_byte(EVEN, SPLIT, 16) == pytest.approx(bits * learned / sum(LENGTHS))
    loss = held_loss(EVEN, head(SPLIT, 3), 16)
    assert loss.count == 1 + 5 + 16 - 3
    assert loss.mean == pytest.approx(math.log(VOCABULARY))
    assert Loss(0.0, 0.0).mean == 0.0
    assert head(SPLIT, 9) is SPLIT


def test_what_stands_for_all_is_from_all_over():
    assert evenly(range(10), 4) == [0, 3, 6, 9]
    assert evenly(range(3), 10) == [0, 1, 2]


def replied(question):
    """The right reply to a question."""
    *ids, stop = encode(TOKENIZER, question.turn.answer)
    return Reply(ids, stop)


def test_right_replies_are_right_and_others_say_what_is_wrong():
    asked = questions(30)
    for question in asked:
        verdict = judge(TOKENIZER, question, replied(question))
        assert (verdict.well_formed, verdict.stopped, verdict.problems) == (True, True, [])
    question = next(question for question in asked if question.arithmetic_call)
    reply = replied(question)
    cut = judge(TOKENIZER, question, replace(reply, stop_token=None))
    assert (cut.well_formed, cut.stopped) == (False, False)
    silent = judge(TOKENIZER, question, replace(reply, ids=[]))
    assert not silent.well_formed
    assert silent.problems[0].startswith("calls [], not [(")
    assert share(bool(n) for n in (0, 1, 1, 1)) == 0.75
    assert share([]) is None


class Speaker:
    """A model whose engine brings two tokens in a step and one in the last."""

    decode_config = SimpleNamespace(num_spec=2)

    def __init__(self):
        self.engine = self

    def stream(self, prompt, params):
        for count in (1, 2, 2, 1):
            yield Delta(request_id="a", token_ids=[7] * count)

    def stats(self):
        return SimpleNamespace(steps={"stock/prefill": 1})


def test_accepted_drafts_are_counted_but_for_the_last_step():
    found = measure(Speaker(), Prompts([[1]], [[2], [3]]), 6)
    assert found["steps"] == {"stock/prefill": 1}
    for kind in ("code", "chat"):
        assert found[kind]["tokens_per_step"] == 2.0
        assert found[kind]["accepted"] == [1.0, 0.0]
        assert found[kind]["tokens_per_second"] > 0


def test_replies_of_one_step_tell_nothing_of_drafts():
    model = Speaker()
    model.stream = lambda prompt, params: iter([Delta(request_id="a", token_ids=[7])] * 2)
    found = measure(model, Prompts([[1]], [[2]]), 2)["code"]
    assert (found["tokens_per_step"], found["accepted"]) == (None, [])


def test_where_both_paths_part_the_gap_is_told():
    texts = {"stock": [5, 6, 7], "specialized": [5, 6, 1]}
    logits = np.zeros((3, VOCABULARY))
    logits[-1, [1, 7]] = 1.0, 1.25

    def load(dtype, decode_backend):
        model = Speaker()
        model.generate = lambda prompt, max_tokens: texts[decode_backend]
        model.logits = lambda ids: logits[: len(ids)]
        return model

    found = agreement(load, Prompts([[4]], []), 3, "bfloat16")
    assert (found["same"], found["compared"]) == (2, 3)
    assert found["partings"] == [{"token": 2, "gap": 0.25}]


def results(gap, bits):
    """An evaluation with what is told, and else good."""
    shares = dict.fromkeys(("well_formed", "stopped", "arithmetic_calls", "after_result"), 1.0)
    counts = {"replies": 9, "arithmetic_calls_count": 4, "after_result_count": 3}
    partings = [] if gap is None else [{"token": 1, "gap": gap}]
    speed = {"tokens_per_second": 10.0, "tokens_per_step": None, "accepted": [0.5]}
    return {
        "text": {
            "bits_per_byte": bits,
            "xz_bits_per_byte": 2.0,
            "code": {"packed": 2.0, "trained": 2.0},
            "chat": {"packed": 1.0},
            "loads": [[1, 3]],
        },
        "chat": {**shares, **counts, "right": 0.5, "by_kind": {"plain": 0.5}},
        "agree": {"float32": {"same": 1, "compared": 2, "partings": partings}},
        "speed": {"A card": {"dtype": "float32", "stock": {"code": speed, "chat": speed}}},
    }


NOTHING = {"tokens_per_second": None, "tokens_per_step": None, "accepted": []}
UNTOLD = {"dtype": "float32", "stock": {"code": NOTHING, "chat": NOTHING}}


def test_the_table_says_what_was_not_reached():
    good, bad = table(results(None, 1.5)), table(results(0.1, 1.51))
    assert good.count("| yes |") == 8
    assert "**no**" not in good
    missed = [line for line in bad.splitlines() if "**no**" in line]
    assert ["bits a byte" in line for line in missed] == [True, False]
    assert "float32" in missed[1]
    assert "| stock | 10.00 | - | 0.50 | 10.00 | - | 0.50 |" in good
    assert "| stock | - | - | - | - | - | - |" in table({"speed": {"A card": UNTOLD}})
    assert table({}) == "| What | Must be | Is | |\n|---|---|---|---|"


def test_the_card_tells_the_run():
    run = {"steps": 1200, "code_rows": 12, "chat_rows": 20, "length": 64, "seed": 3}
    text = card("k3-nano", SHAPES["k3-nano"], model_config("k3-nano"), run, "THE TABLE")
    assert "1,200 steps of 12 rows of code and 20 of conversations, of 64\n" in text
    assert "THE TABLE" in text
    assert "8 (KKKMKKKM): 6 KDA and 2 latent attention" in text
