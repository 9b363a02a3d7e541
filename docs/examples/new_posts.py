"""What content codes are worth where every post is new: draws a world of such posts, and compares rankers with and without codes.

    python docs/examples/new_posts.py world build/new/world --seed 1
    phoenix-ranker train --log build/new/world/log.parquet --until 2026-06-12 --out build/new/with
    phoenix-ranker train --log build/new/world/log.parquet --until 2026-06-12 --out build/new/without \\
        --set code_levels=0 --set code_values=0
    python docs/examples/new_posts.py table build/new/world build/new/with build/new/without

Each impression shows a post under an id that was never seen before. Authors write about all topics equally often, so nothing but
the codes tells what a post is about. The first code is the topic; the second says nothing. The table has the mean AUC over the frequent
actions in the test period, and the share of the optimum's lead over a random order. "Best without topics" is what somebody reaches who
knows the true probabilities but not the topics: no model without codes can be better.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from weights.checkpoint import load_checkpoint
from weights.lab.evaluate.metrics import Figure, PooledAuc, Sampled, draws_of
from weights.lab.evaluate.predict import predict
from weights.lab.training.examples import Examples
from weights.lab.world.settings import WorldSettings
from weights.lab.world.simulate import World, simulate
from weights.lab.world.store import WORLD_NAME, save_world

# Users differ in what they like to read about more than in how active they are, and authors differ little.
TASTES = {
    "interest_low": -1.0, "interest_high": 2.0, "author_quality_sd": 0.3, "freshness_sd": 0.3, "activity_sd": 0.3,
}  # fmt: skip
SIZE = {"users": 800, "new_users": 80, "days": 14, "test_days": 3}
NEW = {"new_posts": True, "content_codes": True, "stray_topic_share": 1.0, "classic_share": 0.0}
FREQUENT_SHARE = 0.01
OPTIMUM = "optimum"


def compared(world: World, checkpoints: Sequence[Path]) -> dict[str, tuple[Figure, Figure]]:
    """For each checkpoint and for the two best possible rankings: the mean AUC over the frequent actions, and the share of the optimum's
    lead over 0.5, with 95 % intervals by resampling users."""
    log, settings = world.log, world.settings
    is_test = log.impression_ts >= settings.test_ts
    probabilities = {}
    for path in checkpoints:
        loaded = load_checkpoint(path)
        examples = Examples(log, loaded.manifest.config)
        requests = np.arange(np.searchsorted(examples.times, settings.test_ts), len(examples))
        probabilities[path.name] = predict(loaded.ranker, examples, requests).probabilities
    probabilities["best without topics"] = world.probabilities_without_topic()
    probabilities[OPTIMUM] = world.truth.probabilities
    users, user = np.unique(log.user_id[is_test], return_inverse=True)
    draws = draws_of(len(users))
    sampled = {name: mean_auc(log.actions[is_test], each, user, draws) for name, each in probabilities.items()}
    lead = sampled[OPTIMUM].value - 0.5, sampled[OPTIMUM].samples - 0.5
    return {
        name: (each.figure(), Sampled((each.value - 0.5) / lead[0], (each.samples - 0.5) / lead[1]).figure())
        for name, each in sampled.items()
    }


def mean_auc(
    happened: NDArray[np.bool_], probability: NDArray[np.float32], user: NDArray[np.int64], draws: NDArray[np.floating]
) -> Sampled:
    """The AUC over all rows, averaged over the actions that happen in at least 1 % of them. `draws [R, U]`: samples of users."""
    shares = happened.mean(0)
    frequent = np.flatnonzero((shares >= FREQUENT_SHARE) & (shares < 1))
    aucs = [Sampled.of(PooledAuc.of(happened[:, a], probability[:, a], user), draws) for a in frequent]
    return Sampled(float(np.mean([each.value for each in aucs])), np.mean([each.samples for each in aucs], 0))


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    world = commands.add_parser("world", help="draw a world and write its log")
    world.add_argument("out", type=Path)
    world.add_argument("--seed", type=int, default=1)
    for name, default in SIZE.items():
        world.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    table = commands.add_parser("table", help="print the figures of checkpoints in a world")
    table.add_argument("world", type=Path)
    table.add_argument("checkpoints", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "world":
        sizes = {name: getattr(options, name) for name in SIZE}
        settings = WorldSettings(**{"seed": options.seed} | sizes | TASTES | NEW)
        drawn = simulate(settings)
        save_world(options.out, drawn)
        print(f"{options.out} holds {len(drawn.log):,} impressions; the test period starts at {settings.test_ts}")
    else:
        settings = WorldSettings(**json.loads((options.world / WORLD_NAME).read_text())["settings"])
        print("| | mean AUC | share of the optimum's lead |\n|---|--:|--:|")
        for name, (auc, share) in compared(simulate(settings), options.checkpoints).items():
            print(f"| {name} | {auc} | {share} |")


if __name__ == "__main__":
    main()
