"""The layer kernels: which implementation of the decoder's own layers replaces which of them.

There is one model. A layer kernel is the decoder's layer made of Pallas ops, as a function that all
layers of its kind share: it is traced, lowered and compiled once a step, whatever the depth. That
works because the residual blocks lie in a buffer of fixed size, beside their count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from k3jax.cache import LayerCache
from k3jax.config import K3Config
from k3jax.decode.config import DecodeConfig
from k3jax.decode.kinds import layer_kinds
from k3jax.model.decoder import Layer, LayerKernel, LayerResult, layer_body
from k3jax.model.inputs import Residual, StepPlan
from k3jax.parallel import world
from pallas_kernels import Impl

GPUS = ("gpu", "cuda", "rocm")  # platforms that Pallas compiles for


@dataclass(frozen=True)
class KernelLayer:
    """A layer of Pallas ops, of a kind that `layer_kinds` names but "stock".

    Layers that start a residual block are functions of their own.
    """

    graph: nnx.GraphDef
    starts_block: bool

    def __call__(
        self, params: Any, residual: Residual, cache: LayerCache, plan: StepPlan
    ) -> LayerResult:
        """See `k3jax.model.decoder.LayerKernel`; only inside `parallel.spmd`."""
        residual, cache, flags, health, _ = layer_body(
            params,
            residual,
            cache,
            plan,
            graph=self.graph,
            starts_block=self.starts_block,
            tracing=False,
            ranks=world(),
        )
        return residual, cache, flags, health


@dataclass(frozen=True)
class LayerKernels:
    """The kernel of each layer that has one; what a specialized `Step` holds."""

    by_layer: Mapping[int, KernelLayer]

    def __call__(self, index: int) -> LayerKernel | None:
        return self.by_layer.get(index)


def layer_kernels(config: K3Config, tp: int, impl: Impl) -> LayerKernels:
    """The kernels of a model that `guards.weight_reasons` has nothing against."""
    kinds = layer_kinds(config)
    graphs = {
        kind: nnx.split(nnx.eval_shape(_maker(config, kinds.index(kind), tp, impl)))[0]
        for kind in sorted(set(kinds) - {"stock"})
    }
    block = config.attn_res_block or 1
    return LayerKernels(
        {
            index: KernelLayer(graphs[kind], index % block == 0)
            for index, kind in enumerate(kinds)
            if kind != "stock"
        }
    )


def _maker(config: K3Config, index: int, tp: int, impl: Impl) -> Any:
    return lambda: Layer(config, index, tp, impl)


def kernel_impl(decode_config: DecodeConfig, mesh: Mesh) -> Impl:
    """How Pallas ops run on this mesh: as asked for, or compiled on a GPU; "reference": not."""
    if decode_config.decode_backend == "stock":
        return "reference"
    if decode_config.impl is not None:
        return decode_config.impl
    device: jax.Device = mesh.devices.flat[0]
    return "pallas" if device.platform in GPUS else "reference"
