"""Latent attention's heads: the kernels give what the reference gives, whatever the sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mla_absorb, mla_values

IMPLS = ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]
SIZES = {"k3": (12, 128, 64, 512, 128), "odd": (3, 24, 8, 200, 40), "no rope": (2, 32, 0, 32, 32)}


def made(seed, shape, dtype, scale=1.0):
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return jnp.asarray(values, dtype)


def check(found, wanted, dtype):
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    found, wanted = (np.asarray(array, np.float64) for array in (found, wanted))
    tolerance = 1e-5 if dtype == "float32" else 8e-3  # two roundings of one sum: a unit apart
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_kernels_and_reference(impl, dtype, sizes):
    heads, nope, rope, latent, value = sizes
    rows = 9
    query = made(0, (rows, heads * (nope + rope)), dtype)
    w_uk = made(1, (heads, nope, latent), "bfloat16", nope**-0.5)
    run = jax.jit(mla_absorb, static_argnames="impl")
    check(run(query, w_uk, impl=impl), run(query, w_uk, impl="reference"), dtype)
    mixed = made(2, (rows, heads, latent), dtype)
    w_uv = made(3, (heads, value, latent), "bfloat16", latent**-0.5)
    run = jax.jit(mla_values, static_argnames="impl")
    for gate in (None, made(4, (rows, heads * value), dtype)):
        wanted = run(mixed, w_uv, gate, impl="reference")
        check(run(mixed, w_uv, gate, impl=impl), wanted, dtype)


def test_misfits_are_refused():
    with pytest.raises(ValueError, match="mla_absorb takes"):
        mla_absorb(jnp.zeros((2, 9)), jnp.zeros((2, 4, 8)), impl="reference")
    with pytest.raises(ValueError, match="takes mixed"):
        mla_values(jnp.zeros((2, 3, 8)), jnp.zeros((2, 4, 8)), None, impl="reference")
    with pytest.raises(ValueError, match="takes gate"):
        mla_values(jnp.zeros((2, 2, 8)), jnp.zeros((2, 4, 8)), jnp.zeros((2, 7)), impl="reference")
    with pytest.raises(NotImplementedError, match="up to 64 rows"):
        mla_absorb(jnp.zeros((65, 8)), jnp.zeros((2, 4, 8)), impl="pallas")
