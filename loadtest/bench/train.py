"""Compares the trainer with a bare training loop."""

from __future__ import annotations

import numpy as np
import torch

from loadtest.matrix import Row, publish
from loadtest.timing import Figure, alternate, ratio
from weights.training.examples import Examples, training_batch
from weights.training.run import reproducible, split
from weights.training.settings import TrainSettings, demo_config
from weights.training.trainer import Trainer
from weights.training.world.settings import WorldSettings
from weights.training.world.simulate import simulate

STEPS, BATCH, IMPRESSIONS = 10, 32, 24  # steps per reading; requests per step; posts per request


def speed_row(users: int, rounds: int) -> Row:
    """The trainer's impressions per second ÷ those of a loop that has the batches ready and only runs forward and backward."""
    log = simulate(WorldSettings(users=users, new_users=0)).log
    settings = TrainSettings(epochs=100)
    examples = Examples(log, demo_config(len(log.action_names)))
    trainer = Trainer(examples, *split(len(examples), 64), settings)
    trainer.advance()
    shares = {name: getattr(settings, name) for name in ("fresh_user_share", "fresh_post_share", "max_candidates")}
    batches = [
        training_batch(examples, trainer.train[step * BATCH :][:BATCH], np.random.default_rng(step), **shares)
        for step in range(STEPS)
    ]

    def bare() -> None:
        for batch, labels in batches:
            trainer.optimizer.zero_grad()
            trainer.plain(batch, labels).backward()

    def trained() -> None:
        for _ in range(STEPS):
            trainer.advance()

    with reproducible(settings.threads):
        seconds = alternate({"trainer": trained, "bare": bare}, rounds)
    sides = [Figure.of(values).scaled(1 / STEPS) for values in seconds.values()]
    rates = " ÷ ".join(f"{BATCH * IMPRESSIONS / side.median:.0f}" for side in sides)
    name = f"trainer ÷ bare loop, impressions a second ({rates})"
    return Row.of(name, ratio(seconds["bare"], seconds["trainer"]), "", 0.75, at_least=True, sides=sides)


def measure(rounds: int = 7) -> None:
    """The trainer against a bare training loop."""
    publish([speed_row(200, rounds)], {"torch": torch.__version__})
