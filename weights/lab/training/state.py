"""Saves and restores an interrupted run: weights, moments and counters. Not a checkpoint to serve."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from weights.errors import reason_of
from weights.format.writer import write_whole
from weights.lab.training.trainer import Trainer

STATE_NAME = "state.pt"
COUNTERS = ("step", "loss", "validation_loss", "best_loss", "looks_without_improvement", "best", "curve", "losses")


class StateError(ValueError):
    """A state that cannot be read, or does not fit this run; the message says which and why."""


def save_state(trainer: Trainer, directory: Path) -> None:
    """Write everything that the next step depends on. A crash while writing leaves the previous state."""
    directory.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {name: getattr(trainer, name) for name in COUNTERS}
    state["ranker"], state["optimizer"] = trainer.ranker.state_dict(), trainer.optimizer.state_dict()
    state["averaged"] = trainer.averaged.state_dict() if trainer.averaged else None
    state["generator"] = trainer.generator.get_state()
    write_whole(directory / STATE_NAME, lambda new: torch.save(state, new))


def load_state(trainer: Trainer, directory: Path) -> None:
    """Restore what `save_state` wrote, for a run with the same log and settings. Raises StateError."""
    path = directory / STATE_NAME
    try:
        state = torch.load(path, map_location=trainer.settings.device, weights_only=True)
    except (OSError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise StateError(f"{path} cannot be read: {reason_of(error).splitlines()[0]}") from error
    try:
        trainer.ranker.load_state_dict(state["ranker"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        if trainer.averaged:
            trainer.averaged.load_state_dict(state["averaged"])
        trainer.generator.set_state(state["generator"].cpu())
        counters = {name: state[name] for name in COUNTERS}
    except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise StateError(f"{path} is not the state of a run with this architecture") from error
    for name, value in counters.items():
        setattr(trainer, name, value)
