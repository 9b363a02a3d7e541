"""Every Prometheus series of the service, in a registry that is handed in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal, Protocol

import msgspec
from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.gc_collector import GCCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from app.budgets import Budget
from app.telemetry.distributions import Histograms, ReplyProbabilities, write
from app.telemetry.sink import Sink
from model.engine import CacheStats
from model.retrieval.inputs import Mark

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
CHECK_TEXT = (
    "The sequence × 10⁹ plus nine digits of the digest: what differs between replicas of one sequence has diverged."
)
RELOAD_RESULTS = ("success", "failure", "unchanged")

Labels = Mapping[str, str]

disable_created_metrics()  # type: ignore[no-untyped-call]  # a `_created` beside every series, which no dashboard reads


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is read at scrape time. `model` holds the labels of `model_info`; None while nothing serves."""

    ready: bool
    load: float
    queue_requests: int
    queue_candidates: int
    cache: CacheStats
    model: dict[str, str] | None
    last_forward_timestamp_seconds: float
    device_memory_bytes: int | None
    engine_steps_down: int | None = None
    searches_waiting: int = 0
    corpus: Corpus | None = None
    milestone: Mark | None = None
    feed_lag_seconds: float | None = None


class Corpus(Protocol):
    """What a scrape says of a corpus: as `interface.Changed`."""

    @property
    def posts(self) -> int: ...
    @property
    def changes(self) -> int: ...
    @property
    def mark(self) -> Mark: ...


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
        registry.register(Scraped(lambda: _budgets(self._budgets)))
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
        self.registry.register(Scraped(lambda: _figures(source.snapshot())))

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


class Scraped(Collector):
    """Families that are made when they are read."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All of them, as they are now."""
        return self._read()


def family(kind: Literal["counter", "gauge"], name: str, text: str, rows: Iterable[tuple[Labels, float]]) -> Metric:
    """The family `ranker_` + name: a value for each set of labels."""
    found = Metric(f"ranker_{name}", text, kind)
    for labels, value in rows:
        found.add_sample(found.name + ("_total" if kind == "counter" else ""), dict(labels), value)
    return found


def model_of(name: str, text: str, labels: Labels | None) -> Iterator[Metric]:
    """A gauge that is 1 and whose labels say which model serves; nothing while none does."""
    if labels is not None:
        yield family("gauge", name, text, [(labels, 1)])


def check_of(mark: Mark) -> float:
    """The sequence, of which nine million differ, and nine digits of the digest: a whole number that a float64 holds."""
    return (mark.sequence % 9_000_000) * 10**9 + int(mark.digest[:12], 16) % 10**9


def _figures(now: Snapshot) -> Iterator[Metric]:
    corpus = now.corpus
    for name, text, value in (
        ("ready", "1 while requests may be sent here.", now.ready),
        ("load", "How much is asked of this process: 1 is as much as should be. Replicas are counted by it.", now.load),
        ("queue_requests", "Requests admitted and not answered.", now.queue_requests),
        ("queue_candidates", "Candidates of those requests.", now.queue_candidates),
        ("context_cache_bytes", "Bytes held by the context cache.", now.cache.bytes),
        (
            "last_forward_timestamp_seconds",
            "Unix time when a forward last finished.",
            now.last_forward_timestamp_seconds,
        ),
        ("device_memory_bytes", "Device memory held by tensors.", now.device_memory_bytes),
        (
            "engine_steps_down",
            "Faster ways of computing that failed their checks on this device.",
            now.engine_steps_down,
        ),
        ("search_queue_requests", "Searches that are not begun.", now.searches_waiting),
        ("corpus_posts", "Posts that a search can return.", None if corpus is None else corpus.posts),
        ("corpus_changes", "Changes to the corpus since it was written.", None if corpus is None else corpus.changes),
        ("corpus_sequence", "Changes that the corpus has ever had.", None if corpus is None else corpus.mark.sequence),
        ("feed_lag_seconds", "How old the newest state of the feed is that the corpus has.", now.feed_lag_seconds),
    ):
        if value is not None:
            yield family("gauge", name, text, [({}, value)])
    marks = {"now": None if corpus is None else corpus.mark, "milestone": now.milestone}
    checks = {at: check_of(mark) for at, mark in marks.items() if mark is not None}
    yield family("gauge", "corpus_check", CHECK_TEXT, by("at", checks))
    lookups = {"hit": now.cache.hits, "prefix": now.cache.prefixes, "miss": now.cache.misses}
    yield family("counter", "context_cache_lookups", "Lookups in the context cache.", by("result", lookups))
    evictions = "Contexts dropped from the cache for want of room."
    yield family("counter", "context_cache_evictions", evictions, [({}, now.cache.evictions)])
    yield from model_of("model_info", "The model that serves; always 1.", now.model)


def _budgets(budgets: Mapping[str, Budget]) -> Iterator[Metric]:
    used, limits, refused = ({n: getattr(b, part) for n, b in budgets.items()} for part in ("used", "limit", "refused"))
    yield family("gauge", "budget_used", "What all callers together take now.", by("budget", used))
    yield family("gauge", "budget_limit", "The most they may take.", by("budget", limits))
    yield family("counter", "budget_refusals", "Refused or cut off for want of room.", by("budget", refused))


def by(label: str, values: Mapping[str, float]) -> Iterator[tuple[Labels, float]]:
    """Rows of a family with one label."""
    return (({label: name}, value) for name, value in values.items())


def add_stats(left: CacheStats, right: CacheStats, *, keep_gauges: bool = False) -> CacheStats:
    """Totals of two caches. Of a cache that is gone only the running totals remain, so that no counter runs backwards."""
    right = right if keep_gauges else replace(right, bytes=0, entries=0)
    return CacheStats(**{name: value + getattr(right, name) for name, value in asdict(left).items()})
