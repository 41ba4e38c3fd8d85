"""Decides what the next step runs; no arrays, no jax, no clock: a decision follows from the calls.

A step is either prefill chunks or the same number of rows (its last token and drafts) of each
decoding request, never both; the more requests, the fewer drafts, as the builds have it. Requests
wait in order, run while they hold a slot, and are preempted latest first when pages run out: their
pages are freed and prompt and generated tokens are prefilled again later. A request begins behind
the longest prefix that is kept (see prefix.py); what is kept goes before a request is preempted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from k3jax.pages import PageAllocator
from k3jax.prefix import NOTHING_KEPT, WIDTH, Entry, PrefixCache, key_of
from k3jax.request import SamplingParams

if TYPE_CHECKING:
    from k3jax.guided import Matcher

STEP_COST = 256  # a step's fixed cost in tokens: below this many, reading the weights dominates


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way; the engine appends to `tokens`, the scheduler changes the rest."""

    request_id: str
    tokens: list[int]  # the prompt, then what was generated and read back
    prompt_length: int
    max_tokens: int
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    matcher: Matcher | None = None  # of its grammar
    drafts: list[int] = field(default_factory=list)  # those of its next step, if it has a grammar
    slot: int = 0  # 0: not running
    pages: list[int] = field(default_factory=list)
    pages_sent: int = 0  # of `pages`, how many the device's table holds
    key: bytes = b""  # of the tokens when it was last to be placed
    source: Entry | None = None  # the prefix that it began behind when the slot was given
    cached: int | None = None  # tokens of the prompt in the first of them
    branch: int = 0  # where its prompt leaves another one: a chunk ends there
    saved: int = 0  # tokens in the latest snapshot of it, or in `source`
    prefilled: int = 0  # tokens whose prefill was dispatched, or that were in `source`
    target: int = 0  # tokens to prefill: all that were known when the slot was given
    rows_in_flight: int = 0  # rows dispatched, not yet read, that may give a token each
    steps_in_flight: int = 0  # steps of those rows; each gives one token or more
    done: bool = False

    @property
    def generated(self) -> int:
        """Tokens generated and read back."""
        return len(self.tokens) - self.prompt_length

    @property
    def ahead(self) -> int:
        """Tokens up to the next place where a chunk must end."""
        end = self.branch if self.prefilled < self.branch else self.target
        return end - self.prefilled

    @property
    def decodes(self) -> bool:
        """Its prompt is in the caches, and tokens are missing even after those in flight."""
        known = len(self.tokens) + self.steps_in_flight - self.prompt_length
        return self.prefilled == self.target and known < self.max_tokens and self.slot > 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of one sequence."""

    sequence: Sequence
    start: int
    count: int
    final: bool  # it ends what is known: sample

    @property
    def end(self) -> int:
        """Tokens that are known to the caches after it."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run these chunks in the bucket (requests, rows)."""

    requests: int
    rows: int
    chunks: list[Chunk]
    page_updates: list[tuple[int, int, int]]  # (slot, index in its table, page)


@dataclass(frozen=True, slots=True)
class Decode:
    """Run the next rows of these sequences in the build (rows, requests)."""

    requests: int
    rows: int
    sequences: list[Sequence]
    page_updates: list[tuple[int, int, int]]


