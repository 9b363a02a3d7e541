"""Every Prometheus series of the service: what code counts on its way, and what a scrape reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import prometheus_client.values
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from model.engine import CacheStats
from model.retrieval.inputs import Mark

if TYPE_CHECKING:  # `app.interface` imports this module
    from app.interface import CorpusState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_SECONDS = (.0005, .001, .002, .003, .005, .0075, .01, .015, .02, .03, .05, .075, .1, .15, .25, .5, 1, 2.5)  # fmt: skip
SIZES = tuple(2.0**power for power in range(13))
ROWS = tuple(4.0**power for power in range(13))
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
PROBABILITIES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
MOST_PENDING_ROWS = 16_384  # candidates whose probabilities wait to be counted: some hundred kilobytes
STAGES_OF_CALLS = ("read", "corpus", "parse", "queue", "attention", "serialize")
STAGES = (*STAGES_OF_CALLS, "collate", "forward", "encode", "search")  # the last four are of batches
REJECTIONS = ("queue_full", "key_rate", "loop_overrun", "deadline", "draining", "not_ready", "too_large")
CANCEL_STAGES = ("body", "queue", "forward")
LOG_DROPS = ("reader_slow", "not_written")
SERVED_DROPS = ("queue_full", "not_written", "fault")
RELOADED = ("checkpoint", "corpus")
RELOAD_RESULTS = ("success", "failure", "unchanged", "busy")
CHECK_TEXT = (
    "The sequence × 10⁹ plus nine digits of the digest: what differs between replicas of one sequence has diverged."
)

disable_created_metrics()  # type: ignore[no-untyped-call]  # a `_created` beside every series, which no dashboard reads
# Values stay in memory even if PROMETHEUS_MULTIPROC_DIR is set: the engine process adds up what all processes count.
prometheus_client.values.ValueClass = prometheus_client.values.MutexValue


class BatchReport(msgspec.Struct, frozen=True):
    """What one forward was: for metrics and the observed rate. `candidates` of each chunk; times in seconds."""

    candidates: Sequence[int]
    cost: int
    collate_seconds: float
    forward_seconds: float
    failed: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the ranker keeps anyway and a scrape reads. `model` holds the labels of `model_info`; None while nothing serves."""

    ready: bool
    queue_requests: int
    queue_candidates: int
    cache: CacheStats
    model: dict[str, str] | None
    last_forward_timestamp_seconds: float
    stalled_seconds: float
    device_memory_bytes: int | None
    engine_steps_down: int | None
    searches_waiting: int
    corpus: CorpusState | None
    milestone: Mark | None
    feed_lag_seconds: float | None


class ReplyProbabilities(Collector):
    """`ranker_reply_probability{action}`: the mean over a reply's candidates, so that a drift of model or inputs shows.

    Many replies are counted by numpy at once: twenty observations of the client library would take a tenth of a small request.
    """

    def __init__(self) -> None:
        self._bounds = np.array(PROBABILITIES, np.float32)
        self._pending: dict[tuple[str, ...], list[NDArray[np.float32]]] = {}  # action names → probabilities [C, A]
        self._pending_rows = 0
        # action → replies in each bucket, sum of their means
        self._counted: dict[str, tuple[NDArray[np.int64], float]] = {}

    def record(self, action_names: tuple[str, ...], probabilities: NDArray[np.float32]) -> None:
        """Count a reply's probabilities, float32 `[C, A]`; a reply without candidates counts nothing."""
        if len(probabilities):
            self._pending.setdefault(action_names, []).append(probabilities)
            self._pending_rows += len(probabilities)
            if self._pending_rows >= MOST_PENDING_ROWS:
                self._count()

    def describe(self) -> Iterable[Metric]:
        """Only the name, so that no other metric can take it."""
        return [self._family()]

    def collect(self) -> Iterator[Metric]:
        """One series an action name, whichever checkpoints had it."""
        self._count()
        family = self._family()
        edges = [floatToGoString(bound) for bound in (*PROBABILITIES, float("inf"))]  # type: ignore[no-untyped-call]
        for name, (row, total) in self._counted.items():
            family.add_metric([name], list(zip(edges, row.cumsum().tolist(), strict=True)), total)
        yield family

    def _count(self) -> None:
        for action_names, pending in self._pending.items():
            lengths = np.array([len(probabilities) for probabilities in pending])
            sums = np.add.reduceat(np.concatenate(pending), lengths.cumsum() - lengths, 0)
            for name, means in zip(action_names, (sums / lengths[:, None]).astype(np.float32).T, strict=True):
                row = np.bincount(self._bounds.searchsorted(means), minlength=len(self._bounds) + 1)
                before, total = self._counted.get(name, (0, 0.0))
                self._counted[name] = before + row, total + float(means.sum(dtype=np.float64))
        self._pending.clear()
        self._pending_rows = 0

    @staticmethod
    def _family() -> HistogramMetricFamily:
        text = "Mean probability of an action over a reply's candidates."
        return HistogramMetricFamily("ranker_reply_probability", text, labels=["action"])


