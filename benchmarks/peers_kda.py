"""flash-linear-attention's KDA kernels on this GPU: `python benchmarks/peers_kda.py`.

Needs torch, triton and fla-core. Every time is that of a CUDA graph replayed over input sets of
more than 200 MB together, with the shapes of a Kimi-K3 rank at TP 8: 12 heads of 128. Gate and l2
norm are inside fla's kernels; convolution, output norm and replayed rows are not.
"""

from __future__ import annotations

import json
import statistics

import torch
from fla.ops.kda import chunk_kda, fused_recurrent_kda

HEADS, DIM, ROTATION = 12, 128, 256 << 20


def make(batch: int, rows: int) -> dict:
    """One set of arguments."""

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)

    per_head = (batch, rows, HEADS, DIM)
    gate = -5.0 * torch.sigmoid(normal(*per_head, dtype=torch.float32))
    return {
        "q": normal(*per_head),
        "k": normal(*per_head),
        "v": normal(*per_head),
        "g": gate,
        "beta": torch.sigmoid(normal(batch, rows, HEADS)),
        "initial_state": normal(batch, HEADS, DIM, DIM, dtype=torch.float32),
    }


def graph_time(function, batch: int, rows: int) -> float:
    """Microseconds of one application."""
    first = make(batch, rows)
    size = sum(array.numel() * array.element_size() for array in first.values())
    sets = [first] + [make(batch, rows) for _ in range(max(1, min(64, ROTATION // size)))]
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for _ in range(3):
        function(**first, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        kept = [function(**arguments, **options) for arguments in sets]
    samples = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / 3 / len(sets))
    del kept
    return statistics.median(samples)


def main() -> None:
    times = {}
    cases = [(fused_recurrent_kda, batch, rows) for rows in (1, 8) for batch in (1, 8, 32)]
    cases += [(chunk_kda, 1, rows) for rows in (1024, 8192, 65536)]
    for function, batch, rows in cases:
        name = f"{function.__name__}-b{batch}-t{rows}"
        try:
            times[name] = graph_time(function, batch, rows)
        except (RuntimeError, TypeError, ValueError) as error:
            times[name] = f"{type(error).__name__}: {error}"[:200]
        print(name, times[name], flush=True)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
