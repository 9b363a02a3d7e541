"""The series of a second checkpoint: whether it is held, how much it answers, and how its scores differ. Only where one is configured."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from app.telemetry.exposition import Scraped, family, model_of
from app.telemetry.metrics import Histograms, count, distribute

DISTANCES = (.0001, .001, .005, .01, .02, .05, .1, .15, .2, .3, .4, .5, .75)  # fmt: skip  # a histogram of negative values has no sum
SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.99)
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
FULL, LATE, FAILED, SCORED = OUTCOMES = ("full", "late", "failed", "scored")
CHECKPOINTS = ("first", "second")


class ShadowMetrics:
    """`held` returns the labels of the second checkpoint, None while none is held."""

    def __init__(self, registry: CollectorRegistry, held: Callable[[], dict[str, str] | None]) -> None:
        answers = "Requests given to each of both checkpoints to be answered."
        self.answers = count(registry, "answers", answers, "checkpoint")
        drawn = "Requests drawn for the second checkpoint too, by what became of that."
        requests = count(registry, "shadow_requests", drawn, "result")
        self.ended = {outcome: requests.labels(outcome) for outcome in OUTCOMES}

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histograms:
            return distribute(registry, f"shadow_{name}", text, *labels, buckets=buckets)

        self.seconds = histogram("seconds", "Time of the second checkpoint's forwards for one request.", SECONDS)
        pearson = "(1 - r) / 2 of Pearson's r of both scores within a request."
        self.correlation = histogram("correlation_distance", pearson, DISTANCES)
        self.kendall = histogram("kendall_distance", "(1 - tau) / 2 of Kendall's tau of both orders.", DISTANCES)
        self.overlap = histogram("overlap", "Share of a request's best k that both have.", SHARES, "k")
        sums = "Sum of probabilities over the candidates that both have scored."
        self.probability = count(registry, "shadow_probability", sums, "action", "checkpoint")
        self.candidates = count(registry, "shadow_candidates", "Candidates that both have scored.")
        for checkpoint in CHECKPOINTS:
            self.answers.labels(checkpoint)
        registry.register(Scraped(lambda: _held(held())))


def _held(labels: dict[str, str] | None) -> Iterator[Metric]:
    """Gauges that say whether the second checkpoint is held, and which one it is."""
    text = "1 while the second checkpoint is held, 0 while it is loaded and once it has failed."
    yield family("gauge", "second_ready", text, [({}, labels is not None)])
    yield from model_of("second_info", "The second checkpoint; always 1.", labels)
