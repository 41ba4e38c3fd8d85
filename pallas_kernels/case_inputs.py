"""Random inputs for the shapes in cases.py, and the op bound to a case.

`inputs` is pure jnp: `jax.eval_shape(functools.partial(inputs, case, dtype))` gives the shapes
alone, and jitting it makes the arrays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.activation import Activation
from pallas_kernels.attn_res import attn_res
from pallas_kernels.cases import HEAD_DIM, Case
from pallas_kernels.impl import Impl
from pallas_kernels.kda_decode import kda_decode
from pallas_kernels.kda_prefill import kda_prefill
from pallas_kernels.kda_types import (
    TAPS,
    KdaCache,
    KdaPending,
    KdaRows,
    KdaWeights,
    ring_rows,
)
from pallas_kernels.linear import linear
from pallas_kernels.linears import Projection, linears
from pallas_kernels.mla import mla_decode, mla_prefill
from pallas_kernels.mla_heads import mla_absorb, mla_values
from pallas_kernels.moe import choose_beside, moe, moe_mxfp4, route
from pallas_kernels.moe_mono import LatentMoeWeights, moe_mono, moe_mono_control
from pallas_kernels.moe_types import DenseBank, Mxfp4Bank
from pallas_kernels.norm import Unnormed

EPS = 1e-5
OPS: Mapping[str, Callable[..., Any]] = {
    "linear": linear,
    "linears": linears,
    "attn_res": attn_res,
    "route": route,
    "choose_beside": choose_beside,
    "moe": moe,
    "moe_mxfp4": moe_mxfp4,
    "moe_mono": moe_mono,
    "kda_decode": kda_decode,
    "kda_prefill": kda_prefill,
    "mla_absorb": mla_absorb,
    "mla_decode": mla_decode,
    "mla_prefill": mla_prefill,
    "mla_values": mla_values,
}


def bind(case: Case, impl: Impl) -> Callable[[dict[str, Any]], Any]:
    """Return the case's op as a function of `inputs`' dict, static options filled in."""
    op, static = OPS[case.op], options(case)
    return lambda arrays: op(**arrays, **static, impl=impl)


def inputs(case: Case, dtype: jax.typing.DTypeLike, seed: int = 0) -> dict[str, Any]:
    """Return the array arguments of a case by name, activations and plain weights in `dtype`."""
    return _INPUTS[case.op](_Random(seed, dtype), **_sizes(case))


class _Random:
    """A source of hashed integers: compiles in no time, and any size is made on the device."""

    def __init__(self, seed: int, dtype: jax.typing.DTypeLike):
        self._salt, self._dtype = seed * 1_000_003, dtype

    def words(self, *shape: int) -> jax.Array:
        """Random u32 words: a bijective integer hash of the element's index."""
        self._salt += 0x9E3779B9
        index = jnp.full(shape, self._salt % 2**32, jnp.uint32)
        for axis, stride in enumerate(np.cumprod((1, *shape[:0:-1]))[::-1]):
            index += jnp.uint32(stride % 2**32) * lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = (index ^ (index >> 16)) * jnp.uint32(0x7FEB352D)
        index = (index ^ (index >> 15)) * jnp.uint32(0x846CA68B)
        return index ^ (index >> 16)

    def normal(self, *shape: int, scale: float = 1.0, dtype: Any = None) -> jax.Array:
        """Nearly normal: the sum of a word's four bytes."""
        words = self.words(*shape)
        total = sum(((words >> shift) & 255 for shift in (8, 16, 24)), words & 255)
        values = (total.astype(jnp.float32) - 510.0) * (scale / 147.8)
        return values.astype(self._dtype if dtype is None else dtype)

    def wide(self, *shape: int, scale: float = 1.0) -> jax.Array:
        return self.normal(*shape, scale=scale, dtype=jnp.float32)

    def gain(self, *shape: int) -> jax.Array:
        return (1.0 + self.wide(*shape, scale=0.1)).astype(self._dtype)

    def integers(self, *shape: int, low: int, high: int, dtype: Any = jnp.int32) -> jax.Array:
        return (low + (self.words(*shape) % (high - low)).astype(jnp.int32)).astype(dtype)


