"""The numbers of an evaluation as Markdown."""

from __future__ import annotations

from typing import Any

import numpy as np

BAR = 0.75  # of xz's bits a byte
PACKED_BAR = 1e-3
NEAR = 0.25  # of two logits in bfloat16: their own rounding and that of the rows before


def table(results: dict[str, Any]) -> str:
    """What must be reached and what was, then speculation and speed."""
    lines = ["| What | Must be | Is | |", "|---|---|---|---|"]
    lines += [*_text(results.get("text")), *_chat(results.get("chat"))]
    lines += _agree(results.get("agree", {}))
    return "\n".join([*lines, *_speed(results.get("speed", {}))])


def _row(what: str, bar: str, value: str, reached: bool) -> str:
    return f"| {what} | {bar} | {value} | {'yes' if reached else '**no**'} |"


def _text(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    bits, xz = found["bits_per_byte"], found["xz_bits_per_byte"]
    bar = BAR * xz
    lines = [
        _row(
            f"Held-out code, bits a byte (xz -9e: {xz:.3f})",
            f"<= {bar:.3f}",
            f"{bits:.3f} ({bits / xz - 1:+.1%})",
            bits <= bar,
        )
    ]
    for name in ("code", "chat"):
        packed, trained = found[name]["packed"], found[name].get("trained")
        if trained is not None:
            off = packed / trained - 1
            value = f"{packed:.4f} / {trained:.4f} ({off:+.3%})"
            what = f"Packed / trained loss on held-out {name}, nats a token"
            lines.append(_row(what, "within 0.1%", value, abs(off) <= PACKED_BAR))
    loads = np.array(found["loads"], np.float64)
    share = loads / loads.sum(axis=1, keepdims=True) * loads.shape[1]
    value = f"{share.min():.2f} to {share.max():.2f} of an even share"
    lines.append(_row("Load of an expert, any layer", "none dead", value, bool(loads.min() > 0)))
    return lines


def _chat(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return []
    wanted = (
        ("well_formed", f"Well-formed K3 turns, of {found['replies']} replies", 0.99),
        ("stopped", "Replies that end by themselves", 0.99),
        (
            "arithmetic_calls",
            f"Right calls for arithmetic, of {found['arithmetic_calls_count']}",
            0.95,
        ),
        ("after_result", f"Right answers after a result, of {found['after_result_count']}", 0.95),
    )
    lines = [
        _row(what, f">= {bar:.0%}", f"{found[key]:.1%}", found[key] >= bar)
        for key, what, bar in wanted
        if found[key] is not None
    ]
    kinds = ", ".join(f"{kind} {value:.0%}" for kind, value in found["by_kind"].items())
    return [*lines, f"| Right replies, of all; by kind: {kinds} | | {found['right']:.1%} | |"]


def _agree(found: dict[str, Any]) -> list[str]:
    lines = []
    for dtype, numbers in found.items():
        value = f"{numbers['same']} of {numbers['compared']} tokens"
        gaps = [parting["gap"] for parting in numbers["partings"]]
        if gaps:
            value += f"; top-2 gap where they part: {max(gaps):.4f} at most"
        exact = dtype == "float32"
        bar = "all" if exact else f"but where the best two are within {NEAR:g}"
        what = f"Stock and specialized greedy text agree, {dtype}"
        lines.append(_row(what, bar, value, max(gaps, default=-1.0) < (0.0 if exact else NEAR)))
    return lines


def _speed(found: dict[str, Any]) -> list[str]:
    lines = []
    for device, numbers in found.items():
        lines += [
            "",
            f"One request on {device}, {numbers['dtype']}:",
            "",
            "| Path | Code: tokens/s | tokens a step | accepted by place "
            "| Chat: tokens/s | tokens a step | accepted by place |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, measured in numbers.items():
            if isinstance(measured, dict):
                cells = [cell for kind in ("code", "chat") for cell in _cells(measured[kind])]
                lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _cells(measured: dict[str, Any]) -> list[str]:
    accepted = " ".join(f"{rate:.2f}" for rate in measured["accepted"])
    numbers = (measured["tokens_per_second"], measured["tokens_per_step"])
    return [*("-" if number is None else f"{number:.2f}" for number in numbers), accepted or "-"]
