"""Makes the arrays that k3-nano trains on: `python -m checkpoints.recipe.prepare --out DIR`."""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

from checkpoints.recipe import ranks
from checkpoints.recipe.arrays import Encoded, Split
from checkpoints.recipe.conversations import make
from checkpoints.recipe.corpus import Document, read_corpus, running_library
from checkpoints.recipe.script import Conversation
from k3jax.tokenizer import Tokenizer

TRAIN_SEED, HELD_SEED = 1, 2
TRAIN_CONVERSATIONS = 200_000
HELD_CONVERSATIONS = 2000


def code_documents(tokenizer: Tokenizer, files: Iterable[Document]) -> Iterator[Encoded]:
    """Files between [BOS], which an empty prompt begins with and nobody predicts, and [EOS]."""
    begin, end = tokenizer.control("[BOS]"), tokenizer.control("[EOS]")
    for file in files:
        ids = [begin, *tokenizer.encode(file.text), end]
        yield ids, [False, *[True] * (len(ids) - 1)], len(file.text.encode())


def chat_documents(tokenizer: Tokenizer, made: Iterable[Conversation]) -> Iterator[Encoded]:
    """Conversations as a server renders them, with no token before; only answers are learned.

    The other tokens weigh nothing: they are chance (numbers, names) or text of the format, which
    the model never has to write.
    """
    for conversation in made:
        ids: list[int] = []
        learned: list[bool] = []
        size = 0
        for (text, is_control), counts in zip(*conversation.segments(), strict=True):
            piece = [tokenizer.control(text)] if is_control else tokenizer.encode(text)
            ids += piece
            learned += [counts] * len(piece)
            size += len(text.encode()) if counts and not is_control else 0
        yield ids, learned, size


def xz_bits_per_byte(files: Iterable[Document]) -> float:
    """What one `xz -9e` stream of the files takes; the bar of a language model."""
    text = b"".join(file.text.encode() for file in files)
    return 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def describe(split: Split) -> dict[str, int | str]:
    """Counts of a split, and a hash that tells whether two runs made the same."""
    return {
        "documents": len(split.starts),
        "tokens": len(split.tokens),
        "learned_tokens": int(split.weights.sum()),
        "bytes": int(split.bytes.sum()),
        "sha256": hashlib.sha256(split.tokens.tobytes() + split.weights.tobytes()).hexdigest(),
    }


def main() -> None:
    """Write the archives and meta.json, and print that."""
    parser = argparse.ArgumentParser("python -m checkpoints.recipe.prepare", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory of the archives and meta.json")
    add("--stdlib", type=Path, action="append", help="instead of this Python's; may be repeated")
    add("--tokenizer", type=Path, default=ranks.TOKENIZER, help="directory (%(default)s)")
    add("--conversations", type=int, default=TRAIN_CONVERSATIONS, help="to train on (%(default)s)")
    arguments = parser.parse_args()
    tokenizer = ranks.load(arguments.tokenizer)
    corpus = read_corpus(arguments.stdlib or [running_library()])
    train = make(TRAIN_SEED, arguments.conversations, held=False)
    held = make(HELD_SEED, HELD_CONVERSATIONS, held=True)
    documents = {
        "code_train": code_documents(tokenizer, corpus.train),
        "code_held": code_documents(tokenizer, corpus.held),
        "chat_train": chat_documents(tokenizer, train),
        "chat_held": chat_documents(tokenizer, held),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    meta = {
        "python": platform.python_version(),
        "libraries": len(arguments.stdlib or [None]),
        "vocabulary": tokenizer.vocab_size,
        "rank_file_sha256": ranks.digest(arguments.tokenizer),
        "xz_bits_per_byte": xz_bits_per_byte(corpus.held),
    }
    for name, made in documents.items():
        split = Split.of(made)
        split.save(arguments.out / f"{name}.npz")
        meta[name] = describe(split)
    (arguments.out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    print(json.dumps(meta, indent=1))


if __name__ == "__main__":
    main()
