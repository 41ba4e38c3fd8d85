"""The one table between logical parameters and Hugging Face tensors, read in both directions.

Every transform keeps the order of the elements: a file's tensor begins with the logical tensor's
elements, row by row, and what may follow (the tail of A_log) must be zero.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from k3jax.config import K3Config
from k3jax.logical import ENDS, DType, ParamSpec, group_params, groups

PREFIXES = {"kimi_k3": "language_model.", "kimi_linear": ""}
IGNORED = re.compile(r"(vision_tower|mm_projector|multi_modal_projector)\.")
"""Tensors of the vision encoder, which the text model leaves alone."""

TABLE: dict[str, str] = {
    "embed": "model.embed_tokens.weight",
    "head": "lm_head.weight",
    "norm": "model.norm.weight",
    "res_norm": "model.output_attn_res_norm.weight",
    "res_proj": "model.output_attn_res_proj.weight",
    "attn_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "attn_res_norm": "self_attention_res_norm.weight",
    "attn_res_proj": "self_attention_res_proj.weight",
    "ffn_res_norm": "mlp_res_norm.weight",
    "ffn_res_proj": "mlp_res_proj.weight",
    "kda.q": "self_attn.q_proj.weight",
    "kda.k": "self_attn.k_proj.weight",
    "kda.v": "self_attn.v_proj.weight",
    "kda.conv_q": "self_attn.q_conv1d.weight",
    "kda.conv_k": "self_attn.k_conv1d.weight",
    "kda.conv_v": "self_attn.v_conv1d.weight",
    "kda.f_a": "self_attn.f_a_proj.weight",
    "kda.f_b": "self_attn.f_b_proj.weight",
    "kda.b": "self_attn.b_proj.weight",
    "kda.g": "self_attn.g_proj.weight",
    "kda.g_a": "self_attn.g_a_proj.weight",
    "kda.g_b": "self_attn.g_b_proj.weight",
    "kda.a_log": "self_attn.A_log",
    "kda.dt_bias": "self_attn.dt_bias",
    "kda.o_norm": "self_attn.o_norm.weight",
    "kda.o": "self_attn.o_proj.weight",
    "mla.q": "self_attn.q_proj.weight",
    "mla.q_a": "self_attn.q_a_proj.weight",
    "mla.q_a_norm": "self_attn.q_a_layernorm.weight",
    "mla.q_b": "self_attn.q_b_proj.weight",
    "mla.kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "mla.kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "mla.kv_b": "self_attn.kv_b_proj.weight",
    "mla.g": "self_attn.g_proj.weight",
    "mla.o": "self_attn.o_proj.weight",
    "dense.gate": "mlp.gate_proj.weight",
    "dense.up": "mlp.up_proj.weight",
    "dense.down": "mlp.down_proj.weight",
    "moe.router": "block_sparse_moe.gate.weight",
    "moe.bias": "block_sparse_moe.gate.e_score_correction_bias",
    "moe.down": "block_sparse_moe.routed_expert_down_proj.weight",
    "moe.up": "block_sparse_moe.routed_expert_up_proj.weight",
    "moe.latent_norm": "block_sparse_moe.routed_expert_norm.weight",
    "moe.shared_gate": "block_sparse_moe.shared_experts.gate_proj.weight",
    "moe.shared_up": "block_sparse_moe.shared_experts.up_proj.weight",
    "moe.shared_down": "block_sparse_moe.shared_experts.down_proj.weight",
    "moe.w1": "block_sparse_moe.experts.{expert}.w1.{weight}",
    "moe.w2": "block_sparse_moe.experts.{expert}.w2.{weight}",
    "moe.w3": "block_sparse_moe.experts.{expert}.w3.{weight}",
    "moe.w1_scale": "block_sparse_moe.experts.{expert}.w1.weight_scale",
    "moe.w2_scale": "block_sparse_moe.experts.{expert}.w2.weight_scale",
    "moe.w3_scale": "block_sparse_moe.experts.{expert}.w3.weight_scale",
}

FILE_DTYPES: dict[DType, tuple[str, ...]] = {
    "bf16": ("BF16",),
    "f32": ("F32", "BF16"),
    "u8": ("U8",),
}
"""Dtypes that a file may have for a logical one; all of them convert exactly."""

BF16_IN_KIMI_LINEAR = ("kda.conv_q", "kda.conv_k", "kda.conv_v", "kda.o_norm", "moe.bias")
A_LOG_MULTIPLE = 128
"""Kimi-K3 files fill A_log with zeros up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a Hugging Face checkpoint and the logical tensor (or expert) it holds."""

    hf_name: str
    group: str
    name: str
    expert: int | None
    shape: tuple[int, ...]
    """Logical shape, without the experts' axis."""
    dtype: DType


def hf_name(config: K3Config, group: str, name: str, expert: int | None = None) -> str:
    """Full Hugging Face name of a logical tensor (of one expert, where they are stacked)."""
    prefix = PREFIXES[config.model_type]
    layer = "" if group == ENDS else f"model.{group}."
    weight = "weight_packed" if config.moe.mxfp4 else "weight"
    return prefix + layer + TABLE[name].format(expert=expert, weight=weight)


def group_tensors(config: K3Config, group: str) -> Iterator[FileTensor]:
    """The file tensors of one group, experts in order within each logical tensor."""
    for name, spec in group_params(config, group).items():
        if "{expert}" not in TABLE[name]:
            full = hf_name(config, group, name)
            yield FileTensor(full, group, name, None, spec.shape, spec.dtype)
            continue
        for expert in range(spec.shape[0]):
            full = hf_name(config, group, name, expert)
            yield FileTensor(full, group, name, expert, spec.shape[1:], spec.dtype)


def file_tensors(config: K3Config) -> Iterator[FileTensor]:
    """Every tensor that a Hugging Face checkpoint of this model must hold."""
    for group in groups(config):
        yield from group_tensors(config, group)


def is_ignored(config: K3Config, name: str) -> bool:
    """Whether a tensor is none of this model's: vision, or a layer past the last."""
    if IGNORED.match(name):
        return True
    layer = re.match(re.escape(PREFIXES[config.model_type]) + r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= config.num_layers


def shape_fits(name: str, file_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a file's shape can hold the logical `shape`; values are not looked at."""
    if name == "kda.a_log":
        longer = len(file_shape) == 1 and file_shape[0] >= shape[0]
        return longer or file_shape == (1, 1, shape[0], 1)
    return file_shape == _plain_file_shape(name, shape)


def _plain_file_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if name.startswith("kda.conv_"):
        return (shape[0], 1, shape[1])
    if name.endswith("res_proj"):
        return (1, *shape)
    return shape


def released_shape(config: K3Config, tensor: FileTensor) -> tuple[int, ...]:
    """Shape in which the released checkpoint of this family holds the tensor."""
    if tensor.name != "kda.a_log":
        return _plain_file_shape(tensor.name, tensor.shape)
    heads = tensor.shape[0]
    if config.model_type == "kimi_linear":
        return (1, 1, heads, 1)
    return (-(-heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE,)


def released_dtype(config: K3Config, name: str, spec: ParamSpec) -> str:
    """Dtype in which the released checkpoint of this family holds the tensor."""
    if config.model_type == "kimi_linear" and name in BF16_IN_KIMI_LINEAR:
        return "BF16"
    return FILE_DTYPES[spec.dtype][0]
