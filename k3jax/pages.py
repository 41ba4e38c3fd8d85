"""Which pages of the latent cache are free; page 0 is the null page and is never given out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PageAllocator:
    """Gives out page ids 1 to `pages` - 1, all that are asked for or none.

    A page has owners, the requests that read it, and it may be kept for requests to come, by any
    number of claims. It is free when it has neither. A page that is freed may be given out again at
    once: steps run in the order of their dispatch, so a row in flight is written before the new
    owner's first one.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 2:
            raise ValueError(f"a cache needs 2 pages or more, one is the null page; got {pages}")
        if page_size < 1:
            raise ValueError(f"page_size must be 1 token or more, got {page_size}")
        self.page_size = page_size
        self.capacity = pages - 1
        self.kept = 0  # pages that are kept, with or without owners
        self.idle = 0  # pages that are kept and have no owner
        self._free = list(range(pages - 1, 0, -1))
        self._owners = [0] * pages
        self._claims = [0] * pages

    @property
    def free(self) -> int:
        """Pages that can be given out now."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Pages that have an owner."""
        return self.capacity - len(self._free) - self.idle

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens of one request."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None if fewer are free; ValueError if count is negative."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add an owner to pages that are kept or given out; ValueError, and no change, else."""
        self._check(pages, self._owners, self._claims)
        for page in pages:
            self.idle -= not self._owners[page]
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take an owner from pages; ValueError, and no change, if one of them is not given out."""
        pages = list(pages)
        self._check(pages, self._owners)
        for page in reversed(pages):
            self._owners[page] -= 1
            if not self._owners[page] and self._claims[page]:
                self.idle += 1
            elif not self._owners[page]:
                self._free.append(page)

    def keep(self, pages: Sequence[int]) -> None:
        """Add a claim to pages that are given out; ValueError, and no change, if one is not."""
        self._check(pages, self._owners)
        for page in pages:
            self.kept += not self._claims[page]
            self._claims[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Take a claim from pages; ValueError, and no change, if one of them is not kept."""
        self._check(pages, self._claims)
        for page in pages:
            self._claims[page] -= 1
            if self._claims[page]:
                continue
            self.kept -= 1
            if not self._owners[page]:
                self.idle -= 1
                self._free.append(page)

    def _check(self, pages: Sequence[int], *counts: list[int]) -> None:
        """Raise ValueError unless each page is named once and counted somewhere."""
        known = range(1, len(self._owners))
        wrong = [p for p in pages if p not in known or not any(count[p] for count in counts)]
        if wrong or len(set(pages)) != len(pages):
            raise ValueError(f"pages {wrong or pages} are not given out, or are named twice")
