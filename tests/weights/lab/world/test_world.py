"""The synthetic world: it is deterministic, its people do what they always did, and the demo was made from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from safetensors.numpy import load_file

from tests.weights.lab.training.unchanged import assert_unchanged
from weights.lab.world.population import draw_authors, draw_posts, draw_users
from weights.lab.world.settings import SURFACES, WorldSettings
from weights.lab.world.simulate import World, simulate
from weights.lab.world.store import save_world

SMALL = WorldSettings(users=400, new_users=20)
DEMO = Path(__file__).parents[4] / "weights"


@pytest.fixture(scope="module")
def world() -> World:
    return simulate(SMALL)


@pytest.mark.slow
def test_the_same_seed_makes_the_same_world_and_another_does_not(tmp_path: Path) -> None:
    tiny = WorldSettings(users=30, new_users=3, authors=24, days=7)
    for name, settings in (("a", tiny), ("b", tiny), ("c", replace(tiny, seed=2))):
        save_world(tmp_path / name, simulate(settings))
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
        assert file.read_bytes() != (tmp_path / "c" / file.name).read_bytes()


def test_the_demo_in_the_tree_was_made_from_the_default_world() -> None:
    settings = WorldSettings()
    rng = np.random.default_rng(settings.seed)
    authors = draw_authors(settings, rng)
    posts = draw_posts(settings, authors, rng)
    users = draw_users(settings, authors, rng)
    names, report = (json.loads((DEMO / "demo" / name).read_text()) for name in ("names.json", "report/figures.json"))
    assert set(map(int, names["authors"])) == set(authors.ids.tolist())
    assert set(map(int, names["users"])) < set(users.ids.tolist())
    kept = load_file(DEMO / "demo-posts/posts.safetensors")
    rows = np.searchsorted(posts.ids, kept["post_ids"].view(np.uint64), sorter=(order := np.argsort(posts.ids)))
    assert np.array_equal(posts.ids[order[rows]], kept["post_ids"].view(np.uint64))
    assert np.array_equal(posts.created_at[order[rows]], kept["created_at"])
    assert np.array_equal(posts.topic[order[rows]], kept["topics"])
    sessions = sum(int((times >= settings.test_ts).sum()) for times in users.session_ts)
    assert (sessions, sessions * settings.slots) == (report["requests"], report["impressions"])


@pytest.mark.slow
def test_people_of_the_default_world_do_what_they_always_did(world: World) -> None:
    log, truth = world.log, world.truth
    shares = {f"share of {name}": log.actions[:, place].mean() for place, name in enumerate(log.action_names)}
    stated = {f"stated {name}": truth.probabilities[:, place].mean() for place, name in enumerate(log.action_names)}
    surfaces = {f"share of {name}": (log.product_surface == place).mean() for place, name in enumerate(SURFACES)}
    ages = np.quantile(log.impression_ts - log.created_at, (0.1, 0.5, 0.8, 0.95))
    of_author = np.unique(log.author_id, return_counts=True)[1]
    others = {
        "impressions": len(log),
        "dwell": np.log(log.dwell_seconds).mean(),
        "stated dwell": truth.log_dwell.mean(),
        "affinity": truth.affinity.mean(),
        "spread of affinity": truth.affinity.std(),
        "share of the most seen author": of_author.max() / len(log),
    } | {f"age {place}": age for place, age in enumerate(ages)}
    assert_unchanged("world", {name: float(value) for name, value in (shares | stated | surfaces | others).items()})


def test_the_log_is_in_time_order_and_shows_no_unwritten_post(world: World) -> None:
    log = world.log
    assert (np.diff(log.impression_ts) >= 0).all()
    assert (log.impression_ts >= log.created_at).all()
    sizes = np.unique(np.unique(log.request_id, return_counts=True)[1])
    assert sizes.tolist() == [SMALL.slots]
    for ids in (world.users.ids, world.authors.ids, world.posts.ids):
        assert len(np.unique(ids)) == len(ids)
        assert (ids > 0).all()


def test_new_users_and_new_posts_appear_in_the_test_period_only(world: World) -> None:
    log, test = world.log, world.log.impression_ts >= SMALL.test_ts
    new = np.isin(log.user_id, world.users.ids[SMALL.users :])
    assert new[test].any()
    assert not new[~test].any()
    unseen = ~np.isin(log.post_id[test], log.post_id[~test])
    assert 0.5 < unseen.mean() < 0.95
    assert 0.1 < test.mean() < 0.2
