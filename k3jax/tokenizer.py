"""Text to token ids and back: tiktoken ranks, and control tokens that text can never spell.

The scheme is that of Kimi-K3: ranks 0..n-1 from `tiktoken.model`, then 256 control slots from n,
named by `tokenizer_config.json` (`added_tokens_decoder`); begin, end and padding ids come from
`config.json`. No jax import.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken

CONTROL_SLOTS = 256
SLICE_CHARACTERS = 400_000  # the regular expression overflows its stack on much longer texts
RUN_CHARACTERS = 25_000  # and backtracks through a run of (non-)blanks

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
_RUN = re.compile(r"\s+|\S+")


@dataclass(frozen=True)
class SpecialIds:
    """The ids that config.json names; None where it names none."""

    bos: int | None
    eos: int | None
    pad: int | None


class Tokenizer:
    """Byte-pair ranks and control tokens of one checkpoint.

    `ranks` maps each byte string to its rank 0..n-1, `names` control ids to names; the slots up
    to `vocab_size` that `names` leaves out are called `<|reserved_token_ID|>`. Raises ValueError
    if the ranks have gaps or lack a byte, or if a name does not fit its slot.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        names: Mapping[int, str],
        *,
        special: SpecialIds,
        vocab_size: int | None = None,
    ) -> None:
        self.text_size = len(ranks)
        self.vocab_size = self.text_size + CONTROL_SLOTS if vocab_size is None else vocab_size
        self._bytes = _ranked_bytes(ranks)
        self._names = _control_names(names, self.text_size, self.vocab_size)
        self._controls = {name: token for token, name in self._names.items()}
        self.bos_id, self.eos_id, self.pad_id = special.bos, special.eos, special.pad
        for token in (special.bos, special.eos, special.pad):
            if token is not None and token not in self._names:
                raise ValueError(
                    f"config.json names token {token}, which is no control slot: those are "
                    f"{self.text_size}..{self.vocab_size - 1}"
                )
        self._encoding = tiktoken.Encoding(
            name="k3", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens={}
        )

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read `tiktoken.model`, `tokenizer_config.json` and `config.json` of a checkpoint."""
        directory = Path(path)
        config = _read_json(directory / "config.json")
        text_config = config.get("text_config", config)
        if not isinstance(text_config, dict):
            raise ValueError(f"{directory / 'config.json'}: text_config is not an object")
        vocab_size = text_config.get("vocab_size")
        if not isinstance(vocab_size, int | None):
            raise ValueError(f"{directory / 'config.json'}: vocab_size {vocab_size!r} is no number")
        special = SpecialIds(
            *(
                _first(config.get(key, text_config.get(key)))
                for key in ("bos_token_id", "eos_token_id", "pad_token_id")
            )
        )
        tokenizer_config = _read_json(directory / "tokenizer_config.json")
        try:
            added = dict(tokenizer_config.get("added_tokens_decoder", {}))
            names = {int(token): str(entry["content"]) for token, entry in added.items()}
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{directory / 'tokenizer_config.json'}: added_tokens_decoder is not "
                '{"ID": {"content": "NAME"}, ...}'
            ) from error
        ranks = _read_ranks(directory / "tiktoken.model")
        return cls(ranks, names, special=special, vocab_size=vocab_size)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, none of them control ids, in time linear in its length."""
        ids: list[int] = []
        for piece in _pieces(text):
            ids.extend(self._encoding.encode_ordinary(piece))
        return ids

    def control(self, name: str) -> int:
        """The id of a control token such as `<|open|>`; ValueError if there is none."""
        if name not in self._controls:
            raise ValueError(f"this tokenizer has no control token {name!r}")
        return self._controls[name]

    def has_control(self, name: str) -> bool:
        """Whether `control(name)` would succeed."""
        return name in self._controls

    def is_control(self, token: int) -> bool:
        """Whether an id stands for no text."""
        return token >= self.text_size

    def token_bytes(self, token: int) -> bytes:
        """The bytes that an id stands for: a control id's are its name. ValueError beyond them."""
        if 0 <= token < self.text_size:
            return self._bytes[token]
        if token not in self._names:
            raise ValueError(f"token {token} is not in [0, {self.vocab_size})")
        return self._names[token].encode()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that ids stand for, control tokens by name."""
        return b"".join(self.token_bytes(token) for token in ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text that ids stand for: control tokens by name, U+FFFD where bytes are no UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


class Detokenizer:
    """Turns a stream of ids into a stream of text that never ends inside a UTF-8 character.

    Control ids give no text, or their names with `show_control`. However the stream is cut, the
    pieces join to the same text.
    """

    def __init__(self, tokenizer: Tokenizer, *, show_control: bool = False) -> None:
        self._tokenizer = tokenizer
        self._show_control = show_control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that became complete with these ids."""
        pieces = []
        for token in ids:
            if not self._tokenizer.is_control(token):
                pieces.append(self._decoder.decode(self._tokenizer.token_bytes(token)))
                continue
            pieces.append(self.finish())
            if self._show_control:
                pieces.append(self._tokenizer.token_bytes(token).decode())
        return "".join(pieces)

    def finish(self) -> str:
        """U+FFFD if the stream ended inside a character, else nothing; ready for a new stream."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        return rest


def _pieces(text: str) -> Iterator[str]:
    """Cut a text as Kimi's tokenizer does: slices, in them runs of (non-)blanks, both bounded."""
    for start in range(0, len(text), SLICE_CHARACTERS):
        part = text[start : start + SLICE_CHARACTERS]
        if len(part) <= RUN_CHARACTERS:
            yield part
            continue
        begin = 0
        for run in _RUN.finditer(part):
            for end in range(run.start() + RUN_CHARACTERS, run.end(), RUN_CHARACTERS):
                yield part[begin:end]
                begin = end
        yield part[begin:]


def _ranked_bytes(ranks: Mapping[bytes, int]) -> list[bytes]:
    """Byte strings in the order of their ranks."""
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"tiktoken.model: {len(ranks)} ranks that are not 0..{len(ranks) - 1}")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"tiktoken.model lacks the single bytes {missing[:8]}")
    return sorted(ranks, key=ranks.__getitem__)


def _control_names(names: Mapping[int, str], first: int, vocab_size: int) -> dict[int, str]:
    """A name for each control id from `first` up to the vocabulary's end."""
    if vocab_size < first + CONTROL_SLOTS:
        raise ValueError(
            f"{first} ranks and {CONTROL_SLOTS} control slots do not fit vocab_size {vocab_size}"
        )
    outside = [token for token in names if not first <= token < vocab_size]
    if outside:
        raise ValueError(
            f"tokenizer_config.json names tokens {outside[:8]} outside the control slots "
            f"{first}..{vocab_size - 1}"
        )
    every = {
        token: names.get(token, f"<|reserved_token_{token}|>") for token in range(first, vocab_size)
    }
    if len(set(every.values())) != len(every):
        raise ValueError("tokenizer_config.json gives two control tokens the same name")
    return every


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Read lines of `base64 rank`."""
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"{path}, line {number}: not `base64 rank`: {line[:60]!r}") from error
    return ranks


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content


def _first(ids: int | Sequence[int] | None) -> int | None:
    """config.json may give one end id or several."""
    return ids if isinstance(ids, int) or ids is None else ids[0]
