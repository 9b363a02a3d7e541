"""Training of the two towers on a small world: it learns, gives the same bits, and corrects for popularity."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from model.retrieval.towers import Towers
from tests.support.random_models import random_model
from tests.weights.call import call
from tests.weights.lab.training.small_run import small_config
from tests.weights.lab.training.unchanged import assert_unchanged, moved
from weights.actions import DWELL_TIME, default_score_weights
from weights.checkpoint import load_checkpoint, load_encoder, save_checkpoint
from weights.corpus.importer import check_corpus
from weights.corpus.store import load_corpus
from weights.lab.evaluate.retrieval import newest_posts, true_values
from weights.lab.training.demo import make_towers
from weights.lab.training.towers import TowerSettings, initial_towers, towers_config, train_towers
from weights.lab.world.population import interest
from weights.lab.world.simulate import World

SETTINGS = TowerSettings(steps=60, batch_requests=16, warmup_steps=10, learning_rate=1e-2)
FEW = TowerSettings(steps=20, batch_requests=16, warmup_steps=5, learning_rate=1e-2)


def trained(world: World, settings: TowerSettings = SETTINGS) -> tuple[Towers, list[float]]:
    losses: list[float] = []
    towers = train_towers(
        world.log,
        towers_config(small_config()),
        settings,
        until_ts=world.settings.test_ts,
        report=lambda step, steps, loss: losses.append(loss),
    )
    return towers, losses


@pytest.mark.slow
def test_it_learns_and_gives_the_same_bits(world: World) -> None:
    first, second = (trained(world, FEW)[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    _, losses = trained(world)
    assert np.mean(losses[-20:]) < np.mean(losses[:20]) - 0.3


def test_posts_of_unknown_authors_are_told_apart(world: World) -> None:
    """An author of 0 is unknown: two such posts are not of one author, and each is a negative for the other's user."""
    log = replace(world.log, author_id=np.zeros_like(world.log.author_id))
    ends = []
    for key in ("author", "post"):
        losses: list[float] = []
        train_towers(
            log,
            towers_config(small_config()),
            replace(FEW, steps=2, negatives_by=key),
            until_ts=world.settings.test_ts,
            report=lambda step, steps, loss, losses=losses: losses.append(loss),
        )
        ends.append(losses)
    assert ends[0] == ends[1]


@pytest.mark.slow
def test_fifteen_default_steps_lead_where_they_always_led(world: World) -> None:
    settings = TowerSettings(steps=15)
    before = initial_towers(towers_config(small_config()), torch.Generator().manual_seed(settings.seed))
    towers, losses = trained(world, settings)
    ends = {"first loss": losses[0], "last loss": losses[-1]}
    assert_unchanged("towers", ends | moved(before.state_dict(), towers.state_dict()))


def test_the_truth_at_the_end_of_the_world(world: World) -> None:
    posts = newest_posts(world, 3)
    created = world.posts.created_at[posts]
    assert (np.diff(created) >= 0).all()
    assert created[0] >= world.settings.end_ts - 3 * 86_400
    values = true_values(world, 2, posts)
    favourite = world.log.action_names.index("favorite")
    topics = interest(world.users.latent[2:3], world.settings)[0][world.posts.topic[posts]]
    keen = topics > np.median(topics)
    assert values[keen, favourite].mean() > 1.5 * values[~keen, favourite].mean()


@pytest.mark.slow
def test_towers_and_posts_are_written_beside_the_demo(world: World, tmp_path: Path) -> None:
    ranker = random_model(small_config(), 1)
    names = world.log.action_names
    manifest = save_checkpoint(
        tmp_path / "demo", ranker, name="demo", action_names=names, continuous=(DWELL_TIME,),
        score_weights=default_score_weights(names),
    )  # fmt: skip
    for _ in range(2):  # and again over what is there
        found = make_towers(tmp_path / "demo", world, ranker, manifest, FEW, lambda what, done, all_: None)
    assert json.loads((tmp_path / "demo-towers" / "retrieval.json").read_text()) == found
    encoder = load_encoder(tmp_path / "demo-towers")
    stored = load_corpus(tmp_path / "demo-posts", encoder.manifest)
    check_corpus(stored, encoder)
    assert (len(stored.corpus), len(stored.corpus.topic_names)) == (found["posts"], 8)
    assert found["recall of towers"][0] > found["recall of random"][0]
    assert load_checkpoint(tmp_path / "demo").manifest == manifest
    chosen = [f"--set={name}={value}" for name, value in asdict(world.settings).items()]
    printed = call("eval-retrieval", tmp_path / "demo-towers", "--ranker", tmp_path / "demo", *chosen)
    assert printed.exit_code == 0, printed.output
    assert json.loads(printed.output.splitlines()[-1]) == found
    assert f"{found['recall of author popularity, test period included'][1]:.3f}" in printed.output
