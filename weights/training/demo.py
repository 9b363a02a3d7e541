"""Makes the demo checkpoint in `weights/demo`: draws its world, trains, evaluates, adds names and the example request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weights.actions import DWELL_TIME, default_score_weights
from weights.checkpoint import save_checkpoint
from weights.format.manifest import Manifest
from weights.training.demo_example import example_request
from weights.training.evaluate.evaluation import evaluate
from weights.training.evaluate.report import figures, write_report
from weights.training.run import train
from weights.training.settings import TrainSettings, demo_config
from weights.training.trainer import Status
from weights.training.world.settings import WorldSettings
from weights.training.world.simulate import World, simulate
from weights.training.world.store import Facts, save_world, world_names

EXAMPLE_NAME = "example.json"
NAMES_NAME = "names.json"
REPORT_NAME = "report"
NAMED_USERS = 200  # all authors are named, but a few users are enough to try


def make_demo(
    out: Path,
    work: Path | None,
    settings: TrainSettings,
    progress: Callable[[str, int, int], None],
    report: Callable[[Status], None],
    world_settings: WorldSettings | None = None,
) -> tuple[Manifest, dict[str, Any]]:
    """Write the checkpoint with example, names and report into `out`, replacing one that is there. Returns manifest and headline figures.

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
    evaluation = evaluate(
        ranker, log, test_ts, manifest.score_weights, facts_of(world), ablation_requests=5000, progress=progress
    )
    command = f"python -m weights train-demo --out {out} --seed {settings.seed}"
    write_report(evaluation, out / REPORT_NAME, f"The demo checkpoint, {manifest.name} {manifest.version}", command)
    return manifest, figures(evaluation)


def facts_of(world: World) -> Facts:
    """The facts of a world in memory: what `load_facts` reads of a saved one."""
    topics = {int(a): int(t) for a, t in zip(world.authors.ids, world.authors.topic, strict=True)}
    return Facts(world.settings.test_ts, world.truth, topics, world_names(world))


def _names(world: World, request: dict[str, Any]) -> dict[str, Any]:
    names = world_names(world)
    kept = [*list(names["users"])[:NAMED_USERS], request["user_id"]]
    return names | {"users": {user: names["users"][user] for user in dict.fromkeys(kept)}}
