"""What the front counts and what the engine reports, for Prometheus."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from k3jax.request import Delta, Stats
from k3jax.serve.link import ReadyInfo

TTFT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
CAUSES = ("kernels", "process")  # that an engine failed
TPOT_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics(Collector):
    """One server's metrics, in a registry of their own."""

    def __init__(self, ranks: int = 1) -> None:
        self.registry = CollectorRegistry()
        self.ranks = ranks
        self.stats: Stats | None = None
        self.info: ReadyInfo | None = None
        self.failed = False
        self.engine: int | None = None  # process id
        self._tokens = Counter(
            "k3jax_tokens", "Tokens of finished and running requests.", ["kind"],
            registry=self.registry,
        )  # fmt: skip
        self._accepted = Counter(
            "k3jax_accepted", "Drafted tokens that were accepted, by place in the draft.",
            ["position"], registry=self.registry,
        )  # fmt: skip
        self._request_steps = Counter(
            "k3jax_request_steps", "Decode steps, each counted once for every request in it.",
            registry=self.registry,
        )  # fmt: skip
        self._ttft = Histogram(
            "k3jax_ttft_seconds", "From a request's arrival to its first token.",
            buckets=TTFT_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._tpot = Histogram(
            "k3jax_tpot_seconds", "Mean time of a request's tokens after the first.",
            buckets=TPOT_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._restarts = Counter(
            "k3jax_engine_restarts", "Engines that failed and were followed by another.",
            ["cause"], registry=self.registry,
        )  # fmt: skip
        for cause in CAUSES:
            self._restarts.labels(cause)
        self._fallback = False
        self.registry.register(self)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def count(self, delta: Delta, first: bool) -> None:
        """Count a delta's tokens; the first of a request counts its prompt."""
        if first:
            self._tokens.labels("prompt").inc(delta.prompt_tokens)
            self._tokens.labels("cached").inc(delta.cached_tokens)
        generated = len(delta.token_ids) + (delta.stop_token is not None)
        self._tokens.labels("generated").inc(generated)
        self._request_steps.inc(not first and generated > 0)
        for position in range(1, generated):
            self._accepted.labels(str(position)).inc()

    def restart(self, kernels: bool) -> None:
        """The engine failed, maybe by its kernels' fault, and another one starts, then without."""
        self._restarts.labels(CAUSES[not kernels]).inc()
        self._fallback = self._fallback or kernels
        self.info, self.stats, self.failed = None, None, False

    def observe_first(self, seconds: float) -> None:
        """A request's first token came."""
        self._ttft.observe(seconds)

    def observe_last(self, seconds: float, tokens: int) -> None:
        """A request ended `seconds` after its first token, with so many tokens."""
        if tokens > 1:
            self._tpot.observe(seconds / (tokens - 1))

    def collect(self) -> Iterable[Metric]:
        """What the engine last reported."""
        health = GaugeMetricFamily("k3jax_health", "0 while the engine runs.", labels=["rank"])
        for rank in range(self.ranks):  # they fail together: one that goes alone takes the others
            health.add_metric([str(rank)], float(self.failed))
        yield health
        yield GaugeMetricFamily(
            "k3jax_fallback",
            "1 since an engine failed by its kernels and its followers run without.",
            value=float(self._fallback),
        )
        yield from self._processes()
        if self.info is not None:
            compilations = CounterMetricFamily("k3jax_compilations", "Steps that were compiled.")
            compilations.add_metric([], self.info.compilations)
            yield compilations
        if self.stats is None:
            return
        steps = CounterMetricFamily(
            "k3jax_steps", "Steps by path and by the reason for it.", labels=["path", "reason"]
        )
        for key, count in self.stats.steps.items():
            path, _, reason = key.partition("/")
            steps.add_metric([path, reason], count)
        yield steps
        for name, text, value in (
            ("slots_in_use", "Requests that hold a slot.", self.stats.slots_in_use),
            ("slots", "Requests that can hold a slot.", self.stats.slots),
            ("pages_in_use", "Pages of the latent cache in use.", self.stats.pages_in_use),
            ("pages", "Pages of the latent cache.", self.stats.pages),
            ("waiting", "Requests that wait for a slot.", self.stats.waiting),
            ("prefix_cache_entries", "Prefixes that are kept.", self.stats.prefix_entries),
            ("prefix_cache_bytes", "What they take on each device.", self.stats.prefix_bytes),
        ):
            yield GaugeMetricFamily(f"k3jax_{name}", text, value=value)
        for name, text, value in (
            ("preemptions", "Requests that lost their slot.", self.stats.preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up.", self.stats.prefix_queries),
            ("prefix_cache_hits", "Of these, found.", self.stats.prefix_hits),
            ("prefix_cache_evictions", "Prefixes given up.", self.stats.prefix_evictions),
        ):
            counter = CounterMetricFamily(f"k3jax_{name}", text)
            counter.add_metric([], value)
            yield counter

    def _processes(self) -> Iterable[Metric]:
        """What front and engine hold of the host; a leak shows here."""
        memory = GaugeMetricFamily(
            "k3jax_memory_bytes", "Resident memory of a process.", labels=["process"]
        )
        files = GaugeMetricFamily(
            "k3jax_open_files", "Open file descriptors of a process.", labels=["process"]
        )
        for name, number in (("front", os.getpid()), ("engine", self.engine)):
            held = None if number is None else held_by(number)
            if held is not None:
                memory.add_metric([name], held[0])
                files.add_metric([name], held[1])
        yield memory
        yield files
        try:
            tasks = len(asyncio.all_tasks())
        except RuntimeError:  # nobody serves in this thread
            return
        yield GaugeMetricFamily("k3jax_tasks", "Tasks of the front's event loop.", value=tasks)


def held_by(process: int) -> tuple[int, int] | None:
    """(resident bytes, open files) of a process; None where Linux does not say."""
    folder = Path(f"/proc/{process}")
    try:
        pages = int((folder / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(folder / "fd"))
    except OSError:
        return None
