"""Mixed traffic for an engine with few pages, and what must hold after many steps of it."""

import random
from dataclasses import replace

import jax
import psutil
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
GROWTH = 24 << 20  # bytes that a process, or a device, may grow by for other reasons
PAGES, SNAPSHOTS = 11, 4


def scarce(golden, tp=1, backend="auto", **fields):
    """An executor of few pages and snapshots, so that requests are preempted."""
    mixers = ("kda", "kda", "mla")
    config = made_config(golden, mixers, block=2, heads=4 * tp, inner=32 * tp)
    fields = {"max_context": 96, "prefill_buckets": ((2, 16),), **fields}
    run = run_of(backend, builds=((1, 1), (1, 6)), tp=tp, **fields)
    sizes = CacheSizes(run.slots, 0, run.page_size, run.max_pages, run.pending)
    page = page_bytes(config, sizes, run.dtype)
    one = abstract_cache(config, replace(sizes, pages=1), run.dtype, make_mesh(tp))
    snapshot = snapshot_bytes(one, None, tp)
    memory = fixed_bytes(config, sizes, run.dtype, tp) + PAGES * page + SNAPSHOTS * snapshot
    run = replace(run, cache_memory=memory, prefix_cache=SNAPSHOTS * snapshot + 8 * page)
    executor = drive(config, made_weights(config), run).executor
    assert (executor.sizes.pages, executor.sizes.prefix.snapshots) == (PAGES, SNAPSHOTS)
    return executor


def engine_on(runs, executor, **options):
    """An engine on what runs the steps of an executor, or on the executor itself."""
    engine = Engine(runs, executor.config, executor.decode_config, **options)
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
    """Bytes of live arrays, of this process, and of its devices where they say.

    Health words wait for the fail-stop to read them until they have landed: all are read first.
    """
    jax.block_until_ready(jax.live_arrays())
    engine.executor.failstop._poll()
    arrays = sum(array.nbytes for array in jax.live_arrays())
    stats = [device.memory_stats() or {} for device in engine.executor.mesh.local_devices]
    devices = sum(own.get("bytes_in_use", 0) for own in stats)
    return arrays, psutil.Process().memory_info().rss, devices


def soak(engine, steps):
    """Run steps of traffic; returns (what does not hold after them, the engine's counters)."""
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
    arrays, process, devices = (b - a for a, b in zip(before, held(engine), strict=True))
    stats, kept, allocator = engine.stats(), engine.prefixes, engine.allocator
    prefixes = (stats.prefix_hits, stats.prefix_entries, stats.prefix_evictions)
    snapshots, free = len(kept) + len(kept._free), len(engine.scheduler._free_slots)
    pages = allocator.free + allocator.idle
    in_use = (stats.slots_in_use, stats.pages_in_use, stats.waiting)
    holds = {
        f"{len(compiled)} programs were compiled": not compiled,
        f"{traffic.ended} requests ended in {steps} steps": traffic.ended > steps / 20,
        f"live arrays grew by {arrays} bytes": arrays == 0,
        f"the process grew by {process} bytes": process < GROWTH,
        f"what its devices hold grew by {devices} bytes": devices < GROWTH,
        f"{stats.preemptions} preemptions": stats.preemptions > 0,
        f"prefix hits, entries, evictions {prefixes}": min(prefixes) > 0,
        f"{snapshots} snapshots of {kept.budget.snapshots}": snapshots == kept.budget.snapshots,
        f"{pages} pages of {allocator.capacity}": pages == allocator.capacity,
        f"{stats.prefix_bytes} bytes of prefixes": stats.prefix_bytes <= kept.budget.total_bytes,
        f"slots, pages, requests in use {in_use}": in_use == (0, 0, 0),
        f"{free} slots free of {stats.slots}": free == stats.slots,
    }
    return [text for text, fine in holds.items() if not fine], stats
