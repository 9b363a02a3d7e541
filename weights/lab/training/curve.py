"""What a training run leaves behind: its evaluations as JSON lines, why it ended, and a picture of them. Trains nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from model.ranker import Ranker
from weights.format.writer import write_whole
from weights.lab.report import plain
from weights.lab.training.events import event_writer, write_look
from weights.lab.training.settings import TrainSettings
from weights.lab.training.trainer import Look, Status

CURVE_NAME = "training.jsonl"
PICTURE_NAME = "training.svg"
DIGITS = 6


class Followed:
    """Reports the steps of a run on to `report`, and remembers the last one.

    So that a run can be watched, two directories are written at every evaluation: `state` gets the curve, and `tensorboard` event files.
    Raises ValueError if `tensorboard` is given without that package, and OSError.
    """

    def __init__(
        self, report: Callable[[Status], None], state: Path | None = None, tensorboard: Path | None = None
    ) -> None:
        self.report, self.state = report, state
        self.events = event_writer(tensorboard) if tensorboard else None
        self.looks_written = 0
        self.status = Status(0, 0, float("nan"), float("nan"), float("inf"), False)

    def __call__(self, status: Status) -> None:
        """Take note of a step."""
        self.status = status
        if status.evaluated and self.state:
            write_whole(self.state / CURVE_NAME, lambda new: new.write_bytes(curve_lines(status.curve)))
        if status.evaluated and self.events:
            for look in status.curve[self.looks_written :]:
                write_look(self.events, look)
            self.looks_written = len(status.curve)
        self.report(status)

    def close(self) -> None:
        """Close the event files."""
        if self.events:
            self.events.close()


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRun:
    """A ranker with the settings of its run and its last step."""

    ranker: Ranker
    settings: TrainSettings
    status: Status

    def line(self) -> str:
        """How the run went, in a sentence."""
        now = self.status
        return (
            f"Seed {self.settings.seed}: {now.step:,} of at most {now.steps:,} steps; {now.ended}. The best validation loss is "
            f"{now.best:.4f}, of step {now.best_step:,}."
        )

    def record(self) -> dict[str, Any]:
        """The same as JSON values, for the manifest."""
        now = self.status
        return {
            "steps": now.step,
            "most_steps": now.steps,
            "best_step": now.best_step,
            "best_validation_loss": plain(now.best, DIGITS),
            "ended": now.ended,
        }


def curve_lines(curve: Sequence[Look]) -> bytes:
    """A JSON object in a line for each evaluation."""
    return "".join(json.dumps(plain(asdict(look), DIGITS)) + "\n" for look in curve).encode()


def draw_curve(checkpoint: Path, directory: Path) -> bool:
    """Draw the losses of the run that made a checkpoint into `PICTURE_NAME` of a directory. False if it has no curve.

    Raises OSError.
    """
    if not (checkpoint / CURVE_NAME).exists():
        return False
    from matplotlib.figure import Figure

    looks = [json.loads(line) for line in (checkpoint / CURVE_NAME).read_text().splitlines()]
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    for name, label in (("training_loss", "training"), ("validation_loss", "validation")):
        axes.plot([look["step"] for look in looks], [look[name] for look in looks], marker=".", label=label)
    axes.legend()
    directory.mkdir(parents=True, exist_ok=True)
    figure.savefig(directory / PICTURE_NAME, metadata={"Date": None})
    return True
