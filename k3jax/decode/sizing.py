"""How the memory for caches is shared out: slots, pages, and snapshots of prefixes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from k3jax.cache import CacheSizes
from k3jax.decode.agreement import agree_on_minimum
from k3jax.decode.config import DecodeConfig
from k3jax.prefix import prefix_budget


@dataclass(frozen=True)
class CacheBytes:
    """Bytes on each device."""

    fixed: int  # of all slots
    page: int  # of one
    snapshot: int  # of one


def fit(
    decode_config: DecodeConfig, sizes: CacheSizes, needs: CacheBytes, memory: int | None
) -> CacheSizes:
    """`sizes` with the pages and the snapshots that fit `memory` bytes on each device.

    `sizes` has the pages that its requests can fill; None: there is memory enough. All ranks call
    it alike and get the same. ValueError if the memory does not hold one request beside the
    snapshots.
    """
    least = 1 + decode_config.max_pages
    left = None
    if memory is not None:
        memory = agree_on_minimum(memory, "the memory for caches")
        left = memory - needs.fixed - least * needs.page
    budget = prefix_budget(
        decode_config.prefix_cache,
        left,
        (needs.snapshot, needs.page),
        decode_config.max_requests,
        decode_config.max_pages,
    )
    pages = sizes.pages + budget.pages(decode_config.max_pages)
    if memory is not None and needs.page:
        snapshots = budget.snapshots * budget.snapshot_bytes
        pages = min(pages, max(0, memory - needs.fixed - snapshots) // needs.page)
    if pages < least:
        raise ValueError(
            f"cache memory of {memory} bytes holds {needs.fixed} bytes of KDA slots, "
            f"{budget.snapshots} snapshots of prefixes and then {pages} pages of {needs.page} "
            f"bytes; a request of {decode_config.max_context} tokens needs {least}: lower "
            "max_requests or max_context, or prefix_cache"
        )
    return replace(sizes, pages=pages, prefix=budget)
