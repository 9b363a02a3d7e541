"""Makes the demo in `weights/demo`: draws its world, trains, evaluates, adds names, an example request, and retrieval beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.ranker import Ranker
from weights.actions import DWELL_TIME, default_score_weights
from weights.checkpoint import Encoder, load_encoder, save_checkpoint
from weights.corpus.importer import encode
from weights.corpus.store import CorpusLabels, write_corpus
from weights.format.manifest import EXAMPLE_NAME, NAMES_NAME, Manifest
from weights.lab.evaluate.evaluation import evaluate
from weights.lab.evaluate.report import figures, write_evaluation
from weights.lab.evaluate.retrieval import evaluate_retrieval, newest_posts
from weights.lab.training.demo_example import example_request
from weights.lab.training.run import train
from weights.lab.training.settings import TrainSettings, demo_config
from weights.lab.training.towers import TowerSettings, towers_config, train_towers
from weights.lab.training.trainer import Status
from weights.lab.world.names import topic_name
from weights.lab.world.settings import WorldSettings
from weights.lab.world.simulate import World, simulate
from weights.lab.world.store import Facts, save_world, world_names

REPORT_NAME = "report"
CORPUS_DAYS = 10
NAMED_USERS = 200  # all authors are named, but a few users are enough to try


def make_demo(
    out: Path,
    work: Path | None,
    settings: TrainSettings,
    progress: Callable[[str, int, int], None],
    report: Callable[[Status], None],
    world_settings: WorldSettings | None = None,
    tower_settings: TowerSettings | None = None,
) -> tuple[Manifest, dict[str, Any]]:
    """Write the checkpoint with example, names and report into `out`, and towers and posts beside it, replacing existing ones.

    Returns manifest and headline figures.

    `work` keeps the world and the state of the run. Raises CheckpointError, ValueError, OSError.
    """
    world = simulate(
        world_settings or WorldSettings(seed=settings.seed), lambda done, all_: progress("sessions", done, all_)
    )
    if work:
        save_world(work / "world", world)
    log, test_ts = world.log, world.settings.test_ts
    ranker = train(
        log,
        demo_config(len(log.action_names)),
        settings,
        until_ts=test_ts,
        dwell_output=0,
        state=work / "state" if work else None,
        report=report,
    )
    request, story = example_request(world)
    extras = {EXAMPLE_NAME: request, NAMES_NAME: _names(world, request) | {"example": story}}
    manifest = save_checkpoint(
        out,
        ranker,
        name="demo",
        action_names=log.action_names,
        continuous=(DWELL_TIME,),
        score_weights=default_score_weights(log.action_names),
        extras={name: (json.dumps(value, indent=1) + "\n").encode() for name, value in extras.items()},
        replace=True,
    )
    evaluation = evaluate(ranker, log, test_ts, manifest.score_weights, facts_of(world), progress=progress)
    command = f"phoenix-ranker train-demo --out {out} --seed {settings.seed}"
    write_evaluation(evaluation, out / REPORT_NAME, f"The demo checkpoint, {manifest.name} {manifest.version}", command)
    retrieval = make_towers(out, world, ranker, manifest, tower_settings or TowerSettings(seed=settings.seed), progress)
    return manifest, figures(evaluation) | {"retrieval": retrieval}


def make_towers(
    out: Path,
    world: World,
    ranker: Ranker,
    manifest: Manifest,
    settings: TowerSettings,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Write the towers and the corpus of the world's newest posts beside the demo in `out`, and return how good they are.

    `OUT-towers` also gets the figures, `retrieval.json`. `ranker` and `manifest` are the demo's.
    """
    log = world.log
    towers = train_towers(
        log,
        towers_config(ranker.config),
        settings,
        until_ts=world.settings.test_ts,
        report=lambda done, all_, loss: progress(f"towers, loss {loss:.3f}", done, all_),
    )
    posts = newest_posts(world, CORPUS_DAYS)
    figures = evaluate_retrieval(world, towers, ranker, posts, manifest.score_weights)
    extras = {"retrieval.json": (json.dumps(figures, indent=1) + "\n").encode()}
    path = out.absolute().with_name(f"{out.absolute().name}-towers")
    save_checkpoint(path, towers, name="demo-towers", action_names=log.action_names, extras=extras, replace=True)
    write_posts(out.absolute().with_name(f"{out.absolute().name}-posts"), world, load_encoder(path), posts)
    return figures


def write_posts(path: Path, world: World, encoder: Encoder, posts: NDArray[np.int64]) -> None:
    """Write a corpus of these rows of the world's posts, with their times and topics."""
    drawn = world.posts
    ids, authors = drawn.ids[posts], world.authors.ids[drawn.author[posts]]
    columns = {
        "post_ids": torch.from_numpy(ids.view(np.int64)),
        "author_ids": torch.from_numpy(authors.view(np.int64)),
        "created_at": torch.from_numpy(drawn.created_at[posts]),
        "topics": torch.from_numpy(drawn.topic[posts].astype(np.int32)),
        "vectors": encode(encoder, ids, authors),
    }
    names = [topic_name(topic) for topic in range(world.settings.topics)]
    labels = CorpusLabels("demo-posts")
    listed = [name for name in columns if name != "vectors"]
    write_corpus(path, labels, encoder, len(posts), listed, lambda name: [columns[name]], lambda: names, replace=True)


def facts_of(world: World) -> Facts:
    """The facts of a world in memory, as `load_facts` reads them from a saved one."""
    return Facts(world.settings.test_ts, world.truth)


def _names(world: World, request: dict[str, Any]) -> dict[str, Any]:
    names = world_names(world)
    users = [*list(names["users"])[:NAMED_USERS], request["user_id"]]
    return names | {"users": {user: names["users"][user] for user in dict.fromkeys(users)}}
