"""The series of a second checkpoint: whether it is held, how much it answers, and how its scores differ. Only where one is configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.telemetry.distributions import Histograms

DISTANCES = (
    0.0001,
    0.001,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
)  # a histogram of negative values has no sum
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.99)
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
FULL, LATE, FAILED, SCORED = OUTCOMES = ("full", "late", "failed", "scored")
CHECKPOINTS = ("first", "second")


class ShadowMetrics:
    """`held` gives the labels of the second checkpoint, None while there is none."""

    def __init__(self, registry: CollectorRegistry, held: Callable[[], dict[str, str] | None]) -> None:
        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(name, text, [label], namespace="ranker", registry=registry)

        def histogram(name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Histograms:
            made = Histograms(f"ranker_shadow_{name}", text, labels, bounds)
            registry.register(made)
            return made

        self.answers = counter("answers", "Requests given to each of both checkpoints to be answered.", "checkpoint")
        requests = counter(
            "shadow_requests", "Requests drawn for the second checkpoint too, by what became of that.", "result"
        )
        self.ended = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self.seconds = histogram("seconds", "Time of the second checkpoint's forwards for one request.", SECONDS)
        self.correlation = histogram(
            "correlation_distance", "(1 - r) / 2 of Pearson's r of both scores within a request.", DISTANCES
        )
        self.kendall = histogram("kendall_distance", "(1 - tau) / 2 of Kendall's tau of both orders.", DISTANCES)
        self.overlap = histogram("overlap", "Share of a request's best k that both have.", SHARES, "k")
        self.probability = Counter(
            "shadow_probability", "Sum of probabilities over the candidates that both have scored.", ["action", "checkpoint"],
            namespace="ranker", registry=registry,
        )  # fmt: skip
        self.candidates = Counter(
            "shadow_candidates", "Candidates that both have scored.", namespace="ranker", registry=registry
        )
        for checkpoint in CHECKPOINTS:
            self.answers.labels(checkpoint)
        registry.register(_Held(held))


class _Held(Collector):
    def __init__(self, held: Callable[[], dict[str, str] | None]) -> None:
        self._labels = held

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Whether the second checkpoint is held, and which it is."""
        labels = self._labels()
        text = "1 while the second checkpoint is held, 0 while it is loaded and once it has failed."
        yield GaugeMetricFamily("ranker_second_ready", text, value=float(labels is not None))
        if labels is not None:
            info = GaugeMetricFamily("ranker_second_info", "The second checkpoint; always 1.", labels=list(labels))
            info.add_metric(list(labels.values()), 1)
            yield info
