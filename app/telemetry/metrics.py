"""Every Prometheus series of the service, in a registry that is handed in: what code counts on its way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from app.budgets import Budget
from app.telemetry.exposition import Distribution, Scraped, Shape, Source, budgets_of, by, family, figures, write
from app.telemetry.sink import Sink

LATENCY_SECONDS = (.0005, .001, .002, .003, .005, .0075, .01, .015, .02, .03, .05, .075, .1, .15, .25, .5, 1, 2.5)  # fmt: skip
SIZES = tuple(2.0**power for power in range(13))
ROWS = tuple(4.0**power for power in range(13))
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
STAGES = ("parse", "queue", "collate", "forward", "serialize", "encode", "search", "attention")
REJECTIONS = ("queue_full", "key_rate", "loop_overrun", "deadline", "draining", "not_ready", "too_large")
CANCEL_STAGES = ("body", "queue", "forward")
VECTOR_SOURCES = ("cache", "tower")
RELOAD_RESULTS = ("success", "failure", "unchanged")
PROBABILITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
MOST_PENDING = 1024  # observations that wait to be counted
MOST_PENDING_REPLIES = 512
MOST_KEPT = 64  # candidates of a reply whose probabilities are summed later, with those of others

disable_created_metrics()  # type: ignore[no-untyped-call]  # a `_created` beside every series, which no dashboard reads


class BatchReport(msgspec.Struct, frozen=True):
    """What one forward was: for metrics and the observed rate. `candidates` of each chunk; times in seconds."""

    candidates: Sequence[int]
    cost: int
    queue_seconds: Sequence[float]
    collate_seconds: float
    forward_seconds: float
    failed: bool


class Series:
    """One histogram. `bounds`: ascending upper bounds, inclusive."""

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
        """The number of values in each bucket, the last one above all bounds, and the sum of the values."""
        self._count()
        return self._counts.tolist(), self._sum

    def _count(self) -> None:
        pending, self._pending = self._pending, []
        self.observe_all(np.array(pending))


class Histograms(Collector):
    """Histograms of one name, by label values. Observations are counted and written many at a time: each costs a tenth of the client
    library's. Used in the event loop only, as scrapes are."""

    def __init__(self, name: str, text: str, labels: Sequence[str], bounds: Iterable[float]) -> None:
        self._bounds = np.array(list(bounds))
        edges = [floatToGoString(bound) for bound in (*self._bounds.tolist(), float("inf"))]  # type: ignore[no-untyped-call]
        self._shape = Shape(name, text, tuple(labels), tuple(edges))
        self._series: dict[tuple[str, ...], Series] = {}
        if not labels:
            self.observe: Callable[[float], None] = self.labels().observe  # counts one value

    def labels(self, *values: str) -> Series:
        """The histogram with these label values."""
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = Series(self._bounds)
        return found

    def describe(self) -> Iterable[Metric]:
        """Only the name, so that no other metric can take it."""
        return [Distribution(self._shape, {})]

    def collect(self) -> Iterator[Metric]:
        """The counts of all series."""
        yield Distribution(self._shape, {values: series.read() for values, series in self._series.items()})


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


