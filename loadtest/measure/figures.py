"""Figures from samples: percentiles, rates over time, and goodput under an SLO. Neither files nor plots."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.generate.http_client import FAILURES
from loadtest.generate.samples import STAGES, UNSENT, Samples

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Slo:
    """`share` of all offered requests are answered 200 within `latency_ms` of their due time."""

    latency_ms: float = 50.0
    share: float = 0.99

    def good(self, samples: Samples) -> NDArray[np.bool_]:
        """bool `[n]`: which requests count as goodput."""
        good: NDArray[np.bool_] = (samples.status == 200) & (1e3 * samples.latency_seconds <= self.latency_ms)
        return good


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures. Rates are per second of the measured window; latencies in milliseconds from the due time, of 200s only.

    `good_share` is over everything offered, so a rejection, an error or a timeout counts against it as a slow reply does.
    """

    requests: int
    seconds: float
    offered_rps: float
    answered_rps: float
    goodput_rps: float
    good_share: float
    holds_slo: bool
    latency_ms: dict[str, float]
    service_ms: dict[str, float]
    stages_ms: dict[str, dict[str, float]]
    statuses: dict[str, int]
    failures: dict[str, int]
    unsent: int
    rejected_p99_ms: float | None
    rejected_with_retry_after: int
    cache_hit_share: float | None
    candidates_rps: float
    reply_bytes_mean: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def summarise(samples: Samples, seconds: float, slo: Slo) -> Summary:
    """All figures of one run whose schedule lasted `seconds`. Raises ValueError without a sample."""
    if not len(samples):
        raise ValueError("a run without a request has no figures")
    ok = samples.where(samples.status == 200)
    rejected = samples.where(samples.status == 429)
    good = slo.good(samples)
    known_cache = ok.cache[ok.cache > 0]
    codes, counts = np.unique(samples.status, return_counts=True)
    failed, failed_counts = np.unique(samples.failure[samples.status == 0], return_counts=True)
    return Summary(
        requests=len(samples),
        seconds=seconds,
        offered_rps=len(samples) / seconds,
        answered_rps=len(ok) / seconds,
        goodput_rps=float(good.sum()) / seconds,
        good_share=float(good.mean()),
        holds_slo=bool(good.mean() >= slo.share),
        latency_ms=percentiles_ms(ok.latency_seconds),
        service_ms=percentiles_ms(ok.service_seconds),
        stages_ms={stage: _percentiles(_known(ok.stages_ms[:, column])) for column, stage in enumerate(STAGES)},
        statuses={str(code): int(count) for code, count in zip(codes, counts, strict=True) if code},
        failures={FAILURES[code]: int(count) for code, count in zip(failed, failed_counts, strict=True)},
        unsent=int((samples.sent == UNSENT).sum()),
        rejected_p99_ms=float(1e3 * np.percentile(rejected.service_seconds, 99)) if len(rejected) else None,
        rejected_with_retry_after=int(rejected.retry_after.sum()),
        cache_hit_share=float((known_cache == 1).mean()) if len(known_cache) else None,
        candidates_rps=float(ok.candidates.sum()) / seconds,
        reply_bytes_mean=float(ok.reply_bytes.mean()) if len(ok) else 0.0,
    )


def percentiles_ms(seconds: Floats) -> dict[str, float]:
    """`{"p50": …, "p99.9": …, "max": …}` in milliseconds; empty without values."""
    return _percentiles(1e3 * seconds)


def over_time(samples: Samples, bin_seconds: float, slo: Slo) -> dict[str, Floats]:
    """Columns by time bin of the due times: `seconds`, `p50`, `p95`, `p99` (NaN where empty), `offered`, `answered`, `good` per second."""
    bins = (samples.due // bin_seconds).astype(np.int64)
    count = int(bins.max()) + 1
    ok, good = samples.status == 200, slo.good(samples)
    columns: dict[str, Floats] = {"seconds": bin_seconds * (np.arange(count, dtype=np.float64) + 0.5)}
    for name in ("p50", "p95", "p99"):
        columns[name] = np.full(count, np.nan)
    for index in range(count):
        latencies = samples.latency_seconds[ok & (bins == index)]
        if len(latencies):
            values = 1e3 * np.percentile(latencies, [50, 95, 99])
            columns["p50"][index], columns["p95"][index], columns["p99"][index] = values
    for name, mask in (("offered", np.ones(len(samples), dtype=bool)), ("answered", ok), ("good", good)):
        columns[name] = np.bincount(bins[mask], minlength=count).astype(np.float64) / bin_seconds
    return columns


def _known(values: NDArray[np.float32]) -> Floats:
    return values[~np.isnan(values)].astype(np.float64)


def _percentiles(values: Floats) -> dict[str, float]:
    if not len(values):
        return {}
    names = [f"p{percentile:g}" for percentile in PERCENTILES]
    figures = dict(zip(names, np.percentile(values, PERCENTILES).tolist(), strict=True))
    return figures | {"mean": float(values.mean()), "max": float(values.max())}
