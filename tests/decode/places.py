"""Buffers of a step without a model, and where arrays lie."""

import jax
import numpy as np
from jax.sharding import NamedSharding

from k3jax.cache import CacheSizes
from k3jax.decode.batch import empty_batch, output_shapes
from k3jax.decode.buffers import StepBuffers
from k3jax.parallel import REPLICATED

SIZES = CacheSizes(slots=3, pages=9, page_size=16, max_pages=4, pending=2)
VOCABULARY = 70


def batch_of(step, number):
    """A batch of `step` in which every array is full of `number`."""
    batch = empty_batch(step, SIZES, VOCABULARY, masked=True)
    return jax.tree.map(lambda leaf: np.full_like(leaf, number), batch)


def output_of(step, mesh, number):
    """An output of `step` full of `number`; the health word is that and the rank's own besides."""

    def fill(shape):
        whole = np.full(shape.shape, number, shape.dtype)
        parts = [
            jax.device_put(whole if whole.ndim else whole + np.uint32(rank), device)
            for rank, device in enumerate(mesh.devices.flat)
            if device in mesh.local_devices
        ]
        sharding = NamedSharding(mesh, REPLICATED)
        return jax.make_array_from_single_device_arrays(whole.shape, sharding, parts)

    return jax.tree.map(fill, output_shapes(step, 2))


def sides_of(step):
    """A batch and an output of `step` as shapes, or arrays that serve as such."""
    return batch_of(step, 0), output_shapes(step, 2)


def buffers_of(step, mesh):
    whole = NamedSharding(mesh, REPLICATED)
    return StepBuffers(
        *jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
            sides_of(step),
        )
    )


def addresses(tree):
    """Of every part of every array."""
    return {
        jax.tree_util.keystr(path): [
            part.data.unsafe_buffer_pointer() for part in leaf.addressable_shards
        ]
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def numbers(tree):
    """The numbers that stand in the arrays' parts; a health word's are for `words`."""
    return {
        int(number)
        for leaf in jax.tree.leaves(tree)
        if leaf.ndim
        for part in leaf.addressable_shards
        for number in np.unique(part.data)
    }


def words(output):
    """The health word of each of this process's ranks."""
    return [int(part.data) for part in output.health.addressable_shards]
