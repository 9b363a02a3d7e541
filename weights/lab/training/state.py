"""Saves and restores an interrupted run: weights, moments and counters, and which run it is. Not a checkpoint to serve."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from model.config import ModelConfig
from model.ranker import Ranker
from weights.errors import reason_of
from weights.format.writer import write_whole
from weights.lab.training.log import Log
from weights.lab.training.settings import TrainSettings
from weights.lab.training.trainer import Trainer

STATE_NAME = "state.pt"
IDENTITY = "identity"
LOG = "log"
PIECE_ROWS = 1_000_000
NAMED_DIFFERENCES, NAMED_LENGTH = 3, 40
COUNTERS = ("step", "loss", "validation_loss", "best_loss", "looks_without_improvement", "best", "curve", "losses")


class StateError(ValueError):
    """A state that cannot be read, or does not fit this run; the message says which and why."""


def identity_of(
    log: Log,
    config: ModelConfig,
    settings: TrainSettings,
    until_ts: int | None,
    start: Ranker | None,
    dwell_output: int | None,
) -> dict[str, str]:
    """What tells a run from others, by name, each value as JSON. The arguments are those of `train`."""
    values = {
        "impressions": len(log), "first_impression_ts": int(log.impression_ts[0]),
        "last_impression_ts": int(log.impression_ts[-1]), "action_names": log.action_names,
        LOG: _digest_of(log), "until_ts": until_ts, "start": _digest(start) if start else None,
        "dwell_output": dwell_output, **asdict(settings), **config.to_dict(),
    }  # fmt: skip
    return {name: json.dumps(value) for name, value in values.items()}


def _digest_of(log: Log) -> str:
    """Of every value that training may read, the same for a log in memory and for one mapped from disk. It reads PIECE_ROWS at a time."""
    columns = {one.name: getattr(log, one.name) for one in fields(log)}
    if served := columns.pop("contexts"):
        columns |= {f"contexts.{one.name}": getattr(served, one.name) for one in fields(served)}
        columns["contexts.order"] = None if served.order is None else np.asarray(served.order)
    digest = xxhash.xxh3_128()
    for name, values in columns.items():
        if isinstance(values, np.ndarray):
            digest.update(f"{name} {values.dtype.str} {values.shape}".encode())
            for first in range(0, len(values), PIECE_ROWS):
                digest.update(np.ascontiguousarray(values[first : first + PIECE_ROWS]).data)
    return digest.hexdigest()


def _digest(ranker: Ranker) -> str:
    digest = xxhash.xxh3_128()
    for name, tensor in ranker.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def save_state(trainer: Trainer, directory: Path, identity: Mapping[str, str]) -> None:
    """Write everything that the next step depends on, and the `identity_of` the run. A crash while writing leaves the previous state, and
    so does a disk that is full: OSError, which names the file."""
    directory.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {name: getattr(trainer, name) for name in COUNTERS}
    state[IDENTITY] = dict(identity)
    state["ranker"], state["optimizer"] = trainer.ranker.state_dict(), trainer.optimizer.state_dict()
    state["averaged"] = trainer.averaged.state_dict() if trainer.averaged else None
    state["generator"] = trainer.generator.get_state()
    write_whole(directory / STATE_NAME, lambda new: _write(state, new))


def _write(state: dict[str, Any], path: Path) -> None:
    with path.open("xb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # torch ends a file that could not be written, and fails again
                raise error.__context__ from None
            raise


def load_state(trainer: Trainer, directory: Path, identity: Mapping[str, str]) -> None:
    """Restore what `save_state` wrote for the run with this `identity_of`. Raises StateError, which says what differs in another run;
    also for a state of an earlier version, which does not tell its log."""
    path = directory / STATE_NAME
    try:
        state = torch.load(path, map_location=trainer.settings.device, weights_only=True)
    except (OSError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise StateError(f"{path} cannot be read: {reason_of(error).splitlines()[0]}") from error
    try:
        if LOG not in state[IDENTITY]:
            raise StateError(
                f"{path} is of an earlier version, which did not keep what log it is of: leave out --resume to begin anew"
            )
        if differences := _differences(state[IDENTITY], identity):
            raise StateError(
                f"{path} is of another run: {differences}; give the command of that run, or leave out --resume to begin anew"
            )
        trainer.ranker.load_state_dict(state["ranker"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        if trainer.averaged:
            trainer.averaged.load_state_dict(state["averaged"])
        trainer.generator.set_state(state["generator"].cpu())
        counters = {name: state[name] for name in COUNTERS}
    except StateError:
        raise
    except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise StateError(f"{path} is not the whole state of a run: leave out --resume to begin anew") from error
    for name, value in counters.items():
        setattr(trainer, name, value)


def _differences(saved: Mapping[str, str], identity: Mapping[str, str]) -> str:
    """What differs between two runs, in words; empty where nothing does."""
    names = [name for name in {**identity, **saved} if saved.get(name) != identity.get(name)]
    words = [
        f"{name} was {saved.get(name, 'unknown'):.{NAMED_LENGTH}} and is now {identity.get(name, 'unknown'):.{NAMED_LENGTH}}"
        for name in names[:NAMED_DIFFERENCES]
    ]
    more = len(names) - len(words)
    return ", ".join(words) + (f", and {more} more" if more else "")
