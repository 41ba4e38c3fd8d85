"""A model of a few lines behind the executor's interface: its next token is a hash of the history.

It reads the history back through page tables and slots, as the real one does, so a page or a slot
with two owners shows as a wrong text; what the planner checks on the device raises here.
"""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from k3jax.cache import CacheSizes
from k3jax.config import K3Config

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


class FakeExecutor:
    """Slots and pages in numpy; steps run when dispatched."""

    def __init__(self, decode_config, pages):
        self.sizes = CacheSizes(
            decode_config.slots, pages, decode_config.page_size, decode_config.max_pages, 1
        )
        self.memory = np.full((pages, decode_config.page_size), -1)
        self.tables = np.zeros((decode_config.slots, decode_config.max_pages), int)
        self.length = np.full(decode_config.slots, 10**9)
        self.token = np.zeros(decode_config.slots, int)
        self.poisoned = set()  # tokens whose request meets a NaN
        self.health = 0
        self.steps = []

    def admit(self, slot, init):
        assert init.prompt_length > 0
        self.tables[slot] = 0
        self.length[slot] = 0

    def write(self, slot, token):
        position = self.length[slot]
        page = self.tables[slot, position // self.sizes.page_size]
        assert page > 0, "a row without a page"
        self.memory[page, position % self.sizes.page_size] = token
        self.length[slot] += 1

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
        tokens = np.zeros((step.requests, 1), np.int32)
        count = np.zeros(step.requests, np.int32)
        bad = np.zeros(step.requests, bool)
        for index, slot in enumerate(batch.slots):
            if not slot:
                continue
            prefill = step.kind == "prefill"
            rows = batch.tokens[index, : batch.rows[index]] if prefill else [self.token[slot]]
            for token in rows:
                self.write(slot, token)
            history = self.history(slot)
            bad[index] = bool(self.poisoned & set(history.tolist()))
            if not prefill or batch.final[index]:
                count[index] = 1
                self.token[slot] = tokens[index, 0] = next_token(history)
        return self.output(tokens, count, bad)

    def output(self, tokens, count, bad):
        wide = np.zeros((*tokens.shape, 20), np.int32)
        arrays = {
            "tokens": tokens,
            "count": count,
            "nonfinite": bad,
            "health": np.uint32(self.health),
            "logprobs": tokens * np.float32(-0.5),
            "top_ids": wide,
            "top_logprobs": wide.astype(np.float32),
        }
        return SimpleNamespace(**{name: jnp.asarray(array) for name, array in arrays.items()})
