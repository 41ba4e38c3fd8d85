"""What k3-nano and its draft model are: the config.json of each, and what they weigh.

`python -m checkpoints.recipe.model` prints both against their budgets.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from checkpoints.recipe.ranks import RANKS
from k3jax.config import K3Config
from k3jax.sizes import active_parameters, bytes_at_rest, total_parameters
from k3jax.tokenizer import CONTROL_SLOTS

SPECIAL_IDS = {
    "bos_token_id": RANKS,
    "eos_token_id": RANKS + 1,
    "pad_token_id": RANKS + CONTROL_SLOTS - 1,
}
MEDIA_PAD = RANKS + 21  # <|media_pad|>; the released model counts from its own first slot
NOT_QUANTIZED = [
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
]
MXFP4_WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "scale_dtype": "torch.uint8",
    "strategy": "group",
    "symmetric": True,
    "type": "float",
    "zp_dtype": None,
}


@dataclass(frozen=True)
class Shape:
    """The sizes that are chosen; what a model of K3's kind has otherwise is in `raw_config`.

    `layers` has a letter for each layer's token mixer: K for KDA, M for latent attention.
    """

    layers: str
    block: int  # layers of an AttnRes block
    hidden: int
    kda_heads: int
    kda_dim: int
    mla_heads: int
    q_lora: int
    kv_lora: int
    nope: int
    rope: int
    value: int
    dense_inner: int
    experts: int
    top_k: int
    latent: int
    expert_inner: int
    shared_experts: int


SHAPES = {
    "k3-nano": Shape(
        layers="KKKMKKKM",
        block=3,
        hidden=256,
        kda_heads=4,
        kda_dim=64,
        mla_heads=4,
        q_lora=128,
        kv_lora=64,
        nope=64,
        rope=32,
        value=64,
        dense_inner=512,
        experts=32,
        top_k=4,
        latent=128,
        expert_inner=64,
        shared_experts=1,
    ),
    "k3-nano-draft": Shape(
        layers="KKM",
        block=2,
        hidden=64,
        kda_heads=4,
        kda_dim=32,
        mla_heads=4,
        q_lora=64,
        kv_lora=32,
        nope=32,
        rope=16,
        value=32,
        dense_inner=256,
        experts=16,
        top_k=2,
        latent=64,
        expert_inner=64,
        shared_experts=1,
    ),
}
BUDGETS = {"k3-nano": 16_000_000, "k3-nano-draft": 2_000_000}
"""Bytes that a model's directory may take in the repository."""
CONTEXT = 8192


def raw_config(shape: Shape) -> dict[str, Any]:
    """The parsed config.json of a model of this shape, in the form of the released one."""
    text = {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": shape.block,
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.dense_inner,
        "kv_lora_rank": shape.kv_lora,
        "latent_moe_use_norm": True,
        "linear_attn_config": _linear_attention(shape),
        "max_position_embeddings": CONTEXT,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": shape.expert_inner,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": shape.mla_heads,
        "num_expert_group": 1,
        "num_experts": shape.experts,
        "num_experts_per_token": shape.top_k,
        "num_hidden_layers": len(shape.layers),
        "num_key_value_heads": shape.mla_heads,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": shape.shared_experts,
        "q_lora_rank": shape.q_lora,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "quantization_config": _quantization(),
        "rms_norm_eps": 1e-05,
        "routed_expert_hidden_size": shape.latent,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": shape.value,
        "vocab_size": RANKS + CONTROL_SLOTS,
        **SPECIAL_IDS,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "dtype": "bfloat16",
        "media_placeholder_token_id": MEDIA_PAD,
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": False,
        **SPECIAL_IDS,
    }


def _linear_attention(shape: Shape) -> dict[str, Any]:
    """Which layers are KDA, counted from 1, and its sizes."""
    numbered = list(enumerate(shape.layers, start=1))
    return {
        "full_attn_layers": [number for number, mixer in numbered if mixer == "M"],
        "gate_lower_bound": -5.0,
        "head_dim": shape.kda_dim,
        "kda_layers": [number for number, mixer in numbered if mixer == "K"],
        "num_heads": shape.kda_heads,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    }


def _quantization() -> dict[str, Any]:
    """How the routed experts are stored, in the words of compressed-tensors."""
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": dict(MXFP4_WEIGHTS),
    }
    return {
        "config_groups": {"group_0": group},
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": list(NOT_QUANTIZED),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def model_config(name: str) -> K3Config:
    """The config of one of SHAPES."""
    return K3Config.from_dict(raw_config(SHAPES[name]))


def main() -> int:
    """Print each model's shape and its weights against its budget; 1 if one is over."""
    over = False
    for name, shape in SHAPES.items():
        config = model_config(name)
        weights = bytes_at_rest(config)
        over |= weights > BUDGETS[name]
        print(f"{name}: {asdict(shape)}")
        print(
            f"  {total_parameters(config):,} parameters, {active_parameters(config):,} of them "
            f"active for a token; {weights:,} bytes of {BUDGETS[name]:,}, "
            f"{bytes_at_rest(config, experts_only=True):,} of them in experts"
        )
    return int(over)


if __name__ == "__main__":
    raise SystemExit(main())
