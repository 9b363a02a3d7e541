"""Budgets: what is taken and given back, and the sum that the operators' page states."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from pydantic import SecretStr
from torch.profiler import ProfilerActivity, profile

from app import budgets
from app.budgets import CALL_AHEAD_BYTES, TOPIC_FILTERS, Budget, attention_bytes, most_bytes, rest_seconds
from app.settings import Admin, Batching, Budgets, Cache, Grpc, Limits, Queue, Settings, Shadow
from loadtest.machine import ROOT
from model.dense import candidate_attention
from model.retrieval.corpus import KEPT_TOPICS
from tests.app.bounds import bounded
from tests.model.builders import random_config, random_ranker, random_request
from weights.checkpoint import load_manifest

CONFIG = load_manifest(ROOT / "weights/demo").config
TOWERS = load_manifest(ROOT / "weights/demo-towers").config
ALL = Settings(
    grpc=Grpc(port=0),
    admin=Admin(port=0, token_sha256=SecretStr("0" * 64)),
    shadow=Shadow(checkpoint=ROOT / "weights/demo"),
)
PAGE = (ROOT / "docs/operations.md").read_text()
MIB = 2**20
ONE_HEAD = {"query_heads": 1, "kv_heads": 1, "head_width": 8, "layers": 1}


def test_a_budget_takes_no_more_than_its_limit() -> None:
    budget = Budget(10)
    assert [budget.take(6), budget.take(5), budget.take(4), budget.take(1)] == [True, False, True, False]
    budget.give(4)
    assert (budget.used, budget.refused) == (6, 2)
    assert budget.take(4)


def test_the_page_states_the_sum_and_its_parts() -> None:
    most = most_bytes(ALL, CONFIG, TOWERS, 10_000_000)
    stated = {name: int(mib) for name, mib in re.findall(r"^\| `(\w+)` \| (\d+) MiB \|", PAGE, re.M)}
    assert stated == {name: round(count / MIB) for name, count in most.items()}
    assert most["total"] == sum(most.values()) - most["total"]


def test_the_page_states_what_a_client_may_send_of_a_call() -> None:
    assert f"; {CALL_AHEAD_BYTES / 1024:g} KiB of a quarter as many on every connection" in PAGE


@pytest.mark.parametrize(
    "changed",
    [
        {"budgets": Budgets(connections=4096)}, {"cache": Cache(bytes=2**30)}, {"queue": Queue(max_requests=10**5)},
        {"batching": Batching(max_requests=128)}, {"limits": Limits(max_retrieved=4000)},
        *({"limits": bounded(Limits(), **{name: 2**30})} for name in ("buffered_bytes", "batch_candidates", "max_values")),
        {"queue": bounded(Queue(), max_context_tokens=2**20)}, {"limits": bounded(Limits(), max_batch_candidates=2**16)},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_may_grow_grows_the_sum(changed: dict[str, object]) -> None:
    more = most_bytes(ALL.model_copy(update=changed), CONFIG, TOWERS, 1000)
    assert more["total"] > most_bytes(ALL, CONFIG, TOWERS, 1000)["total"]


@pytest.mark.parametrize(
    "name",
    ["MAX_HEADER_BYTES", "EXCLUDED_IDS", "CHANGES", "SCAN_REQUESTS", "USER_VECTOR_BYTES", "EXPLANATIONS", "MAX_EXPLAINED",
     "MAX_EXPLAINED_EVENTS", "SHADOW_WAITING", "CALL_CONNECTIONS", "BUFFER_BYTES"],
)  # fmt: skip
def test_each_fixed_bound_is_in_the_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = most_bytes(ALL, CONFIG, TOWERS, 1000)["total"]
    monkeypatch.setattr(budgets, name, getattr(budgets, name) // 64)
    assert most_bytes(ALL, CONFIG, TOWERS, 1000)["total"] < before


def test_topics_that_a_segment_remembers_are_in_the_sum() -> None:
    assert TOPIC_FILTERS == KEPT_TOPICS
    one_more = (
        most_bytes(ALL, CONFIG, TOWERS, 1001 * 8)["retrieval"] - most_bytes(ALL, CONFIG, TOWERS, 1000 * 8)["retrieval"]
    )
    assert one_more >= TOPIC_FILTERS + 16


def test_what_does_not_serve_takes_nothing() -> None:
    parts = ("retrieval", "changes", "grpc", "second")
    assert [most_bytes(Settings(), CONFIG)[part] for part in parts] == [0, 0, 0, 0]
    assert most_bytes(ALL, CONFIG, TOWERS, 2000)["retrieval"] > most_bytes(ALL, CONFIG, TOWERS, 1000)["retrieval"]


def test_only_a_caller_that_held_the_loop_rests() -> None:
    assert rest_seconds(0.001) == 0
    assert rest_seconds(0.010) == pytest.approx(0.040)


@pytest.mark.parametrize(
    ("candidates", "geometry", "slack"),
    [
        (32, {"history_length": 500}, 1.5),  # attention weights are what is large
        (1, {"history_length": 300, "width": 1024, "widening": 1.0} | ONE_HEAD, 1.1),
        (1, {"history_length": 30, "width": 512, "widening": 8.0} | ONE_HEAD, 1.04),
        (1, {"history_length": 5, "width": 16, "widening": 1.0} | ONE_HEAD | {"head_width": 128}, 1.1),
    ],
    ids=["weights", "embeddings", "feed-forward", "heads"],
)
def test_attention_takes_what_is_counted_and_not_much_less(
    candidates: int, geometry: dict[str, Any], slack: float
) -> None:
    config = random_config(**geometry)
    ranker = random_ranker(config, seed=3)
    request = random_request(config, config.history_length, candidates)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        candidate_attention(ranker, *request)
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    steps = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    most = max(itertools.accumulate(steps))
    assert most <= attention_bytes(config, candidates) <= slack * most
