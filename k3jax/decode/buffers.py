"""Fixed places for what a step takes from the host, for what it gives back, and for XLA's scratch.

A command buffer (a CUDA or HIP graph) holds the address of every array that its kernels read or
write. XLA compares them at each run, and once one has changed it updates every node of the graph,
which costs the host more than all else that it does for a step (see benchmarks/RESULTS.md). Cache
and health word stay where they are, because they are donated; here the rest does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.decode.batch import Batch, StepOutput

AT_ONCE = 4  # batches and outputs of one step: under way, being read, and some to spare
SMALL_GAPS = 64  # for what is smaller than any: votes, health words
SMALLEST = 256  # bytes that XLA's allocator gives at least


class StepBuffers:
    """The batch and the outputs of one compiled step, each at one address.

    `batch` and `output` are the abstract arrays of both, with their shardings.
    """

    def __init__(self, batch: Batch, output: StepOutput):
        """For any thread: several processes need not make theirs in the same order."""
        self._batch, self._output = _zeros(batch), _zeros(output)
        put = jax.jit(
            _put_batch, donate_argnums=0, keep_unused=True, out_shardings=_shardings(batch)
        )
        self._put = put.lower(batch, batch).compile()
        copy = jax.jit(_copy_output, out_shardings=_shardings(output))
        self._copy = copy.lower(output).compile()

    @property
    def sides(self) -> tuple[Batch, StepOutput]:
        """The places of both, whatever stands there."""
        return self._batch, self._output

    def put(self, batch: Batch) -> Batch:
        """The batch on the device; what the step before was given is overwritten."""
        self._batch = self._put(self._batch, batch)
        return self._batch

    def place(self) -> StepOutput:
        """Where the step is to leave its outputs: an argument to donate."""
        return self._output

    def take(self, output: StepOutput) -> StepOutput:
        """A copy of what the step left there, which the next step does not overwrite."""
        self._output = output
        return self._copy(output)


def fences(steps: Iterable[tuple[Batch, StepOutput]], devices: Sequence[Any]) -> list[jax.Array]:
    """Arrays to hold on each of this process' `devices`, for the gaps between them.

    XLA allocates its scratch memory in each run of a step, at one address as long as the free
    memory looks the same. So batches and outputs, which come and go between runs, must not be
    allocated from where it was. They go into the smallest gap that holds them: here gaps are made
    for those of `steps`, arrays or abstract ones, and what stands between keeps them apart. A fence
    is as large as its gap: a smaller one might be put into an older gap elsewhere.
    """
    sizes = gaps(steps)
    made = [
        [jax.device_put(np.zeros(size, np.uint8), device) for _ in range(2)]
        for device in devices
        for size in sizes.elements()
    ]
    jax.block_until_ready(made)
    return [fence for _, fence in made]


def gaps(steps: Iterable[tuple[Batch, StepOutput]]) -> Counter[int]:
    """How many gaps of how many bytes: of each size, what the step needs that needs most."""
    most = Counter({SMALLEST: SMALL_GAPS})
    for step in steps:
        sizes = Counter(-(-_bytes(leaf) // SMALLEST) * SMALLEST for leaf in jax.tree.leaves(step))
        most |= Counter({size: AT_ONCE * count for size, count in sizes.items()})
    return most


def _bytes(leaf: Any) -> int:
    return leaf.size * leaf.dtype.itemsize


def _zeros(shapes: Any) -> Any:
    """Made by each process for its own devices; `device_put` would compare them in a collective."""

    def make(leaf: Any) -> jax.Array:
        whole = np.zeros(leaf.shape, leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: whole[index])

    return jax.tree.map(make, shapes)


def _shardings(shapes: Any) -> Any:
    """Told to JAX, which leaves the pairing of donated arrays and results to XLA otherwise."""
    return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def _put_batch(place: Batch, batch: Batch) -> Batch:
    del place
    return jax.tree.map(jnp.copy, batch)


def _copy_output(output: StepOutput) -> StepOutput:
    return jax.tree.map(jnp.copy, output)
