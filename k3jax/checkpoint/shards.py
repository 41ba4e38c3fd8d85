"""Safetensors files by hand: headers checked in full, and slices read without mapping the file.

The safetensors library neither slices bf16 into numpy nor reports more than one fault; a mapped
file would count as host memory and a truncated one would kill the process.
Format: safetensors' own documentation (8 bytes of header length, JSON, data).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from k3jax.checkpoint.report import Problems

INDEX = "model.safetensors.index.json"
BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
    **dict.fromkeys(("U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F4", "F6_E2M3", "F6_E3M2"), 0),  # not read here: sizes are not checked
}
NUMPY_DTYPES: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "U8": np.uint8,
}
MAX_HEADER = 100_000_000
BLOCK = 32 << 20
"""Bytes read at once when only some columns are wanted."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, counted from the start of the file."""


def scan(directory: Path, problems: Problems) -> dict[str, Tensor]:
    """Read the headers of every shard and the index; note whatever does not agree."""
    tensors: dict[str, Tensor] = {}
    broken: set[str] = set()
    files = sorted(directory.glob("*.safetensors"))
    for file in files:
        header = read_header(file, problems)
        if header is None:
            broken.add(file.name)
            continue
        for name, tensor in header.items():
            if name in tensors:
                both = f"in {tensors[name].file.name} and in {file.name}"
                problems.add("duplicated tensor", name, both)
            else:
                tensors[name] = tensor
    if (directory / INDEX).is_file():
        _check_index(directory, tensors, broken, problems)
    elif len(files) > 1:
        problems.add("missing index", INDEX, f"there are {len(files)} shards")
    return tensors


def read_header(file: Path, problems: Problems) -> dict[str, Tensor] | None:
    """Tensors of one file; None, and a problem noted, if the header cannot be trusted."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER):
            detail = f"it claims {length} bytes of header, the file has {size}"
            problems.add("broken header", file.name, detail)
            return None
        text = stream.read(length)
    repeated: list[str] = []
    try:
        header = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, repeated))
        header.pop("__metadata__", None)
        spans = sorted((*entry["data_offsets"], name) for name, entry in header.items())
        tensors = {
            name: Tensor(
                file, header[name]["dtype"], tuple(header[name]["shape"]), 8 + length + start
            )
            for start, _, name in spans
        }
        fault = _span_fault(spans, tensors)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problems.add("broken header", file.name, f"{type(error).__name__} {error}")
        return None
    for name in repeated:
        problems.add("duplicated tensor", name, f"twice in {file.name}")
    if fault:
        problems.add("broken header", file.name, fault)
        return None
    end = 8 + length + (spans[-1][1] if spans else 0)
    if size < end:
        lost = sum(8 + length + last > size for _, last, _ in spans)
        detail = f"{size} bytes of {end}, {lost} of {len(spans)} tensors are not whole"
        problems.add("truncated shard", file.name, detail)
    elif size > end:
        problems.add("broken shard", file.name, f"{size - end} bytes more than its header tells")
    return tensors


def _unique(pairs: list[tuple[str, Any]], repeated: list[str]) -> dict[str, Any]:
    """An object from its pairs, noting the keys that come twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated += sorted({key for key in keys if keys.count(key) > 1})
    return result


def _span_fault(spans: list[tuple[int, int, str]], tensors: dict[str, Tensor]) -> str:
    """What is wrong with the byte ranges: they must tile the data and fit shape and dtype."""
    position = 0
    for start, end, name in spans:
        tensor = tensors[name]
        if start != position or end < start:
            return f"bytes {start} to {end} of {name} do not follow byte {position}"
        position = end
        if tensor.dtype not in BITS:
            return f"dtype {tensor.dtype!r} of {name} is unknown"
        bits = BITS[tensor.dtype]
        if any(type(size) is not int or size < 0 for size in tensor.shape):
            return f"shape {list(tensor.shape)} of {name}"
        if bits and (end - start) * 8 != math.prod(tensor.shape) * bits:
            shape = list(tensor.shape)
            return f"{end - start} bytes of {name} do not fit {tensor.dtype}{shape}"
    return ""


def _check_index(
    directory: Path, tensors: dict[str, Tensor], broken: set[str], problems: Problems
) -> None:
    """Note where the index and the shards disagree."""
    try:
        weight_map = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        named = set(weight_map.values())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problems.add("broken index", INDEX, f"{type(error).__name__} {error}")
        return
    present = {file.name for file in directory.glob("*.safetensors")}
    for file in sorted(named - present, key=str):
        count = sum(each == file for each in weight_map.values())
        problems.add("missing shard", str(file), f"the index puts {count} tensors there")
    for file in sorted(present - named):
        problems.add("stale index", file, "it does not name this shard")
    for name, file in weight_map.items():
        if name not in tensors and file in present - broken:
            problems.add("stale index", name, f"it is not in {file}")
        elif name in tensors and tensors[name].file.name != file:
            problems.add("stale index", name, f"it is in {tensors[name].file.name}, not {file}")
    for name, tensor in tensors.items():
        if name not in weight_map and tensor.file.name in named:
            problems.add("stale index", name, f"{tensor.file.name} has it, the index has not")


def read_into(
    descriptor: int, start: int, shape: Sequence[int], index: Sequence[slice], out: np.ndarray
) -> None:
    """Read a slice of a row-major tensor of `shape` that starts at byte `start`.

    Only the wanted rows are read. Columns are cut from whole rows, a block at a time: a rank's part
    of a row is shorter than what a drive reads at once.
    out: contiguous, of the slice's shape and the file's dtype. Raises ValueError if the file ends
    early.
    """
    bounds = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
    (first, last), inner = bounds[0], bounds[1:]
    row_bytes = math.prod(shape[1:]) * out.itemsize
    start += first * row_bytes
    if all(bound == (0, size) for bound, size in zip(inner, shape[1:], strict=True)):
        _fill(descriptor, start, out)
        return
    step = max(1, BLOCK // row_bytes)
    columns = tuple(slice(*bound) for bound in inner)
    for row in range(0, last - first, step):
        block = np.empty((min(step, last - first - row), *shape[1:]), out.dtype)
        _fill(descriptor, start + row * row_bytes, block)
        out[row : row + step] = block[(slice(None), *columns)]


def _fill(descriptor: int, start: int, out: np.ndarray) -> None:
    """Fill a contiguous array with the bytes from `start` on."""
    buffer = out.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], start + done)
        if count == 0:
            raise ValueError(f"the file ends {len(buffer) - done} bytes early")
        done += count
