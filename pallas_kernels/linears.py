"""Several linear layers of the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import jax
import jax.numpy as jnp

from pallas_kernels.activation import Activation
from pallas_kernels.impl import Impl, require_few_rows, require_impl
from pallas_kernels.linear_reference import linear_reference
from pallas_kernels.linears_pallas import linears_pallas

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Projection:
    """One weight [N, K] and what becomes of its products; see `linear`.

    `widths` parts the N (with an activation, N / 2) columns into results of their own.
    """

    weight: jax.Array
    activation: Activation | None = field(default=None, metadata=STATIC)
    widths: tuple[int, ...] | None = field(default=None, metadata=STATIC)
    out_dtype: jax.typing.DTypeLike | None = field(default=None, metadata=STATIC)

    @property
    def columns(self) -> int:
        """Columns of all its results."""
        return self.weight.shape[0] // (1 if self.activation is None else 2)


def linears(x: jax.Array, projections: Sequence[Projection], *, impl: Impl) -> list[jax.Array]:
    """Compute `linear(x, p.weight, activation=p.activation)` for each projection of x [W, K].

    Returns the results of all projections in order, those of one side by side: [W, n] for each of
    its widths, in its out_dtype (default x.dtype). Raises ValueError when shapes do not fit
    together, NotImplementedError when the kernel is asked for more than 64 rows.
    """
    require_impl("linears", impl)
    for projection in projections:
        _check(x, projection)
    shapes = [
        [
            jax.ShapeDtypeStruct((x.shape[0], width), projection.out_dtype or x.dtype)
            for width in projection.widths or (projection.columns,)
        ]
        for projection in projections
    ]
    if impl == "reference":
        return [part for each in projections for part in _reference(x, each)]
    require_few_rows("linears", x.shape[0])
    return linears_pallas(
        x,
        [projection.weight for projection in projections],
        [projection.activation for projection in projections],
        shapes,
        interpret=impl == "interpret",
    )


def _check(x: jax.Array, projection: Projection) -> None:
    shape = projection.weight.shape
    if x.ndim != 2 or len(shape) != 2 or x.shape[1] != shape[1]:
        raise ValueError(f"linears takes x[W,K] and weights [N,K], got {x.shape} and {shape}")
    if projection.activation is not None and shape[0] % 2:
        raise ValueError(f"an activation splits the {shape[0]} rows of weight into two halves")
    if projection.widths is not None and sum(projection.widths) != projection.columns:
        raise ValueError(f"widths {projection.widths} do not part {projection.columns} columns")


def _reference(x: jax.Array, projection: Projection) -> list[jax.Array]:
    out = linear_reference(
        x,
        projection.weight,
        norm=None,
        eps=0.0,
        activation=projection.activation,
        add=None,
        out_dtype=projection.out_dtype,
    )
    if projection.widths is None:
        return [out]
    return jnp.split(out, list(accumulate(projection.widths))[:-1], axis=1)
