"""An executor driven by hand, one step after the other."""

import jax
import numpy as np

from k3jax.cache import SlotInit
from k3jax.request import SamplingParams
from k3jax.sampling import sampling_row

PAGE = 16
CHUNK = 64
GREEDY = SamplingParams(temperature=0.0)
RUN = {
    "max_context": 256,
    "page_size": PAGE,
    "prefill_buckets": ((2, CHUNK),),
    "prefix_cache": 0,  # a driver never goes on from a prefix
}
K3_RUN = {**RUN, "max_requests": 4, "num_spec": 3, "builds": ((1, 4), (4, 4))}
LINEAR_RUN = {**RUN, "max_requests": 2, "builds": ((1, 2),)}


class Driver:
    """An executor and what the host knows of its slots; a slot owns a fixed run of pages."""

    def __init__(self, executor):
        self.executor = executor
        self.length = {}

    def updates(self, slot, first, end):
        """Page updates for the tokens from `first` up to `end`."""
        own = 1 + (slot - 1) * self.executor.sizes.max_pages
        return [(slot, index, own + index) for index in range(first // PAGE, -(-end // PAGE))]

    def run(self, step, batch, updates):
        if updates:
            batch.page_updates[: len(updates)] = updates
        output = jax.tree.map(np.asarray, self.executor.run(step, batch))
        assert output.health == 0
        return output

    def admit(self, slot, prompt, params=GREEDY):
        row = sampling_row(params, (), len(prompt), 0)
        self.executor.admit(slot, SlotInit(np.int32(len(prompt)), row))
        self.length[slot] = 0

    def chunk(self, parts, *, final, following=None, pad=0):
        """Prefill one chunk of each slot: {slot: ids}."""
        step = next(step for step in self.executor.steps if step.kind == "prefill")
        batch = self.executor.empty_batch(step)
        batch.tokens[:] = pad
        updates = []
        for index, (slot, ids) in enumerate(parts.items()):
            batch.slots[index], batch.rows[index] = slot, len(ids)
            batch.tokens[index, : len(ids)] = ids
            batch.final[index] = final
            batch.following[index] = -1 if following is None else following[slot]
            end = self.length[slot] + len(ids)
            updates += self.updates(slot, self.length[slot], end)
            self.length[slot] = end
        return self.run(step, batch, updates)

    def prefill(self, slot, prompt, *, chunks=(CHUNK,), params=GREEDY, pad=0):
        """Admit a prompt and prefill it in chunks, of the last size on; returns the outputs."""
        self.admit(slot, prompt, params)
        outputs, start = [], 0
        while start < len(prompt):
            end = start + chunks[min(len(outputs), len(chunks) - 1)]
            following = {slot: prompt[end] if end < len(prompt) else -1}
            final = end >= len(prompt)
            part = {slot: prompt[start:end]}
            outputs.append(self.chunk(part, final=final, following=following, pad=pad))
            start = end
        return outputs

    def decode(self, slots, rows=1, drafts=None):
        """One decode step; drafts {slot: ids}. Returns {slot: emitted tokens}, and the output."""
        step = next(s for s in self.executor.steps if (s.kind, s.rows) == ("decode", rows))
        batch = self.executor.empty_batch(step)
        updates = []
        for index, slot in enumerate(slots):
            batch.slots[index] = slot
            if drafts is not None:
                batch.drafts[index] = drafts[slot]
            updates += self.updates(slot, self.length[slot], self.length[slot] + rows)
        output = self.run(step, batch, updates)
        emitted = {}
        for index, slot in enumerate(slots):
            emitted[slot] = output.tokens[index, : output.count[index]].tolist()
            self.length[slot] += output.count[index]
        return emitted, output

    def greedy(self, slot, prompt, count, *, drafter=None, rows=1, chunks=(CHUNK,), pad=0):
        """`count` tokens after a prompt; drafter(tokens so far) -> rows - 1 drafts."""
        tokens = self.prefill(slot, prompt, chunks=chunks, pad=pad)[-1].tokens[0].tolist()
        while len(tokens) < count:
            drafts = None if drafter is None else {slot: drafter(tokens)}
            tokens += self.decode([slot], rows, drafts)[0][slot]
        return tokens[:count]
