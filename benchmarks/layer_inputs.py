"""What layers of real size take: random weights, caches, a plan and a residual stream."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from k3jax.cache import CacheSizes, LayerCache, empty_layers
from k3jax.config import K3Config
from k3jax.model.inputs import Residual, StepPlan
from k3jax.parallel import shardings
from k3jax.params import packed_shapes, packed_specs

PAGE = 64
ACCEPTED = 4
BLOCKS = 8  # of attention residuals, as in the last layers


def noise(shape: tuple[int, ...], dtype: Any, wide: bool, seed: jax.Array) -> jax.Array:
    """Words of a hash; as floats, uniform around zero and of a matrix' usual size if `wide`."""
    number = jnp.zeros(shape, jnp.uint32)  # of each element; a device counts only its own
    for axis, size in enumerate(shape):
        number = number * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    words = mix(number ^ mix(seed))  # not a sum, which would shift one sequence by the seed
    if dtype == jnp.uint32:
        return words
    if dtype == jnp.uint8:
        return (jnp.uint32(119) + words % 2).astype(jnp.uint8)
    uniform = (words >> 8).astype(jnp.float32) * 2.0**-23 - 1.0
    return (uniform * (1.7 * shape[-1] ** -0.5 if wide else 1.0)).astype(dtype)


def mix(words: jax.Array) -> jax.Array:
    """A permutation of the words of 32 bits in which every bit changes half of all others."""
    words = (words ^ (words >> 16)) * jnp.uint32(0x7FEB352D)
    words = (words ^ (words >> 15)) * jnp.uint32(0x846CA68B)
    return words ^ (words >> 16)


@functools.lru_cache
def noise_over(sharding: NamedSharding) -> Any:
    """`noise` made where it lives."""
    return jax.jit(noise, static_argnums=(0, 1, 2), out_shardings=sharding)


def layer_specs(config: K3Config) -> list[Any]:
    """The tree of PartitionSpec of each layer's packed weights."""
    specs = packed_specs(config)["layers"]
    return [specs[index] for index in range(config.num_layers)]


def make_params(config: K3Config, mesh: Mesh, seed: int) -> list[Any]:
    """Packed weights of each layer, made on the devices; the shapes compile abreast."""
    shapes = packed_shapes(config, mesh.size)["layers"]
    shapes = [shapes[index] for index in range(config.num_layers)]
    layers = _filled(shapes, layer_specs(config), mesh, seed)
    _let_choose(layers)
    return layers


def make_model(config: K3Config, mesh: Mesh, seed: int) -> dict[str, Any]:
    """Packed weights of a whole model, made on the devices."""
    params = _filled(packed_shapes(config, mesh.size), packed_specs(config), mesh, seed)
    _let_choose(list(params["layers"].values()))
    return params


def _filled(shapes: Any, specs: Any, mesh: Mesh, seed: int) -> Any:
    leaves, tree = jax.tree.flatten(shapes)
    split = jax.tree.leaves(shardings(mesh, specs))

    def make(number: int) -> jax.Array:
        shape, build = leaves[number], noise_over(split[number])
        return build(shape.shape, shape.dtype, len(shape.shape) > 1, jnp.uint32(seed + number))

    with ThreadPoolExecutor(16) as pool:
        return jax.tree.unflatten(tree, list(pool.map(make, range(len(leaves)))))


def _let_choose(layers: list[Any]) -> None:
    """Zero the router's bias: wider than its scores, it would choose the same for all rows."""
    for layer in layers:
        if "bias" in layer["ffn"]:
            layer["ffn"]["bias"] = jnp.zeros_like(layer["ffn"]["bias"])


def make_caches(config: K3Config, requests: int, rows: int, context: int) -> list[LayerCache]:
    """Caches of each layer for these requests; states are not zero."""
    pages = -(-context // PAGE)
    sizes = CacheSizes(requests + 1, 1 + requests * pages, PAGE, pages, rows)
    empty = empty_layers(config, sizes, "bfloat16")

    def fill(leaf: jax.Array) -> jax.Array:
        return noise(leaf.shape, leaf.dtype, True, jnp.uint32(leaf.ndim))

    return [jax.tree.map(fill, layer) for layer in empty]


def make_plan(kind: Any, requests: int, rows: int, starts: int, context: int) -> StepPlan:
    """Requests in slots 1, 2, ... whose rows follow `starts` tokens."""
    number = jnp.arange(requests, dtype=jnp.int32)
    each = jnp.ones(requests, jnp.int32)
    positions = starts + jnp.tile(jnp.arange(rows, dtype=jnp.int32), (requests, 1))
    pages = -(-context // PAGE)
    table = 1 + number[:, None] * pages + jnp.arange(pages, dtype=jnp.int32)[None, :]
    return StepPlan(
        kind=kind,
        slots=number + 1,
        tokens=jnp.zeros((requests, rows), jnp.int32),
        positions=positions,
        valid=jnp.ones((requests, rows), bool),
        accepted=each * (min(rows, ACCEPTED) if kind == "decode" else 0),
        fresh=(each * starts) == 0,
        starts=each * starts,
        rows=each * rows,
        page_table=table,
        write_pages=jnp.take_along_axis(table, positions // PAGE, axis=1).reshape(-1),
        write_offsets=(positions % PAGE).reshape(-1),
    )


def make_residual(config: K3Config, rows: int) -> Residual:
    """A residual stream deep in the model."""
    shape = (rows, config.hidden_size)
    blocks = noise((BLOCKS, *shape), jnp.bfloat16, False, jnp.uint32(7))
    part = noise(shape, jnp.bfloat16, False, jnp.uint32(8))
    delta = noise(shape, jnp.float32, False, jnp.uint32(9))
    return Residual(blocks, jnp.int32(BLOCKS), part, delta)
