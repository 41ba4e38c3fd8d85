"""What the layer kernels read, and every reason why given weights or caches are not that.

One table, `READS`, names the arrays that a kernel of each kind reads. Their shapes, dtypes and
shardings are those of `params.packed_shapes` and `packed_specs`, and of `cache.abstract_cache`, for
the model as the kernels want it. In float32 mode weights stay as they are stored, so the table of
weights holds for both modes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from k3jax.cache import Cache, CacheSizes, MlaPages, abstract_cache
from k3jax.config import K3Config
from k3jax.decode.kinds import LayerKind, layer_kinds
from k3jax.parallel import shardings
from k3jax.params import packed_shapes, packed_specs
from pallas_kernels import KdaCache

LATENT = ("ffn.down", "ffn.latent_norm", "ffn.up")
SHARED = ("ffn.shared_gate_up", "ffn.shared_down")
SCALES = ("ffn.w13_scale", "ffn.w2_scale")
EVERY = (
    "attn_res_norm",
    "attn_res_proj",
    "attn_norm",
    "ffn_res_norm",
    "ffn_res_proj",
    "ffn_norm",
    "mixer.o_proj",
    "ffn.router",
    "ffn.bias",
    *LATENT,
    *SHARED,
    "ffn.w13",
    "ffn.w2",
    *SCALES,
)
KDA = ("in_proj", "f_b", "conv", "a_log", "dt_bias", "o_norm")
READS: dict[LayerKind, tuple[str, ...]] = {
    "whole": (*EVERY, *(f"mixer.{name}" for name in KDA)),
    "ffn": EVERY,
    "stock": (),
}


def weight_reasons(params: Mapping[str, Any], config: K3Config, mesh: Mesh) -> list[str]:
    """Every reason why the layer kernels cannot run this packed tree on `mesh`; empty: they can."""
    kinds = layer_kinds(config)
    reasons = _scaling_reasons(config)
    if set(kinds) == {"stock"}:
        return _lacks(config) + reasons or ["no layer has a mixture of experts, kernel reads one"]
    if "whole" not in kinds:
        reasons.append("no layer has KDA before its mixture of experts, kernel reads one")
    if config.activation != "situ":
        reasons.append(f"activation: found {config.activation}, kernel reads situ")
    try:
        wanted = _wanted_layers(config, mesh)
    except ValueError as error:
        return [*reasons, f"sizes: {error}"]
    layers = params.get("layers", {})
    for index, kind in enumerate(kinds):
        if kind != "stock":
            reasons += _layer_reasons(index, layers.get(index), wanted[index], kind)
    return reasons


def cache_reasons(
    cache: Cache, config: K3Config, sizes: CacheSizes, dtype: str, mesh: Mesh
) -> list[str]:
    """Every reason why the layer kernels cannot run on this cache; empty: they can.

    `sizes` and `dtype` (of conv windows, keys, values and latents) are those that the steps were
    compiled for.
    """
    if len(cache.layers) != config.num_layers:
        return [f"cache: found {len(cache.layers)} layers, kernel reads {config.num_layers}"]
    reasons = []
    for name, count in (("slots", sizes.slots), ("pages", sizes.pages)):
        if count < 2:
            reasons.append(
                f"{name}: found {count}, kernel reads a null one at 0 and at least one more"
            )
    wanted = abstract_cache(config, sizes, dtype, mesh)
    for index, kind in enumerate(layer_kinds(config)):
        layer, name = cache.layers[index], f"layers.{index}"
        reads = KdaCache if kind == "whole" else MlaPages
        if kind == "stock":
            continue
        if not isinstance(layer, reads):
            found = type(layer).__name__
            reasons.append(f"{name}: found {found}, kernel reads {reads.__name__}")
            continue
        reasons += _tree_reasons(name, layer, wanted.layers[index])
    return reasons + _tree_reasons("slots", cache.slots, wanted.slots)


def _lacks(config: K3Config) -> list[str]:
    """What a model without any layer for the kernels lacks."""
    reasons = []
    if config.moe.latent is None:
        reasons.append("latent MoE: found experts of the full width, kernel reads a latent")
    if config.attn_res_block is None:
        reasons.append("AttnRes: found plain residuals, kernel reads attention residuals")
    return reasons


def _scaling_reasons(config: K3Config) -> list[str]:
    if config.moe.scaling == 1:
        return []
    return [f"routed scaling factor: found {config.moe.scaling:g}, kernel reads 1"]


def _wanted_layers(config: K3Config, mesh: Mesh) -> dict[int, dict[str, Any]]:
    """The layers' trees of ShapeDtypeStruct with shardings, of the model as the kernels want it.

    That has a latent norm, MXFP4 experts and a full-rank gate. Raises ValueError if the mesh does
    not divide its sizes.
    """
    config = replace(
        config,
        kda=replace(config.kda, full_rank_gate=True),
        moe=replace(config.moe, latent_norm=True, mxfp4=True),
    )
    split = shardings(mesh, packed_specs(config))
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        packed_shapes(config, mesh.size),
        split,
    )["layers"]


def _layer_reasons(index: int, layer: Any, wanted: Any, kind: LayerKind) -> list[str]:
    """One reason if the layer is not built as a kernel's is, else those of its arrays."""
    name = f"layers.{index}"
    broken = _structure(layer)
    if broken:
        return [f"{name}{broken}"]
    return [
        reason
        for path in READS[kind]
        for reason in array_reasons(f"{name}.{path}", _find(layer, path), _find(wanted, path))
    ]


