"""Linear layers, norms and activations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Activation, Unnormed, gated, l2_norm, linear, rms_norm
from pallas_kernels.case_inputs import bind, options
from pallas_kernels.cases import CASES
from pallas_kernels.linear_pallas import linear_pallas
from pallas_kernels.linear_tile_pallas import LinearTiles, linear_tiles

from . import oracles
from .oracles import DTYPES, assert_close, assert_same_bits, made, tiny, wide

IMPLS = ["reference", "interpret"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", tiny("linear"))
def test_matches_float64(case, dtype, impl):
    arrays = made(case, dtype)
    actual = jax.jit(bind(case, impl))(arrays)
    assert actual.dtype == dtype
    assert_close(actual, oracles.linear(**wide(arrays), **options(case)), dtype, case.dims["K"])


@pytest.mark.parametrize("split", [2, 4])
@pytest.mark.parametrize("case", tiny("linear"))
def test_programs_that_share_k(case, split):
    """Split K gives the same sums, the same bits each time, and the norm of the whole row."""
    arrays = made(case, jnp.bfloat16)
    tiles = LinearTiles(32, case.dims["K"] // split & -(case.dims["K"] // split), 1, 1, split)
    run = jax.jit(
        partial(linear_pallas, **options(case), out_dtype=None, interpret=True, tiles=tiles)
    )
    actual = run(**arrays)
    expected = oracles.linear(**wide(arrays), **options(case))
    assert_close(actual, expected, jnp.bfloat16, case.dims["K"])
    assert_same_bits(run(**arrays), actual)


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_divided_by_their_runs_root_mean_squares(dtype, split):
    random = np.random.default_rng(5)
    rows, weight, squares = (
        jnp.asarray(random.standard_normal(shape), kind)
        for shape, kind in (((5, 96), dtype), ((24, 96), dtype), ((5, 3, 2), jnp.float32))
    )
    squares = squares.at[0].set(0.0) ** 2  # a row of zeros, as the null slot's
    rows = rows.at[0].set(0.0)
    x = Unnormed(rows, squares)
    scale = 1 / np.sqrt(np.asarray(squares, np.float64).sum(axis=2) / 32 + 1e-5)
    normed = wide(rows).reshape(5, 3, 32) * scale[:, :, None]
    expected = normed.reshape(5, 96) @ wide(weight).T
    assert_close(linear(x, weight, impl="reference"), expected, dtype, 96)
    run = partial(linear_pallas, norm=None, eps=1e-5, activation=None, add=None, out_dtype=None)
    tiles = LinearTiles(16, 16, 1, 1, split)
    actual = jax.jit(partial(run, interpret=True, tiles=tiles))(x, weight)
    assert actual.dtype == dtype
    assert_close(actual, expected, dtype, 96)
    assert linear_tiles(8, 1536, 7168, exact=False, run=128).depth == 128
    lost = x.squares.at[3, 1].set(jnp.nan)  # of one run: its row alone is lost
    found = jax.jit(partial(run, interpret=True, tiles=tiles))(Unnormed(rows, lost), weight)
    np.testing.assert_array_equal(np.isnan(found).any(axis=1), np.arange(5) == 3)
    kept = np.arange(5) != 3
    assert_same_bits(found[kept], actual[kept])


def test_few_features_of_a_long_k_are_split():
    def split(name):
        dims = next(case.dims for case in CASES if case.name == f"k3-tp8-{name}-w8")
        return linear_tiles(8, dims["K"], dims["N"], exact=False).split

    names = ("shared_gate_up", "latent_down", "q_b")
    assert all(split(name) > 1 for name in names)
    assert split("kda_in_proj") == split("o_proj") == split("shared_down") == split("f_b") == 1
    for case in CASES:
        if case.op == "linear":
            rows, depth, features = (case.dims[letter] for letter in "WKN")
            run = depth // case.dims["runs"] if "runs" in case.dims else None
            tiles = linear_tiles(rows, depth, features, exact=False, run=run)
            assert depth % (tiles.depth * tiles.split) == 0
            assert tiles.stages >= 1


@pytest.mark.parametrize("impl", IMPLS)
def test_float32_rows_take_bf16_weights_exactly(impl):
    x = made(*tiny("linear")[0].values, jnp.float32)["x"]
    weight = made(*tiny("linear")[0].values, jnp.bfloat16)["weight"]
    actual = jax.jit(lambda x, weight: linear(x, weight, impl=impl))(x, weight)
    assert_close(actual, wide(x) @ wide(weight).T, jnp.float32, x.shape[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_result_dtype_and_float32_accumulation(impl):
    """Summing in bf16 would stop at 256: a half ulp of it is 1."""
    ones = jnp.ones((2, 4096), jnp.bfloat16)
    actual = linear(ones, ones, out_dtype=jnp.float32, impl=impl)
    assert actual.dtype == jnp.float32
    np.testing.assert_array_equal(actual, 4096.0)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_nan_row_stays_alone(impl):
    x = jnp.ones((4, 32)).at[2].set(jnp.nan)
    actual = linear(x, jnp.ones((8, 32)), impl=impl)
    np.testing.assert_array_equal(np.isnan(actual).all(axis=1), [False, False, True, False])
    np.testing.assert_array_equal(np.isfinite(actual).all(axis=1), [True, True, False, True])


def test_misfit_squares_are_refused():
    rows, weight = jnp.zeros((2, 8)), jnp.zeros((4, 8))
    with pytest.raises(ValueError, match=r"squares\[W,G,N\]"):
        linear(Unnormed(rows, jnp.zeros((2, 3, 1))), weight, impl="reference")
    x = Unnormed(rows, jnp.zeros((2, 2, 1)))
    with pytest.raises(ValueError, match="not by both"):
        linear(x, weight, norm=jnp.zeros(8), impl="reference")


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"x": (4, 8), "weight": (6, 9)}, r"\(4, 8\) and \(6, 9\)"),
        ({"x": (4, 8), "weight": (6, 8), "norm": (6,)}, "norm"),
        ({"x": (4, 8), "weight": (6, 8), "add": (4, 8)}, "add"),
    ],
)
def test_misfit_shapes_are_refused(shapes, text):
    with pytest.raises(ValueError, match=text):
        linear(**{name: jnp.zeros(shape) for name, shape in shapes.items()}, impl="reference")


def test_an_activation_needs_two_halves():
    with pytest.raises(ValueError, match="7 rows"):
        linear(
            jnp.zeros((2, 4)), jnp.zeros((7, 4)), activation=Activation("silu"), impl="reference"
        )
    with pytest.raises(ValueError, match="'gelu'"):
        Activation("gelu")


@pytest.mark.parametrize("kind", ["situ", "silu"])
def test_activations(kind):
    activation = Activation(kind, beta=4.0, linear_beta=25.0)
    gate, up = np.meshgrid(np.linspace(-30, 30, 61), np.linspace(-200, 200, 41))
    actual = gated(activation, jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32))
    np.testing.assert_allclose(actual, oracles.gated(activation, gate, up), rtol=2e-5, atol=1e-9)


def test_norm_epsilons():
    """RMSNorm adds epsilon to the mean of squares, l2_norm 1e-6 to their sum."""
    x = np.full((1, 16), 1e-3)
    weight = np.arange(16.0)
    actual = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32), eps=1e-6)
    np.testing.assert_allclose(actual, oracles.rms(x, weight, 1e-6), rtol=1e-6)
    expected = x / np.sqrt((x**2).sum() + 1e-6)
    np.testing.assert_allclose(l2_norm(jnp.asarray(x, jnp.float32)), expected, rtol=1e-6)
    assert rms_norm(jnp.ones((2, 4), jnp.bfloat16), jnp.ones(4), eps=1e-5).dtype == jnp.bfloat16
