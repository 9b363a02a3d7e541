"""Every counter of the service just below its edge, and a clock after a hundred years: requests go on as before."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from prometheus_client import Counter

from app.errors import DeadlineExceeded
from app.service import watchdog
from app.service.service import RankingService
from app.telemetry.metrics import Histograms, Metrics
from tests.app.fakes import FakeEngine, Gate, rank, right, running
from tests.app.serving import good, served

EDGE = 2.0**53  # beyond it a float counts in steps of two
HUNDRED_YEARS = 100 * 365.25 * 86400


def raise_to_the_edge(metrics: Metrics) -> int:
    """Set every series to just below 2⁵³ the counts of a histogram to 2⁶² together; how many series there are."""
    raised = 0
    for metric in vars(metrics).values():
        if isinstance(metric, Counter):
            for child in metric._metrics.values() if metric._labelnames else [metric]:
                child._value.set(EDGE - 2)
                raised += 1
    for name in ("http_seconds", "stage_seconds", "batch_requests", "batch_candidates", "batch_padding_ratio"):
        raised += raise_histograms(getattr(metrics, name))
    metrics.reply_probabilities._count()
    return raised + raise_histograms(metrics.reply_probabilities._histograms)


def raise_histograms(histograms: Histograms) -> int:
    for series in histograms._series.values():
        series.read()
        series._counts[:], series._sum = 2**62 // len(series._counts), EDGE - 2
    return sum(len(series._counts) for series in histograms._series.values())


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
        raise_to_the_edge(service.metrics)
        before = samples(service)
        for series in service.metrics.reply_probabilities._histograms._series.values():
            series._counts = series._counts.astype(np.int32)
        after = samples(service)
    assert [name for name, value in before.items() if after[name] < value]


@pytest.mark.anyio
@pytest.mark.parametrize("start", [0.0, HUNDRED_YEARS])
async def test_a_clock_of_a_hundred_years_serves_and_keeps_deadlines(start: float) -> None:
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


@pytest.mark.anyio
async def test_the_load_of_a_service_at_work_is_looked_at_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "WATCHDOG_SECONDS", 0.01)
    async with running(FakeEngine(before=lambda items: time.sleep(0.02))) as service:
        before = service.load.value
        for user in range(1, 20):
            await rank(service, user)
        assert service.load.value > before
        assert service.metrics.busy_seconds > 0.2
