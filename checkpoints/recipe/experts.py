"""The routed experts for training: every pair of a row and an expert, in tiles of one expert each.

Exact at any load: no pair is dropped, and only what fills up an expert's last tile is wasted. Every
gather has a gather as its gradient, so that nothing is summed by atomic additions, whose order
changes from run to run.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Activation, gated
from pallas_kernels.moe_groups import group_pairs

TILE = 128  # rows of a product with one expert's weights


def run_experts(
    z: jax.Array,  # [W, Z]
    experts: jax.Array,  # i32[W, J]
    weights: jax.Array,  # f32[W, J]
    w13: jax.Array,  # bf16[E, 2I, Z] = [w1 | w3]
    w2: jax.Array,  # bf16[E, Z, I]
    activation: Activation,
) -> jax.Array:
    """The weighted sum of each row's experts, f32[W, Z]; products in the dtype of z."""
    rows, choices = experts.shape
    count = w13.shape[0]
    tile = min(TILE, rows)
    groups = group_pairs(experts, count, tile)
    pairs = groups.pairs.reshape(-1)
    pairs = jnp.where(pairs < rows * choices, pairs, -1)  # i32[M * tile]
    places = _places(pairs, rows * choices).reshape(rows, choices)

    own = groups.expert[:, None] == jnp.arange(count, dtype=jnp.int32)[None]
    own = own.astype(w13.dtype)
    x = spread(z, pairs, places).reshape(-1, tile, z.shape[1])
    gate_up = product("mtz,mfz->mtf", x, product("me,efz->mfz", own, w13).astype(w13.dtype))
    gate, up = jnp.split(gate_up, 2, axis=-1)
    inner = gated(activation, gate, up).astype(z.dtype)
    out = product("mti,mzi->mtz", inner, product("me,ezi->mzi", own, w2).astype(w2.dtype))
    return jnp.sum(collect(out.reshape(-1, z.shape[1]), pairs, places) * weights[..., None], axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum summed in float32; if either operand is float32, the other is raised to it.

    The gradient's products are of the same kind: a cotangent is rounded to bfloat16 where both
    operands are. Every letter of an operand stands in the other one or in the result.
    """
    if x.dtype != y.dtype:
        return _raised(equation, x, y)
    if x.dtype == jnp.float32:
        return jnp.einsum(equation, x, y, precision=jax.lax.Precision.HIGHEST)
    narrow = partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
    # XLA's CPU backend lacks some products of bfloat16 with float32 sums.
    return jax.lax.platform_dependent(x, y, cpu=partial(_raised, equation), default=narrow)


def _raised(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return product(equation, x.astype(jnp.float32), y.astype(jnp.float32))


def _product_backward(equation, kept, cotangent):
    x, y = kept
    of_x, of_y, out = equation.replace("->", ",").split(",")
    cotangent = cotangent.astype(x.dtype if x.dtype == y.dtype else jnp.float32)
    x_gradient = product(f"{out},{of_y}->{of_x}", cotangent, y)
    y_gradient = product(f"{of_x},{out}->{of_y}", x, cotangent)
    return x_gradient.astype(x.dtype), y_gradient.astype(y.dtype)


product.defvjp(lambda equation, x, y: (product(equation, x, y), (x, y)), _product_backward)


def _places(pairs: jax.Array, count: int) -> jax.Array:
    """Where each of `count` pairs stands among the tiles' places i32[M * tile]; -1 stands nowhere.

    Every pair stands somewhere.
    """
    index = jnp.where(pairs >= 0, pairs, count)
    places = jnp.arange(pairs.size, dtype=jnp.int32)
    return jnp.zeros(count, jnp.int32).at[index].set(places, mode="drop")


@jax.custom_vjp
def spread(x: jax.Array, pairs: jax.Array, places: jax.Array) -> jax.Array:
    """Rows x [W, Z] to the tiles' places [M * tile, Z]; zeros where pairs is -1."""
    choices = places.shape[1]
    rows = x[jnp.maximum(pairs, 0) // choices]
    return jnp.where(pairs[:, None] >= 0, rows, jnp.zeros_like(rows))


def _spread_forward(x, pairs, places):
    return spread(x, pairs, places), (pairs, places)


def _spread_backward(kept, cotangent):
    pairs, places = kept
    wide = cotangent[places].astype(jnp.float32)  # [W, J, Z]
    return jnp.sum(wide, axis=1).astype(cotangent.dtype), *_no_gradients(pairs, places)


@jax.custom_vjp
def collect(y: jax.Array, pairs: jax.Array, places: jax.Array) -> jax.Array:
    """The tiles' places y [M * tile, Z] back by row and choice: [W, J, Z]."""
    return y[places]


def _collect_forward(y, pairs, places):
    return collect(y, pairs, places), (pairs, places)


def _collect_backward(kept, cotangent):
    pairs, places = kept
    flat = cotangent.reshape(-1, cotangent.shape[-1])
    back = flat[jnp.maximum(pairs, 0)]
    back = jnp.where(pairs[:, None] >= 0, back, jnp.zeros_like(back))
    return back, *_no_gradients(pairs, places)


def _no_gradients(*indices: jax.Array) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros(each.shape, jax.dtypes.float0) for each in indices)


spread.defvjp(_spread_forward, _spread_backward)
collect.defvjp(_collect_forward, _collect_backward)
