"""Speculative decoding: the Drafter protocol, and drafts looked up in the request's own text.

A drafter runs on the device at the end of every step, so its guesses are there for the next one
without a word from the host. They change how fast a text comes, never the text: a draft is accepted
only if it equals the token that sampling gives.

Shape letters: B requests, N drafts (num_spec), S slots, H tokens of history.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from k3jax.cache import CacheSizes, Slots, real_slots, record
from k3jax.model.inputs import StepPlan

LONGEST_MATCH = 4  # tokens; on text and code 2 accept less, 8 no more (benchmarks/acceptance.py)


class Drafter(Protocol):
    """Guesses the tokens after each request's last one.

    `params` and what it keeps are pytrees that every rank holds whole; it talks to no other rank.
    """

    params: Any

    def shapes(self, sizes: CacheSizes) -> Any:
        """The shapes and dtypes of what it keeps in a cache of `sizes`, all zeros at first."""

    def page_bytes(self, sizes: CacheSizes) -> int:
        """Bytes that it keeps in each page."""

    def draft(
        self, params: Any, kept: Any, plan: StepPlan, slots: Slots
    ) -> tuple[Any, jax.Array, jax.Array]:
        """After the step of `plan`: (what it keeps, drafts i32[B, N], health u32[]).

        `slots` are those after the step, its tokens in their history. A draft of -1 is none. What
        it says of null requests, or of prompts that have not ended, is not used.
        """

    def take(self, kept: Any, slots: jax.Array, position: jax.Array) -> tuple[Any, jax.Array]:
        """What it knows of slots i32[B] after `position` i32[B] tokens, with a leading B.

        The second result, bool[], says whether it still knows that.
        """

    def put(
        self,
        kept: Any,
        slots: jax.Array,
        position: jax.Array,
        taken: Any,
        pages: tuple[jax.Array, jax.Array],
    ) -> Any:
        """What it keeps, with what was taken in slots i32[B].

        pages (i32[], i32[]): where it keeps something by page, the first is copied to the second.
        """


def speculate(
    drafter: Drafter,
    own: tuple[Any, Any],
    plan: StepPlan,
    slots: Slots,
    said: tuple[jax.Array, jax.Array],
) -> tuple[Slots, Any, jax.Array]:
    """After a step: write its tokens into the history and the next drafts into the slots.

    `own` is the drafter's params and what it keeps, `said` the tokens i32[B, T] that the step
    sampled and how many count, i32[B]. Returns (slots, what the drafter keeps, health u32[]).
    """
    tokens, count = said
    if plan.kind == "prefill":
        slots = record(slots, plan.slots, plan.tokens, jnp.where(plan.valid, plan.positions, -1))
    row = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    first = slots.length[plan.slots] + 1 - count
    emitted = row < count[:, None]
    slots = record(slots, plan.slots, tokens, jnp.where(emitted, first[:, None] + row, -1))
    kept, drafts, health = drafter.draft(*own, plan, slots)
    index = real_slots(plan.slots, slots.length.shape[0])
    drafts = jnp.where(count[:, None] > 0, drafts, -1)
    return replace(slots, drafts=slots.drafts.at[index].set(drafts, mode="drop")), kept, health


class NgramDrafter:
    """Drafts what followed the last time that the request's latest tokens stood in its text."""

    params: Any = None

    def shapes(self, sizes: CacheSizes) -> Any:
        """Nothing: the slots' history is enough."""
        return None

    def page_bytes(self, sizes: CacheSizes) -> int:
        """None."""
        return 0

    def draft(
        self, params: Any, kept: Any, plan: StepPlan, slots: Slots
    ) -> tuple[Any, jax.Array, jax.Array]:
        """See `Drafter.draft`."""
        chosen = plan.slots
        known = slots.length[chosen] + 1  # the next row's token is known, but in no cache yet
        drafts = look_up(slots.history[chosen], known, slots.drafts.shape[1])
        return kept, drafts, jnp.uint32(0)

    def take(self, kept: Any, slots: jax.Array, position: jax.Array) -> tuple[Any, jax.Array]:
        """Nothing."""
        return None, jnp.bool_(True)

    def put(
        self,
        kept: Any,
        slots: jax.Array,
        position: jax.Array,
        taken: Any,
        pages: tuple[jax.Array, jax.Array],
    ) -> Any:
        """Nothing."""
        return kept


def look_up(history: jax.Array, known: jax.Array, count: int) -> jax.Array:
    """What came after the longest earlier match of the last tokens; of equals, after the latest.

    history i32[B, H] of which the first known i32[B] tokens count -> i32[B, count]; -1 where the
    last token never stood before. Where the text ends too soon, it is thought to repeat itself.
    """
    end = known[:, None] - 1  # where the last token stands
    place = jnp.arange(history.shape[1], dtype=jnp.int32)[None, :]
    matches = (place < end) & (end > 0)
    length = jnp.zeros(history.shape, jnp.int32)
    for back in range(LONGEST_MATCH):
        last = jnp.take_along_axis(history, jnp.maximum(end - back, 0), axis=1)
        matches &= (jnp.roll(history, back, axis=1) == last) & (place >= back)
        length += matches.astype(jnp.int32)
    worth = length * history.shape[1] + place
    best = jnp.argmax(jnp.where(length > 0, worth, -1), axis=1).astype(jnp.int32)[:, None]
    found = jnp.any(length > 0, axis=1)[:, None]
    ahead = jnp.arange(count, dtype=jnp.int32)[None, :] % jnp.maximum(end - best, 1)
    drafts = jnp.take_along_axis(history, best + 1 + ahead, axis=1)
    return jnp.where(found, drafts, -1)
