"""Writing of a Hugging Face checkpoint in the released layout: a shard for each group."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from k3jax.checkpoint import table
from k3jax.checkpoint.files import write_text
from k3jax.checkpoint.report import Problems
from k3jax.checkpoint.shards import BITS, INDEX, read_header
from k3jax.checkpoint.source import Readable
from k3jax.config import K3Config
from k3jax.logical import group_params, groups

Entry = tuple[table.FileTensor, str, tuple[int, ...]]
"""A tensor to write, with its dtype and shape in the file."""


def save_hf(source: Readable, directory: str | Path, done: Callable[[str, int], None]) -> None:
    """Write a model as safetensors shards and their index.

    The same names, shapes, dtypes and values as the released files; vision tensors are not among
    them. A shard appears under its name when it is whole, and shards that are there already are
    kept, so a killed export goes on where it stopped. One logical tensor is in memory at a time.
    done: called with each group and its bytes.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = source.config
    names = groups(config)
    weight_map: dict[str, str] = {}
    total = 0
    for number, group in enumerate(names):
        file = directory / f"model-{number + 1:05}-of-{len(names):05}.safetensors"
        if not file.is_file():
            _write_shard(source, group, file)
        tensors = read_header(file, Problems(directory)) or {}
        weight_map |= dict.fromkeys(tensors, file.name)
        total += sum(math.prod(each.shape) * BITS[each.dtype] // 8 for each in tensors.values())
        done(group, sum(spec.nbytes for spec in group_params(config, group).values()))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_text(directory / INDEX, json.dumps(index, indent=2))


def _write_shard(source: Readable, group: str, file: Path) -> None:
    """Write one group: the header, then the tensors in the header's order."""
    temporary = file.with_name(f".{file.name}.tmp")
    entries = _entries(source, group)
    with temporary.open("wb") as stream:
        _write_header(stream, entries)
        for name, members in _by_logical_name(entries):
            _write_tensors(stream, source.read(group, name), members)
    os.replace(temporary, file)


def _entries(source: Readable, group: str) -> list[Entry]:
    """The group's tensors with the dtype and shape that they shall have in the file."""
    config = source.config
    dtypes = {name: _file_dtype(source, group, name) for name in group_params(config, group)}
    return [
        (tensor, dtypes[tensor.name], table.released_shape(config, tensor))
        for tensor in table.group_tensors(config, group)
    ]


def _file_dtype(source: Readable, group: str, name: str) -> str:
    """The released dtype, or f32 where bf16 would lose something."""
    config: K3Config = source.config
    spec = group_params(config, group)[name]
    dtype = table.released_dtype(config, name, spec)
    if spec.dtype == "f32" and dtype == "BF16":
        values = source.read(group, name)
        if not np.array_equal(values, values.astype(ml_dtypes.bfloat16).astype(np.float32)):
            return "F32"
    return dtype


def _by_logical_name(entries: Iterable[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    members: dict[str, list[Entry]] = {}
    for entry in entries:
        members.setdefault(entry[0].name, []).append(entry)
    yield from members.items()


def _write_header(stream: BinaryIO, entries: Iterable[Entry]) -> None:
    """The length of the JSON header, padded to 8 bytes, and the header itself."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor, dtype, shape in entries:
        end = position + math.prod(shape) * BITS[dtype] // 8
        header[tensor.hf_name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    stream.write(len(text).to_bytes(8, "little"))
    stream.write(text)


def _write_tensors(stream: BinaryIO, values: np.ndarray, members: list[Entry]) -> None:
    """Write one logical tensor, or each expert of it, as the file wants it."""
    for tensor, dtype, shape in members:
        part = values if tensor.expert is None else values[tensor.expert]
        if dtype == "BF16":
            part = part.astype(ml_dtypes.bfloat16, copy=False)
        stream.write(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        stream.write(bytes((math.prod(shape) - part.size) * part.itemsize))  # the tail of A_log
