"""Which prefixes of earlier requests are kept, and which requests can go on from them. No jax.

An entry is a snapshot of the recurrent state, in a pool on the device, and the pages that hold the
same tokens' latents: both are there, or there is no entry. Its key is the tokens themselves, so a
hit is never a guess; a look-up reads no more of a text than what some entry shares with it. What is
kept is bounded in bytes, and gives way to requests that run.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from k3jax.pages import PageAllocator

WIDTH = 4  # bytes of a token in a key
BLOCK = 256  # tokens of a step down the tree: a long text takes few, and in one little is compared
MOST_SNAPSHOTS = 4096  # a request that fails walks through all
SHARE = 4  # of a known memory, one part in so many is for prefixes unless somebody says otherwise
EACH_REQUEST = 8  # snapshots for each request that can run, unless somebody says otherwise
OWN_PART = 8  # a prefix is thought to bring one part in so many of a context's pages of its own


@dataclass(frozen=True)
class PrefixBudget:
    """What may be kept; bytes are those on each device."""

    snapshots: int = 0  # that the device's pool has room for; 0: nothing is kept
    total_bytes: int = 0  # of snapshots and the pages kept for them together
    snapshot_bytes: int = 0  # of one
    page_bytes: int = 0  # of one

    def pages(self, max_pages: int) -> int:
        """Pages that there is room for beside the snapshots, those of one at most `max_pages`."""
        rest = self.total_bytes - self.snapshots * self.snapshot_bytes
        return min(rest // max(1, self.page_bytes), self.snapshots * max_pages)


NOTHING_KEPT = PrefixBudget()


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A prefix that a request can go on from."""

    key: bytes
    number: int  # of the snapshot in the device's pool
    pages: tuple[int, ...]  # the last one may be filled in part
    owner: str  # the request that left it
    step: int  # when this one has landed well, it can be used

    @property
    def tokens(self) -> int:
        """Tokens that it knows."""
        return len(self.key) // WIDTH


class Node(dict[bytes, "Node | Entry"]):
    """What is kept behind the same whole blocks of tokens, by the tokens that come next.

    A whole block leads to the node behind it, a part of one to the entry that ends there.
    """


def key_of(tokens: Sequence[int]) -> bytes:
    """The key of a sequence of tokens; that of a prefix is a prefix of it."""
    return array("i", tokens).tobytes()


