"""What the front counts and what the engine reports, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from k3jax.request import Delta, Stats
from k3jax.serve.link import ReadyInfo

TTFT_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TPOT_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics(Collector):
    """One server's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.stats: Stats | None = None
        self.info: ReadyInfo | None = None
        self.failed = False
        self._tokens = Counter(
            "k3jax_tokens", "Tokens of finished and running requests.", ["kind"],
            registry=self.registry,
        )  # fmt: skip
        self._accepted = Counter(
            "k3jax_accepted", "Drafted tokens that were accepted, by place in the draft.",
            ["position"], registry=self.registry,
        )  # fmt: skip
        self._ttft = Histogram(
            "k3jax_ttft_seconds", "From a request's arrival to its first token.",
            buckets=TTFT_SECONDS, registry=self.registry,
        )  # fmt: skip
        self._tpot = Histogram(
            "k3jax_tpot_seconds", "Mean time of a request's tokens after the first.",
            buckets=TPOT_SECONDS, registry=self.registry,
        )  # fmt: skip
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
        for position in range(1, generated):
            self._accepted.labels(str(position)).inc()

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
        health.add_metric(["0"], float(self.failed))
        yield health
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
            ("pages_in_use", "Pages of the latent cache in use.", self.stats.pages_in_use),
            ("waiting", "Requests that wait for a slot.", self.stats.waiting),
        ):
            yield GaugeMetricFamily(f"k3jax_{name}", text, value=value)
        preemptions = CounterMetricFamily("k3jax_preemptions", "Requests that lost their slot.")
        preemptions.add_metric([], self.stats.preemptions)
        yield preemptions
