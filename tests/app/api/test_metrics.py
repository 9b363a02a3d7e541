"""The series of the contract are there under their names, and what is read at scrape time is right."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from app.telemetry import metrics
from app.telemetry.metrics import MOST_PENDING_ROWS, BatchReport, Metrics, ReplyProbabilities
from tests.support import rankers

pytestmark = pytest.mark.one_process("tests/app/processes has the metrics of several processes")

CONTRACT = [
    "http_requests_total", "http_request_duration_seconds_bucket", "stage_duration_seconds_bucket",
    "batch_requests_bucket", "batch_candidates_bucket", "batch_padding_ratio_bucket", "queue_requests",
    "queue_candidates", "rejected_total", "cancelled_total", "candidates_scored_total", "history_truncated_total",
    "context_cache_lookups_total", "context_cache_bytes", "context_cache_evictions_total", "model_info", "ready",
    "last_forward_timestamp_seconds", "stalled_seconds", "reloads_total", "forward_failures_total", "log_lines_dropped_total",
    "reply_probability_bucket", "search_requests_bucket", "user_vectors_total", "feed_entries_total", "context_handles_total",
]  # fmt: skip


def scraped() -> str:
    async def main() -> str:
        async with rankers.running() as ranker:
            ranker.metrics.http_requests.labels("POST", "/rank", "200").inc()
            ranker.metrics.http_seconds.labels("POST", "/rank", "false").observe(0.001)
            ranker.metrics.reply_probabilities.record(("favorite",), np.ones((2, 1), np.float32))
            await rankers.rank(ranker, 1, 5)
            await rankers.until(lambda: rankers.figure(ranker, "ranker_candidates_scored_total") == 5)
            return ranker.metrics.render().decode()

    return asyncio.run(main())


def test_every_series_of_the_contract_is_exposed() -> None:
    text = scraped()
    missing = [name for name in CONTRACT if f"\nranker_{name}" not in text]
    assert missing == []
    for series in (
        'ranker_rejected_total{reason="queue_full"} 0.0',
        'ranker_rejected_total{reason="too_large"} 0.0',
        'ranker_reloads_total{result="failure"} 0.0',
        'ranker_log_lines_dropped_total{reason="reader_slow"} 0.0',
        'ranker_log_lines_dropped_total{reason="not_written"} 0.0',
        'ranker_context_cache_lookups_total{result="miss"} 1.0',
        "ranker_candidates_scored_total 5.0",
        "ranker_ready 1.0",
        "ranker_queue_requests 0.0",
        'ranker_stage_duration_seconds_count{stage="forward"} 1.0',
    ):
        assert series in text, series
    assert 'ranker_model_info{checkpoint="' in text
    assert "ranker_device_memory_bytes" not in text  # there is no device
    assert "_created" not in text


def test_the_buckets_are_those_of_the_contract() -> None:
    expected = "0.0005 0.001 0.002 0.003 0.005 0.0075 0.01 0.015 0.02 0.03 0.05 0.075 0.1 0.15 0.25 0.5 1 2.5"
    assert " ".join(f"{bound:g}" for bound in metrics.LATENCY_SECONDS) == expected
    counted = Metrics()
    counted.record_batch(BatchReport([3, 5], 10, 0.0001, 0.004, False))
    value = counted.registry.get_sample_value
    assert value("ranker_batch_candidates_bucket", {"le": "8.0"}) == 1
    assert value("ranker_batch_candidates_bucket", {"le": "4.0"}) == 0
    assert value("ranker_batch_padding_ratio_sum") == pytest.approx(0.2)  # 2 of 10 slots
    assert value("ranker_stage_duration_seconds_sum", {"stage": "forward"}) == 0.004


def samples(*replies: tuple[tuple[str, ...], list[list[float]]]) -> dict[tuple[str, str], float]:
    registry, counted = CollectorRegistry(), ReplyProbabilities()
    registry.register(counted)
    for names, values in replies:
        counted.record(names, np.array(values, np.float32))
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            found[sample.labels["action"], sample.labels.get("le", sample.name.rpartition("_")[2])] = sample.value
    return found


def test_the_mean_over_candidates_is_counted_once_a_reply() -> None:
    found = samples((("like", "report"), [[0.2, 0.0], [0.6, 0.0]]))
    assert (found["like", "0.3"], found["like", "0.5"], found["like", "+Inf"]) == (0, 1, 1)
    assert found["report", "0.001"] == 1
    assert np.isclose(found["like", "sum"], 0.4)


def test_a_bucket_holds_its_upper_bound_and_the_last_the_rest() -> None:
    found = samples((("a",), [[0.5]]), (("a",), [[np.nextafter(np.float32(0.5), np.float32(1))]]), (("a",), [[0.99]]))
    assert [found["a", bound] for bound in ("0.3", "0.5", "0.7", "0.9", "+Inf")] == [0, 1, 2, 2, 3]


def test_a_name_that_two_checkpoints_share_is_one_series() -> None:
    found = samples((("a", "b"), [[0.1, 0.2]]), (("b", "c"), [[0.4, 0.9]]))
    assert {action: found[action, "count"] for action in "abc"} == {"a": 1, "b": 2, "c": 1}


@pytest.mark.parametrize("count", [1, MOST_PENDING_ROWS - 1, MOST_PENDING_ROWS, 3 * MOST_PENDING_ROWS + 1])
def test_no_reply_is_lost_however_many_there_are(count: int) -> None:
    found = samples(*[(("a", "b"), [[0.25, 0.75]])] * count)
    assert (found["a", "count"], found["a", "sum"], found["b", "0.7"]) == (count, pytest.approx(0.25 * count), 0)
