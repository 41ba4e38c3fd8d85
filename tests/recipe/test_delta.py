"""The recurrence of training against the row by row one, its gradient too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.recipe.delta import CHUNK, check_bound, delta_rule
from pallas_kernels.kda_common import KdaInputs, delta_step


def row_by_row(inputs, first, valid):
    """o of every row, a state at a time."""

    def advance(state, row):
        inputs, first, valid = row
        state = jnp.where(first[:, None, None, None], 0, state)
        after, _ = delta_step(state, inputs.key, inputs.value, inputs.decay, inputs.beta)
        state = jnp.where(valid[:, None, None, None], after, state)
        return state, jnp.einsum("bhvk,bhk->bhv", state, inputs.query)

    rows = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), (inputs, first, valid))
    batch, _, heads, key = inputs.key.shape
    empty = jnp.zeros((batch, heads, inputs.value.shape[-1], key), jnp.float32)
    return jnp.moveaxis(jax.lax.scan(advance, empty, rows)[1], 0, 1)


@pytest.mark.parametrize("chunks", [1, 3, 6])  # 6: three groups of two
def test_equals_the_row_by_row_form(chunks):
    rng = np.random.default_rng(chunks)
    batch, rows, heads, key, value = 2, chunks * CHUNK, 2, 16, 8

    def normal(*shape):
        return rng.normal(size=(batch, rows, heads, *shape)).astype(np.float32)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    decay = -5 / (1 + np.exp(6 - 3 * normal(key)))  # weak mostly, so that states last
    beta = 1 / (1 + np.exp(normal()))
    inputs = (unit(normal(key)), unit(normal(key)), normal(value), decay, beta)
    first, valid = np.zeros((2, batch, rows), bool)
    valid[:] = True
    first[:, 0] = first[0, 3 * rows // 4] = True
    valid[1, 5:9] = False
    real = valid[..., None, None].astype(np.float32)
    weight = normal(value) * real

    def loss(rule, *inputs):
        out = rule(KdaInputs(*inputs), jnp.asarray(first), jnp.asarray(valid))
        return jnp.sum(out * weight), out

    def both(rule):
        function = jax.value_and_grad(lambda *x: loss(rule, *x), range(5), has_aux=True)
        (_, out), gradients = jax.jit(function)(*map(jnp.asarray, inputs))
        return [out * real, *gradients]

    found = both(lambda *given: delta_rule(*given, jax.lax.Precision.HIGHEST))
    for here, wanted in zip(found, both(row_by_row), strict=True):
        difference = np.linalg.norm(here - wanted) / np.linalg.norm(wanted)
        assert difference < 2e-6, difference


def test_bounds_that_float32_does_not_hold_are_refused():
    check_bound(-5.0)
    for bound in (None, -5.5):
        with pytest.raises(ValueError, match=r"gate_lower_bound of -5\.4375 or more"):
            check_bound(bound)
