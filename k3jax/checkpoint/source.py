"""What both kinds of checkpoint are to the code that loads, converts and exports them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding

from k3jax.config import K3Config


class Readable(Protocol):
    """A model whose logical tensors can be read to the host, one at a time."""

    config: K3Config

    def read(self, group: str, name: str) -> np.ndarray:
        """Read one whole logical tensor of a group, in its logical shape and dtype."""


class Source(Readable, Protocol):
    """An open checkpoint; a context manager that closes its files."""

    directory: Path

    def __enter__(self) -> Source: ...

    def __exit__(self, *exception: object) -> None: ...

    def describe(self, group: str, name: str, expert: int) -> str:
        """Name that an error gives to one expert of a stacked tensor."""

    def load(self, group: str, shardings: Mapping[str, NamedSharding]) -> dict[str, jax.Array]:
        """Read the named tensors of one group onto the mesh, each rank only its slice."""
