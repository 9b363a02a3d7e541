"""Every Prometheus series of the service, in a registry that is handed in. Not for deciding anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from app.telemetry.distributions import Histograms, ReplyProbabilities, write
from app.telemetry.sink import Sink
from model.engine import CacheStats

SCRAPE_SECONDS = 0.05  # from one scrape to the next
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_SECONDS = (.0005, .001, .002, .003, .005, .0075, .01, .015, .02, .03, .05, .075, .1, .15, .25, .5, 1, 2.5)  # fmt: skip
SIZES = tuple(2.0**power for power in range(13))
ROWS = tuple(4.0**power for power in range(13))
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
STAGES = ("parse", "queue", "collate", "forward", "serialize", "encode", "search", "attention")
REJECTIONS = ("queue_full", "key_rate", "loop_overrun", "deadline", "draining", "not_ready", "too_large")
CANCEL_STAGES = ("body", "queue", "forward")
VECTOR_SOURCES = ("cache", "tower")
RELOAD_RESULTS = ("success", "failure", "unchanged")

disable_created_metrics()  # type: ignore[no-untyped-call]  # a `_created` beside every series, which no dashboard reads


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is read at scrape time. `model` holds the labels of `model_info`; None while nothing serves."""

    ready: bool
    queue_requests: int
    queue_candidates: int
    cache: CacheStats
    model: dict[str, str] | None
    last_forward_timestamp_seconds: float
    device_memory_bytes: int | None
    engine_steps_down: int | None = None
    searches_waiting: int = 0
    corpus_posts: int | None = None
    corpus_changes: int | None = None


class BatchReport(msgspec.Struct, frozen=True):
    """What one forward was: for metrics and the observed rate. `candidates` of each chunk; times in seconds."""

    candidates: Sequence[int]
    cost: int
    queue_seconds: Sequence[float]
    collate_seconds: float
    forward_seconds: float
    failed: bool


class Source(Protocol):
    """Where a scrape finds the figures that the service keeps anyway."""

    def snapshot(self) -> Snapshot: ...


class Budget(Protocol):
    """So much of something for the whole process."""

    limit: int
    used: int
    refused: int


B = TypeVar("B", bound=Budget)


class Metrics:
    """The counters and histograms that code increments. `watch` adds those that are read at scrape time."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = registry or CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, namespace="ranker", registry=registry)

        def histogram(name: str, text: str, *labels: str, buckets: Iterable[float] = LATENCY_SECONDS) -> Histograms:
            made = Histograms(f"ranker_{name}", text, labels, buckets)
            registry.register(made)
            return made

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
        self.reply_probabilities = ReplyProbabilities()
        registry.register(self.reply_probabilities)
        self.rejected = counter("rejected", "Requests refused before any work was done.", "reason")
        self.cancelled = counter("cancelled", "Requests whose client disconnected.", "stage")
        self.candidates_scored = counter("candidates_scored", "Candidates that came out of a forward.")
        self.history_truncated = counter("history_truncated", "Requests whose history was longer than the window.")
        self.reloads = counter("reloads", "Attempts to change the checkpoint.", "result")
        self.compactions = counter("compactions", "Attempts to write the corpus anew with its changes.", "result")
        self.forward_failures = counter(
            "forward_failures", "Forwards that raised; a batch of several requests is then split."
        )
        self.refusals_held = counter("refusals_held", "Refusals of callers who sent again at once, written later.")
        self.connections_closed = counter("connections_closed", "Connections the server closed.", "reason")
        self._budgets: dict[str, Budget] = {}
        registry.register(_BudgetCollector(self._budgets))
        self.stage = {stage: self.stage_seconds.labels(stage) for stage in STAGES}
        for metric, values in (
            (self.rejected, REJECTIONS), (self.cancelled, CANCEL_STAGES), (self.reloads, RELOAD_RESULTS),
            (self.user_vectors, VECTOR_SOURCES), (self.compactions, RELOAD_RESULTS),
        ):  # fmt: skip
            for value in values:
                metric.labels(value)  # a series that is there from the start can be alerted on

    def watch(self, source: Source) -> None:
        """Read this source at each scrape from now on."""
        self.registry.register(_SnapshotCollector(source))

    def watch_budget(self, name: str, budget: B) -> B:
        """Read this budget at each scrape from now on, and return it."""
        self._budgets[name] = budget
        return budget

    def watch_log(self, sink: Sink) -> None:
        """Read at each scrape what this sink has dropped."""
        self.registry.register(_DroppedLines(sink))

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
        self.record_waits(report)
        self.batch_requests.observe(rows)
        self.batch_candidates.observe(candidates)
        self.batch_padding_ratio.observe(1 - candidates / (rows * max(report.candidates)))

    def record_waits(self, report: BatchReport) -> None:
        """How long the jobs of a forward have waited for it."""
        for seconds in report.queue_seconds:
            self.stage["queue"].observe(seconds)

    def render(self) -> bytes:
        """The exposition, of type CONTENT_TYPE."""
        return write(self.registry.collect())


class Scrapes:
    """One at a time, `SCRAPE_SECONDS` apart: whoever asks before it is begun gets the same, which is never older than the question."""

    def __init__(self, make: Callable[[], Awaitable[bytes]]) -> None:
        self._make = make
        self._next: asyncio.Task[bytes] | None = None
        self._made = asyncio.Lock()
        self._free_at = 0.0  # of the monotonic clock

    async def get(self) -> bytes:
        """Raises what making it raises."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> bytes:
        async with self._made:
            await asyncio.sleep(self._free_at - time.monotonic())
            self._next = None
            try:
                return await self._make()
            finally:
                self._free_at = time.monotonic() + SCRAPE_SECONDS


