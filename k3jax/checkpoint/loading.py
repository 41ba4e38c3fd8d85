"""Streaming of a checkpoint of either kind onto the mesh, and packing it on the way."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from k3jax import parallel
from k3jax.checkpoint.files import conversion_state
from k3jax.checkpoint.huggingface import HuggingFaceCheckpoint
from k3jax.checkpoint.orbax import PARAMS, OrbaxCheckpoint
from k3jax.checkpoint.report import Problems
from k3jax.checkpoint.source import Source
from k3jax.config import K3Config
from k3jax.logical import check_tp, groups
from k3jax.params import Packed, join_groups, logical_shardings, pack_group

NAN_SCALE = 255
"""The E8M0 code of NaN, which packages decode differently: never loaded."""


@dataclass(frozen=True)
class LoadProgress:
    """How far loading is; bytes are those that this process holds, on all of its devices."""

    group: str
    groups_done: int
    groups: int
    bytes_done: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Mean throughput since the start."""
        return self.bytes_done / self.seconds if self.seconds else 0.0


def open_checkpoint(path: str | Path, config: K3Config) -> Source:
    """Open and check a directory of either kind; a context manager.

    Raises ValueError that lists every problem, or says that the directory is neither kind.
    """
    directory = Path(path)
    state = conversion_state(directory)
    if state is not None and not state.finished:
        raise ValueError(
            f"{directory} is a conversion of {state.source} that did not finish: "
            f"run `python -m k3jax.convert {state.source} {directory}` again"
        )
    if (directory / PARAMS).is_dir():
        return OrbaxCheckpoint(directory, config)
    if any(directory.glob("*.safetensors")) or any(directory.glob("*.safetensors.index.json")):
        return HuggingFaceCheckpoint(directory, config)
    what = "does not exist" if not directory.exists() else "holds neither"
    raise ValueError(
        f"{directory} {what}: a checkpoint directory has *.safetensors files (Hugging Face) or "
        f"{PARAMS}/ (converted by `python -m k3jax.convert`)"
    )


def load_params(
    path: str | Path,
    config: K3Config,
    mesh: Mesh,
    *,
    progress: Callable[[LoadProgress], None] | None = None,
) -> Packed:
    """Load a checkpoint of either kind as the packed tree, sharded over the mesh.

    Streams group by group: each rank reads only its slices, and the logical arrays of a layer go
    before the next is read. Raises ValueError for sizes that the mesh does not divide, and one
    that lists every problem of the checkpoint; most are found before any device memory is taken,
    MXFP4 scales of 255 (NaN) on the way.
    """
    check_tp(config, mesh.size)
    names = groups(config)
    packed: dict[str, Packed] = {}
    start, done = time.perf_counter(), 0
    with open_checkpoint(path, config) as source:
        problems = Problems(Path(path))
        for number, group in enumerate(names):
            shardings = logical_shardings(config, group, mesh)
            if problems:  # nothing will be returned: only look for more
                shardings = {name: s for name, s in shardings.items() if is_scale(name)}
            arrays = source.load(group, shardings)
            _check_scales(source, group, arrays, mesh, problems)
            if problems:
                packed.clear()
                continue
            packed[group] = jax.block_until_ready(pack_group(config, group, mesh)(arrays))
            done += sum(_local_bytes(array) for array in arrays.values())
            if progress:
                seconds = time.perf_counter() - start
                progress(LoadProgress(group, number + 1, len(names), done, seconds))
        problems.raise_any()
    return join_groups(packed)


def is_scale(name: str) -> bool:
    """Whether a logical name holds MXFP4 scales."""
    return name.endswith("_scale")


def _local_bytes(array: jax.Array) -> int:
    return sum(shard.data.nbytes for shard in array.addressable_shards)


def _check_scales(
    source: Source, group: str, arrays: Mapping[str, jax.Array], mesh: Mesh, problems: Problems
) -> None:
    """Note every expert with a NaN scale; all ranks see the same, so all of them stop."""
    scales = {name: array for name, array in arrays.items() if is_scale(name)}
    if scales:
        for name, found in jax.device_get(_nan_scales(mesh)(scales)).items():
            note_nan_scales(source, group, name, found, problems)


def note_nan_scales(
    source: Source, group: str, name: str, found: np.ndarray, problems: Problems
) -> None:
    """Note the experts of one scale tensor where `found` bool[E] is true."""
    for expert in np.flatnonzero(found):
        detail = f"a scale of {NAN_SCALE} is NaN in MXFP4"
        problems.add("NaN scale", source.describe(group, name, int(expert)), detail)


@functools.lru_cache(maxsize=8)
def _nan_scales(mesh: Mesh) -> Callable[[Any], Any]:
    """Compiled: u8[E, rows, columns] of each name -> bool[E], equal on every rank."""
    whole = NamedSharding(mesh, parallel.REPLICATED)
    return jax.jit(
        lambda scales: {name: jnp.any(x == NAN_SCALE, axis=(1, 2)) for name, x in scales.items()},
        out_shardings=whole,
    )