def _scattered(count: int) -> jax.Array:
    """A permutation of 1..count, for slot and page numbers: i32[count]."""
    step = next(prime for prime in (7919, 7907, 7901) if count % prime)
    return 1 + (jnp.arange(count, dtype=jnp.int32) * step + count // 2) % count


def options(case: Case) -> dict[str, Any]:
    """Return the static keyword arguments of a case, but for `impl`."""
    dims = case.dims
    match case.op:
        case "linear":
            return {"eps": EPS, "activation": _activation(dims.get("activation"))}
        case "attn_res":
            return {"eps": EPS}
        case "linears" | "mla_absorb" | "mla_values":
            return {}
        case "route" | "choose_beside":
            return {name: dims[name] for name in ("top_k", "scaling", "renormalize")}
        case "moe" | "moe_mxfp4":
            return {"activation": _activation(dims["activation"])}
        case "moe_mono":
            names = ("scaling", "renormalize")
            return {
                "top_k": dims["J"],
                "activation": _activation(dims["activation"]),
                **{name: dims[name] for name in names},
            }
        case "kda_decode":
            norm = not dims.get("unnormed", False)
            return {"lower_bound": dims["lower_bound"], "norm_eps": EPS, "norm": norm}
        case "kda_prefill":
            return {"lower_bound": dims["lower_bound"], "norm_eps": EPS}
        case "mla_decode" | "mla_prefill":
            return {"latent": dims["L"], "scale": (HEAD_DIM + dims["R"]) ** -0.5}
    raise ValueError(f"no op {case.op!r}")


def _activation(kind: Any) -> Activation | None:
    return None if kind is None else Activation(kind, beta=4.0, linear_beta=25.0)


def _sizes(case: Case) -> dict[str, Any]:
    static = ("top_k", "scaling", "renormalize", "lower_bound", "unnormed")
    return {name: value for name, value in case.dims.items() if name not in static}


def _linear(random, W, K, N, norm=False, activation=None, add=False, runs=0, pieces=0):
    columns = N // 2 if activation else N
    x = random.normal(W, K)
    return {
        "x": Unnormed(x, 1.0 + random.wide(W, runs, pieces) ** 2) if runs else x,
        "weight": random.normal(N, K, scale=K**-0.5),
        "norm": random.gain(K) if norm else None,
        "add": random.normal(W, columns) if add else None,
    }


def _linears(random, W, K, widths, gated=0):
    def projection(parts, **static):
        columns = sum(parts)
        return Projection(random.normal(columns, K, scale=K**-0.5), widths=parts, **static)

    situ = _activation("situ")
    last = [Projection(random.normal(2 * gated, K, scale=K**-0.5), situ)] if gated else []
    return {"x": random.normal(W, K), "projections": (*map(projection, widths), *last)}


def _attn_res(random, M, count, W, D, delta):
    return {
        "blocks": random.normal(M, W, D),
        "count": jnp.int32(count),
        "part": random.normal(W, D),
        "query_norm": random.gain(D),
        "query_proj": random.normal(D, scale=D**-0.5),
        "norm": random.gain(D),
        "delta": random.normal(W, D) if delta else None,
    }


def _route(random, W, D, E):
    return {
        "x": random.normal(W, D),
        "weight": random.normal(E, D, scale=D**-0.5),
        "bias": random.wide(E, scale=0.1),
    }


def _choose_beside(random, W, E, K, N):
    return {
        "logits": random.wide(W, E),
        "bias": random.wide(E, scale=0.1),
        "x": random.normal(W, K),
        "weight": random.normal(N, K, scale=K**-0.5),
        "rows": (jnp.arange(W, dtype=jnp.int32) % 5 != 4).astype(jnp.int32),
    }


def _rows_of_experts(random, W, Z, E, J):
    scores = random.wide(W, E)
    return {
        "z": random.normal(W, Z),
        "experts": lax.top_k(scores, J)[1],
        "weights": jax.nn.softmax(random.wide(W, J), axis=1),
    }


def _moe(random, W, Z, E, I, J, activation):
    bank = DenseBank(
        random.normal(E, 2 * I, Z, scale=Z**-0.5), random.normal(E, Z, I, scale=I**-0.5)
    )
    return {**_rows_of_experts(random, W, Z, E, J), "bank": bank}


def _moe_mxfp4(random, W, Z, E, I, J, activation):
    def scales(rows, columns):
        # A random code has a standard deviation of 3: give the products one near 1.
        near = 127 - round((columns.bit_length() - 1) / 2) - 2
        return random.integers(E, rows, columns // 32, low=near - 1, high=near + 2, dtype=jnp.uint8)

    bank = Mxfp4Bank(
        random.words(E, 2 * I, Z // 8), scales(2 * I, Z), random.words(E, Z, I // 8), scales(Z, I)
    )
    return {**_rows_of_experts(random, W, Z, E, J), "bank": bank}


def _moe_mono(random, W, D, Z, E, I, J, S, activation):
    x = random.normal(W, D)
    weights = LatentMoeWeights(
        router=random.normal(E, D, scale=D**-0.5),
        bias=random.wide(E, scale=0.1),
        down=random.normal(Z, D, scale=D**-0.5),
        shared_gate_up=random.normal(2 * S, D, scale=D**-0.5),
        shared_down=random.normal(D, S, scale=S**-0.5),
        bank=_moe_mxfp4(random, W, Z, E, I, J, activation)["bank"],
    )
    live = jnp.ones(W, bool)
    return {
        "x": x,
        "live": live,
        "weights": weights,
        "control": moe_mono_control(x, weights, top_k=J),
    }


def _kda_common(random, B, T, S, Q, H, K, V):
    channels = H * (2 * K + V)
    ring = ring_rows(Q)
    pending = KdaPending(
        key=random.normal(S, ring, H, K, scale=K**-0.5),
        update=random.wide(S, ring, H, V),
        decay=-5.0 * jax.nn.sigmoid(random.wide(S, ring, H, K, scale=2.0)),
    )
    return {
        "rows": KdaRows(
            qkv=random.normal(B, T, channels),
            decay=random.normal(B, T, H * K, scale=2.0),
            beta=random.normal(B, T, H),
            gate=random.normal(B, T, H * V),
        ),
        "weights": KdaWeights(
            conv=random.wide(TAPS, channels, scale=0.5),
            a_log=random.wide(H, scale=0.5),
            dt_bias=random.wide(H * K, scale=0.5) - 1.0,
            o_norm=1.0 + random.wide(V, scale=0.1),
        ),
        "cache": KdaCache(random.normal(S, ring, channels), random.wide(S, H, V, K), pending),
        "slots": _scattered(S - 1)[:B],
        "starts": random.integers(B, low=Q, high=1000),
        "accepted": random.integers(B, low=0, high=Q + 1),
    }


def _kda_prefill(random, B, T, H, K, V):
    common, fresh = _kda_common(random, B, T, B + 2, 4, H, K, V), jnp.arange(B) % 2 == 0
    return {
        **common,
        "starts": jnp.where(fresh, 0, common["starts"]),
        "fresh": fresh,
        "lengths": T - jnp.arange(B, dtype=jnp.int32) * (T // 3),
    }


def _mla(random, B, T, H, L, R, page, context):
    max_pages = -(-context // page)
    return {
        "q": random.normal(B, T, H, L + R),
        "pages": random.normal(1 + B * max_pages, page, L + R),
        "page_table": _scattered(B * max_pages).reshape(B, max_pages),
    }


def _mla_absorb(random, W, H, N, R, L):
    return {
        "query": random.normal(W, H * (N + R)),
        "w_uk": random.normal(H, N, L, scale=N**-0.5),
    }


def _mla_values(random, W, H, V, L):
    return {
        "mixed": random.normal(W, H, L),
        "w_uv": random.normal(H, V, L, scale=L**-0.5),
        "gate": random.normal(W, H * V),
    }


def _mla_decode(random, B, T, H, L, R, page, context):
    lengths = context - jnp.arange(B, dtype=jnp.int32) % 3 * (context // 4)
    return {**_mla(random, B, T, H, L, R, page, context), "lengths": jnp.maximum(lengths, T)}


def _mla_prefill(random, B, T, H, L, R, page, start):
    requests = jnp.arange(B, dtype=jnp.int32)
    return {
        **_mla(random, B, T, H, L, R, page, start + T),
        "starts": start - requests * (start // 3),
        "lengths": T - requests * (T // 3),
    }


_INPUTS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "linear": _linear,
    "linears": _linears,
    "attn_res": _attn_res,
    "route": _route,
    "choose_beside": _choose_beside,
    "moe": _moe,
    "moe_mxfp4": _moe_mxfp4,
    "moe_mono": _moe_mono,
    "kda_decode": _kda_common,
    "kda_prefill": _kda_prefill,
    "mla_absorb": _mla_absorb,
    "mla_decode": _mla_decode,
    "mla_prefill": _mla_prefill,
    "mla_values": _mla_values,
}
