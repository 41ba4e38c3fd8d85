"""Ops of Kimi-K3 and Kimi-Linear: Pallas kernels and their plain-jnp references.

Every op takes `impl`: "reference" is plain jnp and runs anywhere, "pallas" is the kernel,
"interpret" the kernel run as plain JAX. An op that lacks it, for these shapes or dtypes, raises
NotImplementedError; none chooses another by itself.

Shape letters: B requests, T rows of a request in this step, W = B*T rows, S slots (slot 0 is the
null slot), Q pending rows kept, H heads local to the rank, K key dim, V value dim,
C = H(2K + V) convolution channels laid out [q | k | v], D hidden, L latent of the key-value cache,
R its rope dims, P pages, E experts, Z latent (routed expert width), I expert inner, J experts
chosen per row, N output features, M blocks in the AttnRes buffer.

What an op reports: one that reads by slot, page or expert, or that waits inside a launch, returns
the health word (health.py); the attention ops, whose state a bad row would outlive, also return
flags of requests with a non-finite row. linear, attn_res and route have no index from outside and
report nothing: a non-finite value stays in its row and goes on through the residual sum into that
row's logits, where sampling sets the flag. (An infinity that SiTU bounds is finite from there on.)
"""

from pallas_kernels.activation import Activation, gated
from pallas_kernels.attn_res import attn_res, attn_res_mix, attn_res_weights
from pallas_kernels.health import (
    BIT_DIVERGED,
    BIT_EXPERT,
    BIT_PAGE,
    BIT_PLAN,
    BIT_SLOT,
    BIT_WAIT,
)
from pallas_kernels.impl import MOST_ROWS, Impl
from pallas_kernels.kda_commit import kda_commit
from pallas_kernels.kda_decode import kda_decode
from pallas_kernels.kda_prefill import kda_prefill
from pallas_kernels.kda_snapshot import kda_put, kda_take
from pallas_kernels.kda_types import (
    KdaCache,
    KdaPending,
    KdaRows,
    KdaSnapshot,
    KdaWeights,
    most_rows,
    ring_rows,
)
from pallas_kernels.linear import linear
from pallas_kernels.linears import Projection, linears
from pallas_kernels.mla import mla_decode, mla_prefill
from pallas_kernels.mla_heads import mla_absorb, mla_values
from pallas_kernels.moe import choose, choose_beside, moe, moe_mxfp4, route
from pallas_kernels.moe_mono import (
    MOST_MONO_ROWS,
    LatentMoeWeights,
    MoeMonoResult,
    moe_mono,
    moe_mono_control,
)
from pallas_kernels.moe_types import DenseBank, Mxfp4Bank
from pallas_kernels.norm import Unnormed, l2_norm, rms_norm

__all__ = [
    "BIT_DIVERGED",
    "BIT_EXPERT",
    "BIT_PAGE",
    "BIT_PLAN",
    "BIT_SLOT",
    "BIT_WAIT",
    "MOST_MONO_ROWS",
    "MOST_ROWS",
    "Activation",
    "DenseBank",
    "Impl",
    "KdaCache",
    "KdaPending",
    "KdaRows",
    "KdaSnapshot",
    "KdaWeights",
    "LatentMoeWeights",
    "MoeMonoResult",
    "Mxfp4Bank",
    "Projection",
    "Unnormed",
    "attn_res",
    "attn_res_mix",
    "attn_res_weights",
    "choose",
    "choose_beside",
    "gated",
    "kda_commit",
    "kda_decode",
    "kda_prefill",
    "kda_put",
    "kda_take",
    "l2_norm",
    "linear",
    "linears",
    "mla_absorb",
    "mla_decode",
    "mla_prefill",
    "mla_values",
    "moe",
    "moe_mono",
    "moe_mono_control",
    "moe_mxfp4",
    "most_rows",
    "ring_rows",
    "rms_norm",
    "route",
]
