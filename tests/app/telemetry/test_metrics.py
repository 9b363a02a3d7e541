"""The series of the contract are there under their names, and what is read at scrape time is right."""

from __future__ import annotations

import os

import pytest

from app.engine.worker import BatchReport
from app.telemetry.metrics import LATENCY_SECONDS, Metrics, add_stats
from app.telemetry.sink import Sink
from model.engine import CacheStats
from tests.app.fakes import FakeEngine, rank, run, running

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
    sink = Sink(os.open(os.devnull, os.O_WRONLY))
    metrics = Metrics()
    metrics.watch_log(sink)
    sink.dropped["reader_slow"] = 7
    text = metrics.render().decode()
    assert 'ranker_log_lines_dropped_total{reason="reader_slow"} 7.0' in text
    assert 'ranker_log_lines_dropped_total{reason="write_failed"} 0.0' in text  # there from the start, for the alert


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


def test_registries_are_apart() -> None:
    first, second = Metrics(), Metrics()
    first.candidates_scored.inc(7)
    assert second.registry.get_sample_value("ranker_candidates_scored_total") == 0


def test_totals_of_a_cache_that_is_gone_stay_and_its_bytes_do_not() -> None:
    old, new = CacheStats(100, 2, 5, 1, 7, 3), CacheStats(50, 1, 1, 0, 1, 0)
    gone = add_stats(CacheStats(), old)
    assert gone == CacheStats(0, 0, 5, 1, 7, 3)
    assert add_stats(gone, new, keep_gauges=True) == CacheStats(50, 1, 6, 1, 8, 3)
