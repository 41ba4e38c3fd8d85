"""A fault to inject, for tests and for people: `--inject-fault RANK:STEP:BIT`. No jax import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

FaultKind = Literal["wait", "slot", "page", "plan", "diverged", "nonfinite"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


@dataclass(frozen=True)
class Fault:
    """One fault on one rank in one step; all kinds but "nonfinite" are bits of the health word."""

    rank: int
    step: int  # executed steps count from 1
    kind: FaultKind

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read "1:20:wait"; ValueError says what is wrong with it."""
        rank, _, rest = text.partition(":")
        step, _, kind = rest.partition(":")
        known = next((name for name in KINDS if name == kind), None)
        if not rank.isdecimal() or not step.isdecimal() or int(step) < 1 or known is None:
            raise ValueError(
                f"a fault is RANK:STEP:BIT with a rank from 0, a step from 1 and a bit of "
                f"{', '.join(KINDS)}, got {text!r}"
            )
        return cls(int(rank), int(step), known)
