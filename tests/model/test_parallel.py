"""Two ranks give the texts of one, and agree with each other bit for bit."""

import jax
import numpy as np
import pytest
from driving import RUN, Driver

from k3jax import lm
from k3jax.model import ffn
from k3jax.parallel import AXIS, REPLICATED, make_mesh, spec, spmd


@pytest.fixture(scope="module")
def two(golden):
    """kimi-linear-tiny on two ranks, decode steps of two rows."""
    run = {**RUN, "max_requests": 2, "num_spec": 1, "builds": ((2, 2),)}
    model = lm.load(golden / "kimi-linear-tiny", dtype="float32", tp=2, **run)
    return Driver(model.engine.executor)


def test_two_ranks_give_the_text_of_one(two, numbers):
    arrays = numbers["kimi-linear-tiny"]
    prompt, wanted = arrays["seq0.input_ids"], arrays["seq0.greedy"].tolist()

    def drafter(tokens):
        return [wanted[len(tokens)] if len(tokens) % 3 else -1]

    assert two.greedy(1, prompt, 32, drafter=drafter, rows=2, chunks=(16,)) == wanted


def test_two_ranks_compute_the_numbers_of_one(golden, numbers, close):
    """Every kind of layer of Kimi-K3, with what is split over the ranks put together again."""
    arrays = numbers["k3-tiny-a"]
    model = lm.load(golden / "k3-tiny-a", dtype="float32", tp=2)
    trace = model.trace(arrays["seq1.input_ids"])
    close(trace["logits"], arrays["seq1.logits"])
    for layer in range(7):
        close(trace[f"layers.{layer}.attn_out"], arrays[f"seq1.L{layer}.attn_out"])
        close(trace[f"layers.{layer}.ffn_out"], arrays[f"seq1.L{layer}.mlp_out"])
    for name, recorded in (("core", "core_out"), ("decay", "decay_log"), ("beta", "beta")):
        close(trace[f"layers.1.kda_{name}"], arrays[f"seq1.L1.kda_{recorded}"])
    for name in "qkv":
        close(trace[f"layers.1.kda_{name}"], arrays[f"seq1.L1.kda_{name}"])


def test_what_is_replicated_is_bit_equal_on_every_rank(two, numbers):
    """`check_vma` is off, so nothing but this says that replicated results really are."""
    step = two.executor.steps[0]
    two.prefill(2, numbers["kimi-linear-tiny"]["seq1.input_ids"])
    two.decode([2], 2, {2: [5]})
    output = two.executor.run(step, two.executor.empty_batch(step))
    whole = [
        leaf
        for leaf in jax.tree.leaves((output, two.executor.cache, two.executor.health))
        if leaf.sharding.is_fully_replicated
    ]
    assert len(whole) > 25
    for leaf in whole:
        first, second = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        assert first.tobytes() == second.tobytes()


def test_ranks_that_choose_different_experts_are_found():
    mesh = make_mesh(4)
    partial = np.ones((3, 8), np.float32)

    def reduce(experts):
        return ffn.reduce_once(partial, partial[:, :4], experts[0], merge=False)

    function = jax.jit(spmd(reduce, mesh, (spec("heads"),), REPLICATED))
    experts = np.broadcast_to(np.array([[3, 1], [0, 895], [7, 2]], np.int32), (4, 3, 2)).copy()
    routed, shared, health = function(experts)
    assert health == 0
    assert (np.asarray(routed) == 4).all()
    assert shared.shape == (3, 4)
    for change in ([1, 3], [3, 2], [0, 0]):  # another order, another expert, both others
        other = experts.copy()
        other[2, 0] = change
        assert function(other)[2] == ffn.BIT_DIVERGED


def test_a_mesh_needs_its_devices():
    assert make_mesh(2).axis_names == (AXIS,)
    with pytest.raises(ValueError, match="needs that many devices, have 8"):
        make_mesh(9)


def test_an_array_without_elements_is_kept_out_of_a_mesh():
    """XLA may die of one without a word, and not on every platform and in every release."""
    function = spmd(lambda tree: tree, make_mesh(2), (REPLICATED,), REPLICATED)
    with pytest.raises(ValueError, match=r"\['none'\] \(7, 0\)"):
        jax.eval_shape(function, {"none": np.zeros((7, 0)), "one": np.zeros((7, 1))})
