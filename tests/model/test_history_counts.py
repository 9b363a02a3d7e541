"""Counts of the history: what a candidate is told of it, and that nothing else reaches its score."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from model.config import ConfigError
from model.engine import Item
from model.inputs import COUNT_EDGES, Candidates, Context, counted, history_counts
from model.native.engine import NativeEngine
from model.selftest import same_bits
from model.split.engine import SplitEngine
from tests.model.builders import random_candidates, random_config, random_context, random_ranker, random_request
from tests.support.random_models import retrieval_config

COUNTING = random_config(code_levels=0, code_values=0, history_counts=True)


def ids(*numbers: int) -> Any:
    return np.array(numbers, np.uint64)


def history(authors: Any, posts: Any) -> Context:
    context = random_context(COUNTING, len(authors))
    return replace(context, author_ids=authors, post_ids=posts)


def shown(authors: Any, posts: Any) -> Candidates:
    return replace(random_candidates(COUNTING, len(authors)), author_ids=authors, post_ids=posts)


def test_events_of_the_author_and_the_post_are_counted() -> None:
    context = history(ids(7, 7, 8, 7, 0, 0), ids(1, 2, 3, 1, 4, 5))
    candidates = shown(ids(7, 8, 9, 0), ids(1, 6, 3, 0))
    assert history_counts(context, candidates, COUNTING).tolist() == [[3, 2, 6], [1, 0, 6], [0, 1, 6], [0, 0, 6]]


def test_events_with_a_code_of_the_candidate_are_counted_by_level() -> None:
    config = replace(COUNTING, code_levels=2, code_values=9)
    context = replace(history(ids(7, 7, 8), ids(1, 2, 3)), codes=np.array([[4, 1], [4, 0], [0, 2]]))
    candidates = replace(shown(ids(5, 5, 5), ids(6, 6, 6)), codes=np.array([[4, 2], [1, 4], [0, 0]]))
    assert history_counts(context, candidates, config)[:, 3:].tolist() == [[2, 1], [0, 0], [0, 0]]


def test_padding_of_a_history_is_not_counted() -> None:
    context = history(ids(7, 7, 7), ids(1, 0, 2))
    assert history_counts(context, shown(ids(7), ids(2)), COUNTING).tolist() == [[2, 1, 2]]


def test_of_an_empty_history_all_counts_are_zero() -> None:
    assert history_counts(history(ids(), ids()), shown(ids(7, 8), ids(1, 2)), COUNTING).tolist() == [[0, 0, 0]] * 2


def test_many_events_share_a_number() -> None:
    for events, number in ((7, 7), (8, 7), (9, 8), (10, 8), (54, 14), (55, 15), (900, 15)):
        context = history(ids(*[7] * events), ids(*range(1, events + 1)))
        assert history_counts(context, shown(ids(7), ids(99_999)), COUNTING)[0].tolist() == [number, 0, number]
    assert len(COUNT_EDGES) == 15


@pytest.mark.parametrize("known", [0, 3, 20, 37])
def test_a_candidate_may_know_the_oldest_events_alone(known: int) -> None:
    context, candidates = random_request(COUNTING, 37, 12)
    context.post_ids[5] = 0
    told = history_counts(context, candidates, COUNTING, np.full(12, known))
    assert told.tolist() == history_counts(context.first(known), candidates, COUNTING).tolist()


@pytest.mark.parametrize("build", [NativeEngine, SplitEngine])
def test_counts_move_scores_and_no_other_candidate_does(build: Any) -> None:
    ranker = random_ranker(COUNTING)
    engine = build(ranker, cache_bytes=10**6)
    context, candidates = random_request(COUNTING, 20, 12)
    together = engine.forward([Item(context, candidates)])[0].scores
    for place in range(12):
        alone = engine.forward([Item(context, candidates.chunk(place, place + 1))])[0].scores
        assert same_bits(alone, together.rows(slice(place, place + 1)))
    told = counted(context, candidates, COUNTING)
    other = replace(told, codes=np.where(told.codes > 0, told.codes - 1, 0))
    moved = engine.forward([Item(context, other)])[0].scores
    assert np.abs(moved.logits - together.logits).max() > 0.01


def test_a_context_named_by_its_handle_is_counted_again() -> None:
    engine = NativeEngine(random_ranker(COUNTING), cache_bytes=10**6)
    context, candidates = random_request(COUNTING, 20, 12)
    first = engine.forward([Item(context, candidates, caller="a")])[0]
    named = engine.context_of(first.handle, "a")
    assert named is not None
    assert same_bits(engine.forward([Item(named, candidates)])[0].scores, first.scores)


def test_towers_cannot_count() -> None:
    with pytest.raises(ConfigError, match="counts nothing of a history"):
        replace(retrieval_config(COUNTING), history_counts=True)
