"""Order and partitions change no bit of a score; the history is what came before. tests/e2e/test_offline.py compares with the service."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

import pyarrow as pa

from model.batch import hash_rows
from model.create import EngineOptions
from model.engine import EngineError
from weights.checkpoint import load_checkpoint
from weights.errors import CheckpointError
from weights.lab.scoring.scorer import Scorer
from weights.lab.training.log import COLUMNS, log_of
from weights.lab.world.simulate import World
from weights.tables import TableError

DEMO = Path("weights/demo")
OPTIONS = EngineOptions(threads=1)


@pytest.fixture(scope="module")
def table(world: World) -> Any:
    return as_table(world)


def as_table(world: World) -> Any:
    log = world.log
    columns = {name: getattr(log, name) for name in COLUMNS}
    columns |= {f"action.{name}": log.actions[:, place] for place, name in enumerate(log.action_names)}
    return pa.table(columns)


def by_key(scored: Any) -> Any:
    return scored.sort_by([("request_id", "ascending"), ("post_id", "ascending")])


@pytest.mark.slow
def test_scores_depend_on_no_request_order_or_forward_size(scorer: Scorer, table: Any) -> None:
    whole = by_key(scorer.score_table(table))
    small = Scorer(load_checkpoint(DEMO), OPTIONS, batch_tokens=7)  # less than one request has
    _, request = np.unique(table["request_id"].to_numpy(), return_inverse=True)
    place = np.random.default_rng(3).permutation(request.max() + 1)[request]
    moved = table.take(np.argsort(place, kind="stable"))
    assert not moved.equals(table)
    assert by_key(small.score_table(moved)).equals(whole)
    small.close()
    turned = table.take(np.arange(len(table))[::-1])  # events of one time are read in the log's order
    assert not by_key(scorer.score_table(turned)).equals(whole)


def test_requests_before_since_are_history_alone(scorer: Scorer, table: Any, world: World) -> None:
    whole, since = scorer.score_table(table), world.settings.test_ts
    times = log_of(table, "log").impression_ts
    assert 0 < (times >= since).sum() < len(times)
    assert scorer.score_table(table, since).equals(whole.filter(times >= since))
    without = scorer.score_table(table.filter(table["impression_ts"].to_numpy() >= since), since)
    assert not np.array_equal(without["score"].to_numpy(), whole.filter(times >= since)["score"].to_numpy())


def test_some_actions_alone_and_none_that_the_checkpoint_lacks(scorer: Scorer, table: Any) -> None:
    checkpoint = load_checkpoint(DEMO)
    some = Scorer(checkpoint, OPTIONS, ["report", "favorite"])
    names = some.schema("uint64").names
    assert names == ["request_id", "user_id", "post_id", "score", "p.report", "p.favorite", "dwell_time"]
    assert some.score_table(table).equals(scorer.score_table(table).select(names))
    some.close()
    with pytest.raises(CheckpointError, match="has no action likes: it has favorite, "):
        Scorer(checkpoint, OPTIONS, ["likes"])


def test_a_log_that_lacks_an_action_is_refused(scorer: Scorer, table: Any) -> None:
    with pytest.raises(TableError, match="lacks actions of the checkpoint: report"):
        scorer.score_table(table.drop_columns(["action.report"]))


def test_a_request_continues_the_context_of_its_users_last_one(table: Any) -> None:
    """Users' requests are spread over forwards: within one, no request could find what another is computing. Where few users have requests
    left, a forward has two of one."""
    scorer = Scorer(load_checkpoint(DEMO), OPTIONS, batch_tokens=1000)
    prepared = scorer.prepare(table)
    scorer.score(prepared)
    stats = scorer.engine.cache_stats()
    scorer.close()
    assert 50 < prepared.is_kept.sum() < len(prepared.requests)
    assert stats.prefixes + stats.hits > 0.75 * prepared.is_kept.sum()


@pytest.mark.slow
def test_the_cache_holds_a_few_forwards_or_nothing_if_off(table: Any) -> None:
    config = load_checkpoint(DEMO).manifest.config
    few_forwards = 4 * 300 * 2 * 4 * config.layers * config.kv_heads * config.head_width
    for allowed, most in ((None, few_forwards), (0, 0)):
        scorer = Scorer(load_checkpoint(DEMO), replace(OPTIONS, cache_bytes=allowed), batch_tokens=300)
        scorer.score_table(table)
        found = scorer.engine.cache_stats()
        assert found.bytes <= most
        assert (found.prefixes > 50) == (found.evictions > 50) == (most > 0)
        scorer.close()


def test_scores_that_are_no_numbers_name_their_request(table: Any) -> None:
    """Of one user among many in a forward, whose row of the checkpoint's table holds none: the first of that user's requests."""
    checkpoint, users = load_checkpoint(DEMO), table["user_id"].to_numpy()
    user = np.unique(users)[20]
    rows = hash_rows(np.array([user]), checkpoint.manifest.config.user_hashes)
    checkpoint.ranker.tables.user[torch.from_numpy(rows)] = torch.nan
    broken = Scorer(checkpoint, OPTIONS)
    first = table.filter(users == user).sort_by("impression_ts")["request_id"][0]
    with pytest.raises(EngineError, match=f"request {first} gives scores that are not numbers"):
        broken.score_table(table)
    broken.close()
