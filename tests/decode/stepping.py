"""A stand-in for the engine's loop: a step with a collective, run-ahead 1, one read a step."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from k3jax.decode.failstop import check_votes
from k3jax.parallel import REPLICATED, psum, spmd


def make_step(mesh):
    """The compiled step: (health u32[] donated) -> (token i32[], the word's copy, health)."""

    def step(health):
        return psum(jnp.int32(1)), health + jnp.uint32(0), health

    mapped = spmd(step, mesh, (REPLICATED,), (REPLICATED,) * 3)
    return jax.jit(mapped, donate_argnums=0)


def first_health(mesh):
    return jax.device_put(np.uint32(0), NamedSharding(mesh, REPLICATED))


def run(mesh, failstop, steps):
    """Run until the fail-stop raises; returns (steps dispatched, blocking reads, its text)."""
    step, health, flight, reads = make_step(mesh), first_health(mesh), None, 0
    land = partial(jax.tree.map, np.asarray)
    for number in range(1, steps + 1):
        health = failstop.inject(health)
        token, word, health = step(health)
        votes = failstop.after_step(word)
        landing, flight = flight, (token, votes)
        for array in jax.tree.leaves(flight):
            array.copy_to_host_async()
        if landing is None:
            continue
        token, votes = land(landing)
        reads += 1
        assert token == mesh.size
        if votes is not None:
            try:
                check_votes(votes)
            except RuntimeError as error:
                return number, reads, str(error)
    return steps, reads, None