def count(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    """A registered counter."""
    return Counter(name, text, labels, namespace="ranker", registry=registry)


def distribute(
    registry: CollectorRegistry, name: str, text: str, *labels: str, buckets: Iterable[float] = LATENCY_SECONDS
) -> Histograms:
    """A registered histogram."""
    made = Histograms(f"ranker_{name}", text, labels, buckets)
    registry.register(made)
    return made


class Metrics:
    """The counters and histograms that code increments. `watch` adds those that are read at scrape time."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = registry or CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)

        counter, histogram = partial(count, registry), partial(distribute, registry)
        self.http_requests = counter(
            "http_requests", "Replies sent; 499: the client disconnected.", "method", "route", "code"
        )
        self.http_seconds = histogram("http_request_duration_seconds", "From headers to the reply.", "method", "route")
        self.stage_seconds = histogram("stage_duration_seconds", "Time of one stage of a request or batch.", "stage")
        self.batch_requests = histogram("batch_requests", "Requests, or chunks of them, in one forward.", buckets=SIZES)
        self.batch_candidates = histogram("batch_candidates", "Candidates in one forward.", buckets=SIZES)
        self.searches = histogram("search_requests", "Requests that shared one scan of the corpus.", buckets=SIZES)
        self.visible_rows = histogram("search_visible_rows", "Rows that a request's filters left.", buckets=ROWS)
        self.scored_rows = histogram(
            "search_scored_rows", "Rows that a search scored in full, of those that it scanned.", buckets=ROWS
        )
        self.user_vectors = counter(
            "user_vectors", "User vectors that a search needed, by where they came from.", "source"
        )
        self.batch_padding_ratio = histogram(
            "batch_padding_ratio", "Share of a forward's candidate slots that a rectangle would waste.", buckets=RATIOS
        )
        self.last_forward_unix = 0.0  # seconds
        self.busy_seconds = 0.0  # of all forwards
        self.reply_probabilities = ReplyProbabilities()
        registry.register(self.reply_probabilities)
        self.rejected = counter("rejected", "Requests refused before any work was done.", "reason")
        self.cancelled = counter("cancelled", "Requests whose client disconnected.", "stage")
        self.candidates_scored = counter("candidates_scored", "Candidates that came out of a forward.")
        self.history_truncated = counter("history_truncated", "Requests whose history was longer than the window.")
        self.context_handles = counter("context_handles", "Contexts that requests named by a handle.", "result")
        self.reloads = counter("reloads", "Attempts to change the checkpoint.", "result")
        self.feed_entries = counter("feed_entries", "Changes that came by the feed.", "result")
        self.compactions = counter("compactions", "Attempts to write the corpus anew with its changes.", "result")
        self.forward_failures = counter(
            "forward_failures", "Forwards that raised; a batch of several requests is then split."
        )
        self.refusals_held = counter("refusals_held", "Refusals of callers who sent again at once, written later.")
        self.connections_closed = counter("connections_closed", "Connections the server closed.", "reason")
        self._budgets: dict[str, Budget] = {}
        registry.register(Scraped(lambda: budgets_of(self._budgets)))
        self.stage = {stage: self.stage_seconds.labels(stage) for stage in STAGES}
        for metric, values in (
            (self.rejected, REJECTIONS), (self.cancelled, CANCEL_STAGES), (self.reloads, RELOAD_RESULTS),
            (self.user_vectors, VECTOR_SOURCES), (self.compactions, RELOAD_RESULTS), (self.feed_entries, ("made", "unreadable")),
            (self.context_handles, ("found", "unknown")),
        ):  # fmt: skip
            for value in values:
                metric.labels(value)  # a series that is there from the start can be alerted on

    def watch(self, source: Source) -> None:
        """Read this source at each scrape from now on."""
        self.registry.register(Scraped(lambda: figures(source.snapshot())))

    def watch_budget(self, name: str, budget: Budget) -> Budget:
        """Read this budget at each scrape from now on, and return it."""
        self._budgets[name] = budget
        return budget

    def watch_log(self, sink: Sink) -> None:
        """Read at each scrape what this sink has dropped."""
        text = "Lines that standard error did not take in time."
        read = Scraped(lambda: [family("counter", "log_lines_dropped", text, by("reason", sink.dropped))])
        self.registry.register(read)

    def record_batch(self, report: BatchReport) -> None:
        """A forward of the ranker finished."""
        self.last_forward_unix = time.time()
        self.busy_seconds += report.forward_seconds
        candidates, rows = sum(report.candidates), len(report.candidates)
        if report.failed:
            self.forward_failures.inc()
        else:
            self.candidates_scored.inc(candidates)
        self.stage["forward"].observe(report.forward_seconds)
        self.stage["collate"].observe(report.collate_seconds)
        self.record_waits(report)
        self.batch_requests.observe(rows)
        self.batch_candidates.observe(candidates)
        slots = rows * max(report.candidates)
        self.batch_padding_ratio.observe((slots - candidates) / max(1, slots))

    def record_waits(self, report: BatchReport) -> None:
        """How long the jobs of a forward have waited for it."""
        for seconds in report.queue_seconds:
            self.stage["queue"].observe(seconds)

    def render(self) -> bytes:
        """The exposition, of type CONTENT_TYPE."""
        return write(self.registry.collect())
