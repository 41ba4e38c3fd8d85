"""The table of logical parameters: what a checkpoint holds, whatever file or TP it is for.

No jax import: the report on sizes and the checkpoint's checks need only names, shapes and dtypes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from k3jax.config import K3Config

DType = Literal["bf16", "f32", "u8"]
ITEM_BYTES: dict[DType, int] = {"bf16": 2, "f32": 4, "u8": 1}
SCALE_GROUP = 32
"""Columns that share one MXFP4 scale."""
ENDS = "ends"
"""Group of the parameters outside of the layers."""


@dataclass(frozen=True)
class ParamSpec:
    """One logical tensor; `axes` names what a dimension is split by (None: never split)."""

    shape: tuple[int, ...]
    dtype: DType
    axes: tuple[str | None, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.size * ITEM_BYTES[self.dtype]


Specs = dict[str, ParamSpec]


def _matrix(rows: int, columns: int, *axes: str | None) -> ParamSpec:
    return ParamSpec((rows, columns), "bf16", axes or (None, None))


def _vector(size: int, dtype: DType = "bf16", axis: str | None = None) -> ParamSpec:
    return ParamSpec((size,), dtype, (axis,))


def logical_params(config: K3Config) -> Specs:
    """Every logical parameter by its full name; a layer's start with `layers.N.`."""
    specs = dict(end_params(config))
    for layer in range(config.num_layers):
        for name, spec in layer_params(config, layer).items():
            specs[f"layers.{layer}.{name}"] = spec
    return specs


def groups(config: K3Config) -> tuple[str, ...]:
    """Names of the parts that load and convert at once: the ends, then each layer."""
    return (ENDS, *(f"layers.{layer}" for layer in range(config.num_layers)))


def layer_of(group: str) -> int:
    """Number of the layer that a group other than the ends is."""
    return int(group.removeprefix("layers."))


def group_params(config: K3Config, group: str) -> Specs:
    """Parameters of one group, named within it."""
    return end_params(config) if group == ENDS else layer_params(config, layer_of(group))


def end_params(config: K3Config) -> Specs:
    """Parameters before and after the layers."""
    hidden = config.hidden_size
    specs = {
        "embed": _matrix(config.vocab_size, hidden, "vocab", None),
        "head": _matrix(config.vocab_size, hidden, "vocab", None),
        "norm": _vector(hidden),
    }
    if config.attn_res_block:
        specs |= {"res_norm": _vector(hidden), "res_proj": _vector(hidden)}
    return specs


def layer_params(config: K3Config, layer: int) -> Specs:
    """Parameters of one layer, without the `layers.N.` prefix."""
    hidden = config.hidden_size
    names = ["attn_norm", "ffn_norm"]
    if config.attn_res_block:
        names += ["attn_res_norm", "attn_res_proj", "ffn_res_norm", "ffn_res_proj"]
    specs = {name: _vector(hidden) for name in names}
    specs |= _kda_params(config) if config.mixers[layer] == "kda" else _mla_params(config)
    specs |= _dense_params(config) if config.ffns[layer] == "dense" else _moe_params(config)
    return specs


def _kda_params(config: K3Config) -> Specs:
    """Parameters of a KDA mixer; key and value dims are both `head_dim`."""
    kda, hidden = config.kda, config.hidden_size
    width = kda.num_heads * kda.head_dim
    conv = ParamSpec((width, kda.conv_width), "f32", ("heads", None))
    specs = {f"kda.{name}": _matrix(width, hidden, "heads", None) for name in "qkv"}
    specs |= {f"kda.conv_{name}": conv for name in "qkv"}
    specs |= {
        "kda.f_a": _matrix(kda.head_dim, hidden),
        "kda.f_b": _matrix(width, kda.head_dim, "heads", None),
        "kda.b": _matrix(kda.num_heads, hidden, "heads", None),
    }
    if kda.full_rank_gate:
        specs["kda.g"] = _matrix(width, hidden, "heads", None)
    else:
        specs["kda.g_a"] = _matrix(kda.head_dim, hidden)
        specs["kda.g_b"] = _matrix(width, kda.head_dim, "heads", None)
    return specs | {
        "kda.a_log": _vector(kda.num_heads, "f32", "heads"),
        "kda.dt_bias": _vector(width, "f32", "heads"),
        "kda.o_norm": _vector(kda.head_dim, "f32"),
        "kda.o": _matrix(hidden, width, None, "heads"),
    }


