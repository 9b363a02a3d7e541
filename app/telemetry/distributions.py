"""Distribution of each action's probability over replies, as one Prometheus histogram. Not for single candidates or users."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

BOUNDS = np.array([0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9])


class ReplyProbabilities(Collector):
    """`ranker_reply_probability{action}`: the mean over a reply's candidates, so that a drift of model or inputs shows.

    All actions of a reply are counted in a few numpy calls; a client-library histogram an action costs ten times as much.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, ...], tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]] = {}

    def record(self, action_names: tuple[str, ...], probabilities: NDArray[np.float32]) -> None:
        """Count a reply's probabilities, float32 `[C, A]`."""
        if action_names not in self._counts:
            buckets = np.zeros((len(action_names), len(BOUNDS) + 1), np.int64)
            row_starts = np.arange(len(action_names)) * buckets.shape[1]
            self._counts[action_names] = buckets, np.zeros(len(action_names)), row_starts
        counts, sums, row_starts = self._counts[action_names]
        means = np.add.reduce(probabilities, 0) / len(probabilities)
        counts.ravel()[row_starts + BOUNDS.searchsorted(means)] += 1
        sums += means

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """One series an action name, whichever checkpoints had it."""
        totals: dict[str, tuple[NDArray[np.int64], float]] = {}
        for names, (counts, sums, _) in self._counts.items():
            for action, row, total in zip(names, counts, sums, strict=True):
                before, spent = totals.get(action, (np.zeros_like(row), 0.0))
                totals[action] = before + row, spent + float(total)
        text = "Mean probability of an action over a reply's candidates."
        family = HistogramMetricFamily("ranker_reply_probability", text, labels=["action"])
        edges = [*map(str, BOUNDS.tolist()), "+Inf"]
        for action, (row, total) in totals.items():
            family.add_metric([action], list(zip(edges, row.cumsum().tolist(), strict=True)), total)
        yield family
