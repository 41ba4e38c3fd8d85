"""Named, tagged shapes of every op: the one list that tests, benchmarks and the AMD check read.

Tags: a model ("tiny" runs on a CPU in a test; "k3-tp8", "k3-tp4", "k3-tp2", "k3-tp1" are a rank of
Kimi-K3), a phase ("decode", "prefill"), and "gpu" for what one GPU is measured on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pallas_kernels.impl import MOST_ROWS

Dims = dict[str, Any]  # of a case: shape letters and the op's static options

# Kimi-K3, whole: heads, shared inner, expert inner and the dense layer's inner divide by TP.
HIDDEN, LATENT, EXPERTS, TOP_K = 7168, 3584, 896, 16
HEADS, HEAD_DIM, KV_LORA, ROPE, Q_LORA = 96, 128, 512, 64, 1536
SHARED, EXPERT_INNER, DENSE_INNER, VOCAB = 6144, 3072, 33792, 163840
ATTN_RES_BLOCKS = 8
WIDTHS = (1, 8, 16, 64)  # rows of a decode step
MONO_WIDTHS = (1, 8, 16)  # those that moe_mono's kernel takes
REQUESTS = (  # (requests, rows of each) of a decode step
    *((1, rows) for rows in range(1, 9)),
    *((requests, rows) for requests in (8, 32, 64) for rows in (1, 4, 8)),
)
PROMPTS = (1024, 8192, 65536)
ROUTE: Dims = {"top_k": TOP_K, "scaling": 1.0, "renormalize": True}
LONG_CONTEXTS = (65536, 524288)  # one request of eight rows; a chunk of a prompt after the first


@dataclass(frozen=True, eq=False)
class Case:
    """One shape of one op; `dims` holds the shape letters and the op's static options."""

    op: str
    name: str
    tags: frozenset[str]
    dims: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


def select(op: str, *tags: str) -> list[Case]:
    """Return the cases of `op` that carry all `tags`; raises ValueError if there are none."""
    found = [case for case in CASES if case.op == op and case.tags.issuperset(tags)]
    if not found:
        raise ValueError(f"no case of {op!r} has the tags {tags}")
    return found


def _case(op: str, name: str, tags: str, **dims: Any) -> Case:
    return Case(op, name, frozenset(tags.split()), MappingProxyType(dims))


