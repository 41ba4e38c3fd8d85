"""What a model weighs: parameters, bytes, and where it fits. No jax import."""

from __future__ import annotations

from collections import Counter

from k3jax.config import K3Config
from k3jax.logical import SCALE_GROUP, ParamSpec, check_tp, logical_params

GPU_MEMORY = {"MI355X": 288e9, "MI325X": 256e9, "H200": 141e9}
"""Bytes of memory of one GPU, by the vendor's decimal GB."""
REPORTED_TP = (8, 16)
REPORTED_CONTEXTS = {"1k": 1024, "128k": 128 * 1024, "1M": 1024 * 1024}
GB = 1e9
_UNITS = {"B": 1e9, "M": 1e6, "GB": GB, "MB": 1e6, "kB": 1e3}  # billions, millions; bytes


def is_expert(name: str) -> bool:
    """Whether a logical name holds routed experts (or their scales), stacked on axis 0."""
    return name.rpartition(".moe.")[2].split("_")[0] in ("w1", "w2", "w3")


def _weights(name: str, spec: ParamSpec) -> int:
    """Weights in a tensor: a byte of codes holds two, a scale none."""
    if spec.dtype != "u8":
        return spec.size
    return 0 if name.endswith("_scale") else 2 * spec.size


def total_parameters(config: K3Config) -> int:
    """All weights of the text model."""
    return sum(_weights(name, spec) for name, spec in logical_params(config).items())


def active_parameters(config: K3Config) -> int:
    """Weights that a token is multiplied by: its `top_k` experts, and no embedding table."""
    moe = config.moe
    total = 0
    for name, spec in logical_params(config).items():
        weights = 0 if name == "embed" else _weights(name, spec)
        total += weights * moe.top_k // moe.num_experts if is_expert(name) else weights
    return total


def bytes_at_rest(config: K3Config, *, experts_only: bool = False) -> int:
    """Bytes of the weights as logical tensors, in files and, packed, on a single device."""
    specs = logical_params(config).items()
    return sum(spec.nbytes for name, spec in specs if is_expert(name) or not experts_only)


def bytes_per_rank(config: K3Config, tp: int) -> int:
    """Bytes of the weights on one of `tp` ranks; ValueError if `tp` does not divide."""
    check_tp(config, tp)
    specs = logical_params(config).values()
    return sum(spec.nbytes // (tp if any(spec.axes) else 1) for spec in specs)


def checkpoint_tensors(config: K3Config) -> int:
    """Tensors of the text model in a Hugging Face checkpoint, where experts are not stacked."""
    names = logical_params(config)
    return sum(config.moe.num_experts if is_expert(name) else 1 for name in names)


def kda_state_bytes(config: K3Config) -> int:
    """Bytes of one request's recurrent states, f32 [H, K, V] in each KDA layer."""
    kda = config.kda
    return config.mixers.count("kda") * kda.num_heads * kda.head_dim**2 * 4


def conv_window_bytes(config: K3Config) -> int:
    """Bytes of one request's convolution windows, bf16 [3, C] in each KDA layer."""
    kda = config.kda
    channels = 3 * kda.num_heads * kda.head_dim
    return config.mixers.count("kda") * (kda.conv_width - 1) * channels * 2


def latent_bytes(config: K3Config, tokens: int) -> int:
    """Bytes of one request's MLA latents, bf16 [tokens, L + R] in each MLA layer, on every rank."""
    mla = config.mla
    return config.mixers.count("mla") * tokens * (mla.kv_lora_rank + mla.qk_rope_head_dim) * 2


def amount(count: float, unit: str, smaller: str) -> str:
    """A count in `unit`, or in a smaller one if it is less than 1 of that; both of _UNITS."""
    unit = unit if count >= _UNITS[unit] else smaller
    return f"{count / _UNITS[unit]:,.1f} {unit}"


def _fit_lines(config: K3Config, tp: int) -> list[str]:
    """Bytes per GPU at one TP, against each GPU's memory."""
    try:
        need = bytes_per_rank(config, tp)
    except ValueError as error:
        return [f"TP {tp:<3} cannot: {error}"]
    parts = []
    for gpu, memory in GPU_MEMORY.items():
        left = memory - need
        verdict = (
            f"{left / GB:.1f} GB left" if left > 0 else f"does NOT fit, {-left / GB:.1f} GB short"
        )
        parts.append(f"{gpu} ({memory / GB:.0f} GB): {verdict}")
    return [f"TP {tp:<3} {need / GB:.1f} GB per GPU;  " + ";  ".join(parts)]


def report_lines(config: K3Config) -> list[str]:
    """The report of `python -m k3jax.config`, line by line; sizes in decimal units."""
    kinds = Counter(zip(config.mixers, config.ffns, strict=True))
    by_kind = ", ".join(
        f"{count} {mixer.upper()} + {ffn}" for (mixer, ffn), count in sorted(kinds.items())
    )
    mixers = Counter(config.mixers)
    state, window = kda_state_bytes(config), conv_window_bytes(config)
    at_rest, experts = bytes_at_rest(config), bytes_at_rest(config, experts_only=True)
    form = f"MXFP4, {4 + 8 / SCALE_GROUP} bits a weight" if config.moe.mxfp4 else "bf16"
    lines = [
        f"model        {config.model_type}",
        f"layers       {config.num_layers} = {mixers['kda']} KDA + {mixers['mla']} MLA ({by_kind})",
        f"tensors      {checkpoint_tensors(config):,} in the text checkpoint",
        f"parameters   {amount(total_parameters(config), 'B', 'M')}, of which "
        f"{amount(active_parameters(config), 'B', 'M')} active for a token",
        f"at rest      {amount(at_rest, 'GB', 'MB')}, of which routed experts "
        f"{amount(experts, 'GB', 'MB')} ({form})",
    ]
    for tp in REPORTED_TP:
        lines += _fit_lines(config, tp)
    lines.append(
        f"a request    KDA state {amount(state, 'MB', 'kB')} + conv window "
        f"{amount(window, 'MB', 'kB')}, "
        "split over the ranks, at any length"
    )
    contexts = ", ".join(
        f"{amount(latent_bytes(config, tokens), 'MB', 'kB')} at {name}"
        for name, tokens in REPORTED_CONTEXTS.items()
    )
    lines.append(f"             MLA latents {contexts} tokens, whole on every rank")
    return lines
