"""The small files of a checkpoint directory: config, tokenizer, and the state of a conversion."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

STATE = "conversion.json"
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")
KEPT_SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".md")


@dataclass(frozen=True)
class ConversionState:
    """What a directory is being converted from, and whether that is done."""

    source: str
    fingerprint: str
    finished: bool


def conversion_state(directory: Path) -> ConversionState | None:
    """Read the state of a conversion into `directory`; None if there is none."""
    file = directory / STATE
    if not file.is_file():
        return None
    try:
        return ConversionState(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}): delete {directory} and convert") from error


def write_state(directory: Path, state: ConversionState) -> None:
    """Write the state of a conversion, at once or not at all."""
    write_text(directory / STATE, json.dumps(asdict(state), indent=1))


def write_text(file: Path, text: str) -> None:
    """Write a small file at once or not at all."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)


def fingerprint(directory: Path) -> str:
    """A hash of a checkpoint's config and of its weight files' names, sizes and times."""
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for file in sorted(directory.rglob("*")):
        name = file.relative_to(directory)
        if file.is_file() and (len(name.parts) > 1 or name.name.endswith(WEIGHT_SUFFIXES)):
            stat = file.stat()
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def copy_small_files(source: Path, target: Path) -> None:
    """Copy config, tokenizer, chat template and licence; weights stay behind."""
    for file in sorted(source.iterdir()):
        is_weights = file.name.endswith(WEIGHT_SUFFIXES) or file.name == STATE
        if not file.is_file() or is_weights:
            continue
        if file.suffix in KEPT_SUFFIXES or file.name.startswith("LICENSE"):
            shutil.copyfile(file, target / file.name)
