"""Budgets: what is taken and given back, and the sum that the operators' page states."""

from __future__ import annotations

import itertools
import re

import pytest
from pydantic import SecretStr
from torch.profiler import ProfilerActivity, profile

from app.budgets import Budget, attention_bytes, most_bytes, rest_seconds
from app.settings import Admin, Budgets, Cache, Explore, Grpc, Limits, Queue, Retrieval, Settings, Shadow
from loadtest.machine import ROOT
from model.attention import candidate_attention
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


@pytest.mark.parametrize(
    "changed",
    [
        {"budgets": Budgets(connections=4096)}, {"budgets": Budgets(body_bytes=2**30)}, {"budgets": Budgets(reply_bytes=2**30)},
        {"budgets": Budgets(batch_candidates=2**20)}, {"cache": Cache(bytes=2**30)}, {"queue": Queue(max_requests=10**5)},
        {"budgets": Budgets(excluded_ids=2**22)}, {"budgets": Budgets(changes=8)}, {"grpc": Grpc(port=0, max_calls=128)},
        {"retrieval": Retrieval(max_waiting=2048)}, {"retrieval": Retrieval(batch_requests=64)},
        {"retrieval": Retrieval(cache_bytes=2**30)},
        {"shadow": Shadow(checkpoint=ROOT, max_waiting=32)},
        {"explore": Explore(concurrent=2)}, {"explore": Explore(max_candidates=64)},
        {"queue": Queue(max_context_tokens=2**20)}, {"limits": Limits(max_values=10**6)}, {"limits": Limits(max_batch_candidates=2**16)},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_may_grow_grows_the_sum(changed: dict[str, object]) -> None:
    more = most_bytes(ALL.model_copy(update=changed), CONFIG, TOWERS, 1000)
    assert more["total"] > most_bytes(ALL, CONFIG, TOWERS, 1000)["total"]


def test_what_does_not_serve_takes_nothing() -> None:
    parts = ("retrieval", "changes", "grpc", "second")
    assert [most_bytes(Settings(), CONFIG)[part] for part in parts] == [0, 0, 0, 0]
    assert most_bytes(ALL, CONFIG, TOWERS, 2000)["retrieval"] > most_bytes(ALL, CONFIG, TOWERS, 1000)["retrieval"]


def test_only_a_caller_that_held_the_loop_rests() -> None:
    assert rest_seconds(0.001) == 0
    assert rest_seconds(0.010) == pytest.approx(0.040)


def test_attention_takes_no_more_memory_than_is_counted() -> None:
    """And not a fraction of it, where attention weights are what is large."""
    config = random_config(history_length=500)
    ranker = random_ranker(config, seed=3)
    request = random_request(config, 500, 32)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        candidate_attention(ranker, *request)
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    steps = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    most = max(itertools.accumulate(steps))
    assert most <= attention_bytes(config, 32) <= 3 * most
