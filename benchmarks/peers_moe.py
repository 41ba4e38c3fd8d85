"""A published MXFP4 mixture of experts on this GPU: `python benchmarks/peers_moe.py`.

The peer is grouped-nf4-gemm (PyPI), whose grouped small-batch kernel reads native MXFP4; it needs
torch and triton. OpenAI's triton_kernels (matmul_ogs) is not on PyPI: that name holds another
project. Every time is that of a CUDA graph replayed over four routings of a bank of 2 GB, with
the shapes of a Kimi-K3 rank at TP 8: 896 experts, 16 a row, w13 [768, 3584] and w2 [3584, 384].
"products" are the two grouped products alone; "whole" adds the grouping table, the activation
(two torch kernels or more) and the weighted sum, all as torch runs them. The last line is JSON:
peer -> case of cases.py -> microseconds. The status is 1 if no tiles ran at some width.
"""

from __future__ import annotations

import json
import statistics
import sys

EXPERTS, TOP_K, LATENT, INNER = 896, 16, 3584, 384
ROUTINGS = 4
TILE_ROWS = 16  # of the peer's kernel: one tile holds all rows of an expert here
# (block_n, kc, warps, stages) of the peer's kernel; the fastest one counts.
TILES = ((32, 256, 4, 2), (32, 256, 4, 4), (64, 256, 4, 3), (32, 128, 2, 4))


def graph_time(calls) -> float:
    """Microseconds of one of `calls`, run one after another in a replayed graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        kept = [call() for call in calls]
    samples = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / 5 / len(calls))
    del kept
    return statistics.median(samples)


def make_bank() -> dict:
    """Random codes, and scales near one."""

    def codes(rows, columns):
        return torch.randint(
            0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8, device="cuda"
        )

    def scales(rows, columns):
        shape = (EXPERTS, rows, columns // 32)
        return torch.randint(118, 121, shape, dtype=torch.uint8, device="cuda")

    return {
        "w13": (codes(2 * INNER, LATENT), scales(2 * INNER, LATENT)),
        "w2": (codes(LATENT, INNER), scales(LATENT, INNER)),
    }


def situ(pairs):
    """SiTU of [gate | up]."""
    gate, up = pairs.float().chunk(2, dim=1)
    bounded = 4.0 * torch.tanh(gate / 4.0) * torch.sigmoid(gate)
    return (bounded * (25.0 * torch.tanh(up / 25.0))).to(torch.bfloat16)


def routing(rows: int) -> dict:
    """Inputs of one step."""
    scores = torch.rand(rows, EXPERTS, device="cuda")
    return {
        "x": torch.randn(rows, LATENT, device="cuda").to(torch.bfloat16),
        "experts": scores.topk(TOP_K, dim=1).indices.to(torch.int32),
        "weights": torch.softmax(torch.rand(rows, TOP_K, device="cuda"), dim=1),
    }


def table(experts):
    """The peer's tiles: (first row, rows, expert) of each, and the rows by expert."""
    flat = experts.reshape(-1)
    return build_group_tiles_fused(flat, EXPERTS, TILE_ROWS, flat.numel(), lean=True)[:4]


def products(rows, inner, bank: dict, tiles, options: dict):
    """The two grouped products, of rows and of inner rows by expert."""
    row0, count, group, _ = tiles
    up = gemm_mxfp4_grouped_smallm(rows, *bank["w13"], row0, count, group, **options)
    inner = situ(up) if inner is None else inner
    return up, gemm_mxfp4_grouped_smallm(inner, *bank["w2"], row0, count, group, **options)


def whole(step: dict, bank: dict, options: dict):
    """The weighted sum over each row's experts."""
    tiles = table(step["experts"])
    order = tiles[3]
    _, down = products(step["x"][order // TOP_K], None, bank, tiles, options)
    unsorted = torch.empty_like(down).index_copy_(0, order, down)
    weighted = unsorted.float().view(-1, TOP_K, LATENT) * step["weights"][..., None]
    return weighted.sum(dim=1)


def two_products(step: dict, bank: dict, options: dict):
    """The products alone, on tables and rows made beforehand."""
    tiles = table(step["experts"])
    rows = step["x"][tiles[3] // TOP_K]
    inner = torch.randn(len(rows), INNER, device="cuda").to(torch.bfloat16)
    return lambda: products(rows, inner, bank, tiles, options)


def measure(rows: int, bank: dict) -> dict | None:
    """Times of one width by the fastest tiles; None if none ran."""
    steps = [routing(rows) for _ in range(ROUTINGS)]
    best: dict = {"products_us": float("inf")}
    for tile in TILES:
        options = dict(zip(("block_n", "kc", "warps", "stages"), tile, strict=True))
        try:
            alone = graph_time([two_products(step, bank, options) for step in steps])
            full = graph_time([lambda s=step, o=options: whole(s, bank, o) for step in steps])
        except Exception as error:  # noqa: BLE001 - the other tiles are measured all the same
            print(f"rows {rows} tiles {tile}: {type(error).__name__}: {error}"[:200], flush=True)
            continue
        print(f"rows {rows} tiles {tile}: products {alone:.1f} us, whole {full:.1f} us", flush=True)
        if alone < best["products_us"]:
            best = {"products_us": alone, "whole_us": full, "tiles": tile}
    if "whole_us" not in best:
        return None
    distinct = statistics.mean(len(step["experts"].unique()) for step in steps)
    return {**best, "distinct_experts": distinct}


def main() -> int:
    """Measure every width; 1 if one has no time."""
    bank = make_bank()
    wholes, products_alone, failed = {}, {}, False
    for rows in (1, 8, 16):
        found = measure(rows, bank)
        print(f"rows {rows}:", found or "FAILED: no tiles ran", flush=True)
        if found is None:
            failed = True
            continue
        wholes[f"moe_mxfp4-k3-tp8-w{rows}"] = found["whole_us"]
        products_alone[f"moe_mxfp4-k3-tp8-w{rows}"] = found["products_us"]
    print(json.dumps({"nf4-gemm": wholes, "nf4-gemm's products": products_alone}))
    return int(failed)


if __name__ == "__main__":
    try:
        import torch
        from int4_b32 import build_group_tiles_fused
        from mxfp4_grouped import gemm_mxfp4_grouped_smallm
    except ModuleNotFoundError as error:
        sys.exit(f"skipped: {error}; pip install torch grouped-nf4-gemm")
    sys.exit(main())
