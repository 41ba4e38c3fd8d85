"""The list of cases, and the choice of implementation."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import MOST_ROWS
from pallas_kernels.case_inputs import OPS, bind, inputs
from pallas_kernels.cases import CASES, select


def test_names_are_unique_and_every_op_has_cases():
    assert len({str(case) for case in CASES}) == len(CASES)
    assert {case.op for case in CASES} == set(OPS)
    assert all(case.tags & {"decode", "prefill"} for case in CASES)
    assert not any(case.tags >= {"tiny", "gpu"} for case in CASES)


def test_selecting_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"'linear' has the tags \('k3-tp3',\)"):
        select("linear", "k3-tp3")


@pytest.mark.parametrize("op", OPS)
def test_an_unknown_implementation_is_refused(op):
    case = select(op, "tiny")[0]
    shapes = jax.eval_shape(partial(inputs, case, jnp.float32))
    with pytest.raises(NotImplementedError, match=f"{op} has no implementation 'cuda'"):
        jax.eval_shape(bind(case, "cuda"), shapes)


@pytest.mark.parametrize("impl", ["pallas", "interpret"])
@pytest.mark.parametrize("op", ["linear", "route"])
def test_a_kernel_for_few_rows_refuses_more(op, impl):
    case = select(op, "tiny")[0]
    wide = dataclasses.replace(case, dims={**case.dims, "W": MOST_ROWS + 1})
    shapes = jax.eval_shape(partial(inputs, wide, jnp.bfloat16))
    with pytest.raises(NotImplementedError, match=f"{op}'s kernel takes up to 64 rows, not 65"):
        jax.eval_shape(bind(wide, impl), shapes)


@pytest.mark.parametrize("op", [op for op in OPS if op != "moe"])
def test_rank_cases_trace_at_their_full_size(op):
    """Shapes only: nothing of a gigabyte is made."""
    case = select(op, "k3-tp8")[-1]
    shapes = jax.eval_shape(partial(inputs, case, jnp.bfloat16))
    result = jax.eval_shape(bind(case, "reference"), shapes)
    assert jax.tree.leaves(result)


def test_a_rank_of_eight_has_the_shapes_of_kimi_k3():
    def shapes(op, name):
        case = next(case for case in CASES if case.op == op and case.name == name)
        return jax.eval_shape(partial(inputs, case, jnp.bfloat16))

    assert shapes("linear", "k3-tp8-kda_in_proj-w16")["weight"].shape == (6284, 7168)
    assert shapes("linear", "k3-tp8-latent_up-w16")["weight"].shape == (7168, 3584)
    assert shapes("linear", "k3-tp8-shared_down-w1")["weight"].shape == (7168, 768)
    bank = shapes("moe_mxfp4", "k3-tp8-w16")["bank"]
    assert bank.w13.shape == (896, 768, 448)
    assert bank.w13_scale.shape == (896, 768, 112)
    assert bank.w2.shape == (896, 3584, 48)
    assert bank.w2_scale.shape == (896, 3584, 12)
    assert shapes("kda_decode", "k3-tp8-b8-q4")["cache"].state.shape == (9, 12, 128, 128)
    assert shapes("mla_decode", "k3-tp8-b8-q4-context8192")["q"].shape == (8, 4, 12, 576)
