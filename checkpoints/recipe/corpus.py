"""Code to learn from and code to be judged by: the Python standard library, split by module.

Whole top-level modules are held out, in every interpreter's copy, together with their tests.
What repeats other text is dropped, and so is a file that shares text with a held-out one.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = frozenset(
    {
        "argparse",  # command lines
        "ast",  # trees of syntax
        "calendar",  # dates
        "configparser",  # a file format
        "csv",
        "dataclasses",  # code that writes code
        "difflib",  # algorithms on text
        "fractions",  # numbers
        "graphlib",
        "heapq",
        "json",
        "logging",  # a package of similar handlers
        "mailbox",  # a module of similar classes
        "sched",
        "shlex",
        "socketserver",
        "statistics",
        "subprocess",  # code for two systems
        "tarfile",  # a binary format
        "textwrap",
        "wsgiref",
        "zoneinfo",
    }
)
"""Modules that no training text comes from: about 1.2 MB, of all kinds."""
NO_TEXT = frozenset({"encodings", "pydoc_data", "site-packages"})
"""Tables of characters, a manual folded into one literal, and what is no part of the library."""
LARGEST = 300_000  # bytes; the few larger files are mostly tables of test cases
WINDOW = 5  # lines in a row, blank ones left out: what is shorter is idiom rather than a copy
COPIED = 0.8  # a file is a copy if this share of its windows was seen before
NEAR = 0.05  # and near a held-out module if this share is that module's


@dataclass(frozen=True)
class Document:
    """A source file: its path inside the library, with slashes, and its text."""

    name: str
    text: str

    @property
    def module(self) -> str:
        """The top-level module or package that it belongs to."""
        return self.name.split("/")[0].removesuffix(".py")


@dataclass(frozen=True)
class Corpus:
    """Documents to learn from and documents to be judged by."""

    train: list[Document]
    held: list[Document]


def running_library() -> Path:
    """Where the running interpreter keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_corpus(libraries: Sequence[Path]) -> Corpus:
    """Read standard libraries, the first one's held-out modules and the training text of all.

    Raises ValueError if a held-out module is missing from the first.
    """
    found = list(read_documents(libraries[0]))
    held = [document for document in found if document.module in HELD_OUT]
    missing = HELD_OUT - {document.module for document in held}
    if missing:
        raise ValueError(f"{libraries[0]} lacks the held-out modules {sorted(missing)}")
    others = (document for path in libraries[1:] for document in read_documents(path))
    train = [document for document in [*found, *others] if not concerns_held_out(document.name)]
    return Corpus(drop_copies(train, held), held)


def read_documents(library: Path) -> Iterator[Document]:
    """The Python files of a library that are UTF-8 and not too large, ordered by name."""
    names = (path.relative_to(library).as_posix() for path in library.rglob("*.py"))
    for name in sorted(names):
        if NO_TEXT.intersection(name.split("/")):
            continue
        content = (library / name).read_bytes()
        try:
            text = content.decode()
        except UnicodeDecodeError:  # a handful: tests of other encodings
            continue
        if text.strip() and len(content) <= LARGEST:
            yield Document(name, text.replace("\r\n", "\n"))


def concerns_held_out(name: str) -> bool:
    """Whether a path is part of a held-out module, or a test of one."""
    top, *_ = parts = name.removesuffix(".py").split("/")
    tested = [part.split("test_", 1)[1] for part in parts if "test_" in part]
    names = {top, *tested, *(test.split("_")[0] for test in tested)}
    return not HELD_OUT.isdisjoint(names)


def drop_copies(documents: Iterable[Document], held: Iterable[Document]) -> list[Document]:
    """The documents that neither copy one before them nor share text with a held-out one.

    Of the same file in several interpreters the first stays, and a later one that was rewritten.
    """
    judged = {window for document in held for window in windows(document.text)}
    seen: set[bytes] = set()
    texts: set[str] = set()
    kept = []
    for document in documents:
        own = windows(document.text)
        size = max(1, len(own))
        copied = document.text in texts or len(own & seen) >= COPIED * size
        if copied or len(own & judged) >= NEAR * size:
            continue
        seen |= own
        texts.add(document.text)
        kept.append(document)
    return kept


def windows(text: str) -> set[bytes]:
    """Hashes of every WINDOW lines in a row, indentation and blank lines left out."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    groups = (lines[start : start + WINDOW] for start in range(len(lines) - WINDOW + 1))
    return {hashlib.blake2b("\n".join(group).encode(), digest_size=8).digest() for group in groups}