def prefix_budget(
    wanted: int | None, left: int | None, each: tuple[int, int], requests: int, max_pages: int
) -> PrefixBudget:
    """How many snapshots there are, and the bytes for them and their pages; all on each device.

    `wanted` bytes, 0 for none; or None: a share of the bytes that are `left` beside what a request
    needs, or, where nobody knows what is left, enough for all snapshots that `requests` get.
    `each` is the bytes of (a snapshot, a page).
    """
    snapshot, page = each
    whole = max(1, snapshot + -(-max_pages // OWN_PART) * page)
    most, total = MOST_SNAPSHOTS, wanted
    if total is None:
        most = requests * EACH_REQUEST
        total = most * whole if left is None else max(0, left // SHARE)
    count = min(most, total // whole)
    if not count and total >= snapshot + page > 0:
        count = 1
    return PrefixBudget(count, total, snapshot, page) if count else NOTHING_KEPT


class PrefixCache:
    """Entries from the least to the most recently used; without room for one it is empty for ever.

    An entry counts from when the step that made it has landed: until then nobody knows whether its
    request met a value that is not finite.
    """

    def __init__(self, allocator: PageAllocator, budget: PrefixBudget, *, worth: int) -> None:
        """`worth` is the fewest tokens that a step of their own pays for."""
        self.allocator, self.budget, self.worth = allocator, budget, worth
        self.queries = 0  # tokens of admitted requests that were looked up
        self.hits = 0  # tokens of these that were found
        self.evictions = 0
        self._entries: OrderedDict[int, Entry] = OrderedDict()  # by number
        self._tree = Node()  # the same ones; each node has one behind it
        self._block = WIDTH * BLOCK
        self._free = list(range(budget.snapshots - 1, -1, -1))
        self._landed = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Bytes that are taken on each device; pages that requests read as well are among them."""
        return len(self) * self.budget.snapshot_bytes + self.allocator.kept * self.budget.page_bytes

    def use(self, key: bytes, most: int) -> Entry | None:
        """The entry of the longest prefix of `key` of at most `most` tokens; the last to go now."""
        for start, node in reversed(self._path(key)):
            fitting = [
                entry
                for rest, entry in node.items()
                if isinstance(entry, Entry)
                and entry.tokens <= most
                and entry.step <= self._landed
                and key.startswith(rest, start)
            ]
            if fitting:
                found = max(fitting, key=lambda entry: entry.tokens)
                self._entries.move_to_end(found.number)
                return found
        return None

    def branch(self, key: bytes, known: int, most: int) -> int:
        """Where `key` leaves the tokens of some entry; 0 unless that is `worth` beyond `known`.

        A snapshot there serves the next request that shares them, as a common system message.
        """
        start, node = self._path(key)[-1]
        shared = start // WIDTH + in_common(key[start : start + self._block], node, self._block)
        best = min(shared, most)
        return best if best >= known + self.worth else 0

    def count(self, tokens: int, found: int) -> None:
        """A request of so many tokens was admitted, of which so many were found."""
        if self.budget.snapshots:
            self.queries += tokens
            self.hits += found

    def save(
        self, key: bytes, pages: Sequence[int], owner: str, step: int, *, cold: bool = False
    ) -> int | None:
        """Keep a prefix; the number that its snapshot is to get, or None if none is to be taken.

        `pages` must be given out, those of all its tokens. A `cold` entry is the first to be
        evicted, until it is used.
        """
        start, node = self._path(key)[-1]
        same = node.get(key[start:])
        if isinstance(same, Entry):
            self._entries.move_to_end(same.number)
            return None
        alone = self.budget.snapshot_bytes + len(pages) * self.budget.page_bytes
        if alone > self.budget.total_bytes or not (self._free or self._entries):
            return None
        if not self._free:
            self._evict()
        entry = Entry(key, self._free.pop(), tuple(pages), owner, step)
        self.allocator.keep(pages)
        self._entries[entry.number] = entry
        self._plant(entry)
        while self.size > self.budget.total_bytes:
            self._evict()
        if cold:
            self._entries.move_to_end(entry.number, last=False)
        return entry.number

    def make_room(self, pages: int) -> bool:
        """Evict until so many pages are free; False, and no change, if they would not be."""
        if self.allocator.free + self.allocator.idle < pages:
            return False
        while self.allocator.free < pages:
            self._evict()
        return True

    def prove(self, step: int) -> None:
        """A step has landed, and so have all before it."""
        self._landed = step

    def forget(self, owner: str, source: Entry | None) -> None:
        """Drop what a request that failed left behind, and what it went on from."""
        for entry in list(self._entries.values()):
            if entry.owner == owner or entry is source:
                self._drop(entry)

    def _evict(self) -> None:
        self._drop(next(iter(self._entries.values())))
        self.evictions += 1

    def _drop(self, entry: Entry) -> None:
        del self._entries[entry.number]
        self._free.append(entry.number)
        self.allocator.drop(entry.pages)
        path = self._path(entry.key)
        start, node = path[-1]
        del node[entry.key[start:]]
        for (end, node), (start, before) in pairwise(reversed(path)):
            if not node:
                del before[entry.key[start:end]]

    def _path(self, key: bytes) -> list[tuple[int, Node]]:
        """The nodes that `key` passes, from the root on, and how many of its bytes lie before."""
        path = [(0, self._tree)]
        while True:
            start, node = path[-1]
            behind = node.get(key[start : start + self._block])
            if not isinstance(behind, Node):
                return path
            path.append((start + self._block, behind))

    def _plant(self, entry: Entry) -> None:
        key, size = entry.key, self._block
        start, node = self._path(key)[-1]
        while start + size <= len(key):
            behind = node[key[start : start + size]] = Node()
            start, node = start + size, behind
        node[key[start:]] = entry


def in_common(own: bytes, others: Collection[bytes], size: int) -> int:
    """The most tokens with which one of the keys `others` begins as `own`; of up to `size` bytes.

    Shorter ones are filled up with what is no token, and not the same.
    """
    if not others:
        return 0
    table = np.frombuffer(b"".join(other.ljust(size, b"\xff") for other in others), np.int32)
    same = table.reshape(len(others), -1) == np.frombuffer(own.ljust(size, b"\xfe"), np.int32)
    return int(np.logical_and.accumulate(same, axis=1).sum(axis=1).max())
