"""Loops of a kernel that keep loads under way while they multiply."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def sum_blocks(step, blocks, most, start):
    """Add `step(block)` over all blocks to `start`, `most` or fewer blocks' loads at a time.

    step: block number -> a function of no arguments that gives the block's sums: it loads when it
    is called, and multiplies when its result is.
    """
    together = max(count for count in range(1, most + 1) if blocks % count == 0)

    def round_of(index, total):
        loaded = [step(index * together + place) for place in range(together)]
        for product in loaded:
            total = total + product()
        return total

    if together == blocks:
        return round_of(0, start)
    return lax.fori_loop(0, blocks // together, round_of, start)


def run_ahead(load, use, count, carry):
    """Run `carry = use(i, load(i), carry)` for i below `count`, each load one step ahead.

    The body of the loop stays short: long ones wait for instructions.
    """

    def step(index, state):
        loaded, carry = state
        following = load(jnp.minimum(index + 1, count - 1))
        return following, use(index, loaded, carry)

    if count == 1:
        return use(0, load(0), carry)
    return lax.fori_loop(0, count, step, (load(0), carry))[1]


def run_ring(load, use, count, carry, depth):
    """Run `carry = use(i, load(i), carry)` for i below `count`, with `depth` loads under way.

    What is loaded next takes the registers of what was just used. The body of the loop stays
    short: long ones wait for instructions.
    """
    depth = max(size for size in range(1, depth + 1) if count % size == 0)

    def step(index, state):
        ring, carry = list(state[0]), state[1]
        for place in range(depth):
            at = index * depth + place
            carry = use(at, ring[place], carry)
            ring[place] = load(jnp.minimum(at + depth, count - 1))
        return ring, carry

    return lax.fori_loop(0, count // depth, step, ([load(i) for i in range(depth)], carry))[1]
