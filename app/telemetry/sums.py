"""Adds up the metrics of several processes: what each has counted since it last said so, in one exposition without a process label."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from app.telemetry.exposition import Distribution, Rows, added, write

GAUGES = (  # which may be added up
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_open_fds",
    "ranker_budget_used",
    "ranker_budget_limit",
)

Sample = tuple[str, dict[str, str], float]
Key = tuple[str, tuple[tuple[str, str], ...]]


class Family(msgspec.Struct, array_like=True):
    """Samples of one family: name, type and help as the client library has them. `rows` in the place of samples of a histogram."""

    name: str
    kind: str
    text: str
    samples: list[Sample]
    rows: Rows = {}


class Deltas:
    """What a registry has counted since the last time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._last: dict[Key, float] = {}
        self._last_rows: dict[str, Rows] = {}
        self._told: set[Key | tuple[str, tuple[str, ...]]] = set()

    def take(self) -> list[Family]:
        """Counters and histograms as the difference from the last call, gauges as they are; a new series even if it is 0."""
        families = (self._family(metric) for metric in self._registry.collect())
        return [family for family in families if family.samples or family.rows]

    def tell_all(self) -> None:
        """Make the next `take` name every series, for a new process that adds up."""
        self._told.clear()

    def _family(self, metric: Metric) -> Family:
        family = Family(metric.name, metric.type, metric.documentation, [])
        if isinstance(metric, Distribution):
            return msgspec.structs.replace(family, rows=self._rows(metric))
        if metric.type == "counter":
            for sample in metric.samples:
                key = _key(sample.name, sample.labels)
                delta = sample.value - self._last.get(key, 0.0)
                if delta or key not in self._told:
                    self._told.add(key)
                    self._last[key] = sample.value
                    family.samples.append((sample.name, sample.labels, delta))
        elif metric.name in GAUGES:
            family.samples = [(sample.name, sample.labels, sample.value) for sample in metric.samples]
        return family

    def _rows(self, metric: Distribution) -> Rows:
        last, found = self._last_rows.get(metric.name, {}), Rows()
        for values, (counts, total) in metric.rows.items():
            key = metric.name, values
            before, sum_before = last.get(values, ([0] * len(counts), 0.0))
            if counts != before or key not in self._told:
                self._told.add(key)
                found[values] = [one - other for one, other in zip(counts, before, strict=True)], total - sum_before
        self._last_rows[metric.name] = metric.rows
        return found


class Sums:
    """Adds what other processes report to this process's registry. Counts stay when the process that reported them is gone."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[Family, dict[Key, Sample]]] = {}
        self._rows: dict[str, Rows] = {}  # of histograms, whose buckets are the same in every process
        self._gauges: dict[Hashable, list[Family]] = {}  # by running process

    def add(self, process: Hashable, families: Iterable[Family]) -> None:
        """Add what `Deltas.take` returned in that process."""
        self._gauges[process] = []
        for family in families:
            if family.rows:
                self._rows[family.name] = added(self._rows.get(family.name, {}), family.rows)
            elif family.kind != "counter":
                self._gauges[process].append(family)
            else:
                _, samples = self._families.setdefault(family.name, (family, {}))
                _add(samples, family.samples)

    def forget(self, process: Hashable) -> None:
        """Drop the gauges of a process that is gone."""
        self._gauges.pop(process, None)

    def render(self, registry: CollectorRegistry) -> bytes:
        """The exposition of the registry and everything added, of type CONTENT_TYPE."""
        return write(self._summed(registry))

    def _summed(self, registry: CollectorRegistry) -> Iterator[Metric]:
        rest = {name: (family, list(samples.values())) for name, (family, samples) in self._families.items()}
        for family in (family for families in self._gauges.values() for family in families):
            rest.setdefault(family.name, (family, []))[1].extend(family.samples)
        for metric in registry.collect():
            if isinstance(metric, Distribution):
                yield metric.plus(self._rows.get(metric.name, {}))
                continue
            _, samples = rest.pop(metric.name, (None, []))
            own = [(sample.name, sample.labels, sample.value) for sample in metric.samples]
            yield _metric(metric.name, metric.documentation, metric.type, own + samples)
        for name, (family, samples) in rest.items():
            yield _metric(name, family.text, family.kind, samples)


def _metric(name: str, text: str, kind: str, samples: Iterable[Sample]) -> Metric:
    metric, summed = Metric(name, text, kind), dict[Key, Sample]()
    _add(summed, samples)
    for sample in summed.values():
        metric.add_sample(*sample)
    return metric


def _add(sums: dict[Key, Sample], samples: Iterable[Sample]) -> None:
    for name, labels, value in samples:
        key = _key(name, labels)
        before = sums.get(key)
        sums[key] = (name, labels, value if before is None else before[2] + value)


def _key(name: str, labels: dict[str, str]) -> Key:
    return name, tuple(sorted(labels.items()))
