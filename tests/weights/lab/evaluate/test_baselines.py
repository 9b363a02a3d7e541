"""Baselines read what came before and nothing else, and find what is there to find."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("pyarrow")

from tests.weights.lab.training.small_run import WORLD, small_config
from weights.lab.counts import Past
from weights.lab.evaluate.baselines import (
    BASELINES,
    BOOSTED,
    COUNTS,
    FEATURES,
    NEWEST,
    POPULARITY,
    SIMPLE,
    baselines,
    history_features,
    post_vectors,
)  # fmt: skip
from weights.lab.evaluate.metrics import auc
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log
from weights.lab.world.simulate import World

FAVORITE = 0


def test_the_past_of_a_row_is_the_earlier_rows_with_its_key() -> None:
    rng = np.random.default_rng(1)
    key, time = rng.integers(0, 9, 300).astype(np.uint64), np.sort(rng.integers(0, 60, 300))
    happened, counted = rng.random(300) < 0.4, rng.random(300) < 0.8
    past = Past.of(key, time, happened, counted)
    for row in range(300):
        before = (key == key[row]) & (time < time[row]) & counted
        assert (past.shown[row], past.taken[row]) == (before.sum(), (before & happened).sum())
    assert past.rate(0.25, 2.0)[0] == 0.25


def test_no_feature_knows_what_happened_later(world: World, examples: Examples) -> None:
    log, frozen = world.log, int(examples.starts[len(examples) * 2 // 3])
    middle = int(examples.starts[len(examples) // 2])
    flipped = log.actions.copy()
    flipped[middle:] = ~flipped[middle:]
    other = Examples(replace(log, actions=flipped), examples.config)
    vectors = post_vectors(log.take(np.arange(frozen)))
    first, second = (history_features(each, frozen, FAVORITE, vectors)[:middle] for each in (examples, other))
    prior = np.isin(FEATURES, ["post rate", "author rate", "user rate", "user's rate of the author"])
    assert np.array_equal(first[:, ~prior], second[:, ~prior], equal_nan=True)
    assert np.isfinite(first[:, FEATURES.index("likeness to what was liked")]).mean() > 0.2


def test_boosted_trees_learn_the_world_and_popularity_does_not(world: World, examples: Examples) -> None:
    split = int(np.searchsorted(examples.times, WORLD.test_ts))
    found = baselines(examples, split, [FAVORITE])
    assert list(found) == list(BASELINES)
    happened = world.log.actions[examples.starts[split] :, FAVORITE]
    reached = {name: auc(happened, each[FAVORITE]) for name, each in found.items()}
    assert reached[BOOSTED] > max(0.65, reached["popularity"] + 0.05)
    for each in found.values():
        assert abs(each[FAVORITE].mean() - happened.mean()) < 0.1


def test_an_action_that_never_happened_is_predicted_by_its_rate(world: World, examples: Examples) -> None:
    split = int(np.searchsorted(examples.times, WORLD.test_ts))
    actions = world.log.actions.copy()
    actions[: examples.starts[split], FAVORITE] = False
    found = baselines(Examples(replace(world.log, actions=actions), examples.config), split, [FAVORITE])
    assert all((each[FAVORITE] == 0).all() for each in found.values())


def test_posts_of_unknown_authors_share_no_counts(world: World, examples: Examples) -> None:
    """An author of 0 is unknown, and not one author who wrote all of these posts."""
    log, frozen = world.log, int(examples.starts[len(examples) * 2 // 3])
    unknown = Examples(replace(log, author_id=np.zeros_like(log.author_id)), examples.config)
    features = history_features(unknown, frozen, FAVORITE, post_vectors(log.take(np.arange(frozen))))
    assert not features[:, FEATURES.index("author count")].any()
    assert not features[:, FEATURES.index("user's count of the author")].any()
    assert np.ptp(features[:, FEATURES.index("author rate")]) == 0


def test_newest_first_is_the_order_of_age(world: World, examples: Examples) -> None:
    split = int(np.searchsorted(examples.times, WORLD.test_ts))
    test = slice(int(examples.starts[split]), None)
    age = (world.log.impression_ts - world.log.created_at)[test]
    newest = baselines(examples, split, [FAVORITE], names=[NEWEST])[NEWEST][FAVORITE]
    assert (np.diff(newest[np.argsort(age)]) <= 0).all()
    ageless = Examples(replace(world.log, created_at=np.zeros(len(world.log), np.int64)), examples.config)
    assert NEWEST not in baselines(ageless, split, [FAVORITE], names=[NEWEST, POPULARITY])


def one_row_requests(
    liked: NDArray[np.bool_], user: NDArray[np.uint64], author: NDArray[np.uint64], age: int | NDArray[np.int64] = 0
) -> Log:
    """A request a minute, of one new post each. `age`: of the post in seconds, 0 if unknown."""
    rows = len(liked)
    ids, times = np.arange(1, rows + 1, dtype=np.uint64), 1_600_000_000 + 60 * np.arange(rows)
    return Log(
        request_id=ids, impression_ts=times, user_id=user, post_id=ids, author_id=author,
        product_surface=np.zeros(rows, np.int64), created_at=np.where(age, times - age, 0),
        dwell_seconds=np.zeros(rows, np.float32), actions=liked[:, None], action_names=("like",),
    )  # fmt: skip


def test_counts_see_which_authors_a_user_likes() -> None:
    """Each user likes one author of ten; nothing else tells posts apart."""
    rng, rows = np.random.default_rng(1), 6000
    user, author = rng.integers(1, 31, rows).astype(np.uint64), rng.integers(1, 11, rows).astype(np.uint64)
    liked = rng.random(rows) < np.where(user % 10 == author % 10, 0.5, 0.02)
    examples = Examples(one_row_requests(liked, user, author), replace(small_config(), actions=1))
    found = baselines(examples, rows // 2, [0], names=SIMPLE)
    reached = {name: auc(liked[rows // 2 :], each[0]) for name, each in found.items()}
    assert reached[COUNTS] > 0.85
    assert reached["popularity"] < 0.6


def test_no_baseline_sees_other_requests_of_the_same_second() -> None:
    """In each second a user meets a new post in two requests and does the same in both, by chance: nothing earlier tells which."""
    rng, seconds = np.random.default_rng(1), 3000
    twice = np.repeat(np.arange(seconds), 2)
    liked, user = rng.random(seconds)[twice] < 0.4, rng.integers(1, 31, seconds).astype(np.uint64)[twice]
    rows = one_row_requests(liked, user, np.ones(len(twice), np.uint64))
    log = replace(rows, impression_ts=1_600_000_000 + 60 * twice, post_id=rows.post_id[2 * twice])
    found = baselines(Examples(log, replace(small_config(), actions=1)), seconds, [0])
    reached = {name: auc(liked[seconds:], each[0]) for name, each in found.items()}
    assert set(reached) == set(BASELINES) - {NEWEST}
    assert all(0.45 < each < 0.55 for each in reached.values()), reached