def _structure(layer: Any) -> str | None:
    """What makes it pointless to look at a layer's arrays one by one."""
    if not isinstance(layer, Mapping):
        return ": missing"
    for half in ("mixer", "ffn"):
        if not isinstance(layer.get(half), Mapping):
            return f".{half}: missing"
    groups = (
        (("ffn.router", "ffn.w13", "ffn.w2"), "found no experts, kernel reads a latent MoE"),
        (LATENT, "found experts without a latent, kernel reads a latent MoE"),
        (SHARED, "found no shared experts, kernel reads them"),
        (SCALES, "found experts without scales, kernel reads packed MXFP4"),
    )
    for paths, text in groups:
        if all(_find(layer, path) is None for path in paths):
            return f".ffn: {text}"
    return None


def _find(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _tree_reasons(name: str, found: Any, wanted: Any) -> list[str]:
    """The reasons of every leaf of a dataclass pytree."""
    arrays = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(found)
    }
    return [
        reason
        for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)
        for reason in array_reasons(
            f"{name}{jax.tree_util.keystr(path)}", arrays.get(jax.tree_util.keystr(path)), leaf
        )
    ]


def array_reasons(name: str, found: Any, wanted: jax.ShapeDtypeStruct) -> list[str]:
    """Every reason why a kernel that reads `wanted` (with its sharding) cannot read `found`."""
    if found is None:
        return [f"{name}: missing, kernel reads {_text(wanted)}"]
    if not hasattr(found, "shape") or not hasattr(found, "dtype"):
        return [f"{name}: found {type(found).__name__}, kernel reads {_text(wanted)}"]
    reasons = []
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        reasons.append(f"{name}: found {_text(found)}, kernel reads {_text(wanted)}")
    if not isinstance(found, jax.Array):
        kind = type(found).__name__
        return [*reasons, f"{name}: found a host array ({kind}), kernel reads a device array"]
    if found.is_deleted():
        return [*reasons, f"{name}: found it deleted by donation, kernel reads a live array"]
    return reasons + _placement_reasons(name, found, wanted)


def _placement_reasons(name: str, found: jax.Array, wanted: jax.ShapeDtypeStruct) -> list[str]:
    """Reasons that lie in where an array's parts are."""
    reasons, sharding, needed = [], found.sharding, wanted.sharding
    kind, memory = sharding.memory_kind, needed.memory_kind
    if kind != memory:
        reasons.append(f"{name}: found in {kind} memory, kernel reads {memory} memory")
        sharding = sharding.with_memory_kind(memory)
    same_rank = len(found.shape) == len(wanted.shape)
    if same_rank and not sharding.is_equivalent_to(needed, len(wanted.shape)):
        reasons.append(f"{name}: found {_split(sharding)}, kernel reads {_split(needed)}")
    return reasons


def _text(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _split(sharding: Any) -> str:
    """How and over which devices, by id, a sharding splits an array."""
    if not isinstance(sharding, NamedSharding):
        ids = sorted(device.id for device in sharding.device_set)
        return f"{type(sharding).__name__} on devices {ids}"
    devices: Any = sharding.mesh.devices
    return f"{tuple(sharding.spec)} on devices {[device.id for device in devices.flat]}"
