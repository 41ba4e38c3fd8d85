"""From logical parameters to the packed tree that the decoder reads.

`pack` is written for one rank's parts and runs inside `parallel.spmd`: it concatenates local
shards, so that a fused projection is [q|k|v|...] on every rank whatever the TP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax import parallel
from k3jax.config import K3Config
from k3jax.logical import (
    ENDS,
    DType,
    ParamSpec,
    check_tp,
    group_params,
    groups,
    layer_of,
    logical_params,
)
from pallas_kernels.mxfp4 import pack_words

__all__ = [
    "ParamSpec",
    "check_tp",
    "logical_params",
    "logical_shardings",
    "pack",
    "pack_group",
    "pack_params",
    "packed_shapes",
    "packed_specs",
]

JAX_DTYPES: dict[DType, Any] = {"bf16": jnp.bfloat16, "f32": jnp.float32, "u8": jnp.uint8}

# What the dimensions of a packed array are split by; all others are whole on every rank.
PACKED_AXES: dict[str, tuple[str | None, ...]] = {
    "embed": ("vocab", None),
    "head": ("vocab", None),
    "mixer.in_proj": ("heads", None),
    "mixer.f_b": ("heads", None),
    "mixer.g_b": ("heads", None),
    "mixer.conv": (None, "heads"),
    "mixer.a_log": ("heads",),
    "mixer.dt_bias": ("heads",),
    "mixer.q_b": ("heads", None),
    "mixer.w_uk": ("heads", None, None),
    "mixer.w_uv": ("heads", None, None),
    "mixer.o_proj": (None, "heads"),
    "dense.gate_up": ("dense_inner", None),
    "dense.down": (None, "dense_inner"),
    "moe.shared_gate_up": ("shared_inner", None),
    "moe.shared_down": (None, "shared_inner"),
    "moe.w13": (None, "experts_inner", None),
    "moe.w13_scale": (None, "experts_inner", None),
    "moe.w2": (None, None, "experts_inner"),
    "moe.w2_scale": (None, None, "experts_inner"),
}

Arrays = Mapping[str, jax.Array]
Packed = dict[str, Any]


def pack(logical: Arrays, config: K3Config) -> Packed:
    """Fuse one group's local shards; keys without the `layers.N.` prefix.

    A pure function of one rank's parts: the ends give {"embed", "head", ...}, a layer gives its
    norms with {"mixer": {...}, "ffn": {...}}.
    """
    packed: Packed = {name: value for name, value in logical.items() if "." not in name}
    if "embed" in logical:
        return packed
    kda, mla, dense, moe = (_part(logical, name) for name in ("kda", "mla", "dense", "moe"))
    packed["mixer"] = _pack_kda(kda) if kda else _pack_mla(mla, config)
    packed["ffn"] = _pack_dense(dense) if dense else _pack_moe(moe, config)
    return packed


def _part(logical: Arrays, prefix: str) -> dict[str, jax.Array]:
    start = f"{prefix}."
    return {name.removeprefix(start): x for name, x in logical.items() if name.startswith(start)}


def _pack_kda(kda: Arrays) -> Packed:
    """in_proj [q|k|v|g or g_a|f_a|b, D] and conv [4, q|k|v]."""
    gate = "g" if "g" in kda else "g_a"
    packed = {
        "in_proj": jnp.concatenate([kda[name] for name in ("q", "k", "v", gate, "f_a", "b")]),
        "conv": jnp.concatenate([kda[f"conv_{name}"] for name in "qkv"]).T,
        "o_proj": kda["o"],
    }
    kept = ("f_b", "g_b", "a_log", "dt_bias", "o_norm")
    return packed | {name: kda[name] for name in kept if name in kda}


def _pack_mla(mla: Arrays, config: K3Config) -> Packed:
    """in_proj [q_a or q|kv_a|g, D]; kv_b splits into w_uk [H, nope, L] and w_uv [H, V, L]."""
    nope = config.mla.qk_nope_head_dim
    names = ("q_a" if "q_a" in mla else "q", "kv_a", "g")
    by_head = mla["kv_b"].reshape(-1, nope + config.mla.v_head_dim, config.mla.kv_lora_rank)
    packed = {
        "in_proj": jnp.concatenate([mla[name] for name in names if name in mla]),
        "kv_norm": mla["kv_a_norm"],
        "w_uk": by_head[:, :nope],
        "w_uv": by_head[:, nope:],
        "o_proj": mla["o"],
    }
    return packed | {name: mla[name] for name in ("q_a_norm", "q_b") if name in mla}


def _pack_dense(dense: Arrays) -> Packed:
    """gate_up [2F, D] = [gate|up]."""
    return {"gate_up": jnp.concatenate([dense["gate"], dense["up"]]), "down": dense["down"]}


def _pack_moe(moe: Arrays, config: K3Config) -> Packed:
    """w13 [E, 2I, Z] = [w1|w3] in words of 32 bits when MXFP4; w13_scale alike."""
    kept = ("router", "bias", "down", "latent_norm", "up", "shared_down")
    packed = {name: moe[name] for name in kept if name in moe}
    packed["shared_gate_up"] = jnp.concatenate([moe["shared_gate"], moe["shared_up"]])
    w13 = jnp.concatenate([moe["w1"], moe["w3"]], axis=1)
    if not config.moe.mxfp4:
        return packed | {"w13": w13, "w2": moe["w2"]}
    scale = jnp.concatenate([moe["w1_scale"], moe["w3_scale"]], axis=1)
    words = {"w13": pack_words(w13), "w2": pack_words(moe["w2"])}
    return packed | words | {"w13_scale": scale, "w2_scale": moe["w2_scale"]}


def _first_alike(config: K3Config, group: str) -> str:
    """The first group with the same parameters: layers of a kind share one traced `pack`."""
    if group == ENDS:
        return group
    kinds = list(zip(config.mixers, config.ffns, strict=True))
    return f"layers.{kinds.index(kinds[layer_of(group)])}"


def _logical_specs(config: K3Config, group: str) -> dict[str, PartitionSpec]:
    return {name: parallel.spec(*spec.axes) for name, spec in group_params(config, group).items()}


def _local_shapes(config: K3Config, group: str, tp: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one rank's logical shards."""
    shapes = {}
    for name, spec in group_params(config, group).items():
        split = zip(spec.shape, spec.axes, strict=True)
        shape = tuple(size if axis is None else size // tp for size, axis in split)
        shapes[name] = jax.ShapeDtypeStruct(shape, JAX_DTYPES[spec.dtype])
    return shapes


@functools.lru_cache(maxsize=64)
def _group_shapes(config: K3Config, group: str, tp: int) -> tuple[Packed, Packed]:
    """Trees of the packed arrays' axis names and of their global shapes."""
    local = jax.eval_shape(lambda x: pack(x, config), _local_shapes(config, group, tp))
    ffn = "" if group == ENDS else config.ffns[layer_of(group)]

    def axes(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> tuple[str | None, ...]:
        names = [str(entry.key) for entry in path]
        name = ".".join([ffn if names[0] == "ffn" else names[0], *names[1:]])
        return PACKED_AXES.get(name, (None,) * len(shape.shape))

    def whole(shape: jax.ShapeDtypeStruct, names: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        split = zip(shape.shape, names, strict=True)
        sizes = tuple(size if axis is None else size * tp for size, axis in split)
        return jax.ShapeDtypeStruct(sizes, shape.dtype)

    tree = jax.tree_util.tree_map_with_path(axes, local)
    return tree, jax.tree.map(whole, local, tree)


def _group_specs(config: K3Config, group: str) -> Packed:
    axes, _ = _group_shapes(config, _first_alike(config, group), 1)
    return jax.tree.map(
        lambda names: parallel.spec(*names), axes, is_leaf=lambda entry: isinstance(entry, tuple)
    )


def join_groups(packed: Mapping[str, Packed]) -> Packed:
    """The whole tree from its groups: the ends' arrays, and "layers" by number."""
    tree = dict(packed[ENDS])
    tree["layers"] = {layer_of(name): part for name, part in packed.items() if name != ENDS}
    return tree


def packed_specs(config: K3Config) -> Packed:
    """Tree of PartitionSpec, one for each packed array."""
    return join_groups({group: _group_specs(config, group) for group in groups(config)})


def packed_shapes(config: K3Config, tp: int) -> Packed:
    """Tree of the packed arrays' global shapes: the ranks' parts side by side on the split axis.

    What each rank holds whole inside a fused array (f_a and kv_a in in_proj) counts `tp` times.
    Raises ValueError if `tp` does not divide the sizes.
    """
    check_tp(config, tp)
    shapes = {}
    for group in groups(config):
        _, tree = _group_shapes(config, _first_alike(config, group), tp)
        shapes[group] = jax.tree.map(lambda shape: shape, tree)  # a copy: the cache keeps its own
    return join_groups(shapes)


def logical_shardings(config: K3Config, group: str, mesh: Mesh) -> dict[str, NamedSharding]:
    """How the logical arrays of one group are split over the mesh."""
    return parallel.shardings(mesh, _logical_specs(config, group))


def pack_group(config: K3Config, group: str, mesh: Mesh) -> Callable[[Arrays], Packed]:
    """The compiled `pack` of one group: whole sharded logical arrays -> whole packed arrays.

    Layers of a kind share one compilation.
    """
    return _jitted_pack(config, _first_alike(config, group), mesh)


@functools.lru_cache(maxsize=64)
def _jitted_pack(config: K3Config, group: str, mesh: Mesh) -> Callable[[Arrays], Packed]:
    mapped = parallel.spmd(
        lambda logical: pack(logical, config),
        mesh,
        (_logical_specs(config, group),),
        _group_specs(config, group),
    )
    return jax.jit(mapped)


def pack_params(logical: Mapping[str, Any], config: K3Config, mesh: Mesh) -> Packed:
    """Pack a whole model held in memory: full logical names -> the packed tree, sharded.

    Arrays must have the shapes and dtypes of `logical_params`; raises ValueError that lists every
    name that is missing, unknown or different.
    """
    check_tp(config, mesh.size)
    specs = logical_params(config)
    wrong = [f"{name} is missing" for name in specs if name not in logical]
    wrong += [f"{name} is unknown" for name in logical if name not in specs]
    for name, spec in specs.items():
        wanted = jax.ShapeDtypeStruct(spec.shape, JAX_DTYPES[spec.dtype])
        found = logical.get(name, wanted)
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            wrong.append(f"{name} is {found.dtype}{found.shape}, not {wanted.dtype}{wanted.shape}")
    if wrong:
        raise ValueError("parameters do not fit the config: " + "; ".join(wrong))
    packed = {}
    for group in groups(config):
        shardings = logical_shardings(config, group, mesh)
        start = "" if group == ENDS else f"{group}."
        arrays = {
            name: jax.device_put(logical[start + name], shardings[name]) for name in shardings
        }
        packed[group] = pack_group(config, group, mesh)(arrays)
    return join_groups(packed)
