"""The tokenizer of k3-nano, and the arrays that it makes of code and conversations."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.recipe import ranks
from checkpoints.recipe.arrays import Split
from checkpoints.recipe.conversations import make
from checkpoints.recipe.corpus import Document
from checkpoints.recipe.prepare import chat_documents, code_documents, xz_bits_per_byte
from checkpoints.recipe.tokenizer import ranks_of, train
from k3jax.chat import end_ids

NANO = ranks.load(ranks.TOKENIZER)
CODE = Path(__file__).read_text()


def test_ids_are_those_of_the_scheme():
    assert (NANO.text_size, NANO.vocab_size) == (4096, 4352)
    assert (NANO.bos_id, NANO.eos_id, NANO.pad_id) == (4096, 4097, 4351)
    names = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]
    assert [NANO.control(name) for name in names] == list(range(4096, 4102))
    assert end_ids(NANO) == [4097, 4098]


def test_tokenizer_config_names_the_same_controls():
    config = json.loads((ranks.TOKENIZER / "tokenizer_config.json").read_text())
    names = {
        int(token): entry["content"] for token, entry in config["added_tokens_decoder"].items()
    }
    assert names == {token: NANO.token_bytes(token).decode() for token in range(4096, 4352)}
    assert (config["bos_token"], config["eos_token"]) == ("[BOS]", "[EOS]")


@given(st.text())
def test_text_comes_back(text):
    assert NANO.decode(NANO.encode(text)) == text


def test_each_digit_is_a_token():
    assert [NANO.decode([token]) for token in NANO.encode("48213")] == list("48213")
    digits = set(b"0123456789")
    assert not [token for token in range(256, 4096) if digits & set(NANO.token_bytes(token))]


def test_words_of_the_format_are_tokens():
    words = "message think response tools call argument assistant user system string number"
    assert {len(NANO.encode(word)) for word in words.split()} == {1}


@pytest.fixture(scope="module")
def small():
    """Merges of a short text, and the tokenizer that reads their ranks."""
    trained = train([CODE, CODE.upper(), "déjà vu 漢字 12345"], 600)
    return trained, ranks_of(trained)


def test_ranks_give_what_the_merges_give(small, tmp_path):
    trained, found = small
    ranks.write(tmp_path, found)
    read = ranks.load(tmp_path)
    assert list(found)[:256] == [bytes([byte]) for byte in range(256)]
    for text in [*CODE.split("\n\n"), "Wörter, 漢字 and 12345 more"]:
        pieces = [trained.decode([token]) for token in trained.encode(text).ids if text.isascii()]
        ids = read.encode(text)
        assert len(ids) == len(trained.encode(text).ids)
        assert read.decode(ids) == text
        assert not pieces or pieces == [read.decode([token]) for token in ids]


def test_training_is_the_same_each_time(small):
    assert ranks_of(train([CODE, CODE.upper(), "déjà vu 漢字 12345"], 600)) == small[1]


def test_code_stands_between_begin_and_end():
    ((ids, learned, size),) = code_documents(NANO, [Document("a.py", "x = 1\n")])
    assert NANO.decode(ids) == "[BOS]x = 1\n[EOS]"
    assert learned == [False, *[True] * (len(ids) - 1)]
    assert size == 6


def test_of_a_conversation_the_answers_are_learned():
    (made,) = make(11, 1, held=False)
    ((ids, learned, size),) = chat_documents(NANO, [made])
    texts, marks = made.segments()
    assert NANO.decode(ids) == "".join(text for text, _ in texts)
    kept = [token for token, counts in zip(ids, learned, strict=True) if counts]
    answers = "".join(text for (text, _), counts in zip(texts, marks, strict=True) if counts)
    assert NANO.decode(kept) == answers
    assert kept[-1] == NANO.control("<|end_of_msg|>")
    assert size == len("".join(NANO.decode([t]) for t in kept if not NANO.is_control(t)))


def test_arrays_are_read_as_they_were_written(tmp_path):
    documents = [([1, 4351, 2], [False, True, True], 5), ([7], [True], 1)]
    split = Split.of(documents)
    split.save(tmp_path / "some.npz")
    read = Split.load(tmp_path / "some.npz")
    assert (read.tokens.dtype, read.weights.dtype) == (np.uint16, np.uint8)
    assert read.tokens.tolist() == [1, 4351, 2, 7]
    assert read.weights.tolist() == [0, 1, 1, 1]
    assert (read.starts.tolist(), read.bytes.tolist()) == ([0, 3], [5, 1])
    assert (read.starts.dtype, read.bytes.dtype) == (np.int64, np.int64)


def test_xz_packs_what_repeats():
    assert xz_bits_per_byte([Document("a.py", "x = 1\n" * 10_000)]) < 0.1