class _SnapshotCollector(Collector):
    def __init__(self, source: Source) -> None:
        self.source = source

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        now = self.source.snapshot()
        for name, text, value in (
            ("ready", "1 while requests may be sent here.", float(now.ready)),
            ("queue_requests", "Requests admitted and not answered.", now.queue_requests),
            ("queue_candidates", "Candidates of those requests.", now.queue_candidates),
            ("context_cache_bytes", "Bytes held by the context cache.", now.cache.bytes),
            (
                "last_forward_timestamp_seconds",
                "Unix time when a forward last finished.",
                now.last_forward_timestamp_seconds,
            ),
        ):
            yield GaugeMetricFamily(f"ranker_{name}", text, value=value)
        lookups = CounterMetricFamily(
            "ranker_context_cache_lookups", "Lookups in the context cache.", labels=["result"]
        )
        for result, count in (("hit", now.cache.hits), ("prefix", now.cache.prefixes), ("miss", now.cache.misses)):
            lookups.add_metric([result], count)
        yield lookups
        evictions = "Contexts dropped from the cache for want of room."
        yield CounterMetricFamily("ranker_context_cache_evictions", evictions, value=now.cache.evictions)
        if now.model is not None:
            info = GaugeMetricFamily("ranker_model_info", "The model that serves; always 1.", labels=list(now.model))
            info.add_metric(list(now.model.values()), 1)
            yield info
        for name, text, gauge in (
            ("device_memory_bytes", "Device memory held by tensors.", now.device_memory_bytes),
            (
                "engine_steps_down",
                "Faster ways of computing that failed their checks on this device.",
                now.engine_steps_down,
            ),
            ("search_queue_requests", "Searches that are not begun.", now.searches_waiting),
            ("corpus_posts", "Posts that a search can return.", now.corpus_posts),
            ("corpus_changes", "Changes to the corpus since it was written.", now.corpus_changes),
        ):
            if gauge is not None:
                yield GaugeMetricFamily(f"ranker_{name}", text, value=gauge)


class _BudgetCollector(Collector):
    def __init__(self, budgets: Mapping[str, Budget]) -> None:
        self.budgets = budgets

    def collect(self) -> Iterator[Metric]:
        used = GaugeMetricFamily("ranker_budget_used", "What all callers together take now.", labels=["budget"])
        limit = GaugeMetricFamily("ranker_budget_limit", "The most they may take.", labels=["budget"])
        refused = CounterMetricFamily(
            "ranker_budget_refusals", "Refused or cut off for want of room.", labels=["budget"]
        )
        for name, budget in self.budgets.items():
            used.add_metric([name], budget.used)
            limit.add_metric([name], budget.limit)
            refused.add_metric([name], budget.refused)
        yield from (used, limit, refused)


class _DroppedLines(Collector):
    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def collect(self) -> Iterator[Metric]:
        lines = CounterMetricFamily(
            "ranker_log_lines_dropped", "Lines that standard error did not take in time.", labels=["reason"]
        )
        for reason, count in self.sink.dropped.items():
            lines.add_metric([reason], count)
        yield lines


def add_stats(left: CacheStats, right: CacheStats, *, keep_gauges: bool = False) -> CacheStats:
    """Totals of two caches. Of a cache that is gone only the running totals remain, so that no counter runs backwards."""
    gone = () if keep_gauges else ("bytes", "entries")
    return CacheStats(
        **{
            field.name: getattr(left, field.name) + (0 if field.name in gone else getattr(right, field.name))
            for field in fields(CacheStats)
        }
    )
