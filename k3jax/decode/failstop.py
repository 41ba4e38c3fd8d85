"""What a set bit of the health word means, and the error that it ends in."""

from __future__ import annotations

from pallas_kernels.health import BIT_DIVERGED, BIT_PAGE, BIT_PLAN, BIT_SLOT, BIT_WAIT

MEANINGS = {
    BIT_WAIT: "a wait inside a kernel gave up",
    BIT_SLOT: "a slot beyond the cache",
    BIT_PAGE: "a page beyond the pool",
    BIT_PLAN: "a batch that contradicts the slots",
    BIT_DIVERGED: "ranks that chose different experts",
}


def check_health(word: int) -> None:
    """Raise RuntimeError that names the bits of a health word that are set; each is fatal."""
    if word:
        found = [text for bit, text in MEANINGS.items() if word & bit] or ["an unknown bit"]
        raise RuntimeError(f"health word {word:#x}: {'; '.join(found)}. Restart the engine")