def _k3_linear(tp: int, width: int) -> Iterator[Case]:
    """The matrices of a K3 rank: (name, K, N, options)."""
    heads, head_width = HEADS // tp, HEADS // tp * HEAD_DIM
    shared, dense = SHARED // tp, DENSE_INNER // tp
    shapes: list[tuple[str, int, int, Dims]] = [
        ("kda_in_proj", HIDDEN, 4 * head_width + HEAD_DIM + heads, {}),
        ("f_b", HEAD_DIM, head_width, {}),
        ("o_proj", head_width, HIDDEN, {}),
        ("o_proj_unnormed", head_width, HIDDEN, {"runs": heads, "pieces": 4}),
        ("mla_in_proj", HIDDEN, Q_LORA + KV_LORA + ROPE + head_width, {}),
        ("q_b", Q_LORA, heads * (HEAD_DIM + ROPE), {"norm": True}),
        ("shared_gate_up", HIDDEN, 2 * shared, {"activation": "situ"}),
        ("shared_down", shared, HIDDEN, {}),
        ("latent_down", HIDDEN, LATENT, {}),
        ("latent_up", LATENT, HIDDEN, {"add": True}),
        ("dense_gate_up", HIDDEN, 2 * dense, {"activation": "situ"}),
        ("dense_down", dense, HIDDEN, {}),
        ("lm_head", HIDDEN, VOCAB // tp, {}),
    ]
    for name, inner, columns, options in shapes:
        tags = f"k3-tp{tp} decode gpu"
        yield _case(
            "linear", f"k3-tp{tp}-{name}-w{width}", tags, W=width, K=inner, N=columns, **options
        )


def _k3_launches(tp: int, width: int) -> Iterator[Case]:
    """What a layer does in one launch each: (op, name, dims)."""
    heads, shared = HEADS // tp, SHARED // tp
    head_width = heads * HEAD_DIM
    kda = (3 * head_width, head_width, HEAD_DIM, heads)
    mla = (Q_LORA, KV_LORA + ROPE, head_width)
    attention = {"H": heads, "L": KV_LORA}
    shapes: list[tuple[str, str, Dims]] = [
        ("linears", "kda_in_proj", {"K": HIDDEN, "widths": (kda,)}),
        ("linears", "mla_in_proj", {"K": HIDDEN, "widths": (mla,)}),
        ("linears", "experts", {"K": HIDDEN, "widths": ((EXPERTS,), (LATENT,)), "gated": shared}),
        ("mla_absorb", "heads", {"N": HEAD_DIM, "R": ROPE, **attention}),
        ("mla_values", "heads", {"V": HEAD_DIM, **attention}),
    ]
    for op, name, dims in shapes:
        yield _case(op, f"k3-tp{tp}-{name}-w{width}", f"k3-tp{tp} decode gpu", W=width, **dims)
    yield _k3_choice(tp, width)


def _k3_choice(tp: int, width: int) -> Case:
    dims = {"E": EXPERTS, "K": SHARED // tp, "N": HIDDEN, **ROUTE}
    tags = f"k3-tp{tp} {'decode' if width in WIDTHS else 'prefill'} gpu"
    return _case("choose_beside", f"k3-tp{tp}-shared_down-w{width}", tags, W=width, **dims)


def _k3_residuals(width: int, counts: tuple[int, ...]) -> Iterator[Case]:
    phase = "decode" if width in WIDTHS else "prefill"
    tags = f"k3-tp8 k3-tp4 k3-tp2 k3-tp1 {phase} gpu"
    residual: Dims = {"M": ATTN_RES_BLOCKS, "W": width, "D": HIDDEN, "delta": True}
    for count in counts:
        yield _case("attn_res", f"k3-blocks{count}-w{width}", tags, count=count, **residual)


def _k3_rows(width: int) -> Iterator[Case]:
    """Ops of a decode step that every rank runs whole."""
    tags = "k3-tp8 k3-tp4 k3-tp2 k3-tp1 decode gpu"
    yield from _k3_residuals(width, (0, 1, ATTN_RES_BLOCKS))
    yield _case("route", f"k3-w{width}", tags, W=width, D=HIDDEN, E=EXPERTS, **ROUTE)


def _k3_experts(tp: int) -> Dims:
    dims = {"Z": LATENT, "E": EXPERTS, "I": EXPERT_INNER // tp, "J": TOP_K}
    return {**dims, "activation": "situ"}


def _k3_moe(tp: int, width: int) -> Case:
    tags = f"k3-tp{tp} {'decode' if width in WIDTHS else 'prefill'} gpu"
    return _case("moe_mxfp4", f"k3-tp{tp}-w{width}", tags, W=width, **_k3_experts(tp))


def _k3_mono(width: int) -> Case:
    dims = {"W": width, "D": HIDDEN, "S": SHARED // 8, "scaling": 1.0, "renormalize": True}
    return _case("moe_mono", f"k3-tp8-w{width}", "k3-tp8 decode gpu", **dims, **_k3_experts(8))


def _k3_kda(heads: int) -> Dims:
    return {"H": heads, "K": HEAD_DIM, "V": HEAD_DIM, "lower_bound": -5.0}


def _k3_mla(heads: int) -> Dims:
    return {"H": heads, "L": KV_LORA, "R": ROPE, "page": 64}


def _k3_attention(tp: int, requests: int, rows: int) -> Iterator[Case]:
    name, tags, heads = f"k3-tp{tp}-b{requests}-q{rows}", f"k3-tp{tp} decode gpu", HEADS // tp
    kda = {"B": requests, "T": rows, "S": requests + 1, "Q": 8, **_k3_kda(heads)}
    yield _case("kda_decode", name, tags, **kda)
    if requests * rows <= MOST_ROWS:  # as the decoder has it: o_proj divides by the norm
        yield _case("kda_decode", f"{name}-unnormed", tags, **kda, unnormed=True)
    long = LONG_CONTEXTS if (tp, requests, rows) == (8, 1, 8) else ()
    for context in (1024, 8192, *long):
        mla = {"B": requests, "T": rows, "context": context, **_k3_mla(heads)}
        yield _case("mla_decode", f"{name}-context{context}", tags, **mla)


def _k3_prompt(tp: int, rows: int) -> Iterator[Case]:
    name, tags, heads = f"k3-tp{tp}-t{rows}", f"k3-tp{tp} prefill gpu", HEADS // tp
    yield _case("kda_prefill", name, tags, B=1, T=rows, **_k3_kda(heads))
    starts = (0, LONG_CONTEXTS[0]) if (tp, rows) == (8, 8192) else (0,)
    for start in starts:
        late = f"{name}-after{start}" if start else name
        yield _case("mla_prefill", late, tags, B=1, T=rows, start=start, **_k3_mla(heads))


def _kimi_k3() -> Iterator[Case]:
    for width in WIDTHS:
        yield from _k3_linear(8, width)
        yield from _k3_launches(8, width)
        yield from _k3_rows(width)
        yield _k3_moe(8, width)
    for width in PROMPTS[:2]:
        yield from _k3_residuals(width, (1, ATTN_RES_BLOCKS))
        yield _k3_choice(8, width)
        yield _k3_moe(8, width)
    for width in MONO_WIDTHS:
        yield _k3_mono(width)
    for requests, rows in REQUESTS:
        yield from _k3_attention(8, requests, rows)
    for rows in PROMPTS:
        yield from _k3_prompt(8, rows)
    for tp in (1, 2, 4):
        yield from _k3_linear(tp, 16)
        yield from _k3_launches(tp, 16)
        yield _k3_moe(tp, 16)
        yield from _k3_attention(tp, 4, 4)
        yield from _k3_prompt(tp, 1024)


def _tiny(op: str, name: str, phase: str = "decode", **dims: Any) -> Case:
    return _case(op, f"tiny-{name}", f"tiny {phase}", **dims)


# The tiny models' shapes (tests/golden/*/config.json), whole and as one of two ranks, and odd ones.
_SITU: Dims = {"activation": "situ"}
_SILU: Dims = {"activation": "silu"}
_BOUNDED: Dims = {"lower_bound": -5.0}
_UNBOUNDED: Dims = {"lower_bound": None}
_K3_ROUTE: Dims = {"top_k": 4, "scaling": 1.0, "renormalize": True}
_K3_MOE: Dims = {"Z": 96, "E": 16, "J": 4, **_SITU}
_K3_MONO: Dims = {"D": 128, **_K3_MOE}
_LINEAR_MOE: Dims = {"Z": 64, "E": 8, "I": 16, "J": 3, **_SILU}
_TINY = (
    _tiny("linear", "k3-in_proj", W=5, K=128, N=1064),
    _tiny("linear", "k3-latent_up", W=8, K=96, N=128, norm=True, add=True),
    _tiny("linear", "k3-gate_up", W=16, K=128, N=256, **_SITU),
    _tiny("linear", "linear-gate_up", W=1, K=64, N=192, norm=True, add=True, **_SILU),
    _tiny("linears", "k3-in_proj", W=5, K=128, widths=((768, 256, 32, 8),)),
    _tiny("linears", "k3-experts", W=3, K=128, widths=((16,), (96,)), gated=64),
    _tiny("choose_beside", "k3", W=7, E=16, K=64, N=128, **_K3_ROUTE),
    _tiny("choose_beside", "k3-wide", "prefill", W=66, E=16, K=64, N=128, **_K3_ROUTE),
    _tiny("mla_absorb", "k3", W=5, H=8, N=32, R=16, L=32),
    _tiny("mla_values", "k3", W=5, H=8, V=32, L=32),
    _tiny("attn_res", "k3-blocks0", M=3, count=0, W=4, D=128, delta=True),
    _tiny("attn_res", "k3-blocks2", M=3, count=2, W=5, D=128, delta=True),
    _tiny("attn_res", "k3-blocks3", M=3, count=3, W=1, D=128, delta=False),
    _tiny("attn_res", "odd", M=9, count=9, W=2, D=160, delta=True),
    _tiny("attn_res", "k3-wide-blocks0", "prefill", M=2, count=0, W=65, D=128, delta=False),
    _tiny("attn_res", "k3-wide-blocks2", "prefill", M=3, count=2, W=70, D=128, delta=True),
    _tiny("attn_res", "wide-odd", "prefill", M=9, count=9, W=66, D=1056, delta=True),
    _tiny("route", "k3", W=7, D=128, E=16, **_K3_ROUTE),
    _tiny("route", "linear", W=16, D=64, E=8, top_k=3, scaling=2.446, renormalize=True),
    _tiny("route", "raw", W=3, D=96, E=12, top_k=12, scaling=2.0, renormalize=False),
    _tiny("moe_mxfp4", "k3", W=8, I=64, **_K3_MOE),
    _tiny("moe_mxfp4", "k3-tp2", W=1, I=32, **_K3_MOE),
    _tiny("moe_mxfp4", "wide", "prefill", W=150, Z=64, E=5, I=96, J=2, **_SITU),
    _tiny("moe_mxfp4", "wide-turns", "prefill", W=70, Z=256, E=7, I=64, J=3, **_SITU),
    _tiny("moe_mono", "k3", W=5, I=64, S=128, scaling=2.0, renormalize=True, **_K3_MONO),
    _tiny("moe_mono", "k3-tp2", W=1, I=32, S=64, scaling=1.0, renormalize=False, **_K3_MONO),
    _tiny("moe", "linear", W=8, **_LINEAR_MOE),
    _tiny("moe", "linear-wide", "prefill", W=80, **_LINEAR_MOE),
    _tiny("kda_decode", "k3-q4", B=3, T=4, S=6, Q=4, H=8, K=32, V=32, **_BOUNDED),
    _tiny("kda_decode", "k3-tp2-q1", B=4, T=1, S=5, Q=8, H=4, K=32, V=32, **_BOUNDED),
    _tiny("kda_decode", "linear-q2", B=2, T=2, S=4, Q=3, H=4, K=16, V=16, **_UNBOUNDED),
    _tiny("kda_decode", "odd", B=2, T=3, S=5, Q=5, H=3, K=16, V=32, **_BOUNDED),
    _tiny("kda_prefill", "k3", "prefill", B=2, T=150, H=8, K=32, V=32, **_BOUNDED),
    _tiny("kda_prefill", "linear", "prefill", B=1, T=80, H=4, K=16, V=16, **_UNBOUNDED),
    _tiny("kda_prefill", "odd", "prefill", B=3, T=19, H=3, K=16, V=32, **_BOUNDED),
    _tiny("mla_decode", "k3-q4", B=3, T=4, H=8, L=32, R=16, page=16, context=100),
    _tiny("mla_decode", "linear-q1", B=2, T=1, H=4, L=32, R=8, page=4, context=1300),
    _tiny("mla_decode", "odd", B=1, T=8, H=3, L=64, R=16, page=64, context=70),
    _tiny("mla_prefill", "k3", "prefill", B=2, T=150, H=8, L=32, R=16, page=16, start=0),
    _tiny("mla_prefill", "late", "prefill", B=2, T=20, H=4, L=32, R=8, page=8, start=700),
)

CASES: tuple[Case, ...] = (*_TINY, *_kimi_k3())
