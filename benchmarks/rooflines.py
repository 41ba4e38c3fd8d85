"""What a case must do at least: bytes to move, and operations of the matrix unit."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from benchmarks.timing import tree_bytes
from pallas_kernels.cases import Case
from pallas_kernels.kda_types import TAPS
from pallas_kernels.moe import route
from pallas_kernels.mxfp4 import GROUP


def least_bytes(case: Case, arrays: dict, result: Any) -> int:
    """The fewest bytes a case must move: what it reads, once, and what it writes."""
    match case.op:
        case "moe_mxfp4" | "moe_mono":
            return _moe_bytes(case, arrays, result)
        case "attn_res":
            unread = case.dims["M"] - case.dims["count"]
            blocks = tree_bytes(arrays["blocks"]) * unread // case.dims["M"]
            return tree_bytes((arrays, result)) - blocks
        case "kda_decode" | "kda_prefill":
            return _kda_bytes(case, arrays, result)
        case "mla_decode" | "mla_prefill":
            return tree_bytes((arrays["q"], result)) + _latent_bytes(case, arrays)
    return tree_bytes((arrays, result))


def matrix_operations(case: Case, arrays: dict) -> int:
    """Useful floating-point operations of the ops that arithmetic may bound, else 0."""
    if case.op not in ("mla_decode", "mla_prefill"):
        return 0
    dims = case.dims
    lengths = np.asarray(arrays["lengths"], np.int64)
    if case.op == "mla_decode":  # row t sees all but the T - 1 - t rows after it
        seen = dims["T"] * lengths - dims["T"] * (dims["T"] - 1) // 2
    else:
        seen = np.asarray(arrays["starts"], np.int64) * lengths + lengths * (lengths + 1) // 2
    # Scores over latent and rope dims, values over the latent: both absorbed.
    return int(seen.sum()) * dims["H"] * 2 * (2 * dims["L"] + dims["R"])


def _moe_bytes(case: Case, arrays: dict, result: Any) -> int:
    """Weights of the distinct chosen experts, codes and scales, and everything else once."""
    expert = 3 * case.dims["I"] * case.dims["Z"]
    rest = dict(arrays)
    if case.op == "moe_mono":
        weights = rest.pop("weights")
        rest["weights"] = dataclasses.replace(weights, bank=None)
        options = {"top_k": case.dims["J"], "scaling": 1.0, "renormalize": True}
        choose = functools.partial(route, **options, impl="reference")
        experts, _ = jax.jit(choose)(arrays["x"], weights.router, weights.bias)
    else:
        del rest["bank"]
        experts = arrays["experts"]
    chosen = len(np.unique(np.asarray(experts)))
    return chosen * (expert // 2 + expert // GROUP) + tree_bytes((rest, result))


def _kda_bytes(case: Case, arrays: dict, result: Any) -> int:
    """The requests' part of the cache: state in and out, the rows read and written of its rings."""
    requests, cache = case.dims["B"], arrays["cache"]
    slots, ring = cache.conv.shape[:2]
    window, pending = (tree_bytes(each) // slots // ring for each in (cache.conv, cache.pending))
    state = tree_bytes(cache.state) // slots
    replayed = int(np.clip(np.asarray(arrays["accepted"]), 0, ring).sum())
    if case.op == "kda_decode":  # every new row is kept until it is accepted
        written, kept = case.dims["T"], case.dims["T"]
    else:
        written, kept = TAPS - 1, 0
    rows = requests * ((TAPS - 1 + written) * window + kept * pending) + replayed * pending
    rest = tree_bytes((arrays["rows"], arrays["weights"], result[0]))
    return 2 * requests * state + rows + rest


def _latent_bytes(case: Case, arrays: dict) -> int:
    """Every cached row of every request, once."""
    ends = np.asarray(arrays["lengths"], np.int64)
    if case.op == "mla_prefill":
        ends = ends + np.asarray(arrays["starts"], np.int64)
    pages = arrays["pages"]
    return int(ends.sum()) * pages.shape[-1] * pages.dtype.itemsize