def _mla_params(config: K3Config) -> Specs:
    """Parameters of an MLA mixer; kv_b rows are head-major, nope then value."""
    mla, hidden = config.mla, config.hidden_size
    heads, value = mla.num_heads, mla.num_heads * mla.v_head_dim
    query = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        specs = {"mla.q": _matrix(query, hidden, "heads", None)}
    else:
        specs = {
            "mla.q_a": _matrix(mla.q_lora_rank, hidden),
            "mla.q_a_norm": _vector(mla.q_lora_rank),
            "mla.q_b": _matrix(query, mla.q_lora_rank, "heads", None),
        }
    key_value = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    specs |= {
        "mla.kv_a": _matrix(mla.kv_lora_rank + mla.qk_rope_head_dim, hidden),
        "mla.kv_a_norm": _vector(mla.kv_lora_rank),
        "mla.kv_b": _matrix(key_value, mla.kv_lora_rank, "heads", None),
    }
    if mla.output_gate:
        specs["mla.g"] = _matrix(value, hidden, "heads", None)
    return specs | {"mla.o": _matrix(hidden, value, None, "heads")}


def _dense_params(config: K3Config) -> Specs:
    """Parameters of a dense feed-forward layer."""
    hidden, inner = config.hidden_size, config.dense_inner
    return {
        "dense.gate": _matrix(inner, hidden, "dense_inner", None),
        "dense.up": _matrix(inner, hidden, "dense_inner", None),
        "dense.down": _matrix(hidden, inner, None, "dense_inner"),
    }


def _moe_params(config: K3Config) -> Specs:
    """Parameters of a mixture of experts; the experts of a layer are stacked."""
    moe, hidden = config.moe, config.hidden_size
    specs = {
        "moe.router": _matrix(moe.num_experts, hidden),
        "moe.bias": _vector(moe.num_experts, "f32"),
    }
    if moe.latent is not None:
        specs["moe.down"] = _matrix(moe.latent, hidden)
        specs["moe.up"] = _matrix(hidden, moe.latent)
    if moe.latent_norm:
        specs["moe.latent_norm"] = _vector(moe.latent or hidden)
    specs |= {
        "moe.shared_gate": _matrix(moe.shared_inner, hidden, "shared_inner", None),
        "moe.shared_up": _matrix(moe.shared_inner, hidden, "shared_inner", None),
        "moe.shared_down": _matrix(hidden, moe.shared_inner, None, "shared_inner"),
    }
    width = moe.latent or hidden
    for name in ("w1", "w3"):
        specs |= _expert_params(config, name, (moe.inner, width), ("experts_inner", None))
    return specs | _expert_params(config, "w2", (width, moe.inner), (None, "experts_inner"))


def _expert_params(
    config: K3Config, name: str, shape: tuple[int, int], axes: tuple[str | None, str | None]
) -> Specs:
    """One matrix of every expert: bf16 [E, rows, columns], or MXFP4 codes and scales."""
    experts, (rows, columns) = config.moe.num_experts, shape
    axes3 = (None, *axes)
    if not config.moe.mxfp4:
        return {f"moe.{name}": ParamSpec((experts, rows, columns), "bf16", axes3)}
    return {
        f"moe.{name}": ParamSpec((experts, rows, columns // 2), "u8", axes3),
        f"moe.{name}_scale": ParamSpec((experts, rows, columns // SCALE_GROUP), "u8", axes3),
    }


def check_tp(config: K3Config, tp: int) -> None:
    """Raise one ValueError that names every size which `tp` ranks cannot share equally."""
    if tp < 1:
        raise ValueError(f"tensor parallelism must be >= 1, not {tp}")
    moe = config.moe
    unit = SCALE_GROUP if moe.mxfp4 else 1
    sizes = [
        ("heads of KDA", config.kda.num_heads, tp),
        ("heads of MLA", config.mla.num_heads, tp),
        ("vocabulary", config.vocab_size, tp),
        ("hidden size", config.hidden_size, tp),
        ("shared inner width", moe.shared_inner, tp),
        ("expert inner width", moe.inner, unit * tp),
    ]
    if "dense" in config.ffns:
        sizes.append(("dense inner width", config.dense_inner, tp))
    wrong = [
        f"{name} {size} by {part}" + (f" ({tp} x {unit})" if part > tp else "")
        for name, size, part in sizes
        if size % part
    ]
    if wrong:
        raise ValueError(f"tensor parallelism of {tp} does not divide: {', '.join(wrong)}")
