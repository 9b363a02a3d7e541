"""Figures from samples: percentiles, rates over time, and goodput under an SLO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.generate.http_client import FAILURES
from loadtest.generate.samples import STAGES, Samples

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Slo:
    """The objective: a `share` of all offered requests gets 200 within `latency_ms` of the due time."""

    latency_ms: float = 50.0
    share: float = 0.99

    def good(self, samples: Samples) -> NDArray[np.bool_]:
        """bool `[n]`: which requests count as goodput."""
        good: NDArray[np.bool_] = (samples.status == 200) & (1e3 * samples.latency_seconds <= self.latency_ms)
        return good


def summarise(samples: Samples, seconds: float, slo: Slo) -> dict[str, Any]:
    """All figures of one run whose schedule lasted `seconds`, as plain JSON values. Raises ValueError if there are no samples.

    Rates are per second of the schedule. Latencies are in milliseconds from the due time, of 200s only. `good_share` is the share
    of all offered requests, so rejections, errors and timeouts count against it like slow replies. `failures` has all that are no 200s.
    """
    if not len(samples):
        raise ValueError("a run without a request has no figures")
    ok, good = samples[samples.status == 200], slo.good(samples)
    known_cache = ok.cache[ok.cache > 0]
    statuses = {str(code): count for code, count in _counted(samples.status) if code}
    failures: dict[str, int] = {FAILURES[code]: count for code, count in _counted(samples.failure[samples.status == 0])}
    failures |= {f"status {status}": count for status, count in statuses.items() if status != "200"}
    return {
        "requests": len(samples),
        "seconds": seconds,
        "offered_rps": len(samples) / seconds,
        "answered_rps": len(ok) / seconds,
        "goodput_rps": float(good.sum()) / seconds,
        "good_share": float(good.mean()),
        "holds_slo": bool(good.mean() >= slo.share),
        "latency_ms": percentiles_ms(ok.latency_seconds),
        "service_ms": percentiles_ms(ok.service_seconds),
        "stages_ms": {stage: _percentiles(ok.stages_ms[:, column]) for column, stage in enumerate(STAGES)},
        "statuses": statuses,
        "failures": failures,
        "cache_hit_share": float((known_cache == 1).mean()) if len(known_cache) else None,
        "candidates_rps": float(ok.candidates.sum()) / seconds,
    }


def percentiles_ms(seconds: Floats) -> dict[str, float]:
    """`{"p50": …, "p99.9": …, "max": …}` in milliseconds; empty without values."""
    return _percentiles(1e3 * seconds)


def in_words(latency_ms: Mapping[str, float]) -> str:
    """The median and `p99` of what `percentiles_ms` gives, as a line of progress has them."""
    if not latency_ms:
        return "p50       – ms  p99       – ms"
    return f"p50 {latency_ms['p50']:7.1f} ms  p99 {latency_ms['p99']:7.1f} ms"


def over_time(samples: Samples, bin_seconds: float, slo: Slo) -> dict[str, Floats]:
    """Columns by time bin of the due times: `seconds`, `p50`, `p95`, `p99` (ms, NaN if empty), `offered`, `answered`, `good` per second."""
    bins = (samples.due // bin_seconds).astype(np.int64)
    count = int(bins.max()) + 1
    ok, good = samples.status == 200, slo.good(samples)
    latency_ms = 1e3 * samples.latency_seconds
    parts = [latency_ms[ok & (bins == index)] for index in range(count)]
    quantiles = np.array([np.percentile(part, [50, 95, 99]) if len(part) else [np.nan] * 3 for part in parts])
    columns = {"seconds": bin_seconds * (np.arange(count, dtype=np.float64) + 0.5)}
    columns |= dict(zip(("p50", "p95", "p99"), quantiles.T, strict=True))
    for name, mask in (("offered", slice(None)), ("answered", ok), ("good", good)):
        columns[name] = np.bincount(bins[mask], minlength=count) / bin_seconds
    return columns


def _counted(values: NDArray[Any]) -> list[tuple[int, int]]:
    distinct, counts = np.unique(values, return_counts=True)
    return list(zip(distinct.tolist(), counts.tolist(), strict=True))


def _percentiles(values: NDArray[Any]) -> dict[str, float]:
    measured = values[~np.isnan(values)].astype(np.float64)
    if not len(measured):
        return {}
    names = [f"p{percentile:g}" for percentile in PERCENTILES]
    figures = dict(zip(names, np.percentile(measured, PERCENTILES).tolist(), strict=True))
    return figures | {"mean": float(measured.mean()), "max": float(measured.max())}
