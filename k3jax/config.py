"""What the checkpoint is: a frozen model description read from a Hugging Face `config.json`.

`python -m k3jax.config PATH` prints what that model weighs and where it fits. No jax import.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from k3jax.config_keys import KeyReader, Mixer, read_layer_lists, read_quantization

LOGGER = logging.getLogger(__name__)

Ffn = Literal["dense", "moe"]
Activation = Literal["situ", "silu"]

CONV_WIDTH = 4
"""Taps of the short convolution: caches and kernels keep exactly 3 earlier rows."""

# A key that changes the mathematics, and the only values that are computed here.
SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "hidden_act": ("situ", "silu"),
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
}
SUPPORTED_VALUES_IF_PRESENT: dict[str, tuple[object, ...]] = {
    "topk_method": ("noaux_tc",),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "tie_word_embeddings": (False,),
    "num_nextn_predict_layers": (0, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
}


@dataclass(frozen=True)
class KdaConfig:
    """Sizes of the Kimi delta attention; key and value rows are both `head_dim` wide."""

    num_heads: int
    head_dim: int
    conv_width: int
    gate_lower_bound: float | None
    full_rank_gate: bool


@dataclass(frozen=True)
class MlaConfig:
    """Sizes of the latent attention; `qk_rope_head_dim` columns are never rotated."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool


@dataclass(frozen=True)
class MoeConfig:
    """Sizes of the mixture of experts; `latent` None means that experts see the full width."""

    num_experts: int
    top_k: int
    inner: int
    latent: int | None
    latent_norm: bool
    shared_inner: int
    renormalize: bool
    scaling: float
    mxfp4: bool


