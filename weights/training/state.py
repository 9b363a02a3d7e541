"""Saves and restores an interrupted run: weights, moments and counters, nothing pickled. Not a checkpoint to serve."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from weights.training.trainer import Trainer

STATE_NAME = "state.safetensors"
COUNTERS_NAME = "state.json"
COUNTERS = ("step", "loss", "validation_loss", "best_loss", "evaluations_without_improvement")
MOMENTS = ("exp_avg", "exp_avg_sq")


class StateError(ValueError):
    """A state that does not belong to this run, or cannot be read; the message says which and why."""


def save_state(trainer: Trainer, directory: Path) -> None:
    """Write everything that the next step depends on. A crash while writing leaves the state that was there."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainer.ranker.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        for moment in MOMENTS:
            tensors[f"{moment}.{name}"] = trainer.optimizer.state[parameter][moment]
    tensors |= {f"best.{name}": value for name, value in trainer.best.items()}
    counters = {name: getattr(trainer, name) for name in COUNTERS}
    document = {"run": _run(trainer), **counters, "generator": trainer.generator.get_state().tolist()}
    # the counters travel in the tensor file's header, so that one rename replaces both
    save_file(tensors, directory / f"{STATE_NAME}.new", metadata={COUNTERS_NAME: json.dumps(document)})
    os.replace(directory / f"{STATE_NAME}.new", directory / STATE_NAME)


def load_state(trainer: Trainer, directory: Path) -> None:
    """Restore what `save_state` wrote. Raises StateError where it is absent, or of other settings or another log."""
    path = directory / STATE_NAME
    try:
        tensors = load_file(path)
        document = json.loads(_header(path)[COUNTERS_NAME])
        counters = {name: document[name] for name in COUNTERS}
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise StateError(f"{path} cannot be read: {error}") from error
    run = _run(trainer)
    differing = [name for name, value in run.items() if document["run"].get(name) != value]
    if differing:
        raise StateError(f"{path} belongs to another run: {', '.join(differing)} differ")
    with torch.no_grad():
        for name, parameter in trainer.ranker.named_parameters():
            parameter.copy_(tensors[f"weight.{name}"])
            state = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS}
            trainer.optimizer.state[parameter] = {"step": torch.tensor(float(document["step"])), **state}
    trainer.best = {name.removeprefix("best."): t for name, t in tensors.items() if name.startswith("best.")}
    trainer.generator.set_state(torch.tensor(document["generator"], dtype=torch.uint8))
    for name, value in counters.items():
        setattr(trainer, name, value)


def _header(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        metadata: dict[str, str] = file.metadata()
        return metadata


def _run(trainer: Trainer) -> dict[str, Any]:
    """What a state belongs to, as JSON values."""
    log = trainer.examples.log
    return {
        "settings": asdict(trainer.settings),
        "architecture": json.loads(json.dumps(trainer.examples.config.to_dict())),
        "log": [len(log), int(log.impression_ts[0]), int(log.impression_ts[-1]), int(log.post_id.sum())],
        "split": [len(trainer.train), len(trainer.validation), trainer.steps],
    }
