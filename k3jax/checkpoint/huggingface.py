"""A Hugging Face checkpoint as a source of logical tensors, checked in full before it is read."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding

from k3jax.checkpoint import table
from k3jax.checkpoint.report import Problems
from k3jax.checkpoint.shards import NUMPY_DTYPES, Tensor, read_into, scan
from k3jax.config import K3Config
from k3jax.logical import ParamSpec, group_params
from k3jax.params import JAX_DTYPES

READERS = 8
"""Threads that read experts side by side; an expert is a few MB, a drive wants many in flight."""


class HuggingFaceCheckpoint:
    """Safetensors files of one model; `read` gives slices of logical tensors.

    Raises ValueError that lists every problem that headers (and the few values of A_log) show:
    tensors missing, unknown, duplicated, of a wrong shape or dtype, broken files, a stale index.
    """

    def __init__(self, directory: Path, config: K3Config) -> None:
        self.directory = directory
        self.config = config
        problems = Problems(directory)
        tensors = scan(directory, problems)
        self._tensors: dict[tuple[str, str], list[Tensor]] = {}
        self._check(tensors, problems)
        self._files: dict[Path, int] = {}
        self._pool = ThreadPoolExecutor(READERS)
        try:
            self._check_a_log(problems)
            problems.raise_any()
        except ValueError:
            self.close()
            raise

    def __enter__(self) -> HuggingFaceCheckpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and end the readers."""
        self._pool.shutdown()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}

    def _check(self, tensors: dict[str, Tensor], problems: Problems) -> None:
        """Match the files' tensors with the table: exactly one each, of the right form."""
        unknown = dict.fromkeys(tensors)
        for wanted in table.file_tensors(self.config):
            tensor = tensors.get(wanted.hf_name)
            if tensor is None:
                problems.add("missing tensor", wanted.hf_name)
                continue
            unknown.pop(wanted.hf_name, None)
            if tensor.dtype not in table.FILE_DTYPES[wanted.dtype]:
                allowed = " or ".join(table.FILE_DTYPES[wanted.dtype])
                problems.add("wrong dtype", wanted.hf_name, f"{tensor.dtype}, not {allowed}")
            if not table.shape_fits(wanted.name, tensor.shape, wanted.shape):
                right = list(table.released_shape(self.config, wanted))
                problems.add("wrong shape", wanted.hf_name, f"{list(tensor.shape)}, not {right}")
            self._tensors.setdefault((wanted.group, wanted.name), []).append(tensor)
        for name in unknown:
            if not table.is_ignored(self.config, name):
                problems.add("unknown tensor", name, f"in {tensors[name].file.name}")

    def _check_a_log(self, problems: Problems) -> None:
        """Note every A_log that has something after its heads' values."""
        heads = self.config.kda.num_heads
        for (group, name), (tensor, *_) in self._tensors.items():
            if name != "kda.a_log" or len(tensor.shape) != 1 or tensor.dtype not in NUMPY_DTYPES:
                continue
            tail = (slice(heads, None),)
            try:
                values = self._read_one(tensor, tensor.shape, tail)
            except ValueError:
                continue  # the shard is truncated, which is noted already
            if np.any(values != 0):
                full = table.hf_name(self.config, group, name)
                problems.add("nonzero tail", full, f"only the first {heads} values are heads")

    def _descriptor(self, file: Path) -> int:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[file]

    def describe(self, group: str, name: str, expert: int) -> str:
        """Name of an expert's tensor in the files."""
        return table.hf_name(self.config, group, name, expert)

    def read(self, group: str, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Read a slice of a logical tensor (all of it by default), in the logical dtype."""
        spec = group_params(self.config, group)[name]
        index = index or (slice(None),) * len(spec.shape)
        tensors = self._tensors[group, name]
        if "{expert}" not in table.TABLE[name]:
            out = self._read_one(tensors[0], spec.shape, index)
            return out.astype(JAX_DTYPES[spec.dtype], copy=False)
        return self._read_experts(tensors, spec, index)

    def _read_one(
        self, tensor: Tensor, shape: tuple[int, ...], index: tuple[slice, ...]
    ) -> np.ndarray:
        out = np.empty(_sizes(index, shape), NUMPY_DTYPES[tensor.dtype])
        read_into(self._descriptor(tensor.file), tensor.start, shape, index, out)
        return out

    def _read_experts(
        self, tensors: list[Tensor], spec: ParamSpec, index: tuple[slice, ...]
    ) -> np.ndarray:
        """Stack the experts' slices, read side by side."""
        chosen = tensors[index[0]]
        shape = spec.shape[1:]
        out = np.empty((len(chosen), *_sizes(index[1:], shape)), JAX_DTYPES[spec.dtype])
        descriptors = [self._descriptor(tensor.file) for tensor in chosen]

        def read(row: int) -> None:
            read_into(descriptors[row], chosen[row].start, shape, index[1:], out[row])

        for _ in self._pool.map(read, range(len(chosen)), chunksize=8):
            pass
        return out

    def load(self, group: str, shardings: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
        """Read the named tensors of one group onto the mesh, each rank only its slice."""
        specs = group_params(self.config, group)
        return {
            name: jax.make_array_from_callback(
                specs[name].shape,
                sharding,
                functools.partial(self.read, group, name),
                dtype=JAX_DTYPES[specs[name].dtype],
            )
            for name, sharding in shardings.items()
        }


def _sizes(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a slice."""
    return tuple(len(range(*part.indices(size))) for part, size in zip(index, shape, strict=True))