@dataclass(frozen=True)
class K3Config:
    """A Kimi-K3 or Kimi-Linear text model; layers are 0-based here, 1-based in the file."""

    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    mixers: tuple[Mixer, ...]
    ffns: tuple[Ffn, ...]
    dense_inner: int
    activation: Activation
    situ_beta: float
    situ_linear_beta: float
    rms_norm_eps: float
    attn_res_block: int | None
    max_positions: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    kda: KdaConfig
    mla: MlaConfig
    moe: MoeConfig

    @property
    def attn_res_blocks(self) -> int:
        """Blocks that AttnRes keeps at the end of the stack (0 without AttnRes)."""
        return -(-self.num_layers // self.attn_res_block) if self.attn_res_block else 0

    @classmethod
    def from_file(cls, path: str | Path) -> K3Config:
        """Read `config.json`, or the one in a directory; ValueError names every problem."""
        return cls.from_dict(read_config_json(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> K3Config:
        """Read a parsed `config.json`; ValueError names every problem with its value."""
        model_type = raw.get("model_type")
        if model_type not in ("kimi_k3", "kimi_linear"):
            raise ValueError(
                f"model_type {model_type!r} is not supported: kimi_k3 (with a text_config) or "
                "kimi_linear (flat)"
            )
        text = raw.get("text_config") if model_type == "kimi_k3" else raw
        if not isinstance(text, Mapping):
            raise ValueError(f"config.json of a kimi_k3 needs a text_config object, not {text!r}")
        keys = KeyReader(text, outer=raw)
        config = _read(keys, str(model_type))
        unused = keys.unused()
        if unused:
            LOGGER.info("config.json keys without effect here: %s", ", ".join(sorted(unused)))
        return config


def read_config_json(path: str | Path) -> dict[str, Any]:
    """Parse a config.json (the file, or the directory that holds it); ValueError if it is none."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{file} does not exist: a model directory holds a config.json")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} holds {type(raw).__name__}, not an object")
    return raw


def _read(keys: KeyReader, model_type: str) -> K3Config:
    """Read every part, then raise all the problems found together."""
    for name, values in SUPPORTED_VALUES.items():
        keys.supported(name, values)
    for name, values in SUPPORTED_VALUES_IF_PRESENT.items():
        keys.supported(name, values, required=False)
    # A Kimi-K3 file must say each of these; Kimi-Linear predates them.
    is_k3 = model_type == "kimi_k3"
    num_layers = keys.integer("num_hidden_layers")
    kda = _read_kda(keys.section("linear_attn_config"), is_k3)
    mla = _read_mla(keys, is_k3)
    moe = _read_moe(keys, is_k3)
    mixers = read_layer_lists(keys.section("linear_attn_config"), num_layers)
    first_moe = keys.integer("first_k_dense_replace", minimum=0)
    frequency = keys.integer("moe_layer_freq")
    is_situ = keys.get("hidden_act") == "situ"
    config = K3Config(
        model_type=model_type,
        hidden_size=keys.integer("hidden_size"),
        num_layers=num_layers,
        vocab_size=keys.integer("vocab_size"),
        mixers=mixers,
        ffns=tuple(
            "moe" if layer >= first_moe and layer % frequency == 0 else "dense"
            for layer in range(num_layers)
        ),
        dense_inner=keys.integer("intermediate_size"),
        activation="situ" if is_situ else "silu",
        situ_beta=keys.number("activation_situ_beta") if is_situ else 1.0,
        situ_linear_beta=keys.number("activation_situ_linear_beta") if is_situ else 1.0,
        rms_norm_eps=keys.number("rms_norm_eps"),
        attn_res_block=keys.optional_integer("attn_res_block_size", required=is_k3),
        max_positions=keys.integer("max_position_embeddings", "model_max_length"),
        bos_token_id=keys.integer("bos_token_id", minimum=0),
        eos_token_id=keys.integer("eos_token_id", minimum=0),
        pad_token_id=keys.integer("pad_token_id", minimum=0),
        kda=kda,
        mla=mla,
        moe=moe,
    )
    keys.raise_problems()
    return config


def _read_kda(keys: KeyReader, is_k3: bool) -> KdaConfig:
    """Read `linear_attn_config`."""
    keys.supported("short_conv_kernel_size", (CONV_WIDTH,))
    bound = keys.optional_number("gate_lower_bound", required=is_k3)
    if bound is not None and bound >= 0:
        keys.problem(f"gate_lower_bound {bound} must be below 0: it bounds the log of a decay")
    return KdaConfig(
        num_heads=keys.integer("num_heads"),
        head_dim=keys.integer("head_dim"),
        conv_width=CONV_WIDTH,
        gate_lower_bound=bound,
        full_rank_gate=keys.boolean("use_full_rank_gate", default=None if is_k3 else False),
    )


def _read_mla(keys: KeyReader, is_k3: bool) -> MlaConfig:
    """Read the latent attention; its key/value heads cannot be grouped."""
    num_heads = keys.integer("num_attention_heads")
    keys.supported("num_key_value_heads", (num_heads,), required=False)
    return MlaConfig(
        num_heads=num_heads,
        q_lora_rank=keys.optional_integer("q_lora_rank", required=True),
        kv_lora_rank=keys.integer("kv_lora_rank"),
        qk_nope_head_dim=keys.integer("qk_nope_head_dim"),
        qk_rope_head_dim=keys.integer("qk_rope_head_dim"),
        v_head_dim=keys.integer("v_head_dim"),
        output_gate=keys.boolean("mla_use_output_gate", default=None if is_k3 else False),
    )


def _read_moe(keys: KeyReader, is_k3: bool) -> MoeConfig:
    """Read the experts; MXFP4 needs rows that are whole groups of 32."""
    num_experts = keys.integer("num_experts")
    top_k = keys.integer("num_experts_per_token")
    if top_k > num_experts:
        keys.problem(f"num_experts_per_token {top_k} is above num_experts {num_experts}")
    inner = keys.integer("moe_intermediate_size")
    latent = keys.optional_integer("routed_expert_hidden_size", required=is_k3)
    mxfp4 = read_quantization(keys)
    if mxfp4 and (inner % 32 or (latent or keys.integer("hidden_size")) % 32):
        keys.problem(
            f"moe_intermediate_size {inner} and routed_expert_hidden_size {latent} must be "
            "multiples of 32, the MXFP4 group"
        )
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        inner=inner,
        latent=latent,
        latent_norm=latent is not None and keys.boolean("latent_moe_use_norm", default=None),
        shared_inner=inner * keys.integer("num_shared_experts"),
        renormalize=keys.boolean("moe_renormalize", default=None),
        scaling=keys.number("routed_scaling_factor"),
        mxfp4=mxfp4,
    )


def main(arguments: list[str]) -> int:
    """Print the report of the model at the path given; 2 when the arguments are wrong."""
    asked = arguments in (["-h"], ["--help"])
    if len(arguments) != 1 or asked:
        print("usage: python -m k3jax.config PATH  (a config.json or its directory)")
        return 0 if asked else 2
    from k3jax.sizes import report_lines

    try:
        lines = report_lines(K3Config.from_file(arguments[0]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
