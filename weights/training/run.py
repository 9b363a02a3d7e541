"""One training run from a log to a ranker: split, threads, resuming. Called by the command line and the demo."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from model.config import ModelConfig
from model.ranker import Ranker
from weights.format.writer import alone_in, write_whole
from weights.tables import LogError
from weights.training.examples import Examples
from weights.training.log import Log
from weights.training.processes import Processes, weight_sums
from weights.training.settings import TrainSettings
from weights.training.state import load_state, run_facts, save_state
from weights.training.trainer import Status, Trainer

VALIDATION_SHARE = 0.03
CURVE_NAME = "curve.png"
SMOOTH_STEPS = 50  # a batch's loss is mostly noise: the line is the mean over this many


def train(
    log: Log,
    config: ModelConfig,
    settings: TrainSettings,
    *,
    until_ts: int | None = None,
    start: Ranker | None = None,
    dwell_output: int = 0,
    state: Path | None = None,
    resume: bool = False,
    report: Callable[[Status], None] = lambda status: None,
    processes: Processes | None = None,
) -> Ranker:
    """Train on the requests before `until_ts` (all if None); the last 3 % of them validate. Returns the best ranker.

    `start`, of the same architecture, gives the initial values; if None, they are drawn. The dwell is learned by `dwell_output`
    of the continuous outputs.

    Equal arguments give equal bits on one machine and build: algorithms are deterministic, the thread count is fixed.
    Several `processes` call it with the same arguments; the first of them writes the state, and all read it.
    Raises LogError for a log too small to split, StateError if `resume` finds no state of this run in `state`,
    ProcessesError if the processes cannot train together.
    """
    processes = processes or Processes()
    examples = Examples(log, config)
    requests = len(examples) if until_ts is None else int(np.searchsorted(examples.times, until_ts))
    train_requests, validation = split(requests, settings.validation_requests)
    written = alone_in(state) if state and processes.rank == 0 else nullcontext()
    with written, reproducible(settings.threads):
        trainer = Trainer(examples, train_requests, validation, settings, start, processes, dwell_output)
        if resume and state:
            load_state(trainer, state)
        facts = {"torch": torch.__version__, "step": trainer.step, "weights": weight_sums(trainer.ranker)}
        processes.agree(run_facts(trainer) | facts)
        return trainer.run(report, partial(_keep, state if processes.rank == 0 else None)).cpu()


def _keep(state: Path | None, trainer: Trainer) -> None:
    if state:
        save_state(trainer, state)
        draw_curve(trainer.curve, state / CURVE_NAME)


def draw_curve(curve: Sequence[tuple[float, float, float]], path: Path) -> None:
    """Draw a trainer's `curve`: learning rate, loss and validation loss of every step."""
    import matplotlib.pyplot as plt

    from weights.report import BLUE, DARK, GREY, YELLOW, png

    rates, losses, validation = np.array(curve).T
    steps = np.arange(1, len(curve) + 1)
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(8, 5), dpi=90, height_ratios=(3, 1))
    upper.plot(steps, losses, color=GREY, linewidth=0.5, label="loss of each batch")
    if len(curve) > SMOOTH_STEPS:
        means = np.convolve(losses, np.full(SMOOTH_STEPS, 1 / SMOOTH_STEPS), "valid")
        upper.plot(steps[SMOOTH_STEPS - 1 :], means, color=BLUE, label=f"mean of {SMOOTH_STEPS}")
    evaluated = np.isfinite(validation)
    upper.plot(steps[evaluated], validation[evaluated], ".-", color=YELLOW, label="validation loss")
    upper.set_ylabel("loss")
    upper.legend(fontsize=8)
    lower.plot(steps, rates, color=DARK)
    lower.set_ylabel("learning rate")
    lower.set_xlabel("step")
    figure.tight_layout()
    write_whole(path, lambda new: new.write_bytes(png(figure)))


@contextmanager
def reproducible(threads: int) -> Iterator[None]:
    """Use deterministic algorithms and a fixed number of threads inside the block: sums split differently give other bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a GPU is first used
    before, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_deterministic_debug_mode(mode)


def split(requests: int, validation_requests: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices to train on, and an even sample of at most `validation_requests` of the last 3 % to validate on."""
    cut = int(requests * (1 - VALIDATION_SHARE))
    if cut < 1 or cut == requests:
        raise LogError(f"{requests} requests are too few to keep some for validation")
    last = np.arange(cut, requests)
    return np.arange(cut), last[:: -(-len(last) // validation_requests)]
