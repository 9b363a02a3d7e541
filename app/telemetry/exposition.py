"""Prometheus histograms whose observations are counted, and written, many at a time: each costs a tenth of the client library's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import cast

import numpy as np
from numpy.typing import NDArray
from prometheus_client import generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

MOST_PENDING = 1024  # observations that wait to be counted
MOST_PENDING_REPLIES = 512
MOST_KEPT = 64  # candidates of a reply whose probabilities are summed later, with those of others
Rows = dict[tuple[str, ...], tuple[list[int], float]]
"""Label values → how many values fell into each bucket, and their sum."""
PROBABILITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


class Series:
    """One histogram. `bounds` are upper bounds, ascending; a value that equals one lies below it."""

    __slots__ = ("_bounds", "_counts", "_pending", "_sum")

    def __init__(self, bounds: NDArray[np.float64]) -> None:
        self._bounds = bounds
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        self._pending: list[float] = []

    def observe(self, value: float) -> None:
        """Count one value."""
        pending = self._pending
        pending.append(value)
        if len(pending) >= MOST_PENDING:
            self._count()

    def observe_all(self, values: NDArray[np.float64]) -> None:
        """Count many values."""
        self._counts += np.bincount(self._bounds.searchsorted(values), minlength=len(self._counts))
        self._sum += float(values.sum())

    def read(self) -> tuple[list[int], float]:
        """How many values fell below each bound and not below the one before, or above all, and their sum."""
        self._count()
        return self._counts.tolist(), self._sum

    def _count(self) -> None:
        pending, self._pending = self._pending, []
        self.observe_all(np.array(pending))


class Distribution(Metric):
    """Histograms of one name as a scrape has them. Samples are made for who reads them only: writing needs none."""

    def __init__(self, histograms: Histograms, rows: Rows) -> None:
        self.name, self.documentation = histograms.name, histograms.text
        self.type, self.unit = "histogram", ""
        self.rows = rows
        self._histograms = histograms

    def plus(self, others: Rows) -> Distribution:
        """With what other processes have counted."""
        return Distribution(self._histograms, added(self.rows, others))

    @property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        """As the client library has them."""
        made = self._histograms
        family = HistogramMetricFamily(made.name, made.text, labels=made.label_names)
        for values, (counts, total) in self.rows.items():
            family.add_metric(values, list(zip(made.edges, accumulate(counts), strict=True)), total)
        return family.samples

    def write(self) -> str:
        """As the exposition has them."""
        lines = [f"# HELP {self.name} {self.documentation}\n# TYPE {self.name} histogram\n"]
        for values, (counts, total) in self.rows.items():
            below = list(accumulate(counts))
            lines.append(self._histograms.lines_of(values) % (*below, below[-1], total))
        return "".join(lines)


def added(left: Rows, right: Rows) -> Rows:
    """Both together."""
    found = dict(left)
    for values, (counts, total) in right.items():
        before, sum_before = found.get(values, ([0] * len(counts), 0.0))
        found[values] = [one + other for one, other in zip(before, counts, strict=True)], sum_before + total
    return found


def write(metrics: Iterable[Metric]) -> bytes:
    """The exposition of these families."""
    found = list(metrics)
    texts = [metric.write() for metric in found if isinstance(metric, Distribution)]
    others = SimpleNamespace(collect=lambda: [each for each in found if not isinstance(each, Distribution)])
    return generate_latest(cast(Collector, others)) + "".join(texts).encode()


class Histograms(Collector):
    """Histograms of one name, by the values of their labels. Belongs to the event loop, as scrapes do."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Iterable[float]) -> None:
        self.name = name
        self.text = text
        self.label_names = tuple(labels)
        self._bounds = np.array(list(bounds))
        self.edges = [floatToGoString(bound) for bound in (*self._bounds.tolist(), float("inf"))]  # type: ignore[no-untyped-call]
        self._lines: dict[tuple[str, ...], str] = {}
        self._series: dict[tuple[str, ...], Series] = {}
        if not self.label_names:
            self.labels()

    def labels(self, *values: str) -> Series:
        """The histogram with these label values."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Series(self._bounds)
        return found

    def observe(self, value: float) -> None:
        """Count one value of a histogram without labels."""
        self.labels().observe(value)

    def describe(self) -> Iterable[Metric]:
        """The name alone, so that no other metric may have it."""
        return [HistogramMetricFamily(self.name, self.text, labels=self.label_names)]

    def collect(self) -> Iterator[Metric]:
        """All that was counted."""
        yield Distribution(self, {values: series.read() for values, series in self._series.items()})

    def lines_of(self, values: tuple[str, ...]) -> str:
        """The lines of a series: a format of its running counts, all of them, and their sum."""
        found = self._lines.get(values)
        if found is None:
            named = sorted(f'{name}="{_escaped(value)}"' for name, value in zip(self.label_names, values, strict=True))
            buckets = [",".join(sorted([f'le="{edge}"', *named])) for edge in self.edges]
            labels = f"{{{','.join(named)}}}" if named else ""
            lines = [f"{self.name}_bucket{{{bucket}}} %d.0\n" for bucket in buckets]
            lines += [f"{self.name}_count{labels} %d.0\n", f"{self.name}_sum{labels} %r\n"]
            found = self._lines[values] = "".join(lines)
        return found


class ReplyProbabilities(Collector):
    """`ranker_reply_probability{action}`: the mean over a reply's candidates, so that a drift of model or inputs shows."""

    def __init__(self) -> None:
        text = "Mean probability of an action over a reply's candidates."
        self._histograms = Histograms("ranker_reply_probability", text, ["action"], PROBABILITIES)
        self._action_names: tuple[str, ...] = ()
        self._pending: list[NDArray[np.float32]] = []  # of a reply each; of a long one their sum
        self._candidates: list[int] = []

    def record(self, action_names: tuple[str, ...], probabilities: NDArray[np.float32]) -> None:
        """Count a reply's probabilities, float32 `[C, A]`; a reply without candidates counts nothing."""
        if action_names != self._action_names or len(self._pending) >= MOST_PENDING_REPLIES:
            self._count()
            self._action_names = action_names
        count = len(probabilities)
        if not count:
            return
        self._pending.append(probabilities if count <= MOST_KEPT else np.add.reduce(probabilities, 0, keepdims=True))
        self._candidates.append(count)

    def describe(self) -> Iterable[Metric]:
        """See `Histograms.describe`."""
        return self._histograms.describe()

    def collect(self) -> Iterator[Metric]:
        """One series an action name, whichever checkpoints had it."""
        self._count()
        return self._histograms.collect()

    def _count(self) -> None:
        if not self._pending:
            return
        starts = np.cumsum([0, *(len(rows) for rows in self._pending[:-1])])
        sums = np.add.reduceat(np.concatenate(self._pending), starts, 0)
        means = sums / np.array(self._candidates, np.float32)[:, None]
        for action, values in zip(self._action_names, means.T.astype(np.float64), strict=True):
            self._histograms.labels(action).observe_all(values)
        self._pending, self._candidates = [], []


def _escaped(label: str) -> str:
    """For a line of the exposition that is a format."""
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"").replace("%", "%%")
