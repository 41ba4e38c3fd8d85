"""The files of k3-nano's tokenizer, in the scheme of the released ones."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from k3jax.tokenizer import CONTROL_SLOTS, SpecialIds, Tokenizer

TOKENIZER = Path(__file__).parent.parent / "k3-nano"
"""Where the trained one is kept."""
FILE = "tiktoken.model"
RANKS = 4096  # of it
NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}
"""Control slots by their distance from the first one: Kimi-K3's."""


def write(directory: Path, ranks: dict[bytes, int]) -> None:
    """Write `tiktoken.model` and `tokenizer_config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (directory / FILE).write_text("".join(lines))
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    config: dict[str, Any] = {
        "added_tokens_decoder": {
            str(token): {"content": name, **flags, "special": True}
            for token, name in _control_names(len(ranks)).items()
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "model_max_length": 1_048_576,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    text = json.dumps(config, indent=1, sort_keys=True)
    (directory / "tokenizer_config.json").write_text(text + "\n")


def load(directory: Path) -> Tokenizer:
    """The tokenizer that `write` wrote, before there is a config.json beside it."""
    ranks = {}
    for line in (directory / FILE).read_text().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    first = len(ranks)
    special = SpecialIds(bos=first, eos=first + 1, pad=first + 255)
    return Tokenizer(ranks, _control_names(first), special=special)


def digest(directory: Path) -> str:
    """The hash of a rank file, which tells whether two tokenizers are the same."""
    return hashlib.sha256((directory / FILE).read_bytes()).hexdigest()


def _control_names(first: int) -> dict[int, str]:
    return {
        first + slot: NAMES.get(slot, f"<|reserved_token_{first + slot}|>")
        for slot in range(CONTROL_SLOTS)
    }
