"""The feed-forward halves: padding rows read no experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.config import K3Config
from k3jax.model.ffn import Moe
from k3jax.parallel import alone

ROWS = np.array([2, 0, 3], np.int32)  # of each request's three
REAL = np.array([1, 1, 0, 0, 0, 0, 1, 1, 1], bool)


def filled(moe):
    """The module with random parameters in place of its zeros."""
    random = np.random.default_rng(0)

    def fill(leaf):
        if leaf.dtype == jnp.uint32:
            return jnp.asarray(random.integers(0, 1 << 32, leaf.shape, dtype=np.uint32))
        if leaf.dtype == jnp.uint8:
            return jnp.asarray(random.integers(120, 124, leaf.shape, dtype=np.uint8))
        return jnp.asarray(random.standard_normal(leaf.shape) / leaf.shape[-1] ** 0.5, leaf.dtype)

    graph, state = nnx.split(moe)
    return nnx.merge(graph, jax.tree.map(fill, state))


@pytest.mark.parametrize("impl", ["reference", "interpret"])
def test_only_real_rows_read_experts(golden, impl):
    moe = filled(Moe(K3Config.from_file(golden / "k3-tiny-a"), 1, impl))
    random = np.random.default_rng(1)
    x = jnp.asarray(random.standard_normal((len(REAL), moe.router.shape[1])), jnp.bfloat16)

    def run(x, rows):
        taps = {}
        with alone():
            out, health = moe(x, rows, lambda name, value, sharded=None: taps.update({name: value}))
        return out, health, taps["router_experts"], taps["router_weights"]

    run = jax.jit(run)
    wanted, _, every, _ = run(x, np.full_like(ROWS, 3))
    out, health, experts, weights = (np.asarray(part) for part in run(x, ROWS))
    assert health == 0
    np.testing.assert_array_equal(experts[REAL], np.asarray(every)[REAL])
    np.testing.assert_array_equal(experts[~REAL], -1)
    np.testing.assert_array_equal(weights[~REAL], 0)
    assert len(np.unique(experts[experts >= 0])) < len(np.unique(every))
    np.testing.assert_allclose(out[REAL], np.asarray(wanted)[REAL], rtol=1e-5, atol=1e-6)
    hidden = jnp.where(REAL[:, None], x, jnp.nan)
    found, health, experts, _ = run(hidden, ROWS)
    assert health == 0
    np.testing.assert_array_equal(np.asarray(experts)[~REAL], -1)
    np.testing.assert_array_equal(np.asarray(found)[REAL], out[REAL])
