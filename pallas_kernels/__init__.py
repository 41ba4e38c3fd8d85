"""Ops of Kimi-K3 and Kimi-Linear: Pallas kernels and their plain-jnp references.

Every op takes `impl`: "reference" is plain jnp and runs anywhere, "pallas" is the kernel,
"interpret" the kernel run as plain JAX. An op that lacks it, for these shapes or dtypes, raises
NotImplementedError; none chooses another by itself.

Shape letters: B requests, T rows of a request in this step, W = B*T rows, S slots (slot 0 is the
null slot), Q pending rows kept, H heads local to the rank, K key dim, V value dim,
C = H(2K + V) convolution channels laid out [q | k | v], D hidden, L latent of the key-value cache,
R its rope dims, P pages, E experts, Z latent (routed expert width), I expert inner, J experts
chosen per row, N output features, M blocks in the AttnRes buffer.
"""

from pallas_kernels.activation import Activation, gated
from pallas_kernels.attn_res import attn_res, attn_res_mix, attn_res_weights
from pallas_kernels.health import BIT_DIVERGED, BIT_PAGE, BIT_PLAN, BIT_SLOT, BIT_WAIT
from pallas_kernels.impl import MOST_ROWS, Impl
from pallas_kernels.kda_commit import kda_commit
from pallas_kernels.kda_decode import kda_decode
from pallas_kernels.kda_prefill import kda_prefill
from pallas_kernels.kda_types import KdaCache, KdaPending, KdaRows, KdaWeights
from pallas_kernels.linear import linear
from pallas_kernels.mla import mla_decode, mla_prefill
from pallas_kernels.moe import moe, moe_mxfp4, route
from pallas_kernels.moe_types import DenseBank, Mxfp4Bank
from pallas_kernels.norm import l2_norm, rms_norm

__all__ = [
    "BIT_DIVERGED",
    "BIT_PAGE",
    "BIT_PLAN",
    "BIT_SLOT",
    "BIT_WAIT",
    "MOST_ROWS",
    "Activation",
    "DenseBank",
    "Impl",
    "KdaCache",
    "KdaPending",
    "KdaRows",
    "KdaWeights",
    "Mxfp4Bank",
    "attn_res",
    "attn_res_mix",
    "attn_res_weights",
    "gated",
    "kda_commit",
    "kda_decode",
    "kda_prefill",
    "l2_norm",
    "linear",
    "mla_decode",
    "mla_prefill",
    "moe",
    "moe_mxfp4",
    "rms_norm",
    "route",
]
