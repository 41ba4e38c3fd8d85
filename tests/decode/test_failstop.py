"""A bit on one rank is raised by all, at one step, with rank, bit and step; nothing ever blocks."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from stepping import first_health, make_step, run

from k3jax.cache import CacheSizes, make_cache
from k3jax.config import K3Config
from k3jax.decode.failstop import FAULT_BITS, FailStop, check_votes
from k3jax.decode.faults import Fault
from k3jax.parallel import make_mesh
from pallas_kernels.health import BIT_PLAN, BIT_WAIT

EVERY, LAG = 4, 2


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(4)


@dataclass
class Part:
    device: object
    data: object


class Word:
    """A health word of one rank that lands when told; reading it before is an error."""

    def __init__(self, device, value):
        self.value, self.landed, self.copying = value, False, False
        self.addressable_shards = [Part(device, self)]

    def copy_to_host_async(self):
        self.copying = True

    def is_ready(self):
        return self.landed

    def __array__(self, dtype=None, copy=None):
        assert self.landed
        assert self.copying
        return np.array(self.value, np.uint32)


@pytest.mark.parametrize("kind", sorted(FAULT_BITS))
def test_a_bit_of_one_rank_stops_all(mesh, kind):
    number, reads, text = run(mesh, FailStop(mesh, EVERY, Fault(1, 6, kind)), 40)
    assert 6 < number - 1 <= 6 + EVERY + LAG  # the votes are read with the next step in flight
    assert reads == number - 1
    assert f"rank 1 has health word {FAULT_BITS[kind]:#x} since step 6 (" in text
    assert "rank 0" not in text
    assert f"all ranks stop at step {number - 1}:" in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_number_of_ranks(ranks):
    mesh = make_mesh(ranks)
    _, _, text = run(mesh, FailStop(mesh, 2, Fault(ranks - 1, 1, "wait")), 10)
    assert f"rank {ranks - 1} has health word 0x1 since step 1 (a wait inside" in text


def test_a_healthy_run_goes_on(mesh):
    assert run(mesh, FailStop(mesh, EVERY), 20) == (20, 19, None)
    assert run(mesh, FailStop(mesh, EVERY, Fault(2, 3, "nonfinite")), 20) == (20, 19, None)


def test_votes_come_every_so_many_steps(mesh):
    failstop, step, health = FailStop(mesh, EVERY), make_step(mesh), first_health(mesh)
    votes = []
    for _ in range(3 * EVERY):
        _, word, health = step(health)
        votes.append(failstop.after_step(word))
    at = [index + 1 for index, vote in enumerate(votes) if vote is not None]
    assert at == [EVERY, 2 * EVERY, 3 * EVERY]
    for number, vote in zip(at, (votes[index - 1] for index in at), strict=True):
        assert np.asarray(vote).tolist() == [[0, 0, number]] * 4
        parts = [np.asarray(part.data).tobytes() for part in vote.addressable_shards]
        assert parts == parts[:1] * 4


def test_only_what_has_landed_is_read():
    mesh = make_mesh(1)
    device = mesh.devices.flat[0]
    failstop = FailStop(mesh, 1)
    words = [Word(device, value) for value in (0, BIT_PLAN, BIT_PLAN | BIT_WAIT)]
    for number, word in enumerate(words, 1):
        check_votes(np.asarray(failstop.after_step(word)))
        assert failstop.steps == number
    words[0].landed = words[2].landed = True  # not in order: nothing is passed over
    last = Word(device, BIT_PLAN | BIT_WAIT)
    check_votes(np.asarray(failstop.after_step(last)))
    words[1].landed = last.landed = True
    votes = np.asarray(failstop.after_step(Word(device, 0)))
    assert votes.tolist() == [[BIT_PLAN | BIT_WAIT, 2, 5]]
    with pytest.raises(RuntimeError, match=r"word 0x9 since step 2 \(a wait .*; a batch that"):
        check_votes(votes)


def test_several_ranks_are_all_named(mesh):
    votes = np.array([[0, 0, 8], [1, 3, 8], [0, 0, 8], [1 << 20, 7, 8]], np.uint32)
    with pytest.raises(RuntimeError, match=r"at step 8: rank 1 .* step 3 .*, rank 3 .*an unknown"):
        check_votes(votes)


def test_a_nan_for_one_slot(golden, mesh):
    config = K3Config.from_file(golden / "k3-tiny-a")
    cache = make_cache(config, CacheSizes(3, 2, 16, 2, 1), "float32", mesh)
    failstop = FailStop(mesh, EVERY, Fault(1, 1, "nonfinite"))
    poisoned = failstop.poison(cache, 2)
    heads = np.isnan(np.asarray(poisoned.layers[0].state)).all((2, 3))
    assert np.argwhere(heads).tolist() == [[2, 2], [2, 3]]  # rank 1 has 2 of the 8 heads
    rest = replace(poisoned, layers=poisoned.layers[1:])
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(rest))
    failstop.after_step(first_health(mesh))
    assert failstop.poison(cache, 2) is cache


def test_a_fault_needs_its_rank(mesh):
    with pytest.raises(ValueError, match="rank 4 needs more than 4 ranks"):
        FailStop(mesh, EVERY, Fault(4, 1, "wait"))
