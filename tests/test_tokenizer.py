"""The recorded pre-split, bounded time on long runs, control ids, incremental text."""

import base64
import json
import random
import time
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

import k3jax.tokenizer
from k3jax.tokenizer import PATTERN, Detokenizer, Tokenizer

CHECKPOINT = Path(__file__).parent.parent / "checkpoints" / "k3-tiny"
TOKENIZER = Tokenizer.from_directory(CHECKPOINT)
CONTROLS = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>", "[PAD]"]


def write_checkpoint(directory, *, merges=(), names=None, config=None):
    """A tokenizer directory with the single bytes, then `merges`, as ranks."""
    tokens = [bytes([byte]) for byte in range(256)] + list(merges)
    lines = [f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens)]
    (directory / "tiktoken.model").write_text("".join(lines))
    names = names if names is not None else {len(tokens): "[BOS]", len(tokens) + 1: "[EOS]"}
    added = {token: {"content": name} for token, name in names.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    config = config or {"vocab_size": len(tokens) + 256, "bos_token_id": len(tokens)}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def merging(tmp_path_factory):
    """A tokenizer that merges long runs: a^2, a^4 ... a^1024, blanks too, and a few words."""
    merges = [letter * 2**power for letter in (b"a", b" ") for power in range(1, 11)]
    merges += [b"he", b"ll", b"hell", b"hello", b"\xe4\xbd", b"\xe4\xbd\xa0"]
    return Tokenizer.from_directory(
        write_checkpoint(tmp_path_factory.mktemp("merging"), merges=merges)
    )


def test_presplit_is_the_recorded_one(golden):
    recorded = json.loads((golden / "chat" / "presplit.json").read_text())
    assert recorded["pattern"] == PATTERN
    pattern = regex.compile(PATTERN, flags=regex.VERSION1)
    for text, pieces in recorded["splits"]:
        assert pattern.findall(text) == pieces


def test_encoding_follows_the_presplit(golden, tmp_path):
    """Make each recorded piece a token of its own: a text must then encode to just those."""
    recorded = json.loads((golden / "chat" / "presplit.json").read_text())
    for number, (text, pieces) in enumerate(recorded["splits"]):
        prefixes = {piece.encode()[:end] for piece in pieces for end in range(2, 200)}
        merges = sorted({p for p in prefixes if len(p) > 1}, key=lambda p: (len(p), p))
        directory = tmp_path / str(number)
        directory.mkdir()
        tokenizer = Tokenizer.from_directory(write_checkpoint(directory, merges=merges))
        tokens = [tokenizer.decode_bytes([token]).decode() for token in tokenizer.encode(text)]
        assert tokens == pieces


@given(st.text())
def test_text_survives(text):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert not any(TOKENIZER.is_control(token) for token in ids)


@given(st.lists(st.one_of(st.sampled_from(CONTROLS), st.text(max_size=8))))
def test_text_never_spells_a_control_token(parts):
    text = "".join(parts)
    assert max(TOKENIZER.encode(text), default=0) < 256
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_lone_surrogate_becomes_a_replacement_character():
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a\ufffdb"


@pytest.mark.parametrize("letter", ["a", "A", " ", "\n", "1", "!", "中", "ʰ", "\u0301", "\u3000"])
def test_a_million_equal_characters_take_linear_time(merging, letter):
    began = time.process_time()
    ids = merging.encode(letter * 1_000_000)
    assert time.process_time() - began < 5.0  # measured: below 0.5 s; quadratic would be minutes
    assert merging.decode_bytes(ids) == letter.encode() * 1_000_000


def test_long_mixed_runs_do_not_overflow_the_pattern(merging):
    generator = random.Random(0)
    letters = ["a", "B", "ʰ", "\u0301", "中", "!", " ", "\n", "1", "가", "ǅ"]
    runs = "".join(generator.choice(letters) * generator.randint(1, 60_000) for _ in range(30))
    assert merging.decode(merging.encode(runs)) == runs


def pieces_by_hand(text, slice_characters, run_characters):
    """The rule said plainly: a piece ends where its last run would grow past the bound."""
    for start in range(0, len(text), slice_characters):
        piece, run = "", 0
        for character in text[start : start + slice_characters]:
            run = run + 1 if piece and piece[-1].isspace() == character.isspace() else 1
            if run > run_characters:
                yield piece
                piece, run = "", 1
            piece += character
        yield piece


@given(st.text(alphabet=" \n\u3000\x1cab", max_size=60))
def test_pieces(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(k3jax.tokenizer, "SLICE_CHARACTERS", 17)
        patch.setattr(k3jax.tokenizer, "RUN_CHARACTERS", 5)
        assert list(k3jax.tokenizer._pieces(text)) == list(pieces_by_hand(text, 17, 5))


def test_control_tokens_have_the_scheme_of_the_released_model():
    ids = {name: TOKENIZER.control(name) for name in CONTROLS}
    assert ids == {
        "[BOS]": 508,
        "[EOS]": 509,
        "<|end_of_msg|>": 258,
        "<|open|>": 259,
        "<|close|>": 260,
        "<|sep|>": 261,
        "[PAD]": 511,
    }
    assert TOKENIZER.control("<|media_pad|>") == 510
    assert TOKENIZER.control("<|reserved_token_300|>") == 300
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id) == (508, 509, 511)
    assert TOKENIZER.vocab_size == 512
    assert TOKENIZER.decode([259, 104, 105, 261]) == "<|open|>hi<|sep|>"
    with pytest.raises(ValueError, match=r"no control token '<\|nothing\|>'"):
        TOKENIZER.control("<|nothing|>")
    for token in (-1, 512):
        with pytest.raises(ValueError, match=rf"token {token} is not in \[0, 512\)"):
            TOKENIZER.token_bytes(token)


def test_unnamed_slots_are_reserved(tmp_path):
    directory = write_checkpoint(tmp_path, merges=[b"ab"], names={257: "[BOS]"})
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.control("<|reserved_token_512|>") == 512
    assert tokenizer.encode("ab") == [256]


def chunks(draw, ids):
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


@st.composite
def cut_streams(draw):
    ids = draw(st.lists(st.one_of(st.integers(0, 255), st.integers(0, 511)), max_size=40))
    text = draw(st.text(max_size=10))
    return chunks(draw, TOKENIZER.encode(text) + ids)


@given(cut_streams(), st.booleans())
def test_incremental_text_does_not_depend_on_the_cuts(stream, show_control):
    detokenizer = Detokenizer(TOKENIZER, show_control=show_control)
    text = "".join(detokenizer.push(ids) for ids in stream) + detokenizer.finish()
    whole = Detokenizer(TOKENIZER, show_control=show_control)
    ids = [token for part in stream for token in part]
    assert text == whole.push(ids) + whole.finish()
    if show_control or max(ids, default=0) < 256:
        assert text == TOKENIZER.decode(ids)


@settings(max_examples=50)
@given(st.text(max_size=20))
def test_incremental_text_never_holds_half_a_character(text):
    detokenizer = Detokenizer(TOKENIZER)
    shown = ""
    for token in TOKENIZER.encode(text):
        shown += detokenizer.push([token])
        assert text.startswith(shown)
    assert shown + detokenizer.finish() == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": {5: "[BOS]"}}, r"names tokens \[5\] outside the control slots 256..511"),
        ({"names": {256: "[BOS]", 257: "[BOS]"}}, "two control tokens the same name"),
        ({"config": {"vocab_size": 300}}, "do not fit vocab_size 300"),
        ({"config": {"vocab_size": 512, "eos_token_id": 7}}, "token 7, which is no control slot"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_directory(write_checkpoint(tmp_path, **change))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("YQ== x\n", "line 1: not `base64 rank`"),
        ("!!! 0\n", "line 1: not `base64 rank`"),
        ("YQ== 0\n", "lacks the single bytes"),
        ("YQ== 1\n", "ranks that are not 0..0"),
    ],
)
def test_a_broken_rank_file_is_refused(tmp_path, line, message):
    write_checkpoint(tmp_path)
    (tmp_path / "tiktoken.model").write_text(line)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_k3_tiny_is_the_golden_one(golden):
    for path in sorted((golden / "k3-tiny-a").iterdir()):
        if path.suffix in (".safetensors", ".json"):
            assert (CHECKPOINT / path.name).read_bytes() == path.read_bytes()
