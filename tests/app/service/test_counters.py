"""Every counter of the service just below its edge, and a clock after a hundred years: requests go on as before."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from prometheus_client import Counter, Histogram

from app.errors import DeadlineExceeded
from app.service.service import RankingService
from app.telemetry.metrics import Metrics
from tests.app.fakes import FakeEngine, Gate, rank, right, run, running
from tests.app.serving import good, served

EDGE = 2.0**53  # beyond it a float counts in steps of two
HUNDRED_YEARS = 100 * 365.25 * 86400


def raise_to_the_edge(metrics: Metrics) -> int:
    """Set every series to just below 2⁵³ and the counts of replies to 2⁶² together; how many series there are."""
    raised = 0
    for metric in vars(metrics).values():
        if not isinstance(metric, Counter | Histogram):
            continue
        for child in metric._metrics.values() if metric._labelnames else [metric]:
            for value in [child._value] if isinstance(metric, Counter) else [child._sum, *child._buckets]:
                value.set(EDGE - 2)
                raised += 1
    for counts, sums, _ in metrics.reply_probabilities._counts.values():
        counts[:], sums[:] = 2**62 // counts.shape[1], EDGE - 2
        raised += counts.size + sums.size
    return raised


def samples(service: RankingService) -> dict[tuple[str, Any], float]:
    found = [sample for metric in service.metrics.registry.collect() for sample in metric.samples]
    ours = [sample for sample in found if sample.name.startswith("ranker_")]
    counting = ("_total", "_sum", "_count", "_bucket")
    return {
        (sample.name, tuple(sample.labels.items())): sample.value for sample in ours if sample.name.endswith(counting)
    }


def test_no_series_falls_or_breaks_at_its_edge() -> None:
    with served() as (client, service):
        assert client.post("/rank", json=good()).status_code == 200
        assert raise_to_the_edge(service.metrics) > 200
        before = samples(service)
        assert [client.post("/rank", json=good()).status_code for _ in range(20)] == [200] * 20
        after = samples(service)
        shown = client.get("/metrics")
    assert shown.status_code == 200
    assert "NaN" not in shown.text
    scored = ("ranker_candidates_scored_total", ())
    assert after[scored] > before[scored]
    assert after[scored] > EDGE - 2
    assert [name for name, value in before.items() if after[name] < value] == []


def test_a_counter_of_32_bits_would_be_noticed() -> None:
    with served() as (client, service):
        client.post("/rank", json=good())
        [(names, (counts, sums, starts))] = service.metrics.reply_probabilities._counts.items()
        narrow = counts.astype(np.int32)
        narrow[:] = 2**31 - 1
        service.metrics.reply_probabilities._counts[names] = narrow, sums, starts  # type: ignore[assignment]
        before = samples(service)
        client.post("/rank", json=good())
        after = samples(service)
    assert [name for name, value in before.items() if after[name] < value]


@pytest.mark.parametrize("start", [0.0, HUNDRED_YEARS])
def test_a_clock_of_a_hundred_years_serves_and_keeps_deadlines(start: float) -> None:
    async def main() -> None:
        began = time.monotonic()
        gate = Gate()
        gate.opened.set()
        async with running(FakeEngine(before=gate), clock=lambda: start + time.monotonic() - began) as service:
            for user in range(1, 20):
                assert right(await rank(service, user), user)
            gate.opened.clear()
            with pytest.raises(DeadlineExceeded):
                await rank(service, 1, deadline=service.clock() + 0.05)
            gate.opened.set()
            async with asyncio.timeout(5):
                assert right(await rank(service, 2), 2)

    run(main())
