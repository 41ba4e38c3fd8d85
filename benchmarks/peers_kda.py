"""flash-linear-attention's KDA kernels on this GPU: `python benchmarks/peers_kda.py`.

Needs torch, triton and fla-core. Every time is that of a CUDA graph replayed over input sets of
more than 200 MB together, with the shapes of a Kimi-K3 rank at TP 8: 12 heads of 128. Bounded
gate, beta's sigmoid and l2 norm are inside fla's kernels; convolution, output norm and replayed
rows are not. fla clears its output first, a launch of its own inside the graph. The last line is
JSON: peer -> case of cases.py -> microseconds. The status is 1 if something could not be measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

HEADS, DIM, ROTATION = 12, 128, 256 << 20
OPTIONS = {
    "output_final_state": True,
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "lower_bound": -5.0,
}
# Case of cases.py, requests, rows of each.
CASES = {
    "decode": [
        (f"kda_decode-k3-tp8-b{batch}-q{rows}", batch, rows)
        for rows in (1, 8)
        for batch in (1, 8, 32)
    ],
    "prefill": [(f"kda_prefill-k3-tp8-t{rows}", 1, rows) for rows in (1024, 8192, 65536)],
}


def make(batch: int, rows: int) -> dict:
    """One set of arguments."""

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    per_head = (batch, rows, HEADS, DIM)
    return {
        **{name: normal(*per_head) for name in "qkvg"},
        "beta": normal(batch, rows, HEADS),
        "A_log": normal(HEADS, dtype=torch.float32),
        "dt_bias": normal(HEADS * DIM, dtype=torch.float32),
        "initial_state": normal(batch, HEADS, DIM, DIM, dtype=torch.float32),
    }


def graph_time(function, batch: int, rows: int, options: dict) -> float:
    """Microseconds of one application."""
    first = make(batch, rows)
    size = sum(array.numel() * array.element_size() for array in first.values())
    sets = [first] + [make(batch, rows) for _ in range(max(1, ROTATION // size))]
    options = OPTIONS | options
    with torch.inference_mode():
        for _ in range(2):
            function(**first, **options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = [function(**arguments, **options) for arguments in sets]
    samples = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / len(sets))
    del kept
    return statistics.median(samples[1:])


def main() -> int:
    """Time the kinds that the command line names; 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(CASES), help=" or ".join(CASES))
    kinds = parser.parse_args().kinds
    if unknown := set(kinds) - set(CASES):
        parser.error(f"no kind {', '.join(sorted(unknown))}: choose of {', '.join(CASES)}")
    functions = {
        "decode": ("fla's recurrence", fused_recurrent_kda, {}),
        "prefill": ("fla's chunks", chunk_kda, {"safe_gate": True}),
    }
    times, failed, start = {}, False, time.perf_counter()
    for kind in kinds:
        peer, function, options = functions[kind]
        for name, batch, rows in CASES[kind]:
            try:
                found = graph_time(function, batch, rows, options)
                times.setdefault(peer, {})[name] = found
            except Exception as error:  # noqa: BLE001 - the other cases are measured all the same
                found, failed = f"FAILED: {type(error).__name__}: {error}"[:300], True
            print(f"{time.perf_counter() - start:6.1f} s", peer, name, found, flush=True)
    print(json.dumps(times))
    return int(failed)


if __name__ == "__main__":
    try:
        import torch
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
    except ModuleNotFoundError as error:
        sys.exit(f"skipped: {error}; pip install torch fla-core")
    sys.exit(main())
