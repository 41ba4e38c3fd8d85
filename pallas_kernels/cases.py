"""Named, tagged shapes of every op: the one list that tests, benchmarks and the AMD check read.

Tags: a model ("tiny" runs on a CPU in a test; "k3-tp8", "k3-tp4", "k3-tp2", "k3-tp1" are a rank of
Kimi-K3), a phase ("decode", "prefill"), and "gpu" for what one GPU is measured on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# Kimi-K3, whole: heads, shared inner, expert inner and the dense layer's inner divide by TP.
HIDDEN, LATENT, EXPERTS, TOP_K = 7168, 3584, 896, 16
HEADS, HEAD_DIM, KV_LORA, ROPE, Q_LORA = 96, 128, 512, 64, 1536
SHARED, EXPERT_INNER, DENSE_INNER, VOCAB = 6144, 3072, 33792, 163840
ATTN_RES_BLOCKS = 8
WIDTHS = (1, 8, 16, 64)  # rows of a decode step
REQUESTS = (  # (requests, rows of each) of a decode step
    *((1, rows) for rows in range(1, 9)),
    *((requests, rows) for requests in (8, 32, 64) for rows in (1, 4, 8)),
)
PROMPTS = (1024, 8192, 65536)


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
    shapes: list[tuple[str, int, int, dict[str, Any]]] = [
        ("kda_in_proj", HIDDEN, 4 * head_width + HEAD_DIM + heads, {}),
        ("f_b", HEAD_DIM, head_width, {}),
        ("o_proj", head_width, HIDDEN, {}),
        ("mla_in_proj", HIDDEN, Q_LORA + KV_LORA + ROPE + head_width, {}),
        ("q_b", Q_LORA, heads * (HEAD_DIM + ROPE), {"norm": True}),
        ("shared_gate_up", HIDDEN, 2 * shared, {"activation": "situ"}),
        ("shared_down", shared, HIDDEN, {}),
        ("latent_down", HIDDEN, LATENT, {}),
        ("latent_up", LATENT, HIDDEN, {"norm": True, "add": True}),
        ("latent_up_shard", LATENT, HIDDEN // tp, {"norm": True}),
        ("dense_gate_up", HIDDEN, 2 * dense, {"activation": "situ"}),
        ("dense_down", dense, HIDDEN, {}),
        ("lm_head", HIDDEN, VOCAB // tp, {}),
    ]
    for name, inner, columns, options in shapes:
        tags = f"k3-tp{tp} decode gpu"
        yield _case(
            "linear", f"k3-tp{tp}-{name}-w{width}", tags, W=width, K=inner, N=columns, **options
        )


def _k3_rows(width: int) -> Iterator[Case]:
    """Ops of a decode step that every rank runs whole."""
    tags = "k3-tp8 k3-tp4 k3-tp2 k3-tp1 decode gpu"
    for count in (0, 1, ATTN_RES_BLOCKS):
        yield _case(
            "attn_res",
            f"k3-blocks{count}-w{width}",
            tags,
            M=ATTN_RES_BLOCKS,
            count=count,
            W=width,
            D=HIDDEN,
            delta=True,
        )
    yield _case(
        "route",
        f"k3-w{width}",
        tags,
        W=width,
        D=HIDDEN,
        E=EXPERTS,
        top_k=TOP_K,
        scaling=1.0,
        renormalize=True,
    )


def _k3_moe(tp: int, width: int) -> Case:
    return _case(
        "moe_mxfp4",
        f"k3-tp{tp}-w{width}",
        f"k3-tp{tp} decode gpu" if width in WIDTHS else f"k3-tp{tp} prefill",
        W=width,
        Z=LATENT,
        E=EXPERTS,
        I=EXPERT_INNER // tp,
        J=TOP_K,
        activation="situ",
    )


def _k3_attention(tp: int, requests: int, rows: int) -> Iterator[Case]:
    name, tags, heads = f"k3-tp{tp}-b{requests}-q{rows}", f"k3-tp{tp} decode gpu", HEADS // tp
    yield _case(
        "kda_decode",
        name,
        tags,
        B=requests,
        T=rows,
        S=requests + 1,
        Q=8,
        H=heads,
        K=HEAD_DIM,
        V=HEAD_DIM,
        lower_bound=-5.0,
    )
    for context in (1024, 8192):
        yield _case(
            "mla_decode",
            f"{name}-context{context}",
            tags,
            B=requests,
            T=rows,
            H=heads,
            L=KV_LORA,
            R=ROPE,
            page=64,
            context=context,
        )


def _k3_prompt(tp: int, rows: int) -> Iterator[Case]:
    name, tags, heads = f"k3-tp{tp}-t{rows}", f"k3-tp{tp} prefill gpu", HEADS // tp
    yield _case(
        "kda_prefill", name, tags, B=1, T=rows, H=heads, K=HEAD_DIM, V=HEAD_DIM, lower_bound=-5.0
    )
    yield _case(
        "mla_prefill", name, tags, B=1, T=rows, H=heads, L=KV_LORA, R=ROPE, page=64, start=0
    )


def _kimi_k3() -> Iterator[Case]:
    for width in WIDTHS:
        yield from _k3_linear(8, width)
        yield from _k3_rows(width)
        yield _k3_moe(8, width)
    yield _k3_moe(8, 1024)
    for requests, rows in REQUESTS:
        yield from _k3_attention(8, requests, rows)
    for rows in PROMPTS:
        yield from _k3_prompt(8, rows)
    for tp in (1, 2, 4):
        yield from _k3_linear(tp, 16)
        yield _k3_moe(tp, 16)
        yield from _k3_attention(tp, 4, 4)
        yield from _k3_prompt(tp, 1024)


# The tiny models' shapes (tests/golden/*/config.json), whole and as one of two ranks, and odd ones.
_TINY = (
    _case("linear", "tiny-k3-in_proj", "tiny decode", W=5, K=128, N=1064),
    _case("linear", "tiny-k3-latent_up", "tiny decode", W=8, K=96, N=128, norm=True, add=True),
    _case("linear", "tiny-k3-gate_up", "tiny decode", W=16, K=128, N=256, activation="situ"),
    _case(
        "linear",
        "tiny-linear-gate_up",
        "tiny decode",
        W=1,
        K=64,
        N=192,
        norm=True,
        activation="silu",
        add=True,
    ),
    _case("attn_res", "tiny-k3-blocks0", "tiny decode", M=3, count=0, W=4, D=128, delta=True),
    _case("attn_res", "tiny-k3-blocks2", "tiny decode", M=3, count=2, W=5, D=128, delta=True),
    _case("attn_res", "tiny-k3-blocks3", "tiny decode", M=3, count=3, W=1, D=128, delta=False),
    _case(
        "route", "tiny-k3", "tiny decode", W=7, D=128, E=16, top_k=4, scaling=1.0, renormalize=True
    ),
    _case(
        "route",
        "tiny-linear",
        "tiny decode",
        W=16,
        D=64,
        E=8,
        top_k=3,
        scaling=2.446,
        renormalize=True,
    ),
    _case(
        "route",
        "tiny-raw",
        "tiny decode",
        W=3,
        D=96,
        E=12,
        top_k=12,
        scaling=2.0,
        renormalize=False,
    ),
    _case("moe_mxfp4", "tiny-k3", "tiny decode", W=8, Z=96, E=16, I=64, J=4, activation="situ"),
    _case("moe_mxfp4", "tiny-k3-tp2", "tiny decode", W=1, Z=96, E=16, I=32, J=4, activation="situ"),
    _case("moe_mxfp4", "tiny-wide", "tiny prefill", W=150, Z=64, E=5, I=96, J=2, activation="situ"),
    _case("moe", "tiny-linear", "tiny decode", W=8, Z=64, E=8, I=16, J=3, activation="silu"),
    _case("moe", "tiny-linear-wide", "tiny prefill", W=80, Z=64, E=8, I=16, J=3, activation="silu"),
    _case(
        "kda_decode",
        "tiny-k3-q4",
        "tiny decode",
        B=3,
        T=4,
        S=6,
        Q=4,
        H=8,
        K=32,
        V=32,
        lower_bound=-5.0,
    ),
    _case(
        "kda_decode",
        "tiny-k3-tp2-q1",
        "tiny decode",
        B=4,
        T=1,
        S=5,
        Q=8,
        H=4,
        K=32,
        V=32,
        lower_bound=-5.0,
    ),
    _case(
        "kda_decode",
        "tiny-linear-q2",
        "tiny decode",
        B=2,
        T=2,
        S=4,
        Q=3,
        H=4,
        K=16,
        V=16,
        lower_bound=None,
    ),
    _case(
        "kda_decode",
        "tiny-odd",
        "tiny decode",
        B=2,
        T=3,
        S=5,
        Q=5,
        H=3,
        K=16,
        V=32,
        lower_bound=-5.0,
    ),
    _case("kda_prefill", "tiny-k3", "tiny prefill", B=2, T=150, H=8, K=32, V=32, lower_bound=-5.0),
    _case(
        "kda_prefill", "tiny-linear", "tiny prefill", B=1, T=80, H=4, K=16, V=16, lower_bound=None
    ),
    _case("kda_prefill", "tiny-odd", "tiny prefill", B=3, T=19, H=3, K=16, V=32, lower_bound=-5.0),
    _case(
        "mla_decode", "tiny-k3-q4", "tiny decode", B=3, T=4, H=8, L=32, R=16, page=16, context=100
    ),
    _case(
        "mla_decode",
        "tiny-linear-q1",
        "tiny decode",
        B=2,
        T=1,
        H=4,
        L=32,
        R=8,
        page=4,
        context=1300,
    ),
    _case("mla_decode", "tiny-odd", "tiny decode", B=1, T=8, H=3, L=64, R=16, page=64, context=70),
    _case("mla_prefill", "tiny-k3", "tiny prefill", B=2, T=150, H=8, L=32, R=16, page=16, start=0),
    _case("mla_prefill", "tiny-late", "tiny prefill", B=2, T=20, H=4, L=32, R=8, page=8, start=700),
)

CASES: tuple[Case, ...] = (*_TINY, *_kimi_k3())
