"""Saving of logical parameters as a converted (Orbax) checkpoint, group by group."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from k3jax.checkpoint.files import copy_small_files, write_text
from k3jax.checkpoint.loading import NAN_SCALE, is_scale, note_nan_scales
from k3jax.checkpoint.orbax import LazyArray, is_saved, save_group
from k3jax.checkpoint.report import Problems
from k3jax.checkpoint.source import Source
from k3jax.config import K3Config
from k3jax.logical import ENDS, group_params, groups
from k3jax.params import JAX_DTYPES

Done = Callable[[str, int], None]
"""Called with a group and its bytes when it is saved."""


def by_group(logical: Mapping[str, Any], config: K3Config) -> Iterator[tuple[str, dict[str, Any]]]:
    """Cut a whole model's arrays, by full logical name, into the groups that `save_orbax` takes."""
    for group in groups(config):
        start = "" if group == ENDS else f"{group}."
        yield group, {name: logical[start + name] for name in group_params(config, group)}


def save_orbax(
    directory: str | Path,
    raw_config: Mapping[str, Any],
    arrays: Iterable[tuple[str, Mapping[str, Any]]],
    *,
    files_from: str | Path | None = None,
) -> None:
    """Save a model as a converted checkpoint, with one group in memory at a time.

    raw_config: what config.json shall say. arrays: (group, {name: numpy or jax array}), every group
    once (`by_group` makes them of a flat dict). files_from: a directory whose tokenizer files are
    copied. Raises ValueError for arrays that are missing, unknown or of another shape or dtype.
    """
    directory = Path(directory)
    config = K3Config.from_dict(raw_config)
    directory.mkdir(parents=True, exist_ok=True)
    missing = set(groups(config))
    for group, tree in arrays:
        if group not in missing:
            raise ValueError(f"group {group!r} is unknown or comes twice")
        _check_arrays(directory, config, group, tree)
        save_group(directory, group, tree)
        missing.remove(group)
    if missing:
        raise ValueError(f"groups {sorted(missing)} are missing")
    if files_from is not None:
        copy_small_files(Path(files_from), directory)
    write_text(directory / "config.json", json.dumps(raw_config, indent=2))


def _check_arrays(directory: Path, config: K3Config, group: str, tree: Mapping[str, Any]) -> None:
    """Raise what is wrong with one group's arrays, all together."""
    problems = Problems(directory)
    specs = group_params(config, group)
    for name in tree.keys() - specs.keys():
        problems.add("unknown array", f"{group}.{name}")
    for name, spec in specs.items():
        if name not in tree:
            problems.add("missing array", f"{group}.{name}")
            continue
        found, dtype = tree[name], np.dtype(JAX_DTYPES[spec.dtype])
        if (tuple(found.shape), found.dtype) != (spec.shape, dtype):
            detail = f"{found.dtype}{list(found.shape)}, not {dtype}{list(spec.shape)}"
            problems.add("wrong array", f"{group}.{name}", detail)
    problems.raise_any()


def save_source(source: Source, directory: Path, done: Done) -> None:
    """Save the groups of an open checkpoint that `directory` does not hold yet.

    One tensor is in memory at a time. Raises ValueError that lists every NaN scale from the first
    group that has one on; that group and those after it are not saved.
    """
    problems = Problems(source.directory)
    for group in groups(source.config):
        specs = group_params(source.config, group)
        if not is_saved(directory, group):
            check_scales(source, group, problems)
            if problems:
                continue
            save_group(directory, group, {name: lazy(source, group, name) for name in specs})
        done(group, sum(spec.nbytes for spec in specs.values()))
    problems.raise_any()


def lazy(source: Source, group: str, name: str) -> LazyArray:
    """An array that is read from the source when it is written."""
    spec = group_params(source.config, group)[name]
    return LazyArray(spec, lambda: source.read(group, name))


def check_scales(source: Source, group: str, problems: Problems) -> None:
    """Note every expert of one group with a NaN scale."""
    for name in group_params(source.config, group):
        if is_scale(name):
            found = np.any(source.read(group, name) == NAN_SCALE, axis=(1, 2))
            note_nan_scales(source, group, name, found, problems)
