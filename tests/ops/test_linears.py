"""Several linear layers in one launch give what each gives alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Activation, Projection, choose_beside, linear, linears

SITU = Activation("situ")


def arrays(rows, depth, features, dtype):
    random = np.random.default_rng(rows)
    made = [random.standard_normal((n, depth)) * depth**-0.5 for n in features]
    return jnp.asarray(random.standard_normal((rows, depth)), dtype), [
        jnp.asarray(weight, jnp.bfloat16) for weight in made
    ]


def projections(weights):
    """A plain one, one in parts that fit no tile, and a gated one."""
    return (
        Projection(weights[0], out_dtype=jnp.float32),
        Projection(weights[1], widths=(50, 33, 12)),
        Projection(weights[2], activation=SITU),
    )


IMPLS = ["interpret", pytest.param("pallas", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [1, 9])
def test_each_gives_what_it_gives_alone(impl, dtype, rows):
    x, weights = arrays(rows, 256, (40, 95, 36), dtype)
    found = jax.jit(lambda x, w: linears(x, projections(w), impl=impl))(x, weights)
    plain, *parts, gated = found
    wanted = linear(x, weights[0], out_dtype=jnp.float32, impl="reference")
    whole = linear(x, weights[1], impl="reference")
    both = linear(x, weights[2], activation=SITU, impl="reference")
    assert [part.shape for part in parts] == [(rows, 50), (rows, 33), (rows, 12)]
    # Results in bfloat16 are two roundings of one sum: a unit apart.
    for out, right in ((plain, wanted), (jnp.concatenate(parts, axis=1), whole), (gated, both)):
        assert (out.shape, out.dtype) == (right.shape, right.dtype)
        tolerance = 1e-5 if out.dtype == jnp.float32 else 8e-3
        out, right = (np.asarray(array, np.float64) for array in (out, right))
        assert np.abs(out - right).max() <= tolerance * np.abs(right).max()


ROUTE = {"top_k": 6, "scaling": 1.5, "renormalize": True}


def beside(count, real, dtype):
    """Operands of choose_beside for `count` rows of requests with so many real ones."""
    x, (weight,) = arrays(count, 96, (70,), dtype)
    random = np.random.default_rng(0)
    shapes = ((count, 37), (37,))
    logits, bias = (jnp.asarray(random.standard_normal(s), jnp.float32) for s in shapes)
    return logits, bias, x, weight, jnp.array(real, jnp.int32)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("real", "live"),
    [
        ([1, 1, 1, 0, 1], [1, 1, 1, 0, 1]),
        ([2, 0, 3], [1, 1, 0, 0, 0, 0, 1, 1, 1]),
        ([33, 2], [1] * 33 + [0] * 2 + [1] * 2 + [0] * 33),
    ],
    ids=["a row each", "three each", "a prompt"],
)
def test_a_choice_beside_a_linear_layer(impl, dtype, real, live):
    """Of requests with a row each, with three, and with more rows than one launch takes."""
    operands = beside(len(live), real, dtype)
    found = choose_beside(*operands, impl=impl, **ROUTE)
    experts, weights, out = choose_beside(*operands, impl="reference", **ROUTE)
    live = np.array(live, bool)
    assert ((np.asarray(experts) >= 0).all(axis=1) == live).all()
    assert (experts[~live] == -1).all()
    assert not np.asarray(weights[~live]).any()
    assert (found[0] == experts).all()
    np.testing.assert_allclose(found[1], weights, rtol=1e-6)
    np.testing.assert_allclose(found[2], out, atol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "interpret", "pallas"])
def test_a_choice_that_cannot_be_is_refused(impl):
    """Alike by all implementations: the kernel would choose experts that do not exist."""
    logits, bias, x, weight, rows = beside(4, [1, 1], "float32")
    with pytest.raises(ValueError, match=r"top_k 38 lies outside \[1, 37 experts\]"):
        choose_beside(logits, bias, x, weight, rows, impl=impl, **{**ROUTE, "top_k": 38})
    for misfit in (
        (logits, bias, x[:3], weight, rows),
        (logits, bias, x, weight[:, :95], rows),
        (logits, bias, x, weight, jnp.zeros(3, jnp.int32)),
    ):
        with pytest.raises(ValueError, match="B a divisor of W, got"):
            choose_beside(*misfit, impl=impl, **ROUTE)


def test_misfits_are_refused():
    x, weights = arrays(2, 64, (8, 7, 9), "float32")
    with pytest.raises(ValueError, match="splits the 7 rows"):
        linears(x, (Projection(weights[1], activation=SITU),), impl="reference")
    with pytest.raises(ValueError, match="do not part 8 columns"):
        linears(x, (Projection(weights[0], widths=(3, 4)),), impl="reference")
    with pytest.raises(ValueError, match=r"weights \[N,K\], got"):
        linears(x, (Projection(weights[0][:, :3]),), impl="reference")
    with pytest.raises(NotImplementedError, match="up to 64 rows"):
        linears(jnp.zeros((65, 64)), (Projection(weights[0]),), impl="pallas")
