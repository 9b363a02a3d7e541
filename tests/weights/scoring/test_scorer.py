"""Offline scores are what the engine gives each request alone; the history is that of training; order and partitions change no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa

from model.create import EngineOptions, create_engine
from model.engine import EngineError, Item
from model.ranking import combine
from weights.checkpoint import load_checkpoint
from weights.errors import CheckpointError
from weights.scoring import scorer as module
from weights.scoring.scorer import Scorer
from weights.tables import LogError
from weights.training.examples import Examples
from weights.training.log import COLUMNS, log_of
from weights.world.simulate import World

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


def test_each_score_has_the_bits_of_its_request_alone(scorer: Scorer, table: Any) -> None:
    checkpoint = load_checkpoint(DEMO)
    examples, scored = Examples(log_of(table, "log"), checkpoint.manifest.config), scorer.score_table(table)
    weights = np.array([checkpoint.manifest.score_weights.get(name, 0.0) for name in checkpoint.manifest.action_names])
    engine = create_engine(checkpoint.ranker, OPTIONS)
    engine.warm_up()
    names = checkpoint.manifest.action_names
    assert len(scored) == len(table)
    for index in range(0, len(examples), 97):
        rows = examples.rows(index)
        [alone] = engine.forward([Item(examples.context(index), examples.candidates(index, rows))])
        mine = scored.slice(rows[0], len(rows))
        assert mine["post_id"].to_numpy().tolist() == examples.log.post_id[rows].tolist()
        for column, name in enumerate(names):
            assert mine[f"p.{name}"].to_numpy().tobytes() == alone.scores.probabilities[:, column].tobytes()
        assert mine["score"].to_numpy().tobytes() == combine(alone.scores.probabilities, weights).tobytes()
        assert mine["dwell_time"].to_numpy().tobytes() == (alone.scores.continuous[:, 0] * np.float32(30)).tobytes()
    engine.close()
    assert len(set(scored["score"].to_pylist())) > len(table) / 2


def test_an_engine_that_fails_its_check_scores_nothing(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scorer.engine.info.notes["self_test"]["different_bits"] == 0

    def differs(engine: Any) -> None:
        raise EngineError("isolation is broken on this device")

    monkeypatch.setattr("model.native.engine.check_isolation", differs)
    with pytest.raises(EngineError, match="isolation is broken"):
        Scorer(load_checkpoint(DEMO), OPTIONS)


def test_requests_may_come_in_any_order_and_forwards_may_be_of_any_size(
    scorer: Scorer, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = by_key(scorer.score_table(table))
    monkeypatch.setattr(module, "BATCH_TOKENS", 7)  # less than one request has
    _, request = np.unique(table["request_id"].to_numpy(), return_inverse=True)
    place = np.random.default_rng(3).permutation(request.max() + 1)[request]
    moved = table.take(np.argsort(place, kind="stable"))
    assert not moved.equals(table)
    assert by_key(scorer.score_table(moved)).equals(whole)
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
    assert some.schema.names == ["request_id", "user_id", "post_id", "score", "p.report", "p.favorite", "dwell_time"]
    assert some.score_table(table).equals(scorer.score_table(table).select(some.schema.names))
    some.close()
    with pytest.raises(CheckpointError, match="has no action likes: it has favorite, "):
        Scorer(checkpoint, OPTIONS, ["likes"])


def test_a_log_that_lacks_an_action_is_refused(scorer: Scorer, table: Any) -> None:
    with pytest.raises(LogError, match="lacks actions of the checkpoint: report"):
        scorer.score_table(table.drop_columns(["action.report"]))


def test_a_request_continues_the_context_of_its_users_last_one(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users' requests are spread over forwards: within one, no request could find what another is computing. Where few users have requests
    left, a forward has two of one."""
    monkeypatch.setattr(module, "BATCH_TOKENS", 1000)
    scorer = Scorer(load_checkpoint(DEMO), OPTIONS)
    prepared = scorer.prepare(table)
    scorer.score(prepared)
    stats = scorer.engine.cache_stats()
    scorer.close()
    assert 50 < prepared.is_kept.sum() < len(prepared.requests)
    assert stats.prefixes + stats.hits > 0.75 * prepared.is_kept.sum()


def test_the_cache_keeps_the_contexts_of_a_few_forwards_and_none_where_it_is_turned_off(
    table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_TOKENS", 300)
    config = load_checkpoint(DEMO).manifest.config
    few_forwards = 4 * 300 * 2 * 4 * config.layers * config.kv_heads * config.head_width
    for allowed, most in ((None, few_forwards), (few_forwards // 2, few_forwards // 2), (0, 0)):
        scorer = Scorer(load_checkpoint(DEMO), replace(OPTIONS, cache_bytes=allowed))
        scorer.score_table(table)
        found = scorer.engine.cache_stats()
        assert found.bytes <= most
        assert (found.prefixes > 50) == (found.evictions > 50) == (most > 0)
        scorer.close()


def test_scores_that_are_no_numbers_name_their_request(
    scorer: Scorer, table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, posts = scorer.engine.forward, []

    def poisoned(items: Any) -> Any:
        outcomes = forward(items)
        if not posts:
            posts.extend(items[2].candidates.post_ids.tolist())
            logits = np.full_like(outcomes[2].scores.logits, np.inf)
            outcomes[2] = replace(outcomes[2], scores=replace(outcomes[2].scores, logits=logits, finite=False))
        return outcomes

    monkeypatch.setattr(scorer.engine, "forward", poisoned)
    with pytest.raises(EngineError, match="gives scores that are no numbers") as raised:
        scorer.score_table(table)
    named = int(str(raised.value).split("request ")[1].split()[0])
    assert table.filter(table["request_id"].to_numpy() == named)["post_id"].to_pylist() == posts
