"""The series of the contract are there under their names, and what is read at scrape time is right."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

import numpy as np
import pytest
from prometheus_client import generate_latest

from app.engine.worker import BatchReport
from app.telemetry.exposition import SCRAPE_SECONDS, Scrapes, add_stats
from app.telemetry.metrics import LATENCY_SECONDS, Metrics
from app.telemetry.sink import Sink
from model.engine import CacheStats
from tests.app.fakes import FakeEngine, rank, run, running

pytestmark = pytest.mark.anyio

CONTRACT = [
    "http_requests_total", "http_request_duration_seconds_bucket", "stage_duration_seconds_bucket",
    "batch_requests_bucket", "batch_candidates_bucket", "batch_padding_ratio_bucket", "queue_requests",
    "queue_candidates", "rejected_total", "cancelled_total", "candidates_scored_total", "history_truncated_total",
    "context_cache_lookups_total", "context_cache_bytes", "context_cache_evictions_total", "model_info", "ready",
    "last_forward_timestamp_seconds", "reloads_total",
]  # fmt: skip


def scraped() -> str:
    async def main() -> str:
        async with running(FakeEngine()) as service:
            service.metrics.http_requests.labels("POST", "/rank", "200").inc()
            service.metrics.http_seconds.labels("POST", "/rank").observe(0.001)
            await rank(service, 1, 5)
            return service.metrics.render().decode()

    return run(main())


def test_every_series_of_the_contract_is_exposed() -> None:
    text = scraped()
    missing = [name for name in CONTRACT if f"\nranker_{name}" not in text]
    assert missing == []
    for series in (
        'ranker_rejected_total{reason="queue_full"} 0.0',
        'ranker_rejected_total{reason="too_large"} 0.0',
        'ranker_reloads_total{result="failure"} 0.0',
        'ranker_context_cache_lookups_total{result="miss"} 1.0',
        "ranker_candidates_scored_total 5.0",
        "ranker_ready 1.0",
        "ranker_queue_requests 0.0",
        'ranker_stage_duration_seconds_count{stage="forward"} 1.0',
    ):
        assert series in text, series
    assert 'ranker_model_info{checkpoint="' in text
    assert "ranker_device_memory_bytes" not in text  # there is no device


def test_dropped_log_lines_are_exposed_by_reason() -> None:
    sink, metrics, other = Sink(os.open(os.devnull, os.O_WRONLY)), Metrics(), Metrics()
    metrics.watch_log(sink)
    sink.dropped["reader_slow"] = 7
    text = metrics.render().decode()
    assert 'ranker_log_lines_dropped_total{reason="reader_slow"} 7.0' in text
    assert 'ranker_log_lines_dropped_total{reason="write_failed"} 0.0' in text  # there from the start, for the alert
    assert b"ranker_log_lines_dropped" not in other.render()  # registries are apart


def test_the_buckets_are_those_of_the_contract() -> None:
    expected = "0.0005 0.001 0.002 0.003 0.005 0.0075 0.01 0.015 0.02 0.03 0.05 0.075 0.1 0.15 0.25 0.5 1 2.5"
    assert " ".join(f"{bound:g}" for bound in LATENCY_SECONDS) == expected
    metrics = Metrics()
    metrics.record_batch(BatchReport([3, 5], 10, [0.001, 0.002], 0.0001, 0.004, False))
    value = metrics.registry.get_sample_value
    assert value("ranker_batch_candidates_bucket", {"le": "8.0"}) == 1
    assert value("ranker_batch_candidates_bucket", {"le": "4.0"}) == 0
    assert value("ranker_batch_padding_ratio_sum") == pytest.approx(0.2)  # 2 of 10 slots
    assert value("ranker_stage_duration_seconds_count", {"stage": "queue"}) == 2


def full() -> Metrics:
    """As many series as a month of every path leaves."""
    metrics, actions = Metrics(), tuple(f"action_{number}" for number in range(22))
    metrics.reply_probabilities.record(actions, np.random.default_rng(1).random((5, 22), np.float32))
    for route in range(14):
        for method in ("GET", "POST"):
            metrics.http_seconds.labels(method, f'/{route}%"\\').observe(0.01)
            metrics.http_requests.labels(method, str(route), "200").inc()
    return metrics


def test_the_lines_of_histograms_are_those_of_the_client_library() -> None:
    metrics = full()

    def lines(text: bytes) -> list[str]:
        return sorted(line for line in text.decode().splitlines() if "ranker_" in line)

    assert lines(metrics.render()) == lines(generate_latest(metrics.registry))


def test_a_scrape_costs_the_loop_little() -> None:
    """As a share of what the client library takes, so that no machine is too slow for it: a seventh, 1.4 ms where that takes 10."""
    metrics = full()

    def seconds(render: Callable[[], object]) -> float:
        began = time.thread_time()
        render()
        return time.thread_time() - began

    took = [(seconds(metrics.render), seconds(lambda: generate_latest(metrics.registry))) for _ in range(9)]
    ours, theirs = (min(each) for each in zip(*took, strict=True))
    assert ours < 0.3 * theirs


async def test_one_scrape_at_a_time_which_those_who_asked_before_it_share() -> None:
    begun, running = 0, 0

    async def make() -> bytes:
        nonlocal begun, running
        begun, running = begun + 1, running + 1
        assert running == 1
        number = b"%d" % begun
        await asyncio.sleep(0.02)
        running -= 1
        if begun == 3:
            raise OSError("planted")
        return number

    scrapes = Scrapes(make)
    assert await scrapes.get() == b"1"
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await asyncio.gather(*(scrapes.get() for _ in range(50))) == [b"2"] * 50
    assert loop.time() - began >= 0.8 * SCRAPE_SECONDS
    third = asyncio.ensure_future(scrapes.get())
    while begun < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    fourth = asyncio.ensure_future(scrapes.get())  # what the third holds may be older than this question
    with pytest.raises(OSError, match="planted"):
        await third
    assert await fourth == b"4"
    gone = asyncio.ensure_future(scrapes.get())
    stays = asyncio.ensure_future(scrapes.get())
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays == b"5"


def test_totals_of_a_cache_that_is_gone_stay_and_its_bytes_do_not() -> None:
    old, new = CacheStats(100, 2, 5, 1, 7, 3), CacheStats(50, 1, 1, 0, 1, 0)
    gone = add_stats(CacheStats(), old)
    assert gone == CacheStats(0, 0, 5, 1, 7, 3)
    assert add_stats(gone, new, keep_gauges=True) == CacheStats(50, 1, 6, 1, 8, 3)
