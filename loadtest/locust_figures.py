"""What locust cannot know by itself: goodput, cache hits, rejections, the server's stage times. For its web page, console and CSV."""

from __future__ import annotations

import csv
import io
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadtest.generate.samples import STAGES, server_timing

KEY = "ranking"
KEPT_TIMES = 20_000  # the newest of each stage and scenario


@dataclass(slots=True)
class Scenario:
    """Counts and the newest stage times in milliseconds of one scenario."""

    requests: int = 0
    good: int = 0
    rejected: int = 0
    hits: int = 0
    misses: int = 0
    latencies_ms: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    stages_ms: dict[str, deque[float]] = field(
        default_factory=lambda: {stage: deque[float](maxlen=KEPT_TIMES) for stage in STAGES}
    )


class Figures:
    """All scenarios. On a worker, `drain` hands over what is new; on the master, `merge` adds it up."""

    def __init__(self) -> None:
        self.scenarios: dict[str, Scenario] = defaultdict(Scenario)

    def record(self, name: str, status: int, latency_ms: float, headers: Any, slo_ms: float) -> None:
        """One reply to a request that should have been answered."""
        scenario = self.scenarios[name]
        scenario.requests += 1
        scenario.rejected += status == 429
        if status != 200:
            return
        scenario.good += latency_ms <= slo_ms
        scenario.latencies_ms.append(latency_ms)
        cache = headers.get("X-Context-Cache")
        scenario.hits += cache == "hit"
        scenario.misses += cache == "miss"
        for stage, milliseconds in server_timing(headers.get("Server-Timing") or "").items():
            if stage in scenario.stages_ms:
                scenario.stages_ms[stage].append(milliseconds)

    def drain(self) -> dict[str, Any]:
        """Everything so far as plain values, and start over."""
        drained = {
            name: {
                "counts": [one.requests, one.good, one.rejected, one.hits, one.misses],
                "latencies_ms": list(one.latencies_ms),
                "stages_ms": {stage: list(times) for stage, times in one.stages_ms.items()},
            }
            for name, one in self.scenarios.items()
        }
        self.scenarios.clear()
        return drained

    def merge(self, drained: dict[str, Any]) -> None:
        """Add what a worker drained."""
        for name, values in drained.items():
            one = self.scenarios[name]
            requests, good, rejected, hits, misses = values["counts"]
            one.requests += requests
            one.good += good
            one.rejected += rejected
            one.hits += hits
            one.misses += misses
            one.latencies_ms.extend(values["latencies_ms"])
            for stage, times in values["stages_ms"].items():
                one.stages_ms[stage].extend(times)

    def clear(self) -> None:
        """Forget the last test."""
        self.scenarios.clear()

    def rows(self, seconds: float) -> list[dict[str, Any]]:
        """A row a scenario, over a test that has run for `seconds`."""
        rows = []
        for name, one in sorted(self.scenarios.items()):
            row: dict[str, Any] = {
                "name": name,
                "requests": one.requests,
                "goodput_rps": round(one.good / max(seconds, 1e-9), 1),
                "good_percent": _percent(one.good, one.requests),
                "rejected_percent": _percent(one.rejected, one.requests),
                "cache_hit_percent": _percent(one.hits, one.hits + one.misses),
                "p50_ms": _percentile(one.latencies_ms, 50),
                "p99_ms": _percentile(one.latencies_ms, 99),
            }
            for stage in STAGES:
                row[f"{stage}_p50_ms"] = _percentile(one.stages_ms[stage], 50)
                row[f"{stage}_p99_ms"] = _percentile(one.stages_ms[stage], 99)
            rows.append(row)
        return rows


def columns() -> list[dict[str, Any]]:
    """The table's structure, as locust's web page wants it."""
    titles = {
        "name": "Scenario",
        "requests": "# Requests",
        "goodput_rps": "Goodput/s",
        "good_percent": "Good %",
        "rejected_percent": "429 %",
        "cache_hit_percent": "Cache hit %",
    }
    titles |= {f"{stage}_{name}_ms": f"{stage} {name} (ms)" for stage in STAGES for name in ("p50", "p99")}
    return [{"key": key, "title": title} for key, title in titles.items()]


def to_csv(rows: list[dict[str, Any]]) -> str:
    """The same rows for a spreadsheet; only a header without any."""
    names = list(rows[0]) if rows else ["name"]
    text = io.StringIO()
    writer = csv.DictWriter(text, names)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_text(rows: list[dict[str, Any]]) -> str:
    """The same rows for a terminal."""
    lines = [
        f"{'scenario':14s} {'requests':>9s} {'goodput/s':>10s} {'good %':>7s} {'429 %':>6s} {'hit %':>6s}  stages p50/p99 ms"
    ]
    for row in rows:
        stages = "  ".join(f"{stage} {row[f'{stage}_p50_ms']}/{row[f'{stage}_p99_ms']}" for stage in STAGES)
        lines.append(
            f"{row['name']:14s} {row['requests']:9d} {row['goodput_rps']:10.1f} {row['good_percent']:7.2f} "
            f"{row['rejected_percent']:6.2f} {row['cache_hit_percent']:6.2f}  {stages}"
        )
    return "\n".join(lines)


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 2) if whole else 0.0


def _percentile(values: deque[float], percentile: float) -> float:
    return round(float(np.percentile(values, percentile)), 2) if values else 0.0
