"""Work shared out by tickets inside one launch: who does what, hand-offs, and giving up.

A kernel's work is a list of stages of items, numbered through: an item's number is its ticket. A
program takes the next ticket from a counter when it starts, whatever its place in the grid. It
waits only for items of smaller tickets, which running programs have taken before, so one of them
can always go on: there is no deadlock, however few programs run at once and whatever the order in
which they start, and programs that run one after another never wait. Programs that took tickets in
a loop would save a start for each item; but Triton computes the addresses of all stages before the
loop and keeps them: 255 registers and spills, where moe_mono needs 118.

The control words live across launches. A counter gets the same number of additions in each launch
and is never zeroed: in launch number `epoch` it rises from epoch * additions to (epoch + 1) *
additions, both modulo 2^32. Who takes the last ticket of a launch, when all have read the epoch,
starts the next one. Control words belong to one kernel at one shape.

A wait is bounded. One that gives up sets BIT_WAIT in the control's health word, and its program
leaves; while the bit is set, every later launch leaves at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import launch
from pallas_kernels.health import BIT_WAIT

TICKET, EPOCH, HEALTH = range(3)
HEADER = 32  # words: what is polled lies on other cache lines than the tickets
POLLS = 1 << 18  # of some 0.7 us each on an H200; a step of the whole model takes milliseconds


def make_control(counters: int) -> jax.Array:
    """Control words before the first launch: i32[HEADER + counters]."""
    return jnp.zeros(HEADER + counters, jnp.int32)


def health_of(control: jax.Array) -> jax.Array:
    """The health word of a launch's control: u32[]."""
    return control[HEALTH].astype(jnp.uint32)


@dataclasses.dataclass(frozen=True)
class Stage:
    """`count` items; `run(item)` does one."""

    count: int
    run: Callable[[Any], None]


class Control:
    """The control words as a program sees them; to be made where it begins.

    `pauses`: between two looks of a wait, on an NVIDIA GPU. An atomic that acquires empties the
    multiprocessor's first-level cache, on which the neighbors feed.
    """

    def __init__(self, ref: Any, *, interpret: bool, pauses: bool, polls: int = POLLS):
        self.ref, self.interpret, self.pauses, self.polls = ref, interpret, pauses, polls
        self.epoch = ref[EPOCH]

    def wait(self, counter: Any, additions: Any) -> Any:
        """Wait until `counter` has its `additions` of this launch; false if it gave up."""
        word = jnp.asarray(HEADER + counter, jnp.int32)
        target = (self.epoch + 1) * additions

        def look():
            return launch.fetch_add(self.ref, word, jnp.int32(0), interpret=self.interpret)

        def waiting(state):
            polls, seen = state
            return (polls > 0) & (seen != target)

        def again(state):
            polls, seen = state
            # The loop's own result, and an atomic: what only reads, a compiler may leave out.
            seen = look()
            return polls - 1, launch.pause(seen) if self.pauses else seen

        _, seen = lax.while_loop(waiting, again, (jnp.int32(self.polls), look()))
        arrived = seen == target

        @pl.when(jnp.logical_not(arrived))
        def give_up():
            bit = jnp.int32(BIT_WAIT)
            launch.fetch_or(self.ref, jnp.int32(HEALTH), bit, interpret=self.interpret)

        return arrived

    def behind(self, counter: Any, additions: Any) -> Any:
        """Whether `counter` still lacks additions of this launch; orders nothing."""
        seen = launch.load(self.ref.at[jnp.asarray(HEADER + counter, jnp.int32)], volatile=True)
        return seen != (self.epoch + 1) * additions

    def publish(self, counter: Any) -> Any:
        """Add one to `counter`, after all that this program has stored; returns the old value."""
        if not self.interpret:
            launch.barrier()
        word = jnp.asarray(HEADER + counter, jnp.int32)
        return launch.fetch_add(self.ref, word, jnp.int32(1), interpret=self.interpret)

    def publish_last(self, counter: Any, additions: Any) -> Any:
        """Publish, and return whether that was the last of the `additions` of this launch.

        If so, all that the others stored before theirs can be read.
        """
        return self.publish(counter) == (self.epoch + 1) * additions - 1


def count_items(stages: Sequence[Stage]) -> int:
    """Programs of a launch."""
    return sum(stage.count for stage in stages)


def run_stages(control: Control, stages: Sequence[Stage]) -> None:
    """The body of a kernel with a program for each item: do one item."""

    @pl.when(control.ref[HEALTH] & BIT_WAIT == 0)
    def _():
        word, one = jnp.int32(TICKET), jnp.int32(1)
        ticket = launch.fetch_add(control.ref, word, one, interpret=control.interpret)

        @pl.when(ticket == count_items(stages) - 1)
        def start_epoch():
            control.ref[TICKET] = jnp.int32(0)
            control.ref[EPOCH] = control.epoch + 1

        first = 0
        for stage in stages:

            @pl.when((ticket >= first) & (ticket < first + stage.count))
            def perform(stage=stage, first=first):
                stage.run(ticket - first)

            first += stage.count
