"""The engine: decide a step, run it, apply the one before; token ids in, token ids out.

Run-ahead is 1: a step is dispatched before the tokens of the one before it are read, so the device
never waits for the host; while a request with a grammar runs, a step's tokens are read before the
next is dispatched, whose mask they decide. What a finished or aborted request still had in flight
is discarded; its slot and pages are free at once, since steps run in the order of dispatch.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from k3jax.cache import CacheSizes, SlotInit
from k3jax.config import K3Config
from k3jax.decode.batch import Batch, Step, StepOutput, empty_batch
from k3jax.decode.config import DecodeConfig
from k3jax.decode.failstop import check_votes
from k3jax.decode.reasons import BatchRows, Reason
from k3jax.flight import (
    ALWAYS,
    LOGPROBS,
    PROMPT_LOGPROBS,
    Flight,
    delta_of,
    follow,
    logprobs_of,
    rows_of,
    samples,
    sequences_of,
)
from k3jax.keeper import Keeper
from k3jax.pages import PageAllocator
from k3jax.prefix import PrefixCache
from k3jax.request import Delta, FinishReason, Request, SamplingParams, Stats, TokenLogprob
from k3jax.sampling import STOP_IDS, sampling_row
from k3jax.scheduler import STEP_COST, Decode, Prefill, Scheduler, Sequence
from k3jax.snapshots import Resume, resume_from

if TYPE_CHECKING:
    from k3jax.guided import Guides, Matcher


class Runs(Protocol):
    """What the engine needs of an executor; `run` returns before the step has run."""

    sizes: CacheSizes

    def plan(self, batch: BatchRows) -> Step | None: ...

    def reason(self, batch: BatchRows) -> Reason | None: ...

    def admit(self, slot: int, init: SlotInit) -> None: ...

    def save(self, slot: int, position: int, number: int) -> None: ...

    def resume(self, order: Resume) -> None: ...

    def run(self, step: Step, batch: Batch) -> StepOutput: ...


def unwatched(step: int) -> AbstractContextManager[None]:
    """Around a read that may take any time."""
    return nullcontext()


class Engine:
    """Requests in, deltas out, one step at a time; one thread may use it."""

    def __init__(
        self,
        executor: Runs,
        config: K3Config,
        decode_config: DecodeConfig,
        *,
        end_ids: Items[int] | None = None,
        guides: Guides | None = None,
        landing: Callable[[int], AbstractContextManager[None]] = unwatched,
    ) -> None:
        """`end_ids` are the tokens that stop a request unless it ignores them; None: the EOS.

        `guides` reads the grammars of requests; None: they are refused.
        `landing(n)` is entered around the blocking read of step n's results.
        """
        self.executor = executor
        self.guides = guides
        self.config = config
        self.max_context = decode_config.max_context
        self.end_ids = tuple((config.eos_token_id,) if end_ids is None else end_ids)
        self.allocator = PageAllocator(executor.sizes.pages, executor.sizes.page_size)
        self.prefixes = PrefixCache(self.allocator, executor.sizes.prefix, worth=STEP_COST)
        self.scheduler = Scheduler(
            self.allocator,
            requests=executor.sizes.slots - 1,
            table_pages=executor.sizes.max_pages,
            builds=decode_config.builds,
            buckets=decode_config.prefill_buckets,
            lookahead=decode_config.lookahead,
            prefixes=self.prefixes,
        )
        self.keeper = Keeper(self.prefixes, executor.save, decode_config)
        self._sequences: dict[str, Sequence] = {}
        self._scores: dict[str, list[TokenLogprob | None]] = {}  # of prompts in prefill
        self._aborted: list[Delta] = []
        self._flight: Flight | None = None
        self._mailboxes: dict[str, deque[Delta]] = {}
        self._counters: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()
        self._landing = landing

    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """Queue a request; ValueError if it cannot be served, and nothing has changed.

        `matcher` is what `self.matcher` gave for it; None: its grammar is compiled now.
        """
        params, prompt = request.params, request.prompt_ids
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use")
        params.check_vocabulary(self.config.vocab_size)
        max_tokens = request.room(self.config.vocab_size, self.max_context)
        stops = set(params.stop_token_ids) | set(() if params.ignore_eos else self.end_ids)
        if len(stops) > STOP_IDS:
            raise ValueError(f"at most {STOP_IDS} stop ids fit a request, got {len(stops)}")
        if len(request.generated) >= max_tokens:
            raise ValueError(f"all of max_tokens {max_tokens} are generated already")
        sequence = Sequence(
            request.request_id,
            prompt + request.generated,
            len(prompt),
            max_tokens,
            params,
            stop_ids=tuple(sorted(stops)),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            matcher=matcher or self.matcher(request),
        )
        self.scheduler.add(sequence)
        self._sequences[request.request_id] = sequence
        if params.prompt_logprobs is not None and not request.generated:
            self._scores[request.request_id] = [None]

    def matcher(self, request: Request) -> Matcher | None:
        """What follows a request's grammar, if any; ValueError if it cannot be; for any thread."""
        if request.params.grammar is None:
            return None
        if self.guides is None:
            raise ValueError("grammars are not offered by this engine")
        matcher = self.guides.matcher(request.params.grammar)
        matcher.advance(request.generated)
        return matcher

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; the next step gives its last delta. Unknown ids pass."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._aborted.append(self._finish(sequence, "abort"))

    def step(self) -> list[Delta]:
        """Dispatch the next step and return what the one before it, and aborts, brought.

        RuntimeError if any rank's health word has a bit set.
        """
        landing = self._flight
        wait = any(sequence.matcher for sequence in self.scheduler.running)
        deltas = self._apply(landing) if landing and wait else []
        decision = self.scheduler.decide()
        self._start()
        self._flight = self._run(decision) if decision else None
        deltas += self._apply(landing) if landing and not wait else []
        aborted, self._aborted = self._aborted, []
        return aborted + deltas

    def has_work(self) -> bool:
        """Whether another step would bring, or clean up, anything."""
        return bool(self._sequences or self._flight or self._aborted)

    def stats(self) -> Stats:
        """Where the engine stands, and its counters."""
        return Stats(
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            slots_in_use=len(self.scheduler.running),
            slots=self.scheduler.slots,
            pages_in_use=self.allocator.in_use,
            pages=self.allocator.capacity,
            prompt_tokens=self._counters["prompt"],
            generated_tokens=self._counters["generated"],
            preemptions=self.scheduler.preemptions,
            finished=dict(self._finished),
            steps=dict(self._steps),
            prefix_queries=self.prefixes.queries,
            prefix_hits=self.prefixes.hits,
            prefix_entries=len(self.prefixes),
            prefix_bytes=self.prefixes.size,
            prefix_evictions=self.prefixes.evictions,
        )

    def stream(self, prompt_ids: list[int], params: SamplingParams) -> Iterator[Delta]:
        """Generate: the deltas of one new request; closing the generator aborts it.

        Several streams may be drawn from in turns. Deltas of requests that were added otherwise are
        dropped while a stream steps the engine.
        """
        request_id = secrets.token_hex(8)
        self.add(Request(request_id=request_id, prompt_ids=prompt_ids, params=params))
        mailbox = self._mailboxes[request_id] = deque()
        try:
            while True:
                while not mailbox:
                    for delta in self.step():
                        self._mailboxes.get(delta.request_id, deque()).append(delta)
                delta = mailbox.popleft()
                yield delta
                if delta.finish_reason:
                    return
        finally:
            self.abort(request_id)
            del self._mailboxes[request_id]

    def _start(self) -> None:
        """Prepare the slots that the scheduler gave away; who lost one again is passed over."""
        started, self.scheduler.started = self.scheduler.started, []
        for sequence in filter(lambda sequence: sequence.slot, started):
            length = sequence.prompt_length
            row = sampling_row(sequence.params, sequence.stop_ids, length, sequence.seed)
            self.executor.admit(sequence.slot, SlotInit(np.int32(length), row))
            if sequence.source is not None:
                place = (sequence.slot, sequence.pages, self.executor.sizes)
                self.executor.resume(resume_from(sequence.source, *place))

    def _run(self, decision: Prefill | Decode) -> Flight:
        """Dispatch a decided step and start the copies of what will be read of it."""
        rows = rows_of(decision)
        step, reason = self.executor.plan(rows), self.executor.reason(rows)
        if step is None:
            kind: Literal["prefill", "decode"] = "prefill" if rows.prefilling else "decode"
            step = Step(kind, decision.requests, decision.rows)
        sequences = sequences_of(decision)
        guided = [
            (index, sequence.matcher, sequence.drafts)
            for index, sequence in enumerate(sequences)
            if sequence.matcher is not None and samples(decision, index)
        ]
        masked = bool(guided)
        batch = empty_batch(step, self.executor.sizes, self.config.vocab_size, masked=masked)
        if isinstance(decision, Prefill):
            self._fill_prefill(batch, decision)
        for index, matcher, drafts in guided:
            matcher.fill(batch.bitmask[index], drafts)
        batch.slots[: len(sequences)] = [sequence.slot for sequence in sequences]
        if decision.page_updates:
            batch.page_updates[: len(decision.page_updates)] = decision.page_updates
        output = self.executor.run(step, batch)
        self._steps[f"stock/{reason}" if reason else "specialized/"] += 1
        if isinstance(decision, Prefill):
            self.keeper.chunks(decision.chunks, self._steps.total())
        names = list(ALWAYS)
        if any(sequence.params.logprobs is not None for sequence in sequences):
            names += LOGPROBS
        if rows.prefilling and any(s.request_id in self._scores for s in sequences):
            names += PROMPT_LOGPROBS
        if output.votes is not None:
            names.append("votes")
        if masked and output.drafts is not None:
            names.append("drafts")
        outputs = {name: getattr(output, name) for name in names}
        for array in outputs.values():
            array.copy_to_host_async()
        sources = [sequence.source for sequence in sequences]
        return Flight(self._steps.total(), decision, sequences, sources, outputs)

    def _fill_prefill(self, batch: Batch, decision: Prefill) -> None:
        """Write the chunks into the batch."""
        for index, chunk in enumerate(decision.chunks):
            sequence, end = chunk.sequence, chunk.end
            batch.tokens[index, : chunk.count] = sequence.tokens[chunk.start : end]
            batch.rows[index] = chunk.count
            batch.final[index] = chunk.final
            if end < len(sequence.tokens):
                batch.following[index] = sequence.tokens[end]
            self._counters["prompt"] += chunk.count

    def _apply(self, flight: Flight) -> list[Delta]:
        """Read a step's results, the one blocking read, and move its requests on."""
        with self._landing(flight.number):
            values = {name: np.asarray(array) for name, array in flight.outputs.items()}
        if "votes" in values:
            check_votes(values["votes"])
        decision = flight.decision
        if isinstance(decision, Prefill):
            self._score(decision, values)
        tokens, counts = values["tokens"].tolist(), values["count"].tolist()
        bad = values["nonfinite"].tolist()
        deltas = []
        for index, sequence in enumerate(flight.sequences):
            if samples(decision, index):
                sequence.rows_in_flight -= decision.rows if isinstance(decision, Decode) else 1
                sequence.steps_in_flight -= 1
            if bad[index]:
                self.prefixes.forget(sequence.request_id, flight.sources[index])
            if sequence.done:
                continue
            if "drafts" in values:
                sequence.drafts = values["drafts"][index].tolist()
            error = follow(sequence, tokens[index][: counts[index]])
            if bad[index]:
                error = "the model gave a value that is not finite for this request"
            if error:
                deltas.append(self._finish(sequence, "error", error=error))
            elif counts[index]:
                pending = counts[index] if isinstance(decision, Decode) else 0
                emitted = tokens[index][: counts[index]]
                deltas.append(self._advance(sequence, emitted, values, index, pending=pending))
        self.prefixes.prove(flight.number)
        return deltas

    def _advance(
        self,
        sequence: Sequence,
        tokens: list[int],
        values: dict[str, Any],
        index: int,
        *,
        pending: int,
    ) -> Delta:
        """Append a step's tokens up to a stop token or the limit.

        `pending` of the sequence's rows wait for the next step to replay them.
        """
        emitted = len(sequence.tokens) + len(tokens)
        tokens = tokens[: sequence.max_tokens - sequence.generated]
        stop = next((token for token in tokens if token in sequence.stop_ids), None)
        if stop is not None:
            tokens = tokens[: tokens.index(stop)]
        sequence.tokens += tokens
        self._counters["generated"] += len(tokens) + (stop is not None)
        fields: dict[str, Any] = {"token_ids": tokens}
        if sequence.params.logprobs is not None:
            found = [values[name][index] for name in LOGPROBS]
            said = tokens if stop is None else [*tokens, stop]
            scores = logprobs_of(said, found, sequence.params.logprobs)
            fields["logprobs"] = scores[: len(tokens)]
            fields["stop_logprob"] = None if stop is None else scores[-1]
        if sequence.request_id in self._scores:
            fields["prompt_logprobs"] = self._scores.pop(sequence.request_id)
        if stop is None and sequence.generated < sequence.max_tokens:
            return delta_of(sequence, **fields)
        self.keeper.turn(sequence, stop, (emitted, pending), self._steps.total())
        if stop is not None:
            return self._finish(sequence, "stop", stop_token=stop, **fields)
        return self._finish(sequence, "length", **fields)

    def _finish(self, sequence: Sequence, reason: FinishReason, **fields: Any) -> Delta:
        """Free what a request holds and make its last delta."""
        self.scheduler.release(sequence)
        del self._sequences[sequence.request_id]
        self._scores.pop(sequence.request_id, None)
        self._finished[reason] += 1
        return delta_of(sequence, finish_reason=reason, **fields)

    def _score(self, decision: Prefill, values: dict[str, Any]) -> None:
        """Collect the prompt's log probabilities; rows met before a preemption are skipped."""
        for index, chunk in enumerate(decision.chunks):
            sequence = chunk.sequence
            scores = self._scores.get(sequence.request_id)
            if scores is None or sequence.done:
                continue
            first = len(scores)  # row r of the chunk scores the token at start + r + 1
            last = min(chunk.end, sequence.prompt_length - 1)
            rows = slice(first - 1 - chunk.start, last - chunk.start)
            found = [values[name][index, rows] for name in PROMPT_LOGPROBS]
            wanted = sequence.params.prompt_logprobs or 0
            scores += logprobs_of(sequence.tokens[first : last + 1], found, wanted)
