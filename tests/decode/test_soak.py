"""Mixed traffic for many steps: nothing is compiled or grows, no page, slot or snapshot is lost."""

import random
from dataclasses import replace

import jax
import psutil
import pytest
from made import drive, made_config, made_weights, run_of

from k3jax.cache import CacheSizes, abstract_cache, fixed_bytes, page_bytes
from k3jax.engine import Engine
from k3jax.parallel import make_mesh
from k3jax.request import Request, SamplingParams
from k3jax.snapshots import snapshot_bytes

WISHES = (
    {"temperature": 0.0},
    {"seed": 3, "top_p": 0.9, "logprobs": 5},
    {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 0.7, "min_p": 0.1, "prompt_logprobs": 2, "logit_bias": {7: 2.0}},
)
GROWTH = 24 << 20  # bytes that a process may grow by for other reasons


@pytest.fixture(scope="module")
def engine(golden):
    """Few pages and snapshots, so that requests are preempted; kernels where they compile."""
    config = made_config(golden, ("kda", "kda", "mla"), block=2)
    run = run_of("auto", builds=((1, 1), (1, 6)), max_context=96, prefill_buckets=((2, 16),))
    sizes = CacheSizes(run.slots, 0, run.page_size, run.max_pages, run.pending)
    page = page_bytes(config, sizes, run.dtype)
    one = abstract_cache(config, replace(sizes, pages=1), run.dtype, make_mesh(1))
    snapshot = snapshot_bytes(one, None, 1)
    memory = fixed_bytes(config, sizes, run.dtype, 1) + 11 * page + 4 * snapshot
    run = replace(run, cache_memory=memory, prefix_cache=4 * snapshot + 8 * page)
    executor = drive(config, made_weights(config), run).executor
    assert (executor.sizes.pages, executor.sizes.prefix.snapshots) == (11, 4)
    engine = Engine(executor, config, run)
    engine.prefixes.worth = 8
    return engine


class Traffic:
    """Requests of all sorts that come, end, are aborted, and go on from earlier ones."""

    def __init__(self, engine, seed=0):
        self.engine, self.random = engine, random.Random(seed)
        self.open, self.count, self.ended = set(), 0, 0
        self.earlier = [[]]

    def step(self):
        chance = self.random.random
        if len(self.open) < 9 and chance() < 0.3:
            self.count += 1
            prompt = [self.random.randrange(500) for _ in range(self.random.randint(1, 60))]
            prompt = [*self.random.choice(self.earlier), *prompt][:60]
            self.earlier = [[], prompt, *self.earlier[1:9]]
            wish = self.random.choice(WISHES)
            params = SamplingParams(max_tokens=self.random.randint(1, 36), **wish)
            name = str(self.count)
            self.engine.add(Request(request_id=name, prompt_ids=prompt, params=params))
            self.open.add(name)
        if self.open and chance() < 0.02:
            self.engine.abort(self.random.choice(sorted(self.open)))
        for delta in self.engine.step():
            if delta.finish_reason:
                assert delta.finish_reason != "error"
                self.open.discard(delta.request_id)
                self.ended += 1

    def drain(self):
        while self.engine.has_work():
            for delta in self.engine.step():
                self.open.discard(delta.request_id)
        assert not self.open


def held(engine):
    """Bytes of live device arrays, and of this process.

    Health words wait for the fail-stop to read them until they have landed: all are read first.
    """
    jax.block_until_ready(jax.live_arrays())
    engine.executor.failstop._poll()
    arrays = sum(array.nbytes for array in jax.live_arrays())
    return arrays, psutil.Process().memory_info().rss


@pytest.mark.parametrize("steps", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_soak(engine, steps):
    compiled = []

    def count(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    traffic = Traffic(engine)
    for _ in range(steps // 3):
        traffic.step()
    traffic.drain()
    jax.monitoring.register_event_duration_secs_listener(count)
    before = held(engine)
    for _ in range(steps - steps // 3):
        traffic.step()
    traffic.drain()
    after = held(engine)
    assert compiled == []
    assert traffic.ended > steps / 20
    assert after[0] == before[0]
    assert after[1] - before[1] < GROWTH
    stats = engine.stats()
    assert stats.preemptions > 0
    assert min(stats.prefix_hits, stats.prefix_entries, stats.prefix_evictions) > 0
    kept, allocator = engine.prefixes, engine.allocator
    assert len(kept) + len(kept._free) == kept.budget.snapshots
    assert allocator.free + allocator.idle == allocator.capacity
    assert stats.prefix_bytes <= kept.budget.total_bytes
    assert (stats.slots_in_use, stats.pages_in_use, stats.waiting) == (0, 0, 0)
    assert len(engine.scheduler._free_slots) == stats.slots
    print(f"\n{steps} steps: {stats.finished}, {stats.preemptions} preemptions, {stats.steps}")