class Scraped(Collector):
    """Families that are made when they are read."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The families with their present values."""
        return self._read()


class Metrics:
    """The counters and histograms that code increments. `watch` adds those that are read at scrape time."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)

        counter, histogram = partial(count, registry), partial(distribute, registry)
        self.http_requests = counter(
            "http_requests", "Replies sent; 499: the client disconnected.", "method", "route", "code"
        )
        self.http_seconds = histogram(
            "http_request_duration_seconds",
            "From the first bytes of a request to the end of its reply; refused: with 4xx other than 499.",
            "method",
            "route",
            "refused",
        )
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
        self.reply_probabilities = ReplyProbabilities()
        registry.register(self.reply_probabilities)
        self.rejected = counter("rejected", "Requests refused before any work was done.", "reason")
        self.connections_not_taken = counter(
            "connections_not_taken", "Attempts to take connections that failed for lack of file descriptors or memory."
        )
        self.cancelled = counter("cancelled", "Requests whose client disconnected.", "stage")
        self.candidates_scored = counter("candidates_scored", "Candidates that came out of a forward.")
        self.history_truncated = counter("history_truncated", "Requests whose history was longer than the window.")
        self.context_handles = counter("context_handles", "Contexts that requests named by a handle.", "result")
        self.reloads = counter("reloads", "Attempts to change the checkpoint.", "result")
        self.reload_failed = Gauge(
            "reload_failed",
            "1 from a reload that failed to one that does not, of the checkpoint or of towers and corpus.",
            ("of",),
            namespace="ranker",
            registry=registry,
        )
        self.worker_up = Gauge(
            "worker_up",
            "1 if this worker answered the scrape, of several processes.",
            ("worker",),
            namespace="ranker",
            registry=registry,
        )
        self.feed_entries = counter("feed_entries", "Changes that came by the feed.", "result")
        self.forward_failures = counter(
            "forward_failures", "Forwards that raised; a batch of several requests is then split."
        )
        self.log_lines_dropped = counter(
            "log_lines_dropped", "Lines that standard error did not take, or not in time.", "reason"
        )
        self.served_rankings = counter("served_rankings", "Rankings in closed parts of the log of what was served.")
        self.served_bytes = counter("served_bytes", "Size of those parts.")
        self.served_dropped = counter(
            "served_dropped", "Rankings that the log of what was served lacks although it should have them.", "reason"
        )
        self.stage = {stage: self.stage_seconds.labels(stage) for stage in STAGES}
        for metric, values in (
            (self.rejected, REJECTIONS), (self.cancelled, CANCEL_STAGES), (self.reloads, RELOAD_RESULTS),
            (self.reload_failed, RELOADED),
            (self.user_vectors, ("cache", "tower")), (self.feed_entries, ("made", "unreadable")),
            (self.context_handles, ("found", "unknown")), (self.log_lines_dropped, LOG_DROPS),
            (self.served_dropped, SERVED_DROPS),
        ):  # fmt: skip
            for value in values:
                metric.labels(value)  # a series that is there from the start can be alerted on

    def watch(self, snapshot: Callable[[], Snapshot]) -> None:
        """Read these figures at each scrape from now on."""
        self.registry.register(Scraped(lambda: figures(snapshot())))

    def record_batch(self, report: BatchReport) -> None:
        """A forward of the ranker finished."""
        self.last_forward_unix = time.time()
        candidates, rows = sum(report.candidates), len(report.candidates)
        if report.failed:
            self.forward_failures.inc()
        else:
            self.candidates_scored.inc(candidates)
        self.stage["forward"].observe(report.forward_seconds)
        self.stage["collate"].observe(report.collate_seconds)
        self.batch_requests.observe(rows)
        self.batch_candidates.observe(candidates)
        slots = rows * max(report.candidates)
        self.batch_padding_ratio.observe((slots - candidates) / max(1, slots))

    def render(self) -> bytes:
        """The exposition, of type CONTENT_TYPE."""
        return generate_latest(self.registry)


def count(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Counter:
    """A registered counter."""
    return Counter(name, text, labels, namespace="ranker", registry=registry)


def distribute(
    registry: CollectorRegistry, name: str, text: str, *labels: str, buckets: Sequence[float] = LATENCY_SECONDS
) -> Histogram:
    """A registered histogram."""
    return Histogram(name, text, labels, namespace="ranker", registry=registry, buckets=buckets)


def figures(now: Snapshot) -> Iterator[Metric]:
    """The families of a snapshot. What is None has no series."""
    corpus = now.corpus
    gauges: dict[str, tuple[str, float | None]] = {
        "ready": ("1 while requests may be sent here.", now.ready),
        "queue_requests": ("Requests admitted and not answered.", now.queue_requests),
        "queue_candidates": ("Candidates of those requests.", now.queue_candidates),
        "context_cache_bytes": ("Bytes held by the context cache.", now.cache.bytes),
        "last_forward_timestamp_seconds": (
            "Unix time when a forward last finished.",
            now.last_forward_timestamp_seconds,
        ),
        "stalled_seconds": ("How long work has waited while no forward finished; 0 without work.", now.stalled_seconds),
        "device_memory_bytes": ("Device memory held by tensors.", now.device_memory_bytes),
        "engine_steps_down": (
            "Faster ways of computing that failed their checks on this device.",
            now.engine_steps_down,
        ),
        "search_queue_requests": ("Searches that are not begun.", now.searches_waiting),
        "corpus_posts": ("Posts that a search can return.", None if corpus is None else corpus.posts),
        "corpus_changes": ("Changes to the corpus since it was written.", None if corpus is None else corpus.changes),
        "corpus_sequence": ("Changes that the corpus has ever had.", None if corpus is None else corpus.mark.sequence),
        "feed_lag_seconds": ("How old the newest state of the feed is that the corpus has.", now.feed_lag_seconds),
    }
    for name, (text, value) in gauges.items():
        if value is not None:
            yield GaugeMetricFamily(f"ranker_{name}", text, value=value)
    marks = {"now": None if corpus is None else corpus.mark, "milestone": now.milestone}
    checks = {at: check_of(mark) for at, mark in marks.items() if mark is not None}
    yield labelled(GaugeMetricFamily("ranker_corpus_check", CHECK_TEXT, labels=["at"]), checks)
    lookups = CounterMetricFamily(
        "ranker_context_cache_lookups", "Lookups in the context cache, by result.", labels=["result"]
    )
    yield labelled(lookups, {"hit": now.cache.hits, "prefix": now.cache.prefixes, "miss": now.cache.misses})
    evictions = "Contexts dropped from the cache for want of room."
    yield CounterMetricFamily("ranker_context_cache_evictions", evictions, value=now.cache.evictions)
    if now.model is not None:
        info = GaugeMetricFamily("ranker_model_info", "The model that serves; always 1.", labels=list(now.model))
        info.add_metric(list(now.model.values()), 1)
        yield info


def labelled(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]
) -> GaugeMetricFamily | CounterMetricFamily:
    """The family with a value for each value of its one label."""
    for label, value in values.items():
        family.add_metric([label], value)
    return family


def check_of(mark: Mark) -> float:
    """The sequence modulo nine million, then nine digits from the digest: an integer that fits a float64."""
    return (mark.sequence % 9_000_000) * 10**9 + int(mark.digest[:12], 16) % 10**9
