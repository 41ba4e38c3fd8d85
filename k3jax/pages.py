"""Which pages of the latent cache are free; page 0 is the null page and is never given out."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Gives out page ids 1 to `pages` - 1, all that are asked for or none.

    A page that is freed may be given out again at once: steps run in the order of their dispatch,
    so a row in flight is written before the new owner's first one.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 2:
            raise ValueError(f"a cache needs 2 pages or more, one is the null page; got {pages}")
        if page_size < 1:
            raise ValueError(f"page_size must be 1 token or more, got {page_size}")
        self.page_size = page_size
        self.capacity = pages - 1
        self._free = list(range(pages - 1, 0, -1))
        self._used = bytearray(pages)

    @property
    def free(self) -> int:
        """Pages that can be given out now."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Pages that have an owner."""
        return self.capacity - len(self._free)

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
            self._used[page] = 1
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Take pages back; ValueError, and no change, if one of them is not given out."""
        pages = list(pages)
        wrong = [page for page in pages if not (0 < page < len(self._used) and self._used[page])]
        if wrong or len(set(pages)) != len(pages):
            raise ValueError(f"pages {wrong or pages} are not given out, or are released twice")
        for page in pages:
            self._used[page] = 0
        self._free.extend(reversed(pages))