class Scheduler:
    """Waiting and running sequences, and the slots and pages that they hold."""

    def __init__(
        self,
        allocator: PageAllocator,
        *,
        requests: int,
        table_pages: int,
        builds: Items[tuple[int, int]],
        buckets: Items[tuple[int, int]],
        lookahead: int = 0,
        token_budget: int | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        """Serve up to `requests` at a time, each of up to `table_pages` pages.

        A decoding request always has pages for `lookahead` tokens more than it needs, for a draft
        model to write to.

        `builds` (rows, requests) and `buckets` (requests, tokens) are the compiled steps.
        `token_budget` bounds the prompt tokens between two decode steps; None: the largest bucket.
        `prefixes` of the same allocator is what requests can begin behind; None: nothing.
        """
        self.allocator = allocator
        self.table_pages = table_pages
        self.builds = sorted(builds)
        self.buckets = sorted(buckets, key=lambda bucket: (bucket[0] * bucket[1], bucket))
        self.token_budget = token_budget or max(count * tokens for count, tokens in buckets)
        self.slots = requests
        self.lookahead = lookahead
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.started: list[Sequence] = []  # those that got a slot since somebody took them out
        self.preemptions = 0
        nothing = PrefixCache(allocator, NOTHING_KEPT, worth=STEP_COST)
        self.prefixes = nothing if prefixes is None else prefixes
        self._prefilling: deque[Sequence] = deque()
        self._free_slots = list(range(requests, 0, -1))
        self._since_decode = 0  # prompt tokens since the last decode step

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; ValueError if it could never hold all its tokens."""
        drafts = max(rows for rows, _ in self.builds) - 1
        tokens = sequence.prompt_length + sequence.max_tokens - 1 + drafts + self.lookahead
        limit = min(self.allocator.capacity, self.table_pages)
        if self.allocator.pages_for(tokens) > limit:
            raise ValueError(
                f"a prompt of {sequence.prompt_length} tokens and max_tokens "
                f"{sequence.max_tokens} need {self.allocator.pages_for(tokens)} pages of "
                f"{self.allocator.page_size} tokens; there are {limit}: ask for fewer tokens or "
                "raise --cache-memory"
            )
        self.waiting.append(sequence)

    def decide(self) -> Prefill | Decode | None:
        """The next step, or None if nothing can run before the steps in flight are read."""
        decodable = [sequence for sequence in self.running if sequence.decodes]
        self._admit()
        if self._prefilling:
            bucket = choose_bucket(self.buckets, [s.ahead for s in self._prefilling])
            chunks = self._chunks(*bucket)
            tokens = sum(chunk.count for chunk in chunks)
            waited = self._since_decode
            if not decodable or waited == 0 or waited + tokens <= self.token_budget:
                self._since_decode += tokens
                return self._prefill(bucket, chunks)
        return self._decode(decodable) if decodable else None

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that waits or runs; its slot and pages are free at once."""
        if sequence.done:
            return
        sequence.done = True
        if sequence.slot:
            self._stop(sequence)
        else:
            self.waiting.remove(sequence)

    def _admit(self) -> None:
        """Give slots, and pages for all known tokens, to the first that wait."""
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            if not self._place(sequence):
                return
            self.waiting.popleft()
            sequence.slot, sequence.target = self._free_slots.pop(), len(sequence.tokens)
            self.running.append(sequence)
            self.started.append(sequence)
            self._prefilling.append(sequence)

    def _place(self, sequence: Sequence) -> bool:
        """Give a sequence its pages, the first of them those of a prefix that is kept.

        One page for each running sequence stays free, or the newcomer would soon be preempted.
        """
        if len(sequence.key) != WIDTH * len(sequence.tokens):
            sequence.key = key_of(sequence.tokens)
        key, most = sequence.key, len(sequence.tokens) - 1  # one row is to be sampled
        scored = sequence.params.prompt_logprobs is not None  # needs the logits of all its rows
        entry = None if scored else self.prefixes.use(key, most)
        known = 0 if entry is None else entry.tokens
        shared = [] if entry is None else list(entry.pages[: known // self.allocator.page_size])
        self.allocator.share(shared)  # so they stay even if the entry itself has to go
        needed = self.allocator.pages_for(len(sequence.tokens)) - len(shared)
        short = needed + len(self.running) > self.allocator.free + self.allocator.idle
        pages = None if short and self.running else self._allocate(needed)
        if pages is None:
            self.allocator.release(shared)
            return False
        if not scored:
            self.prefixes.count(len(sequence.tokens), known)
        if sequence.cached is None:
            sequence.cached = min(known, sequence.prompt_length)
        sequence.source, sequence.pages = entry, shared + pages
        sequence.prefilled = sequence.saved = known
        sequence.pages_sent = self.allocator.pages_for(known)
        sequence.branch = self.prefixes.branch(key, known, most)
        return True

    def _allocate(self, count: int) -> list[int] | None:
        """So many pages, if need be from what is kept; None if that is not enough."""
        return self.allocator.allocate(count) if self.prefixes.make_room(count) else None

    def _chunks(self, requests: int, rows: int) -> list[Chunk]:
        """What the first sequences in prefill would bring to a bucket."""
        chunks = []
        for sequence in list(self._prefilling)[:requests]:
            count = min(rows, sequence.ahead)
            final = sequence.prefilled + count == sequence.target
            chunks.append(Chunk(sequence, sequence.prefilled, count, final))
        return chunks

    def _prefill(self, bucket: tuple[int, int], chunks: list[Chunk]) -> Prefill:
        """Commit to the chunks; who is not through goes behind the others, so none starves."""
        updates: list[tuple[int, int, int]] = []
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.prefilled += chunk.count
            self._prefilling.popleft()
            if chunk.final:
                sequence.rows_in_flight += 1
                sequence.steps_in_flight += 1
            else:
                self._prefilling.append(sequence)
            self._send_pages(sequence, sequence.prefilled, updates)
        return Prefill(*bucket, chunks, updates)

    def _decode(self, decodable: list[Sequence]) -> Decode | None:
        """The next rows of each sequence that has, or gets by preemption, pages for them."""
        rows = self._rows(decodable)
        chosen = []
        updates: list[tuple[int, int, int]] = []
        for sequence in decodable:
            end = self._end(sequence, rows)
            if sequence.slot and self._reserve(sequence, end):
                chosen.append(sequence)
                self._send_pages(sequence, end, updates)
        if not chosen:
            return None
        for sequence in chosen:
            sequence.rows_in_flight += rows
            sequence.steps_in_flight += 1
        self._since_decode = 0
        _, requests = self._build(rows, len(chosen))
        return Decode(requests, rows, chosen, updates)

    def _rows(self, decodable: list[Sequence]) -> int:
        """The most rows for which a build holds all sequences, and nobody loses pages to drafts."""
        choices = sorted({rows for rows, requests in self.builds if requests >= len(decodable)})
        while len(choices) > 1:
            ends = ((sequence, self._end(sequence, choices[-1])) for sequence in decodable)
            missing = sum(max(0, self.allocator.pages_for(e) - len(s.pages)) for s, e in ends)
            if missing <= self.allocator.free + self.allocator.idle:
                break
            choices.pop()
        return choices[-1]

    def _end(self, sequence: Sequence, rows: int) -> int:
        """The tokens that a sequence needs pages for if all its rows, those in flight too, stay."""
        return len(sequence.tokens) - 1 + sequence.rows_in_flight + rows + self.lookahead

    def _build(self, rows: int, requests: int) -> tuple[int, int]:
        """The build of fewest rows, then requests, that holds so many of each."""
        return next(build for build in self.builds if build[0] >= rows and build[1] >= requests)

    def _reserve(self, sequence: Sequence, end: int) -> bool:
        """Whether the sequence has pages for `end` tokens; the latest admitted make room for it."""
        if end <= len(sequence.pages) * self.allocator.page_size:
            return True
        needed = self.allocator.pages_for(end)
        if needed > self.table_pages:
            return False  # the worst case of the rows in flight; once they are read it fits
        while needed > len(sequence.pages):
            pages = self._allocate(needed - len(sequence.pages))
            if pages is not None:
                sequence.pages += pages
                continue
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _send_pages(
        self, sequence: Sequence, end: int, updates: list[tuple[int, int, int]]
    ) -> None:
        """Add to `updates` the table entries that the device lacks for tokens below `end`."""
        if end > sequence.pages_sent * self.allocator.page_size:
            needed = self.allocator.pages_for(end)
            for index in range(sequence.pages_sent, needed):
                updates.append((sequence.slot, index, sequence.pages[index]))
            sequence.pages_sent = needed

    def _preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back to the head of those that wait; its tokens are kept."""
        self._stop(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _stop(self, sequence: Sequence) -> None:
        """Take slot and pages from a running sequence."""
        self.running.remove(sequence)
        if sequence.prefilled < sequence.target:
            self._prefilling.remove(sequence)
        self.allocator.release(sequence.pages)
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.pages = 0, []
        sequence.pages_sent = sequence.prefilled = sequence.target = 0
        sequence.source, sequence.branch, sequence.saved = None, 0, 0


def choose_bucket(buckets: Items[tuple[int, int]], missing: Items[int]) -> tuple[int, int]:
    """The bucket (requests, tokens) that gets most of the missing tokens done for its cost.

    A step costs STEP_COST and its padded tokens; ties go to the first bucket.
    """

    def worth(bucket: tuple[int, int]) -> float:
        requests, tokens = bucket
        useful = sum(min(count, tokens) for count in missing[:requests])
        return useful / (STEP_COST + requests * tokens)

    return max(buckets, key=worth)
