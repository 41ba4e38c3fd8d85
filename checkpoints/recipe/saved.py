"""The whole state of a training run in one file, and its log."""

from __future__ import annotations

import csv
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.recipe.batches import Cursor
from checkpoints.recipe.step import TrainState

STATE, LOG, FINAL, RUN = "state.npz", "log.csv", "final.json", "run.json"
CURSORS = "cursors"
WEIGHT = re.compile(r"\.(?:params|bias)\['(.*)'\]")  # its place in the state


def save_state(directory: Path, state: TrainState, cursors: dict[str, Cursor]) -> None:
    """Write weights, optimizer, step and the streams' positions; replaces the file at once."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(state))
    arrays = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    places = json.dumps({name: asdict(cursor) for name, cursor in cursors.items()})
    temporary = directory / f".{STATE}"
    with temporary.open("wb") as stream:
        np.savez(stream, **arrays, **{CURSORS: np.array(places)})
    os.replace(temporary, directory / STATE)


def load_state(directory: Path, like: TrainState) -> tuple[TrainState, dict[str, Cursor]]:
    """Read what `save_state` wrote; `like` has the shapes and dtypes. ValueError if they differ."""
    wanted, tree = jax.tree_util.tree_flatten_with_path(like)
    with np.load(directory / STATE) as arrays:
        places = json.loads(str(arrays[CURSORS]))
        found = {name: arrays[name] for name in arrays.files if name != CURSORS}
    shapes = {jax.tree_util.keystr(path): (leaf.shape, leaf.dtype) for path, leaf in wanted}
    if {name: (leaf.shape, leaf.dtype) for name, leaf in found.items()} != shapes:
        raise ValueError(f"{directory / STATE} is of another model or optimizer: start anew")
    state = jax.tree.unflatten(tree, [jnp.asarray(found[name]) for name in shapes])
    return state, {name: Cursor(**place) for name, place in places.items()}


def load_weights(directory: Path) -> dict[str, np.ndarray]:
    """The master weights f32 of a saved run by logical name, the routers' biases included."""
    with np.load(directory / STATE) as arrays:
        return {
            match[1]: arrays[name]
            for name in arrays.files
            if (match := WEIGHT.fullmatch(name)) is not None
        }


class Log:
    """A CSV of a run; lines of steps that are taken again are dropped."""

    def __init__(self, path: Path, step: int) -> None:
        """`step` is how many steps the run has taken."""
        self.path = path
        kept = [row for row in read_log(path) if int(row["step"]) <= step] if path.is_file() else []
        self.fields: list[str] = list(kept[0]) if kept else []
        if self.fields:
            self._write(kept, "w")

    def add(self, row: dict[str, Any]) -> None:
        """Append a line; every line has the fields of the first."""
        mode = "a" if self.fields else "w"
        self.fields = self.fields or list(row)
        self._write([row], mode)

    def _write(self, rows: list[dict[str, Any]], mode: str) -> None:
        with self.path.open(mode, newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, self.fields)
            if mode == "w":
                writer.writeheader()
            writer.writerows(rows)


def read_log(path: Path) -> list[dict[str, str]]:
    """The lines of a log."""
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
