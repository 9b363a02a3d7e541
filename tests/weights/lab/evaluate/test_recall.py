"""Recall on logs with nobody, with unknown authors, with few users and with what everybody had liked before."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.weights.lab.training.small_run import small_config
from weights.lab.evaluate.recall import POPULARITY, Posts, Recalls, evaluate_recall, popularity_source
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log
from weights.lab.training.towers import initial_towers, towers_config
from weights.lab.world.simulate import World
from weights.tables import TableError


def recalls(world: World, log: Log, worth: np.ndarray) -> Recalls:
    config = towers_config(small_config())
    towers = initial_towers(config, torch.Generator().manual_seed(1))
    examples = Examples(log, config)
    split = int(np.searchsorted(examples.times, world.settings.test_ts))
    return evaluate_recall(examples, split, worth, towers, most_queries=100)


def liked(log: Log) -> np.ndarray:
    return log.actions[:, log.action_names.index("favorite")].astype(np.float64)


@pytest.mark.slow
def test_impressions_of_nobody_are_no_queries(world: World) -> None:
    """The service refuses to retrieve for nobody, and nobody is not one user."""
    nobody = (world.log.impression_ts >= world.settings.test_ts) & (world.log.user_id % 3 == 0)
    log = replace(world.log, user_id=np.where(nobody, 0, world.log.user_id).astype(np.uint64))
    found, without = (recalls(world, log, liked(log) * kept) for kept in (np.ones(len(log)), ~nobody))
    assert without.liked > 0
    assert found.record() == without.record()


def test_unknown_authors_are_not_one_author(world: World) -> None:
    log = replace(world.log, author_id=np.zeros_like(world.log.author_id))
    frozen, posts = len(log) // 2, Posts.of(log)
    (scores,) = popularity_source(log, posts, frozen, liked(log))(np.zeros(1, np.int64))
    unseen = ~np.isin(posts.ids, log.post_id[:frozen])
    assert unseen.any()
    assert not scores[unseen].any()


def test_what_was_liked_before_is_nothing_to_find(world: World) -> None:
    log = replace(world.log, post_id=world.log.author_id)  # each author has one post, which is shown again and again
    examples = Examples(log, small_config())
    again = np.zeros(len(log), bool)
    for index in np.flatnonzero(examples.times >= world.settings.test_ts):
        rows = examples.rows(int(index))
        again[rows] = np.isin(log.post_id[rows], examples.history_posts(int(index)))
    assert (liked(log) * again).any()
    with pytest.raises(TableError, match="in its user's history already"):
        recalls(world, log, liked(log) * again)


def test_only_requests_with_something_to_find_are_counted(world: World) -> None:
    log, new = world.log, np.unique(world.log.post_id)[-1] + np.uint64(1)
    examples = Examples(log, small_config())
    later = np.flatnonzero((examples.times >= world.settings.test_ts) & (examples.history_lengths > 0))[:20]
    first = examples.starts[later]  # one liked post in each request, in half of them one of the history
    seen = np.array([examples.history_posts(int(index))[-1] for index in later])
    is_new = np.arange(len(later)) % 2 == 0
    posts, worth = log.post_id.copy(), np.zeros(len(log))
    posts[first], worth[first] = np.where(is_new, new, seen), 1
    found = recalls(world, replace(log, post_id=posts), worth)
    assert (found.queries, found.liked) == (10, 10)
    assert found.users == len(np.unique(log.user_id[first[is_new]]))
    assert found.record()["queries"] == 10


def test_few_users_have_figures_without_intervals(world: World) -> None:
    users = np.unique(world.log.user_id[(liked(world.log) > 0) & (world.log.impression_ts >= world.settings.test_ts)])
    found = recalls(world, world.log, liked(world.log) * np.isin(world.log.user_id, users[:4]))
    assert found.users <= 4
    assert f"too few users to compare with {POPULARITY}" in found.verdict()
    assert "null" in json.dumps(found.record(), allow_nan=False)
