"""Saves and restores an interrupted run: weights, moments and counters, nothing pickled. Not a checkpoint to serve."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from weights.format.writer import write_whole
from weights.training.trainer import Trainer

STATE_NAME = "state.safetensors"
COUNTERS_NAME = "state.json"
COUNTERS = ("step", "loss", "validation_loss", "best_loss", "evaluations_without_improvement")
CURVE = "curve"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # a parameter without a gradient so far has none


class StateError(ValueError):
    """A state that does not belong to this run, or cannot be read or written; the message says which and why."""


def save_state(trainer: Trainer, directory: Path) -> None:
    """Write everything that the next step depends on. A crash while writing leaves the previous state. Raises StateError."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainer.ranker.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        for moment, value in trainer.optimizer.state.get(parameter, {}).items():
            tensors[f"{moment}.{name}"] = value
    tensors[CURVE] = torch.tensor(trainer.curve, dtype=torch.float64).reshape(-1, 3)
    tensors |= {f"best.{name}": value for name, value in trainer.best.items()}
    counters = {name: getattr(trainer, name) for name in COUNTERS}
    document = {"run": run_facts(trainer), **counters, "generator": trainer.generator.get_state().tolist()}
    # the counters are in the tensor file's header, so that one rename replaces both
    metadata = {COUNTERS_NAME: json.dumps(document)}
    path = directory / STATE_NAME
    try:
        write_whole(path, lambda new: save_file(tensors, new, metadata))
    except SafetensorError as error:  # what the library raises for a full disk
        raise StateError(f"{path} cannot be written: {error}") from error


def load_state(trainer: Trainer, directory: Path) -> None:
    """Restore what `save_state` wrote. Raises StateError if it is absent or belongs to other settings or another log."""
    path = directory / STATE_NAME
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            document = json.loads((file.metadata() or {})[COUNTERS_NAME])
        counters = {name: document[name] for name in COUNTERS}
        trainer.curve = [tuple(row) for row in tensors.pop(CURVE).tolist()]
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise StateError(f"{path} cannot be read: {error}") from error
    run = run_facts(trainer)
    differing = [name for name, value in run.items() if document["run"].get(name) != value]
    if differing:
        raise StateError(f"{path} belongs to another run: {', '.join(differing)} differ")
    with torch.no_grad():
        for name, parameter in trainer.ranker.named_parameters():
            parameter.copy_(tensors[f"weight.{name}"])
            if f"{MOMENTS[0]}.{name}" in tensors:
                step, *moments = (tensors[f"{moment}.{name}"] for moment in MOMENTS)
                values = (step, *(moment.to(parameter.device) for moment in moments))
                trainer.optimizer.state[parameter] = dict(zip(MOMENTS, values, strict=True))
    trainer.best = {name.removeprefix("best."): t for name, t in tensors.items() if name.startswith("best.")}
    trainer.generator.set_state(torch.tensor(document["generator"], dtype=torch.uint8))
    for name, value in counters.items():
        setattr(trainer, name, value)


def run_facts(trainer: Trainer) -> dict[str, Any]:
    """The facts that identify a run, as JSON values; they do not depend on the number of processes."""
    return {
        "settings": asdict(trainer.settings),
        "architecture": json.loads(json.dumps(trainer.examples.config.to_dict())),
        "log": trainer.examples.fingerprint,
        "split": [len(trainer.train), len(trainer.validation), trainer.steps],
    }
