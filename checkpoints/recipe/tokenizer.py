"""Trains k3-nano's tokenizer: byte pairs by count, over Kimi-K3's pre-split pattern.

Digits never merge, so that a number is copied digit by digit. `python -m
checkpoints.recipe.tokenizer --out DIR` writes the rank file and tokenizer_config.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from checkpoints.recipe.conversations import make
from checkpoints.recipe.corpus import read_corpus, running_library
from checkpoints.recipe.ranks import RANKS, digest, write
from k3jax.tokenizer import PATTERN
from k3jax.tokenizer_json import byte_letters

CONVERSATIONS = 4000  # beside the code, about an eighth of the text
SEED = 5


def training_text(libraries: list[Path]) -> Iterator[str]:
    """The code to learn from, and what conversations say, piece by piece as they are encoded."""
    for document in read_corpus(libraries).train:
        yield document.text
    for conversation in make(SEED, CONVERSATIONS, held=False):
        yield from (text for text, is_control in conversation.segments()[0] if not is_control)


def train(texts: Iterable[str], ranks: int = RANKS) -> tokenizers.Tokenizer:
    """Byte pairs of the texts: the 256 bytes, then merges by how often they occur."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated"),
            pre_tokenizers.Split(tokenizers.Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=ranks,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    trained.train_from_iterator(texts, trainer)
    return trained


def ranks_of(trained: tokenizers.Tokenizer) -> dict[bytes, int]:
    """Ranks in tiktoken's sense: bytes in their own order, then merges in the order they came."""
    spelled = {character: byte for byte, character in enumerate(byte_letters())}
    ordered = sorted(trained.get_vocab().items(), key=lambda entry: entry[1])
    tokens = [bytes(spelled[character] for character in text) for text, _ in ordered]
    merged = [token for token in tokens if len(token) > 1]
    return {token: rank for rank, token in enumerate([*map(_byte, range(256)), *merged])}


def _byte(value: int) -> bytes:
    return bytes([value])


def main() -> None:
    """Train, write both files, and print their hash."""
    parser = argparse.ArgumentParser("python -m checkpoints.recipe.tokenizer", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory of the rank file and its config")
    add("--stdlib", type=Path, action="append", help="instead of this Python's; may be repeated")
    arguments = parser.parse_args()
    ranks = ranks_of(train(training_text(arguments.stdlib or [running_library()])))
    write(arguments.out, ranks)
    print(f"{len(ranks)} ranks, sha256 {digest(arguments.out)}")


if __name__ == "__main__":
    main()
