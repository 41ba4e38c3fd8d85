"""The engine: decide a step, run it, apply the one before; token ids in, token ids out.

Run-ahead is 1: a step is dispatched before the tokens of the one before it are read, so the device
never waits for the host. What a finished or aborted request still had in flight is discarded; its
slot and pages may be given away at once, since steps run in the order of their dispatch.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import numpy as np

from k3jax.cache import CacheSizes, SlotInit
from k3jax.config import K3Config
from k3jax.decode.batch import Batch, Step, StepOutput, empty_batch
from k3jax.decode.config import DecodeConfig
from k3jax.decode.failstop import check_health
from k3jax.pages import PageAllocator
from k3jax.request import Delta, FinishReason, Request, SamplingParams, Stats, TokenLogprob
from k3jax.sampling import STOP_IDS, sampling_row
from k3jax.scheduler import Decode, Prefill, Scheduler, Sequence

ALWAYS = ("tokens", "count", "nonfinite", "health")
LOGPROBS = ("logprobs", "top_ids", "top_logprobs")
PROMPT_LOGPROBS = ("prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs")


class Runs(Protocol):
    """What the engine needs of an executor; `run` returns before the step has run."""

    sizes: CacheSizes

    def admit(self, slot: int, init: SlotInit) -> None: ...

    def run(self, step: Step, batch: Batch) -> StepOutput: ...


@dataclass(frozen=True, slots=True)
class Flight:
    """A dispatched step whose results are on their way to the host."""

    decision: Prefill | Decode
    sequences: list[Sequence]
    outputs: dict[str, jax.Array]


class Engine:
    """Requests in, deltas out, one step at a time; one thread may use it."""

    def __init__(
        self,
        executor: Runs,
        config: K3Config,
        decode_config: DecodeConfig,
        *,
        end_ids: Items[int] | None = None,
    ) -> None:
        """`end_ids` are the tokens that stop a request unless it ignores them; None: the EOS."""
        self.executor = executor
        self.config = config
        self.max_context = decode_config.max_context
        self.end_ids = tuple((config.eos_token_id,) if end_ids is None else end_ids)
        self.allocator = PageAllocator(executor.sizes.pages, executor.sizes.page_size)
        self.scheduler = Scheduler(
            self.allocator,
            requests=executor.sizes.slots - 1,
            table_pages=executor.sizes.max_pages,
            builds=decode_config.builds,
            buckets=decode_config.prefill_buckets,
        )
        self._sequences: dict[str, Sequence] = {}
        self._scores: dict[str, list[TokenLogprob | None]] = {}  # of prompts in prefill
        self._aborted: list[Delta] = []
        self._flight: Flight | None = None
        self._mailboxes: dict[str, deque[Delta]] = {}
        self._counters: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._steps: Counter[str] = Counter()

    def add(self, request: Request) -> None:
        """Queue a request; ValueError if it cannot be served, and nothing has changed."""
        params, prompt = request.params, request.prompt_ids
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use")
        params.check_vocabulary(self.config.vocab_size)
        max_tokens = self._max_tokens(prompt, params)
        stops = set(params.stop_token_ids) | set(() if params.ignore_eos else self.end_ids)
        if len(stops) > STOP_IDS:
            raise ValueError(f"at most {STOP_IDS} stop ids fit a request, got {len(stops)}")
        sequence = Sequence(
            request.request_id,
            list(prompt),
            len(prompt),
            max_tokens,
            params,
            stop_ids=tuple(sorted(stops)),
            seed=secrets.randbits(63) if params.seed is None else params.seed,
        )
        self.scheduler.add(sequence)
        self._sequences[request.request_id] = sequence
        if params.prompt_logprobs is not None:
            self._scores[request.request_id] = [None]

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; the next step gives its last delta. Unknown ids pass."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._aborted.append(self._finish(sequence, "abort"))

    def step(self) -> list[Delta]:
        """Dispatch the next step and return what the one before it, and aborts, brought.

        RuntimeError if a fatal health bit is set.
        """
        decision = self.scheduler.decide()
        landing, self._flight = self._flight, self._run(decision) if decision else None
        deltas = self._apply(landing) if landing else []
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

    def _max_tokens(self, prompt: list[int], params: SamplingParams) -> int:
        """The tokens that a request may generate; ValueError if the prompt leaves too few."""
        vocabulary = self.config.vocab_size
        wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} of the prompt is not in [0, {vocabulary})")
        if not 0 < len(prompt) < self.max_context:
            raise ValueError(
                f"a prompt must have 1 to {self.max_context - 1} tokens (max_context - 1), "
                f"got {len(prompt)}"
            )
        room = self.max_context - len(prompt)
        if params.max_tokens is None:
            return room
        if params.max_tokens > room:
            raise ValueError(
                f"max_tokens {params.max_tokens} and a prompt of {len(prompt)} tokens exceed "
                f"max_context {self.max_context}: at most {room} can be generated"
            )
        return params.max_tokens

    def _run(self, decision: Prefill | Decode) -> Flight:
        """Dispatch a decided step and start the copies of what will be read of it."""
        kind: Literal["prefill", "decode"]
        kind = "prefill" if isinstance(decision, Prefill) else "decode"
        step = Step(kind, decision.requests, decision.rows)
        batch = empty_batch(step, self.executor.sizes, self.config.vocab_size)
        if isinstance(decision, Prefill):
            sequences = self._fill_prefill(batch, decision)
        else:
            sequences = decision.sequences
        batch.slots[: len(sequences)] = [sequence.slot for sequence in sequences]
        if decision.page_updates:
            batch.page_updates[: len(decision.page_updates)] = decision.page_updates
        output = self.executor.run(step, batch)
        self._steps[f"{'specialized' if step.specialized else 'stock'}/{kind}"] += 1
        names = list(ALWAYS)
        if any(sequence.params.logprobs is not None for sequence in sequences):
            names += LOGPROBS
        if kind == "prefill" and any(s.request_id in self._scores for s in sequences):
            names += PROMPT_LOGPROBS
        outputs = {name: getattr(output, name) for name in names}
        for array in outputs.values():
            array.copy_to_host_async()
        return Flight(decision, sequences, outputs)

    def _fill_prefill(self, batch: Batch, decision: Prefill) -> list[Sequence]:
        """Write the chunks into the batch; a chunk from 0 first takes its slot."""
        for index, chunk in enumerate(decision.chunks):
            sequence, end = chunk.sequence, chunk.start + chunk.count
            if chunk.start == 0:
                length = sequence.prompt_length
                row = sampling_row(sequence.params, sequence.stop_ids, length, sequence.seed)
                self.executor.admit(sequence.slot, SlotInit(np.int32(length), row))
            batch.tokens[index, : chunk.count] = sequence.tokens[chunk.start : end]
            batch.rows[index] = chunk.count
            batch.final[index] = chunk.final
            if end < len(sequence.tokens):
                batch.following[index] = sequence.tokens[end]
            self._counters["prompt"] += chunk.count
        return [chunk.sequence for chunk in decision.chunks]

    def _apply(self, flight: Flight) -> list[Delta]:
        """Read a step's results, the one blocking read, and move its requests on."""
        values = {name: np.asarray(array) for name, array in flight.outputs.items()}
        check_health(int(values["health"]))
        decision = flight.decision
        if isinstance(decision, Prefill):
            self._score(decision, values)
        tokens, counts = values["tokens"].tolist(), values["count"].tolist()
        bad = values["nonfinite"].tolist()
        deltas = []
        for index, sequence in enumerate(flight.sequences):
            if isinstance(decision, Decode) or decision.chunks[index].final:
                sequence.rows_in_flight -= decision.rows if isinstance(decision, Decode) else 1
                sequence.steps_in_flight -= 1
            if sequence.done:
                continue
            if bad[index]:
                message = "the model gave a value that is not finite for this request"
                deltas.append(self._finish(sequence, "error", error=message))
            elif counts[index]:
                deltas.append(
                    self._advance(sequence, tokens[index][: counts[index]], values, index)
                )
        return deltas

    def _advance(
        self, sequence: Sequence, tokens: list[int], values: dict[str, Any], index: int
    ) -> Delta:
        """Append a step's tokens up to a stop token or the limit."""
        tokens = tokens[: sequence.max_tokens - sequence.generated]
        stop = next((token for token in tokens if token in sequence.stop_ids), None)
        if stop is not None:
            tokens = tokens[: tokens.index(stop)]
        sequence.tokens += tokens
        self._counters["generated"] += len(tokens) + (stop is not None)
        fields: dict[str, Any] = {"token_ids": tokens}
        if sequence.params.logprobs is not None:
            found = [values[name][index] for name in LOGPROBS]
            fields["logprobs"] = logprobs_of(tokens, found, sequence.params.logprobs)
        if sequence.request_id in self._scores:
            fields["prompt_logprobs"] = self._scores.pop(sequence.request_id)
        if stop is not None:
            return self._finish(sequence, "stop", stop_token=stop, **fields)
        if sequence.generated >= sequence.max_tokens:
            return self._finish(sequence, "length", **fields)
        return delta_of(sequence, **fields)

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
            last = min(chunk.start + chunk.count, sequence.prompt_length - 1)
            rows = slice(first - 1 - chunk.start, last - chunk.start)
            found = [values[name][index, rows] for name in PROMPT_LOGPROBS]
            wanted = sequence.params.prompt_logprobs or 0
            scores += logprobs_of(sequence.tokens[first : last + 1], found, wanted)


def logprobs_of(tokens: list[int], found: list[np.ndarray], wanted: int) -> list[Any]:
    """One TokenLogprob a token of (logprobs [T], top ids [T, 20], top logprobs [T, 20])."""
    own, ids, values = (array.tolist() for array in found)
    return [
        TokenLogprob(token, own[row], list(zip(ids[row], values[row], strict=True))[:wanted])
        for row, token in enumerate(tokens)
    ]


def delta_of(sequence: Sequence, **fields: Any) -> Delta:
    """A delta with the request's counts filled in."""
    stopped = fields.get("stop_token") is not None
    return Delta(
        request_id=sequence.request_id,
        prompt_tokens=sequence.prompt_length,
        completion_tokens=sequence.generated + stopped,
        **fields,
    )
