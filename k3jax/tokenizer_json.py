"""`tokenizer.json` and `tokenizer_config.json`, for tools that do not read tiktoken ranks.

The same ids as `Tokenizer.encode`, with three differences that the format or its library imposes:
control tokens are recognized in any text, runs of more than 25,000 (non-)blanks are not cut, and
characters that are newer than the library's Unicode tables may be split otherwise. The chat
template is not written: Kimi-K3's is code, and a template for text could not keep what a user
writes apart from control tokens. No jax import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from k3jax.tokenizer import PATTERN, Tokenizer

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL = ("bos", "eos", "pad")


def tokenizer_files(directory: Path) -> dict[str, str]:
    """The two files' texts by name, from the rank file of the checkpoint in `directory`.

    None of them if there is no rank file, or a `tokenizer.json` already. Raises ValueError as
    `Tokenizer.from_directory` does.
    """
    if not (directory / "tiktoken.model").is_file() or (directory / TOKENIZER_JSON).is_file():
        return {}
    tokenizer = Tokenizer.from_directory(directory)
    config = json.loads((directory / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
    return {
        TOKENIZER_JSON: json.dumps(tokenizer_json(tokenizer), ensure_ascii=False, indent=1),
        TOKENIZER_CONFIG: json.dumps(_config(tokenizer, config), ensure_ascii=False, indent=1),
    }


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of a `tokenizer.json` in the format of the `tokenizers` library."""
    tokens = [tokenizer.token_bytes(rank) for rank in range(tokenizer.text_size)]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    pairs = [pair for token in tokens if (pair := last_merge(token, ranks)) is not None]
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    split = {
        "type": "Split",
        "pattern": {"Regex": PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, **_added_token(tokenizer, token)}
            for token in range(tokenizer.text_size, tokenizer.vocab_size)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a piece that is a token is not merged from bytes
            "vocab": {spell(token): rank for rank, token in enumerate(tokens)},
            "merges": [[spell(left), spell(right)] for left, right in pairs],
        },
    }


def last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that byte-pair encoding joins last when it makes `token` from its bytes.

    None for a single byte, and for a token that merging never reaches. What happens inside a token
    does not depend on what stands around it, as long as no merge crosses its borders: so this is
    the only pair that can ever become it, and one merge a token says all that the ranks say.
    """
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        best = min(joined)
        if best == len(ranks):
            return None
        place = joined.index(best)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def byte_letters() -> list[str]:
    """GPT-2's letter of each byte: itself where it is visible Latin-1, else one from U+0100 on."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    visible += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in visible]
    return [chr(byte if byte in visible else 256 + others.index(byte)) for byte in range(256)]


def _added_token(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"content": tokenizer.token_bytes(token).decode(), **flags, "special": True}


def _config(tokenizer: Tokenizer, config: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer's config with the class that reads `tokenizer.json`, and every control token.

    `auto_map` names Python files of the original model, which are not copied.
    """
    kept = {name: value for name, value in config.items() if name != "auto_map"}
    controls = range(tokenizer.text_size, tokenizer.vocab_size)
    ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    return kept | {
        "added_tokens_decoder": {str(token): _added_token(tokenizer, token) for token in controls},
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{
            f"{name}_token": tokenizer.token_bytes(token).decode()
            for name, token in zip(SPECIAL, ids, strict=True)
            if token is not None
        },
    }
