"""What a step takes and gives stays at its addresses, on every rank, and nothing is mixed up."""

import re
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest
from made import drive, made_config, made_weights, run_of
from places import addresses, batch_of, buffers_of, numbers, output_of, sides_of, words

from k3jax.decode.batch import Step, empty_batch
from k3jax.decode.buffers import AT_ONCE, SMALL_GAPS, fences, gaps
from k3jax.decode.failstop import FailStop
from k3jax.decode.faults import Fault
from k3jax.parallel import make_mesh
from k3jax.snapshots import NOTHING, resume_from
from k3jax.speculative import NgramDrafter
from pallas_kernels import BIT_WAIT

STEPS = (Step("decode", 2, 2), Step("prefill", 2, 8))


@pytest.fixture(params=[1, 2])
def mesh(request):
    return make_mesh(request.param)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.kind)
def test_a_batch_has_its_place(mesh, step):
    """From the host or the devices; the null mask of the engine is one of the latter."""
    buffers = buffers_of(step, mesh)
    own = addresses(buffers.put(batch_of(step, 1)))
    on_devices = buffers_of(step, mesh).put(batch_of(step, 1))
    for number, batch in ((0, batch_of(step, 0)), (1, on_devices), (0, batch_of(step, 0))):
        found = buffers.put(batch)
        assert numbers(found) == {number}
        assert addresses(found) == own
    assert numbers(on_devices) == {1}  # not donated with the rest


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.kind)
def test_an_output_outlives_the_next(mesh, step):
    buffers, kept = buffers_of(step, mesh), []
    assert numbers(buffers.place()) == {0}
    for number in (0, 1):
        left = output_of(step, mesh, number)
        kept.append(buffers.take(left))
        assert buffers.place() is left
        jax.tree.map(lambda leaf: leaf.delete(), left)  # as a step that takes the place does
    for number, output in enumerate(kept):
        assert numbers(output) == {number}
        assert words(output) == [number + rank for rank in range(mesh.size)]


def test_every_device_has_gaps_for_all_steps(mesh):
    """As many as the step that needs most of a size, and for what no step names."""
    sizes = gaps(map(sides_of, (*STEPS, *STEPS)))
    # The likeliest tokens: of two rows of two requests, and of eight prompt rows of two.
    assert sizes == {256: SMALL_GAPS, 512: 2 * AT_ONCE, 1280: 2 * AT_ONCE}
    held = fences(map(sides_of, STEPS), mesh.local_devices)
    for device in mesh.local_devices:
        assert Counter(fence.nbytes for fence in held if fence.device == device) == sizes
    assert {fence.device for fence in held} == set(mesh.local_devices)


@pytest.mark.gpu
def test_memory_of_a_run_keeps_its_address():
    """Scratch of each run, freed before its outputs are made, which outlive the next run."""
    device = jax.devices()[0]
    held = fences(map(sides_of, STEPS), [device])
    kept, seen = [], set()
    for run in range(12):
        scratch = jax.block_until_ready(jax.device_put(np.zeros(1 << 20, np.uint8), device))
        seen.add(scratch.unsafe_buffer_pointer())
        scratch.delete()
        leaves = jax.tree.leaves(sides_of(STEPS[run % 2]))
        kept = [*kept[len(kept) // 2 :], *(device_zeros(leaf, device) for leaf in leaves)]
    assert len(seen) == 1
    assert held


def device_zeros(leaf, device):
    return jax.device_put(np.zeros(leaf.shape, leaf.dtype), device)


@pytest.fixture(scope="module")
def two_ranks(golden):
    """Several builds, a drafter and a pool of snapshots, on two ranks."""
    config = made_config(golden, ("kda", "kda", "mla"), block=2, inner=64)
    builds = ((1, 2), (2, 1), (2, 2))
    run = run_of("stock", builds=builds, tp=2, check_every=4, prefix_cache=1 << 20)
    run = replace(run, drafter="ngram")
    return drive(config, made_weights(config), run, drafter=NgramDrafter())


def test_nothing_moves_on_two_ranks(two_ranks):
    """Steps of every shape in turns, and between them what changes slots and snapshots."""
    driver, executor = two_ranks, two_ranks.executor

    def places():
        kept = [(each._batch, each._output) for _, each in executor._compiled.values()]
        return addresses((kept, executor.cache, executor.health, executor._snapshots._snapshots))

    def all_steps():
        for step in executor.steps:
            executor.run(step, executor.empty_batch(step))

    all_steps()
    all_steps()  # what the host made itself is first copied to where it stays
    own = places()
    for _ in range(2):
        driver.admit(1, [1, 2, 3])
        driver.chunk({1: [1, 2, 3]}, final=True)
        executor.save(1, 3, 0)
        executor.resume(resume_from(NOTHING, 1, [], executor.sizes))
        all_steps()
        assert places() == own


def test_a_mask_holds_for_its_step_alone(two_ranks):
    """It comes from the host into the place where the mask of all tokens lay, and lies again."""
    driver, executor, prompt = two_ranks, two_ranks.executor, [5, 6, 7]
    wanted = driver.greedy(2, prompt, 4, chunks=(32,))
    driver.prefill(1, prompt, chunks=(32,))
    step = next(s for s in executor.steps if (s.kind, s.rows) == ("decode", 1))
    batch = empty_batch(step, executor.sizes, executor.config.vocab_size, masked=True)
    batch.slots[0] = 1
    for token in (7, 40):
        batch.bitmask[0] = 0
        batch.bitmask[0, 0, token // 32] = 1 << token % 32
        output = driver.run(step, batch, driver.updates(1, 0, 32))
        assert output.tokens[0, 0] == token
        batch = replace(batch, bitmask=batch.bitmask.copy())  # the other may still be on its way
    assert driver.greedy(2, prompt, 4, chunks=(32,)) == wanted


def test_a_word_stays_with_its_rank(two_ranks):
    """The fault of one rank is in the outputs that the host still holds, and nowhere else."""
    executor = two_ranks.executor
    executor.failstop = FailStop(executor.mesh, 4, Fault(1, 3, "wait"))
    step = executor.steps[-1]
    outputs = [executor.run(step, executor.empty_batch(step)) for _ in range(4)]
    found = [words(output) for output in outputs]
    assert found == [[0, 0], [0, 0], [0, BIT_WAIT], [0, BIT_WAIT]]
    votes = np.asarray(outputs[-1].votes)
    assert votes.shape == (2, 3)
    assert not votes[0, 0]
    executor.health = executor.health - executor.health


def test_each_result_has_a_place_of_its_own(two_ranks):
    """JAX says which; XLA would choose among those of one size, and a layer might move."""
    executor = two_ranks.executor
    own = (executor.cache, executor.health)
    for step in executor.steps:
        text = executor._lower(step, executor.sizes).as_text()
        results = len(jax.tree.leaves((own, executor._host_side(step, executor.sizes)[1])))
        found = [int(number) for number in re.findall(r"tf.aliasing_output = (\d+)", text)]
        assert found == list(range(results))
