"""What a scrape says: families made of what the code has counted and of what the service keeps anyway, and how they are written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Literal, NamedTuple, Protocol, cast

from prometheus_client import generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from app.budgets import Budget
from model.engine import CacheStats
from model.retrieval.inputs import Mark

SCRAPE_SECONDS = 0.05  # from one scrape to the next
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
CHECK_TEXT = (
    "The sequence × 10⁹ plus nine digits of the digest: what differs between replicas of one sequence has diverged."
)
Labels = Mapping[str, str]
Rows = dict[tuple[str, ...], tuple[list[int], float]]
"""Label values → how many values fell into each bucket, and their sum."""


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
    engine_steps_down: int | None
    searches_waiting: int
    corpus: Corpus | None
    milestone: Mark | None
    feed_lag_seconds: float | None


class Corpus(Protocol):
    """What a scrape reports of a corpus: as `interface.Changed`."""

    @property
    def posts(self) -> int: ...
    @property
    def changes(self) -> int: ...
    @property
    def mark(self) -> Mark: ...


class Source(Protocol):
    """Where a scrape reads the figures that the service keeps anyway."""

    def snapshot(self) -> Snapshot: ...


class Shape(NamedTuple):
    """What the histograms of one name have in common. `edges`: upper bounds, as the exposition writes them."""

    name: str
    text: str
    labels: tuple[str, ...]
    edges: tuple[str, ...]


class Distribution(Metric):
    """Histograms of one name, for a scrape. Samples are made only when `samples` is read: writing needs none."""

    def __init__(self, shape: Shape, rows: Rows) -> None:
        self.name, self.documentation = shape.name, shape.text
        self.type, self.unit = "histogram", ""
        self.shape = shape
        self.rows = rows

    def plus(self, others: Rows) -> Distribution:
        """These histograms plus those of other processes."""
        return Distribution(self.shape, added(self.rows, others))

    @property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        """As samples of the client library."""
        family = HistogramMetricFamily(self.name, self.documentation, labels=self.shape.labels)
        for values, (counts, total) in self.rows.items():
            family.add_metric(values, list(zip(self.shape.edges, accumulate(counts), strict=True)), total)
        return family.samples

    def write(self) -> str:
        """As lines of the exposition."""
        lines = [f"# HELP {self.name} {self.documentation}\n# TYPE {self.name} histogram\n"]
        for values, (counts, total) in self.rows.items():
            below = list(accumulate(counts))
            lines.append(_lines(self.shape, values) % (*below, below[-1], total))
        return "".join(lines)


@cache
def _lines(shape: Shape, values: tuple[str, ...]) -> str:
    """A format string for the lines of one series, which takes the running counts, the total count and the sum."""
    named = sorted(f'{name}="{_escaped(value)}"' for name, value in zip(shape.labels, values, strict=True))
    buckets = [",".join(sorted([f'le="{edge}"', *named])) for edge in shape.edges]
    labels = f"{{{','.join(named)}}}" if named else ""
    lines = [f"{shape.name}_bucket{{{bucket}}} %d.0\n" for bucket in buckets]
    return "".join([*lines, f"{shape.name}_count{labels} %d.0\n", f"{shape.name}_sum{labels} %r\n"])


def _escaped(label: str) -> str:
    """A label value escaped for the exposition and for the format string."""
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"").replace("%", "%%")


def added(left: Rows, right: Rows) -> Rows:
    """The sum of both, series by series."""
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


class Scrapes:
    """Makes one scrape at a time, `SCRAPE_SECONDS` apart. Callers that ask before it begins share it, so none gets an older one."""

    def __init__(self, make: Callable[[], Awaitable[bytes]]) -> None:
        self._make = make
        self._next: asyncio.Task[bytes] | None = None
        self._made = asyncio.Lock()
        self._free_at = 0.0  # of the monotonic clock

    async def get(self) -> bytes:
        """The next scrape. Raises what `make` raises."""
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
        """The families with their present values."""
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
    """The sequence modulo nine million, then nine digits from the digest: an integer that fits a float64."""
    return (mark.sequence % 9_000_000) * 10**9 + int(mark.digest[:12], 16) % 10**9


def figures(now: Snapshot) -> Iterator[Metric]:
    """The families of a snapshot."""
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


def budgets_of(budgets: Mapping[str, Budget]) -> Iterator[Metric]:
    """The metric families of budgets, labelled by budget name."""
    used, limits, refused = ({n: getattr(b, part) for n, b in budgets.items()} for part in ("used", "limit", "refused"))
    yield family("gauge", "budget_used", "How much all callers take together now.", by("budget", used))
    yield family("gauge", "budget_limit", "The most they may take.", by("budget", limits))
    yield family("counter", "budget_refusals", "Refused or cut off: the budget was full.", by("budget", refused))


def by(label: str, values: Mapping[str, float]) -> Iterator[tuple[Labels, float]]:
    """Rows of a family with one label."""
    return (({label: name}, value) for name, value in values.items())


def add_stats(left: CacheStats, right: CacheStats, *, keep_gauges: bool = False) -> CacheStats:
    """Totals of two caches. `right` is a cache that is gone unless `keep_gauges`: only its counters remain, so that none runs backwards."""
    right = right if keep_gauges else replace(right, bytes=0, entries=0)
    return CacheStats(**{name: value + getattr(right, name) for name, value in asdict(left).items()})
