"""The `tokenizers` library finds the same ids in `tokenizer.json` as we do in the ranks."""

import base64
import json
import os
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from k3jax.tokenizer import SpecialIds, Tokenizer
from k3jax.tokenizer_json import last_merge, tokenizer_files, tokenizer_json

CHECKPOINT = Path(__file__).parent.parent / "checkpoints" / "k3-tiny"
SOURCES = Path(os.__file__).parent
ASSIGNED = st.characters(exclude_categories=["Cs", "Cn"])  # to Unicode, when Python was made


def tokenizer_of(merged, names=None):
    """The single bytes, then `merged` bytes strings, as ranks."""
    tokens = [bytes([byte]) for byte in range(256)] + list(merged)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return Tokenizer(ranks, names or {}, special=SpecialIds(None, None, None))


def library(tokenizer):
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(tokenizer)))


@pytest.fixture(scope="module")
def trained():
    """1,000 merges that the library learned from source code and other scripts; and its export."""
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1256,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = [(SOURCES / name).read_text() for name in ("argparse.py", "datetime.py", "random.py")]
    texts += ["深度學習模型 を 開發する Привет, мир! Ünïcödé 🙂🙂" * 20]
    model.train_from_iterator(texts, trainer)
    letters = {letter: byte for byte, letter in enumerate(tokenizer_letters())}
    spelled = sorted(model.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(letters[letter] for letter in text) for text, _ in spelled if len(text) > 1]
    assert len(merged) == 1000
    tokenizer = tokenizer_of(merged)
    return tokenizer, library(tokenizer)


def tokenizer_letters():
    """The letters of bytes 0 to 255, as the exported vocabulary has them."""
    vocabulary = tokenizer_json(tokenizer_of([]))["model"]["vocab"]
    assert set(vocabulary) == set(pre_tokenizers.ByteLevel.alphabet())
    return sorted(vocabulary, key=vocabulary.__getitem__)


def test_the_texts_of_the_recorded_presplit(golden, trained):
    tokenizer, exported = trained
    recorded = json.loads((golden / "chat" / "presplit.json").read_text())
    for text, _ in recorded["splits"]:
        assert exported.encode(text).ids == tokenizer.encode(text)


def test_source_code(trained):
    tokenizer, exported = trained
    for name in ("ast.py", "base64.py", "statistics.py"):
        text = (SOURCES / name).read_text()
        ids = tokenizer.encode(text)
        assert len(ids) < len(text) / 2  # it merges
        assert exported.encode(text).ids == ids
        assert exported.decode(ids) == text


@settings(max_examples=200)
@given(text=st.one_of(st.text(ASSIGNED), st.text("aAéǅʰ中\u0301 \n\r\t1!'sLl\x85\u3000\x1c")))
def test_any_text(trained, text):
    tokenizer, exported = trained
    assert exported.encode(text).ids == tokenizer.encode(text)


@st.composite
def rank_tables(draw):
    """Tokens of a and b in any order: some are made late, some never, some in several ways."""
    tokens = draw(
        st.lists(st.text("ab", min_size=2, max_size=6), min_size=1, max_size=16, unique=True)
    )
    return [token.encode() for token in tokens]


@settings(max_examples=100)
@given(rank_tables(), st.lists(st.text("ab", max_size=30), min_size=5, max_size=10))
def test_ranks_that_no_training_would_give(merged, texts):
    tokenizer = tokenizer_of(merged)
    exported = library(tokenizer)
    for text in texts:
        assert exported.encode(text).ids == tokenizer.encode(text)


def test_last_merge():
    tokens = [b"a", b"b", b"c", b"ab", b"abc", b"cc", b"bca"]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    assert last_merge(b"abc", ranks) == (b"ab", b"c")
    assert last_merge(b"cc", ranks) == (b"c", b"c")
    assert last_merge(b"a", ranks) is None
    assert last_merge(b"bca", ranks) is None  # neither bc nor ca is a token


def test_control_tokens_of_k3_tiny():
    tokenizer = Tokenizer.from_directory(CHECKPOINT)
    files = tokenizer_files(CHECKPOINT)
    exported = tokenizers.Tokenizer.from_str(files["tokenizer.json"])
    assert exported.get_vocab_size() == tokenizer.vocab_size
    for token in range(tokenizer.text_size, tokenizer.vocab_size):
        name = tokenizer.token_bytes(token).decode()
        assert exported.encode(f"a{name}b").ids == [97, token, 98]
        assert exported.id_to_token(token) == name
    ids = [tokenizer.control("<|open|>"), *tokenizer.encode("hi")]
    assert exported.decode(ids, skip_special_tokens=False) == "<|open|>hi"
    assert exported.decode(ids) == "hi"


def test_the_config_names_the_class_and_every_control_token(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (tmp_path / "tiktoken.model").write_text("".join(lines))
    config = {
        "added_tokens_decoder": {"256": {"content": "[BOS]"}, "257": {"content": "[EOS]"}},
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "model_max_length": 4096,
        "tokenizer_class": "TikTokenTokenizer",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"vocab_size": 512, "eos_token_id": 257}')
    written = json.loads(tokenizer_files(tmp_path)["tokenizer_config.json"])
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["model_max_length"] == 4096
    assert written["eos_token"] == "[EOS]"
    assert "auto_map" not in written
    assert "bos_token" not in written  # config.json names none
    names = {token: entry["content"] for token, entry in written["added_tokens_decoder"].items()}
    assert names["256"] == "[BOS]"
    assert names["511"] == "<|reserved_token_511|>"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_files(tmp_path) == {}  # somebody's own is kept
