"""Linear layer with an RMSNorm prologue and an activation or addition epilogue."""

from __future__ import annotations

import functools

import jax

from pallas_kernels.activation import Activation
from pallas_kernels.impl import Impl, require_few_rows, require_impl
from pallas_kernels.linear_pallas import linear_pallas
from pallas_kernels.linear_reference import linear_reference
from pallas_kernels.norm import Unnormed


def linear(
    x: jax.Array | Unnormed,  # [W, K]
    weight: jax.Array,  # [N, K]
    *,
    norm: jax.Array | None = None,  # [K]
    eps: float = 1e-5,
    activation: Activation | None = None,
    add: jax.Array | None = None,  # [W, N], or [W, N/2] with an activation
    out_dtype: jax.typing.DTypeLike | None = None,
    impl: Impl,
) -> jax.Array:
    """Compute epilogue(rms_norm(x) @ weight.T) with float32 accumulation.

    With `norm`, x is RMS-normalized by it first; `Unnormed` x is divided by its root mean squares.
    With `activation`, N is [gate | up] and the result act(gate, up) has N/2 columns. `add` is added
    last. Returns [W, N or N/2] in `out_dtype` (default x.dtype). Raises ValueError when shapes do
    not fit together, NotImplementedError when the kernel is asked for more than 64 rows.
    """
    require_impl("linear", impl)
    rows = x.rows if isinstance(x, Unnormed) else x
    _check(rows, weight, norm, activation, add)
    if isinstance(x, Unnormed):
        _check_runs(x, norm)
    run = linear_reference
    if impl != "reference":
        require_few_rows("linear", rows.shape[0])
        run = functools.partial(linear_pallas, interpret=impl == "interpret")
    return run(x, weight, norm=norm, eps=eps, activation=activation, add=add, out_dtype=out_dtype)


def _check(x, weight, norm, activation, add) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"linear takes x[W,K] and weight[N,K], got {x.shape} and {weight.shape}")
    if norm is not None and norm.shape != (x.shape[1],):
        raise ValueError(f"linear norm has shape {norm.shape}, x has {x.shape[1]} columns")
    columns = weight.shape[0]
    if activation is not None:
        if columns % 2:
            raise ValueError(f"an activation splits the {columns} rows of weight into two halves")
        columns //= 2
    if add is not None and add.shape != (x.shape[0], columns):
        raise ValueError(f"linear add has shape {add.shape}, the result {(x.shape[0], columns)}")


def _check_runs(x: Unnormed, norm: jax.Array | None) -> None:
    shape = x.squares.shape
    if len(shape) != 3 or shape[0] != x.rows.shape[0] or x.rows.shape[1] % shape[1]:
        raise ValueError(f"linear takes squares[W,G,N] for rows {x.rows.shape}, got {shape}")
    if norm is not None:
        raise ValueError("linear normalizes x by `norm` or by its squares, not by both")
