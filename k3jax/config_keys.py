"""Reading of config.json keys that collects every problem before it raises. No jax import."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

Mixer = Literal["kda", "mla"]

MXFP4_FORMAT = "mxfp4-pack-quantized"
MXFP4_WEIGHTS: dict[str, tuple[object, ...]] = {
    "num_bits": (4,),
    "type": ("float",),
    "group_size": (32,),
    "strategy": ("group",),
    "symmetric": (True,),
    "dynamic": (False, None),
    "actorder": (None, False),
    "block_structure": (None,),
    "zp_dtype": (None,),
    "scale_dtype": ("torch.uint8", None),
}
# What `ignore` must leave in bf16, and what it must not leave out.
BF16_MODULES = (
    "language_model.model.layers.0.self_attn.q_proj",
    "language_model.model.layers.0.mlp.gate_proj",
    "language_model.model.layers.0.mlp.down_proj",
    "language_model.model.layers.1.block_sparse_moe.shared_experts.gate_proj",
    "language_model.model.layers.1.block_sparse_moe.shared_experts.down_proj",
    "language_model.lm_head",
)
MXFP4_MODULES = tuple(
    f"language_model.model.layers.1.block_sparse_moe.experts.0.{name}"
    for name in ("w1", "w2", "w3")
)


class KeyReader:
    """Typed reading of one object of config.json; problems gather until `raise_problems`.

    A key that could not be read gives 1 (or a neutral value), so that reading goes on.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        outer: Mapping[str, Any] | None = None,
        prefix: str = "",
        problems: list[str] | None = None,
    ) -> None:
        self.values = values
        self.outer = outer if outer is not None else values
        self.prefix = prefix
        self.problems: list[str] = [] if problems is None else problems
        self.read: set[str] = set()

    def problem(self, text: str) -> None:
        """Note a problem, once."""
        text = f"{self.prefix}{text}"
        if text not in self.problems:
            self.problems.append(text)

    def raise_problems(self) -> None:
        """Raise one ValueError that lists every problem, if there is any."""
        if self.problems:
            raise ValueError("config.json: " + "; ".join(self.problems))

    def unused(self) -> set[str]:
        """Keys that nobody read."""
        return set(self.values) - self.read

    def get(self, name: str) -> Any:
        """The raw value, or None."""
        self.read.add(name)
        return self.values.get(name)

    def section(self, name: str) -> KeyReader:
        """The object under `name`, reporting into the same list."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            self.problem(f"{name} must be an object, not {value!r}")
            value = {}
        return KeyReader(value, prefix=f"{self.prefix}{name}.", problems=self.problems)

    def supported(self, name: str, values: tuple[object, ...], *, required: bool = True) -> None:
        """Note a problem unless the value is one that is computed here."""
        if name not in self.values:
            if required:
                self.problem(f"{name} is missing")
            return
        value = self.get(name)
        if not any(type(value) is type(each) and value == each for each in values):
            wanted = " or ".join(repr(each) for each in values if each is not None) or "null"
            self.problem(f"{name} {value!r} is not supported (only {wanted})")

    def integer(self, *names: str, minimum: int = 1) -> int:
        """An integer under the first of `names` that is there."""
        name = next((each for each in names if each in self.values), names[0])
        if name not in self.values:
            self.problem(f"{' or '.join(names)} is missing")
            return max(1, minimum)
        value = self.get(name)
        if type(value) is not int or value < minimum:
            self.problem(f"{name} {value!r} must be an integer of at least {minimum}")
            return max(1, minimum)
        return value

    def optional_integer(self, name: str, *, required: bool) -> int | None:
        """An integer or null; absent means null unless the key is required."""
        if self.get(name) is None and (name in self.values or not required):
            return None
        return self.integer(name)

    def number(self, name: str) -> float:
        """A finite number."""
        if name not in self.values:
            self.problem(f"{name} is missing")
            return 1.0
        value = self.get(name)
        if type(value) not in (int, float) or not abs(value) < float("inf"):
            self.problem(f"{name} {value!r} must be a finite number")
            return 1.0
        return float(value)

    def optional_number(self, name: str, *, required: bool) -> float | None:
        """A number or null; absent means null unless the key is required."""
        if self.get(name) is None and (name in self.values or not required):
            return None
        return self.number(name)

    def boolean(self, name: str, *, default: bool | None) -> bool:
        """A boolean; a default of None makes the key required."""
        if name not in self.values:
            if default is None:
                self.problem(f"{name} is missing")
            return bool(default)
        value = self.get(name)
        if type(value) is not bool:
            self.problem(f"{name} {value!r} must be true or false")
        return bool(value)


def read_layer_lists(keys: KeyReader, num_layers: int) -> tuple[Mixer, ...]:
    """Mixer of each layer from the 1-based `kda_layers` and `full_attn_layers`."""
    lists: dict[str, list[int]] = {}
    for name in ("kda_layers", "full_attn_layers"):
        value = keys.get(name)
        if not isinstance(value, list) or any(type(each) is not int for each in value):
            keys.problem(f"{name} must be a list of layer numbers, not {value!r}")
            return ()
        lists[name] = value
        if len(set(value)) != len(value):
            keys.problem(f"{name} names layers twice: {_repeated(value)}")
    kda, full = set(lists["kda_layers"]), set(lists["full_attn_layers"])
    every = set(range(1, num_layers + 1))
    if kda & full:
        keys.problem(f"kda_layers and full_attn_layers both name {sorted(kda & full)}")
    if every - kda - full:
        keys.problem(
            f"neither kda_layers nor full_attn_layers names {sorted(every - kda - full)} "
            f"(layers are numbered from 1 to {num_layers})"
        )
    if (kda | full) - every:
        keys.problem(
            f"kda_layers and full_attn_layers name {sorted((kda | full) - every)}, outside of "
            f"1 to {num_layers}"
        )
    mixers: list[Mixer] = ["kda" if layer in kda else "mla" for layer in sorted(every)]
    return tuple(mixers)


def _repeated(values: list[int]) -> list[int]:
    return sorted({each for each in values if values.count(each) > 1})


def read_quantization(keys: KeyReader) -> bool:
    """Whether routed experts are MXFP4; any other quantization is a problem."""
    value = keys.get("quantization_config")
    if value is None:
        value = keys.outer.get("quantization_config")
    if value is None:
        return False
    if not isinstance(value, Mapping):
        keys.problem(f"quantization_config must be an object, not {value!r}")
        return False
    quantization = KeyReader(value, prefix="quantization_config.", problems=keys.problems)
    quantization.supported("quant_method", ("compressed-tensors",))
    quantization.supported("format", (MXFP4_FORMAT,))
    quantization.supported("kv_cache_scheme", (None,), required=False)
    groups = quantization.section("config_groups")
    if len(groups.values) != 1:
        quantization.problem(f"config_groups must be one group, not {sorted(groups.values)}")
    for name in groups.values:
        group = groups.section(name)
        group.supported("format", (MXFP4_FORMAT, None), required=False)
        group.supported("targets", (["Linear"],))
        group.supported("input_activations", (None,), required=False)
        group.supported("output_activations", (None,), required=False)
        weights = group.section("weights")
        for key, supported in MXFP4_WEIGHTS.items():
            weights.supported(key, supported, required=key in ("num_bits", "type", "group_size"))
    _check_ignore(quantization)
    return True


def _check_ignore(keys: KeyReader) -> None:
    """Note a problem unless `ignore` leaves exactly the routed experts quantized."""
    value = keys.get("ignore")
    if not isinstance(value, list) or any(not isinstance(each, str) for each in value):
        keys.problem(f"ignore must be a list of module names or re:patterns, not {value!r}")
        return
    try:
        patterns = [re.compile(each[3:]) for each in value if each.startswith("re:")]
    except re.error as error:
        keys.problem(f"ignore {value!r} holds a pattern that does not compile: {error}")
        return

    def ignored(module: str) -> bool:
        return module in value or any(pattern.match(module) for pattern in patterns)

    wrong = [f"{each} would be quantized" for each in BF16_MODULES if not ignored(each)]
    wrong += [f"{each} would not be quantized" for each in MXFP4_MODULES if ignored(each)]
    if wrong:
        keys.problem(
            f"ignore {value!r} is not supported: exactly the routed experts are MXFP4, but "
            + ", ".join(wrong)
        )
