"""The compiled latent attention kernels: their names, the measured shapes, far offsets, repeats."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import aot, mla_decode
from pallas_kernels.case_inputs import bind, inputs
from pallas_kernels.cases import select

from .oracles import DTYPES, assert_close, assert_same_bits

LONGEST_PROMPT = 8192  # the reference takes its time beyond


@pytest.mark.parametrize(
    ("op", "names"),
    [("mla_decode", {"mla_decode", "mla_combine"}), ("mla_prefill", {"mla_prefill"})],
)
def test_the_kernels_are_in_the_lowered_program(op, names):
    case = select(op, "gpu")[0]
    shapes = jax.eval_shape(lambda: inputs(case, jnp.bfloat16))
    kernels = aot.triton_kernels(aot.lower_rocm(bind(case, "pallas"), shapes))
    assert {kernel.name for kernel in kernels} == names
    for kernel in kernels:
        # What Pallas makes of jnp.where(scalar, LITERAL, LITERAL): the literals are lost.
        assert not re.search(r"arith\.select .*%(true|false)\S*, .* : i1\b", kernel.text)


def measured():
    cases = [*select("mla_decode", "gpu"), *select("mla_prefill", "gpu")]
    return [pytest.param(case, id=str(case)) for case in cases if case.dims["T"] <= LONGEST_PROMPT]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", measured())
def test_measured_shapes_match_the_reference_in_float32(case, dtype):
    arrays = jax.jit(lambda: inputs(case, dtype))()
    wide = {
        name: array.astype(jnp.float32) if array.dtype == dtype else array
        for name, array in arrays.items()
    }
    op = jax.jit(bind(case, "pallas"))
    out, flags, health = op(arrays)
    expected, _, _ = jax.jit(bind(case, "reference"))(wide)
    seen = int(jnp.max(arrays["lengths"] + arrays.get("starts", 0)))
    assert_close(out, np.asarray(expected, np.float64), dtype, case.dims["L"] + seen)
    assert not np.asarray(flags).any()
    assert health == 0
    assert_same_bits(op(arrays), (out, flags, health))


@pytest.mark.gpu
@pytest.mark.parametrize("pages", [40_000, 70_000], ids=["2-to-4-GiB", "over-4-GiB"])
def test_pages_past_two_to_the_31(pages):
    """The pool's last pages: byte offsets past 2^31, and then element offsets too."""
    used, page, width = 5, 64, 576
    ids = pages - 1 - jnp.arange(used, dtype=jnp.int32)[None]
    rows = jax.random.normal(jax.random.key(0), (used, page, width), jnp.bfloat16)
    pool = jnp.zeros((pages, page, width), jnp.bfloat16).at[ids[0]].set(rows)
    q = jax.random.normal(jax.random.key(1), (1, 8, 12, width), jnp.bfloat16)
    known = {"lengths": jnp.full(1, used * page - 3, jnp.int32), "latent": 512, "scale": 0.07}
    far, _, health = mla_decode(q, pool, ids, **known, impl="pallas")
    near = jnp.arange(used, dtype=jnp.int32)[None]
    assert health == 0
    assert_same_bits(far, mla_decode(q, rows, near, **known, impl="pallas")[0])
