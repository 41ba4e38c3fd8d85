"""Conversations with an engine whose prefixes are kept, or are not."""

import random
from dataclasses import replace

from k3jax.engine import Engine
from k3jax.request import Request, SamplingParams

WISHES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 11, "top_p": 0.9},
    "penalized": {"temperature": 0.0, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
}


class FewPages:
    """An executor as if its cache had fewer pages."""

    def __init__(self, executor, pages):
        self.executor, self.sizes = executor, replace(executor.sizes, pages=pages)

    def __getattr__(self, name):
        return getattr(self.executor, name)


def engine_of(executor, pages=None, *, caching=True):
    """An engine whose prefix cache is empty, or stays so."""
    few = FewPages(executor, executor.sizes.pages if pages is None else pages)
    engine = Engine(few, executor.config, executor.decode_config)
    engine.prefixes.worth = 10
    if not caching:
        engine.prefixes.save = lambda *args, **options: None
    return engine


class Conversations:
    """Some that go on for a few turns each, all at once; each turn ends before its next begins."""

    def __init__(self, engine, seed, count=5):
        self.engine, self.random = engine, random.Random(seed)
        system = self.tokens(14)
        self.prompts = [[*system, *self.tokens(4 + 3 * n)] for n in range(count)]
        self.params = [
            SamplingParams(max_tokens=5 + 2 * n, ignore_eos=True, **wish)
            for n, wish in zip(range(count), 2 * list(WISHES.values()), strict=False)
        ]
        self.said = [[] for _ in self.prompts]
        self.cached = []

    def tokens(self, count):
        return [self.random.randrange(500) for _ in range(count)]

    def run(self, turns=3):
        """What each said in all its turns."""
        engine = self.engine
        left = dict.fromkeys(range(len(self.prompts)), turns)
        text, joins = {}, [2 * n for n in left]
        for step in range(2000):
            for n in left:
                if left[n] and n not in text and step >= joins[n]:
                    prompt = self.prompts[n]
                    request = Request(request_id=str(n), prompt_ids=prompt, params=self.params[n])
                    engine.add(request)
                    text[n] = []
            for delta in engine.step():
                n = int(delta.request_id)
                text[n] += delta.token_ids
                if delta.finish_reason:
                    assert delta.error is None
                    said = text.pop(n)
                    self.said[n].append(said)
                    self.cached.append(delta.cached_tokens)
                    self.prompts[n] = [*self.prompts[n], *said, 7 + n, 300 + left[n]]
                    left[n], joins[n] = left[n] - 1, step + 3
            if not engine.has_work() and not any(left.values()):
                return self.said
        raise AssertionError("not done")


def check_conversations(executor, wanted):
    """They say what they say without a cache, and all later turns go on from an earlier one."""
    talk = Conversations(engine_of(executor), 1)
    assert talk.run() == wanted
    assert sum(count > 0 for count in talk.cached) >= 10
    stats = talk.engine.stats()
    assert stats.prefix_hits == sum(talk.cached)
    assert (stats.slots_in_use, stats.pages_in_use) == (0, 0)
    assert executor.health == 0
    return stats
