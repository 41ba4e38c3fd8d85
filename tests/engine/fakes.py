"""A model of a few lines behind the executor's interface: its next token is a hash of the history.

It reads the history back through page tables and slots, as the real one does, so a page or a slot
with two owners shows as a wrong text; what the planner checks on the device raises here.
"""

from types import SimpleNamespace
from zlib import crc32

import jax.numpy as jnp
import numpy as np

from k3jax.cache import CacheSizes
from k3jax.config import K3Config
from k3jax.prefix import NOTHING_KEPT

VOCAB = 97
END = 96


def config():
    """What the engine reads of a K3Config."""
    fake = object.__new__(K3Config)
    object.__setattr__(fake, "vocab_size", VOCAB)
    object.__setattr__(fake, "eos_token_id", END)
    return fake


def next_token(history):
    """The fake model: a token of the whole history, now and then the end token."""
    value = 7
    for token in history:
        value = (value * 31 + int(token) + 1) % 1000003
    return value % VOCAB


def continuation(prompt, max_tokens, stops=(END,)):
    """(tokens, stop token or None) that a request should get."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        token = next_token(tokens)
        if token in stops:
            return tokens[len(prompt) :], token
        tokens.append(token)
    return tokens[len(prompt) :], None


def finish(engine, step):
    """Call `step` until the engine has no work."""
    for _ in range(3000):
        if not engine.has_work():
            return
        step()
    raise AssertionError("not done")


class FakeMatcher:
    """A grammar of so many tokens; its mask says what it was made for, see `FakeExecutor.heed`."""

    def __init__(self, tokens):
        self.said, self.most, self.error = [], int(tokens), None

    def advance(self, tokens):
        self.said += tokens
        if len(self.said) > self.most:
            self.error = "too many tokens"

    def fill(self, mask, drafts=()):
        mask[0, 0] = crc32(bytes(self.said))
        if len(mask) > 1:
            mask[0, 1] = crc32(bytes(drafts))


GUIDES = SimpleNamespace(matcher=FakeMatcher)


class FakeExecutor:
    """Slots and pages in numpy; steps run when dispatched."""

    def __init__(self, decode_config, pages, prefix=NOTHING_KEPT):
        self.sizes = CacheSizes(
            slots=decode_config.slots,
            pages=pages,
            page_size=decode_config.page_size,
            max_pages=decode_config.max_pages,
            pending=decode_config.pending,
            history=decode_config.history,
            prefix=prefix,
        )
        self.lookahead = decode_config.lookahead
        self.memory = np.full((pages, decode_config.page_size), -1)
        self.tables = np.zeros((decode_config.slots, decode_config.max_pages), int)
        self.length = np.full(decode_config.slots, 10**9)
        self.token = np.zeros(decode_config.slots, int)
        self.low = np.zeros(decode_config.slots, int)  # before the pending rows
        self.prompts = np.zeros(decode_config.slots, int)  # their lengths
        self.drafts = np.zeros((decode_config.slots, decode_config.num_spec), np.int32)
        self.snapshots = [None] * self.sizes.prefix.snapshots
        self.poisoned = set()  # tokens whose request meets a NaN
        self.health = self.masks = 0
        self.steps = []

    def plan(self, batch):
        return None

    def reason(self, batch):
        return "prefill" if batch.prefilling else "backend"

    def admit(self, slot, init):
        assert init.prompt_length > 0
        self.tables[slot], self.prompts[slot] = 0, init.prompt_length
        self.length[slot] = self.low[slot] = 0

    def save(self, slot, position, number):
        """The state is the text so far, as it was when it was read, not as the pages have it."""
        behind = int(self.lookahead > 0)  # a draft model is a token ahead
        low = self.low[slot] + (behind if self.low[slot] < self.length[slot] else 0)
        assert low <= position <= self.length[slot], "that state is gone"
        self.snapshots[number] = self.history(slot)[:position]

    def resume(self, order):
        """The pages must hold what the snapshot knows; one that is filled in part is copied."""
        slot, position = order.slot, order.position
        assert self.length[slot] == 0
        self.memory[order.target] = self.memory[order.source]
        self.tables[slot], self.length[slot] = order.pages, position
        self.low[slot] = position
        known = self.snapshots[order.entry]
        assert known.tolist() == order.tokens[:position].tolist() == self.history(slot).tolist()

    def write(self, slot, token):
        position = self.length[slot]
        page = self.tables[slot, position // self.sizes.page_size]
        assert page > 0, "a row without a page"
        self.memory[page, position % self.sizes.page_size] = token
        self.length[slot] += 1

    def accepted(self, slot, rows):
        """How many rows of a decode step count; each of them, and a draft model's, has a page."""
        end = self.length[slot] + rows + self.lookahead
        assert self.tables[slot, : -(-end // self.sizes.page_size)].all(), "a row without a page"
        return 1 + next_token(self.history(slot)) % rows

    def heed(self, slot, mask):
        """A grammar's mask must fit what the slot has said, and the drafts that it verifies."""
        if mask[0, 0] != 0xFFFFFFFF:
            self.masks += 1
            assert mask[0, 0] == crc32(bytes(self.history(slot)[self.prompts[slot] :].tolist()))
            assert len(mask) == 1 or mask[0, 1] == crc32(bytes(self.drafts[slot].tolist()))

    def history(self, slot):
        positions = np.arange(self.length[slot])
        pages = self.tables[slot, positions // self.sizes.page_size]
        return self.memory[pages, positions % self.sizes.page_size]

    def run(self, step, batch):
        self.steps.append((step.kind, int((batch.slots > 0).sum())))
        for slot, index, page in batch.page_updates:
            if slot:
                assert 0 < page < self.sizes.pages
                self.tables[slot, index] = page
        live = [slot for slot in batch.slots if slot]
        assert len(set(live)) == len(live)
        assert step.kind == "prefill" or batch.drafts is None
        tokens = np.zeros((step.requests, step.sampled_rows), np.int32)
        count = np.zeros(step.requests, np.int32)
        bad = np.zeros(step.requests, bool)
        for index, slot in enumerate(batch.slots):
            if not slot:
                continue
            before = self.length[slot]
            if step.kind == "prefill":
                for token in batch.tokens[index, : batch.rows[index]]:
                    self.write(slot, token)
                count[index] = batch.final[index]
            else:
                count[index] = self.accepted(slot, step.rows)
                self.write(slot, self.token[slot])
            if batch.bitmask is not None:
                self.heed(slot, batch.bitmask[index])
            for row in range(count[index]):
                if row:
                    self.write(slot, self.token[slot])
                self.token[slot] = tokens[index, row] = next_token(self.history(slot))
            self.low[slot] = self.length[slot] if step.kind == "prefill" else before
            self.drafts[slot] = (self.length[slot] + np.arange(self.drafts.shape[1])) % VOCAB
            bad[index] = bool(self.poisoned & set(self.history(slot).tolist()))
        drafts = jnp.asarray(self.drafts[batch.slots]) if self.sizes.history else None
        scores = {} if batch.tokens is None else self.scores(batch)
        arrays = {**self.output(tokens, count, bad), **scores}
        found = {name: jnp.asarray(array) for name, array in arrays.items()}
        return SimpleNamespace(**found, drafts=drafts)

    def scores(self, batch):
        """Of the tokens after each row of the chunks."""
        after = np.roll(batch.tokens, -1, axis=1)
        after[np.arange(len(after)), batch.rows - 1] = batch.following
        wide = np.zeros((*after.shape, 20), np.int32)
        return {
            "prompt_logprobs": after * np.float32(-0.5),
            "prompt_top_ids": wide,
            "prompt_top_logprobs": wide.astype(np.float32),
        }

    def output(self, tokens, count, bad):
        wide = np.zeros((*tokens.shape, 20), np.int32)
        return {
            "tokens": tokens,
            "count": count,
            "nonfinite": bad,
            "votes": np.array([[self.health, 1, len(self.steps)]], np.uint32),
            "logprobs": tokens * np.float32(-0.5),
            "top_ids": wide,
            "top_logprobs": wide.astype(np.float32),
        }
