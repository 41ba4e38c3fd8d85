"""Which steps the layer kernels run, on which parameters, and on which cache."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from k3jax.cache import Cache, CacheSizes
from k3jax.config import K3Config
from k3jax.decode.agreement import agree, refusal
from k3jax.decode.batch import Step
from k3jax.decode.config import DecodeConfig
from k3jax.decode.guards import cache_reasons, weight_reasons
from k3jax.decode.kinds import layer_kinds
from k3jax.decode.layers import kernel_impl, layer_kernels
from k3jax.decode.reasons import BatchRows, Reason, Refused, step_reason

LOGGER = logging.getLogger(__name__)


class SpecializedDecode:
    """The specialized steps of one executor, from the first refusal to each step's choice.

    All ranks refuse alike. Under the backend `specialized` a refusal raises ValueError, and a
    decode step that cannot be specialized RuntimeError; under `auto` steps run stock instead, and
    each reason is told once.
    """

    def __init__(
        self,
        params: Any,
        config: K3Config,
        decode_config: DecodeConfig,
        mesh: Mesh,
        *,
        say: Callable[[str], None] = LOGGER.info,
    ) -> None:
        """Look at the packed tree `params`, which belongs to the executor from now on."""
        self.params, self.config, self.decode_config = params, config, decode_config
        self.mesh, self._say = mesh, say
        self.refused: Refused | None = None
        self.steps: tuple[Step, ...] = ()
        self._generation: int | None = None  # of the cache that the kernels are bound to
        self._told: set[Reason] = {"backend"}  # who asked for the stock path knows
        if decode_config.decode_backend == "stock":
            self.refused = "backend"
            return
        reasons = agree(weight_reasons(params, config, mesh), "these weights")
        if reasons:
            self._refuse("weights", "these weights", reasons)
            return
        impl = kernel_impl(decode_config, mesh)
        if impl == "reference":
            self._refuse("platform", "this platform", platform_reasons(decode_config, mesh))
            return
        kernels = layer_kernels(config, mesh.size, impl)
        self.steps = tuple(
            Step("decode", requests, rows, specialized=True, kernels=kernels)
            for rows, requests in decode_config.builds
        )

    @property
    def required(self) -> bool:
        """Whether nothing else may run decode steps."""
        return self.decode_config.decode_backend == "specialized"

    def prepare_kv(self, cache: Cache | None, sizes: CacheSizes, generation: int) -> bool:
        """Bind the kernels to a cache of `sizes`; whether they are bound now.

        `generation` is the executor's number of this cache: donation changes the arrays with every
        step, so they cannot tell. No cache, or a refusal, leaves the kernels unbound.
        """
        self._generation = None
        if cache is None or not self.steps:
            return False
        dtype = self.decode_config.dtype
        reasons = agree(cache_reasons(cache, self.config, sizes, dtype, self.mesh), "this cache")
        if reasons:
            self._report("this cache", reasons)
            return False
        self._generation = generation
        return True

    def reason(self, batch: BatchRows, generation: int) -> Reason | None:
        """Why a step of these rows on that cache is not specialized."""
        bound = self._generation == generation
        builds = self.decode_config.builds
        return step_reason(batch, builds, bound, refused=self.refused)

    def plan(self, batch: BatchRows, generation: int) -> Step | None:
        """The specialized step for these rows, or None: the stock path runs them."""
        reason = self.reason(batch, generation)
        if reason is None:
            rows, requests = batch.decoding[0], len(batch.decoding)
            fitting = (s for s in self.steps if s.rows == rows and s.requests >= requests)
            return min(fitting, key=lambda step: step.requests)
        if reason in ("prefill", "no requests"):
            return None
        if self.required:
            raise RuntimeError(f"a decode step cannot be specialized: {reason}")
        if reason not in self._told:
            self._told.add(reason)
            self._say(f"decode steps run on the stock path: {reason}")
        return None

    def check(self, params: Any, generation: int) -> None:
        """Raise RuntimeError unless a specialized step may run on these parameters and cache."""
        if params is not self.params:
            raise RuntimeError("these are not the parameters that the layer kernels were made for")
        if generation != self._generation:
            raise RuntimeError(
                "the cache is not the one that the layer kernels are bound to: call prepare_kv"
            )

    def describe(self) -> list[str]:
        """What is specialized, line by line."""
        if not self.steps:
            return []
        kinds = Counter(layer_kinds(self.config))
        layers = ", ".join(f"{kinds[kind]} {kind}" for kind in ("whole", "ffn", "stock"))
        builds = ", ".join(f"{step.rows}x{step.requests}" for step in self.steps)
        return [
            f"specialized decode of {layers} layers, builds {builds} (rows x requests)",
            "embedding, logits, sampling and prefill are not specialized",
        ]

    def _refuse(self, refused: Refused, what: str, reasons: list[str]) -> None:
        self.refused = refused
        self._told.add(refused)
        self._report(what, reasons)

    def _report(self, what: str, reasons: list[str]) -> None:
        if self.required:
            raise refusal(what, reasons)
        self._say(f"decode steps run on the stock path, {what}: {'; '.join(reasons)}")


def platform_reasons(decode_config: DecodeConfig, mesh: Mesh) -> list[str]:
    """Why Pallas ops do not run: asked not to, or nothing to compile them for."""
    if decode_config.impl == "reference":
        return ["impl: found reference, kernel runs as pallas or interpret"]
    device: jax.Device = mesh.devices.flat[0]
    return [
        f"found {device.platform}, kernels compile for an AMD or NVIDIA GPU "
        "(--impl interpret runs them on any, slowly)"
    ]
