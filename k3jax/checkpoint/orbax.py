"""A converted checkpoint: `config.json`, tokenizer files, and `params/` with one Orbax PyTree
checkpoint for each layer and one for the ends.

Arrays keep their logical names and are not packed, so one directory serves every TP. They are
stored uncompressed in plain zarr files rather than OCDBT: weights do not compress, and a missing
or short chunk shows from the file sizes alone.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from k3jax.checkpoint.report import Problems
from k3jax.config import K3Config
from k3jax.logical import ITEM_BYTES, DType, ParamSpec, group_params, groups
from k3jax.params import JAX_DTYPES

PARAMS = "params"
CHUNK_BYTES = 32 << 20
"""Largest chunk: a rank reads whole chunks, and larger ones cost memory on the way."""
ZARR_DTYPES: dict[str, DType] = {"|u1": "u8", "<f4": "f32", "bfloat16": "bf16"}


class LazyArray:
    """An array to save that is read only when its turn comes.

    load: gives the array, of this shape and dtype.
    """

    def __init__(self, spec: ParamSpec, load: Callable[[], np.ndarray]) -> None:
        self.shape = spec.shape
        self.dtype = np.dtype(JAX_DTYPES[spec.dtype])
        self.size = spec.size
        self.nbytes = spec.nbytes
        self.load = load


class LazyHandler(ocp.type_handlers.NumpyHandler):
    """Saves LazyArrays as numpy arrays, one after the other, so that one is in memory at a time."""

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Load, write and drop each array in turn; nothing is left to wait for."""
        saved = args or [ocp.SaveArgs()] * len(values)
        for value, info, arg in zip(values, infos, saved, strict=True):
            for future in await super().serialize([value.load()], [info], [arg]):
                future.result()
        return []


def _checkpointer() -> ocp.Checkpointer:
    """Orbax for plain, uncompressed zarr files."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler()),
        (np.ndarray, ocp.type_handlers.NumpyHandler()),
        (LazyArray, LazyHandler(deepcopy_host_arrays=False)),
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, type_handler_registry=registry
    )
    return ocp.Checkpointer(handler)


def is_saved(directory: Path, group: str) -> bool:
    """Whether this group was saved to its end: Orbax renames it into place when it is whole."""
    return (directory / PARAMS / group / "_METADATA").is_file()


def save_group(directory: Path, group: str, arrays: Mapping[str, Any]) -> None:
    """Save one group's logical arrays (numpy, jax or LazyArray); atomic, an older one is replaced.

    What a killed save of this group left behind is removed.
    """
    for leftover in (directory / PARAMS).glob(f"{group}.orbax-checkpoint-tmp*"):
        shutil.rmtree(leftover)
    tree = dict(arrays)
    save_args = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in tree}
    target = directory.absolute() / PARAMS / group
    with _checkpointer() as checkpointer:
        args = ocp.args.PyTreeSave(tree, save_args=save_args)
        checkpointer.save(target, args=args, force=True)
    for note in target.glob("commit_success.txt"):  # Orbax's; it says where on this machine
        note.write_text("Checkpoint commit was successful", encoding="utf-8")


class OrbaxCheckpoint:
    """A converted checkpoint as a source of logical tensors.

    Raises ValueError that lists every problem that metadata and file sizes show: groups or arrays
    missing or unknown, wrong shapes or dtypes, chunks missing or cut short.
    """

    def __init__(self, directory: Path, config: K3Config) -> None:
        self.directory = directory
        self.config = config
        problems = Problems(directory)
        for group in groups(config):
            self._check_group(group, problems)
        problems.raise_any()
        self._checkpointer = _checkpointer()

    def __enter__(self) -> OrbaxCheckpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._checkpointer.close()

    def _check_group(self, group: str, problems: Problems) -> None:
        path = self.directory / PARAMS / group
        if not is_saved(self.directory, group):
            problems.add("missing group", f"{PARAMS}/{group}")
            return
        specs = group_params(self.config, group)
        found = {entry.name for entry in path.iterdir() if (entry / ".zarray").is_file()}
        for name in sorted(found - set(specs)):
            problems.add("unknown array", f"{group}.{name}")
        for name, spec in specs.items():
            if name in found:
                _check_array(path / name, f"{group}.{name}", spec, problems)
            else:
                problems.add("missing array", f"{group}.{name}")

    def describe(self, group: str, name: str, expert: int) -> str:
        """Name of an expert's part of an array."""
        return f"{group}.{name}[{expert}]"

    def read(self, group: str, name: str) -> np.ndarray:
        """Read one whole logical tensor to the host."""
        return self._restore(group, {name: ocp.RestoreArgs(restore_type=np.ndarray)})[name]

    def load(self, group: str, shardings: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
        """Read the named tensors of one group onto the mesh, each rank only its chunks."""
        specs = group_params(self.config, group)
        arguments = {
            name: ocp.ArrayRestoreArgs(
                sharding=sharding,
                global_shape=specs[name].shape,
                dtype=JAX_DTYPES[specs[name].dtype],
            )
            for name, sharding in shardings.items()
        }
        return self._restore(group, arguments)

    def _restore(self, group: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        path = self.directory.absolute() / PARAMS / group
        arrays = self._checkpointer.restore(
            path,
            args=ocp.args.PyTreeRestore(
                item=dict.fromkeys(arguments, 0),
                restore_args=dict(arguments),
                partial_restore=True,
            ),
        )
        return dict(arrays)


def _check_array(path: Path, name: str, spec: ParamSpec, problems: Problems) -> None:
    """Compare one zarr array with its spec, and its chunks' sizes with what they must be."""
    try:
        metadata = json.loads((path / ".zarray").read_text(encoding="utf-8"))
        shape, chunks = tuple(metadata["shape"]), tuple(metadata["chunks"])
        dtype, separator = metadata["dtype"], metadata["dimension_separator"]
        counts = [-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True)]
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        problems.add("broken array", name, f"{type(error).__name__} {error} in .zarray")
        return
    if ZARR_DTYPES.get(dtype) != spec.dtype:
        problems.add("wrong dtype", name, f"{dtype}, not {spec.dtype}")
    if shape != spec.shape:
        problems.add("wrong shape", name, f"{list(shape)}, not {list(spec.shape)}")
    if metadata.get("compressor") is not None or ZARR_DTYPES.get(dtype) is None:
        return  # only the decoder can tell
    wanted = math.prod(chunks) * ITEM_BYTES[ZARR_DTYPES[dtype]]
    sizes = {entry.name: entry.stat().st_size for entry in os.scandir(path)}
    for position in itertools.product(*map(range, counts)):
        chunk = separator.join(map(str, position))
        if sizes.get(chunk) != wanted:
            size = sizes.get(chunk, "no file")
            problems.add("broken chunk", name, f"{chunk} should have {wanted} bytes: {size}")
