"""Fixed places for what a step takes from the host and for what it gives back.

A command buffer (a CUDA or HIP graph) holds the address of every array that its kernels read or
write. XLA compares them at each run, and once one has changed it updates every node of the graph,
which costs the host more than all else that it does for a step (see benchmarks/RESULTS.md). Cache
and health word stay where they are, because they are donated; here the rest does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.decode.batch import Batch, StepOutput


class StepBuffers:
    """The batch and the outputs of one compiled step, each at one address.

    `batch` and `output` are the abstract arrays of both, with their shardings.
    """

    def __init__(self, batch: Batch, output: StepOutput):
        self._batch, self._output = _zeros(batch), _zeros(output)
        put = jax.jit(_second, donate_argnums=0, keep_unused=True)
        self._put = put.lower(batch, batch).compile()
        self._copy = jax.jit(_copied).lower(output).compile()

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


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), shapes
    )


def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _second(_: Any, tree: Any) -> Any:
    return _copied(tree)
