"""From slots and a batch to the index arrays of a step; jitted with the step, no host arithmetic.

The plan trusts nothing that the host sent: whatever lies outside its range is moved into it, so
that no write goes astray, and sets BIT_PLAN (BIT_SLOT for a slot), which is fatal.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from k3jax.cache import Slots
from k3jax.decode.batch import Batch, Step
from k3jax.model.inputs import StepPlan
from pallas_kernels import BIT_PLAN, BIT_SLOT


def plan_step(
    step: Step,
    slots: Slots,
    batch: Batch,
    *,
    vocabulary: int,
    page_size: int,
    pages: int,
    rows: int,
) -> tuple[StepPlan, Slots, jax.Array]:
    """Lay out one step.

    `pages` is the size of the pool, `rows` the pending rows that the cache keeps. Returns (plan,
    slots with the batch's page updates, health u32[]).
    """
    table, pages_fine = update_pages(slots.pages, batch.page_updates, pages)
    slots = replace(slots, pages=table)
    chosen, slots_fine = resolve(batch.slots, slots.length.shape[0])
    live = chosen > 0
    if step.kind == "decode":
        first = slots.token[chosen][:, None]
        drafts = drafts_of(step, slots, batch)
        tokens = first if drafts is None else jnp.concatenate([first, drafts], axis=1)
        lowest, count = -1, jnp.where(live, step.rows, 0)  # -1: no draft
        counts_fine = jnp.bool_(True)
    else:
        tokens, lowest = batch.tokens, 0
        count = jnp.where(live, jnp.clip(batch.rows, 0, step.rows), 0)
        counts_fine = jnp.all(count == jnp.where(live, batch.rows, 0))
    row = jnp.arange(step.rows, dtype=jnp.int32)[None, :]
    valid = row < count[:, None]
    starts, accepted = slots.length[chosen], slots.accepted[chosen]
    positions = starts[:, None] + row
    write_pages, write_offsets, room = locate(table[chosen], positions, valid, page_size, pages)
    tokens_fine = ((tokens >= lowest) & (tokens < vocabulary)) | ~valid
    fine = [pages_fine, counts_fine, room, jnp.all(tokens_fine), distinct(chosen)]
    fine.append(jnp.all((accepted >= 0) & (accepted <= rows) & (starts >= accepted)))
    health = bit(jnp.stack(fine).all(), BIT_PLAN) | bit(slots_fine, BIT_SLOT)
    plan = StepPlan(
        kind=step.kind,
        slots=chosen,
        tokens=jnp.clip(tokens, 0, vocabulary - 1),
        positions=positions,
        valid=valid,
        accepted=jnp.clip(accepted, 0, rows),
        fresh=live & (starts == 0),
        starts=starts,
        rows=count,
        page_table=table[chosen],
        write_pages=write_pages.reshape(-1),
        write_offsets=write_offsets.reshape(-1),
    )
    return plan, slots, health


def drafts_of(step: Step, slots: Slots, batch: Batch) -> jax.Array | None:
    """The drafts i32[B, T-1] of a decode step: the host's, if it sent some, else the slots'."""
    if step.rows == 1 or batch.drafts is not None:
        return batch.drafts
    chosen, _ = resolve(batch.slots, slots.length.shape[0])
    return slots.drafts[chosen][:, : step.rows - 1]


def resolve(slots: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Slots i32[B] with what lies outside [0, size) made null, and whether all lay inside."""
    inside = (slots >= 0) & (slots < size)
    return jnp.where(inside, slots, 0), jnp.all(inside)


def distinct(slots: jax.Array) -> jax.Array:
    """bool[]: no slot but the null one stands in i32[B] twice."""
    same = slots[:, None] == slots[None, :]
    twice = jnp.triu(same, k=1) & (slots > 0)[:, None]
    return ~jnp.any(twice)


def update_pages(table: jax.Array, updates: jax.Array, pages: int) -> tuple[jax.Array, jax.Array]:
    """Set table[slot, index] = page for each of i32[N, 3]; (0, 0, 0) does nothing.

    Returns (table, whether all updates lay inside the table and the pool of `pages`).
    """
    slot, index, page = updates[:, 0], updates[:, 1], updates[:, 2]
    null = (slot == 0) & (index == 0) & (page == 0)
    inside = (slot > 0) & (slot < table.shape[0]) & (index >= 0) & (index < table.shape[1])
    inside = inside & (page >= 0) & (page < pages)
    table = table.at[jnp.where(inside, slot, table.shape[0]), index].set(page, mode="drop")
    return table, jnp.all(inside | null)


def locate(
    table: jax.Array, positions: jax.Array, valid: jax.Array, page_size: int, pages: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where rows at positions i32[B, T] are stored under page tables i32[B, max_pages].

    Returns (page i32[B, T], offset i32[B, T], whether every valid row has a page of its own). Rows
    that are not valid, or have no page, go to the null page.
    """
    index = positions // page_size
    inside = index < table.shape[1]
    page = jnp.take_along_axis(table, jnp.where(inside, index, 0), axis=1)
    found = valid & inside & (page > 0) & (page < pages)
    page = jnp.where(found, page, 0)
    return page, jnp.where(found, positions % page_size, 0), jnp.all(found == valid)


def bit(fine: jax.Array, value: int) -> jax.Array:
    """u32[]: `value` unless fine."""
    return jnp.where(fine, jnp.uint32(0), jnp.uint32(value))
