"""Fail-stop: when a rank's health word has a bit set, all ranks raise at one and the same step.

A rank that raised alone would leave the others in the next collective for ever. So nobody raises
on what it sees itself: each rank's host follows its own word, from copies that have landed anyway,
and every `check_every` steps all ranks add up their votes in a collective of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from k3jax.cache import Cache
from k3jax.decode.faults import Fault
from k3jax.parallel import AXIS, REPLICATED, psum, rank, spmd, world
from pallas_kernels import KdaCache
from pallas_kernels.health import (
    BIT_DIVERGED,
    BIT_EXPERT,
    BIT_PAGE,
    BIT_PLAN,
    BIT_SLOT,
    BIT_WAIT,
)

MEANINGS = {
    BIT_WAIT: "a wait inside a kernel gave up",
    BIT_SLOT: "a slot beyond the cache",
    BIT_PAGE: "a page beyond the pool",
    BIT_PLAN: "a batch that contradicts the slots",
    BIT_DIVERGED: "ranks that chose different experts",
    BIT_EXPERT: "an expert beyond the bank",
}
FAULT_BITS = {
    "wait": BIT_WAIT,
    "slot": BIT_SLOT,
    "page": BIT_PAGE,
    "plan": BIT_PLAN,
    "diverged": BIT_DIVERGED,
}
BY_RANK = PartitionSpec(AXIS)
COLUMNS = 3  # of a vote: the word, the step that first showed it, the step of the vote


class FailStopError(RuntimeError):
    """A rank's health word has a bit set."""


def describe(word: int) -> str:
    """The bits of a health word in words."""
    return "; ".join(text for bit, text in MEANINGS.items() if word & bit) or "an unknown bit"


def check_health(word: int) -> None:
    """Raise FailStopError that names the bits of a health word that are set; each is fatal."""
    if word:
        raise FailStopError(f"health word {word:#x}: {describe(word)}. Restart the engine")


def check_votes(votes: np.ndarray) -> None:
    """Raise FailStopError if any rank voted u32[ranks, 3] for it; all ranks read the same."""
    guilty = [(number, *map(int, vote)) for number, vote in enumerate(votes) if vote[0]]
    if guilty:
        found = ", ".join(
            f"rank {number} has health word {word:#x} since step {step} ({describe(word)})"
            for number, word, step, _ in guilty
        )
        raise FailStopError(f"all ranks stop at step {guilty[0][3]}: {found}. Restart the engine")


@dataclass
class Seen:
    """What the host knows of one rank's health word."""

    word: int = 0
    step: int = 0  # the first one after which a bit was set


class FailStop:
    """Follows the health words of this process's ranks and votes on them; steps count from 1.

    Call `after_step` once for every executed step, on all ranks, never for a warm-up or a trace.
    When it returns votes, read them together with that step's tokens: see `check_votes`.
    """

    def __init__(self, mesh: Mesh, check_every: int, fault: Fault | None = None) -> None:
        """`fault` is one to inject; ValueError if `mesh` has no such rank."""
        if fault is not None and fault.rank >= mesh.size:
            raise ValueError(f"a fault on rank {fault.rank} needs more than {mesh.size} ranks")
        self.mesh, self.check_every, self.fault = mesh, check_every, fault
        self.steps = 0
        self._rank_of = {device: number for number, device in enumerate(mesh.devices.flat)}
        self._seen = {self._rank_of[device]: Seen() for device in mesh.local_devices}
        self._flying: deque[tuple[int, list[tuple[int, jax.Array]]]] = deque()
        self._votes = compile_votes(mesh)

    def after_step(self, health: jax.Array) -> jax.Array | None:
        """Note a dispatched step's word u32[], of which ranks may hold different values.

        Never blocks. Every `check_every` steps returns the votes u32[ranks, 3], on their way.
        """
        self.steps += 1
        words = [(self._rank_of[part.device], part.data) for part in health.addressable_shards]
        for _, word in words:
            word.copy_to_host_async()
        self._flying.append((self.steps, words))
        self._poll()
        return None if self.steps % self.check_every else self._vote()

    def inject(self, health: jax.Array) -> jax.Array:
        """The word u32[] that the coming step takes: with the fault's bit if it is due."""
        if not self._due() or self.fault is None or self.fault.kind not in FAULT_BITS:
            return health
        bit = np.uint32(FAULT_BITS[self.fault.kind])
        return self._on_rank(health, lambda word: word | bit)

    def poison(self, cache: Cache, slot: int) -> Cache:
        """The cache that the coming step takes: a NaN in `slot` if such a fault is due.

        It stands in the first KDA state of the fault's rank. A request that only starts in this
        step does not read it.
        """
        if not self._due() or self.fault is None or self.fault.kind != "nonfinite":
            return cache
        layers = list(cache.layers)
        for index, layer in enumerate(layers):
            if isinstance(layer, KdaCache):
                state = self._on_rank(layer.state, lambda part: part.at[slot].set(jnp.nan))
                layers[index] = replace(layer, state=state)
                break
        return replace(cache, layers=tuple(layers))

    def _poll(self) -> None:
        """Take in, oldest first, the words that have landed."""
        while self._flying and all(has_landed(word) for _, word in self._flying[0][1]):
            step, words = self._flying.popleft()
            for number, array in words:
                word, seen = int(np.asarray(array)), self._seen[number]
                if word and not seen.word:
                    seen.step = step
                seen.word |= word

    def _vote(self) -> jax.Array:
        rows = [
            jax.device_put(np.array([[seen.word, seen.step, self.steps]], np.uint32), device)
            for device, seen in zip(self.mesh.local_devices, self._seen.values(), strict=True)
        ]
        shape, sharding = (self.mesh.size, COLUMNS), NamedSharding(self.mesh, BY_RANK)
        return self._votes(jax.make_array_from_single_device_arrays(shape, sharding, rows))

    def _due(self) -> bool:
        return self.fault is not None and self.fault.step == self.steps + 1

    def _on_rank(self, array: jax.Array, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """`array` with the part of the fault's rank changed; the other parts are taken over."""
        number = None if self.fault is None else self.fault.rank
        parts = [
            change(part.data) if self._rank_of[part.device] == number else part.data
            for part in array.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def has_landed(array: Any) -> bool:
    """Whether reading the array blocks no more; its copy to the host was started when it was made.

    The type stubs of jax.Array leave `is_ready` out.
    """
    return array.is_ready()


def compile_votes(mesh: Mesh) -> Compiled:
    """u32[ranks, 3], a row on each rank -> the same, whole on every rank: a sum of one-hot rows."""

    def add(own: jax.Array) -> jax.Array:
        mine = jnp.arange(world(), dtype=jnp.int32) == rank()
        return psum(jnp.where(mine[:, None], own, jnp.uint32(0)))

    vote = jax.ShapeDtypeStruct(
        (mesh.size, COLUMNS), jnp.uint32, sharding=NamedSharding(mesh, BY_RANK)
    )
    return jax.jit(spmd(add, mesh, BY_RANK, REPLICATED)).lower(vote).compile()
