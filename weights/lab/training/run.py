"""One training run from a log to a ranker: split, threads, resuming. Called by the command line and the demo."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from model.config import ModelConfig
from model.ranker import Ranker
from weights.format.writer import alone_in
from weights.lab.counts import smoothed_labels
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log, date_of
from weights.lab.training.settings import VALIDATION_SHARE, TrainSettings
from weights.lab.training.state import identity_of, load_state, save_state
from weights.lab.training.trainer import Status, Trainer
from weights.tables import TableError
from weights.values import time_problem


def train(
    log: Log,
    config: ModelConfig,
    settings: TrainSettings,
    *,
    until_ts: int | None = None,
    start: Ranker | None = None,
    dwell_output: int | None = None,
    state: Path | None = None,
    resume: bool = False,
    report: Callable[[Status], None] = lambda status: None,
) -> Ranker:
    """Train on the requests before `until_ts` (all if None); the newest of them validate. Returns the best ranker.

    `start`, of the same architecture, gives the initial values; if None, they are drawn. The dwell is learned by `dwell_output`
    of the continuous outputs, or by none. `state`: a directory that keeps the run, for `resume`.

    Equal arguments give equal bits on one machine and build: algorithms are deterministic, the thread count is fixed.
    Raises TableError for a split outside the log or a log too small to split, StateError if `resume` finds no state of this run in `state`,
    ValueError if `device` is not available, TrainingError if the validation loss never was finite.
    """
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda needs a GPU and a build of torch for it")
    if until_ts is not None:
        check_split(log, until_ts)
    examples = Examples(log, config)
    requests = len(examples) if until_ts is None else int(np.searchsorted(examples.times, until_ts))
    parts = split(log.counted_requests[:requests], settings.validation_requests, settings.validation_share)
    if settings.counts_share:
        examples.smoothed = smoothed_labels(examples, int(examples.stops[parts[0][-1]]), settings.counts_share)
    with alone_in(state) if state else nullcontext(), reproducible(settings.threads):
        trainer = Trainer(examples, *parts, settings, start, dwell_output)
        if state is None:
            return trainer.run(report, lambda run: None).cpu()
        identity = identity_of(log, config, settings, until_ts, start, dwell_output)
        if resume:
            load_state(trainer, state, identity)
        return trainer.run(report, lambda run: save_state(run, state, identity)).cpu()


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


def check_split(log: Log, split_ts: int) -> None:
    """Raises TableError for a time that leaves no request before it, or none from it on; the message names the log's range."""
    if problem := time_problem(split_ts):
        raise TableError(f"the time of the split {problem}; the log covers {log.span}")
    if not log.impression_ts[0] < split_ts <= log.impression_ts[-1]:
        raise TableError(f"the split at {split_ts} ({date_of(split_ts)}) lies outside the log, which covers {log.span}")


def validation_requests(examples: Examples, until_ts: int | None, share: float = VALIDATION_SHARE) -> NDArray[np.int64]:
    """The requests that `train` validates on, from which no step learned: all of the last `share` of the training period."""
    requests = len(examples) if until_ts is None else int(np.searchsorted(examples.times, until_ts))
    return split(examples.log.counted_requests[:requests], requests, share)[1]


def validation_begins(log: Log, until_ts: int | None, settings: TrainSettings) -> int:
    """The time of the first request that `train` validates on, Unix seconds."""
    past = log.before(until_ts)
    _, validation = split(past.counted_requests, settings.validation_requests, settings.validation_share)
    return int(past.impression_ts[past.request_starts[validation[0]]])


def taught_actions(log: Log, until_ts: int | None, settings: TrainSettings, start: Ranker | None = None) -> list[str]:
    """The actions that `train` teaches by these arguments, or that `start` was taught before: a head of zeros was taught by nothing."""
    past = log.before(until_ts)
    trained, _ = split(past.counted_requests, settings.validation_requests, settings.validation_share)
    taught = past.take(slice(0, int(np.append(past.request_starts, len(past))[len(trained)]))).taught_actions
    if start is not None:
        taught = taught | start.heads.actions.weight.any(0).cpu().numpy()
    return [name for name, is_taught in zip(log.action_names, taught, strict=True) if is_taught]


def split(
    counted: NDArray[np.bool_], validation_requests: int, share: float = VALIDATION_SHARE
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices to train on, and an even sample of at most `validation_requests` to validate on: of the last `share` of the requests that
    count. `counted`: `Log.counted_requests`, in time order. Raises TableError."""
    counting = np.flatnonzero(counted)
    cut = min(int(len(counting) * (1 - share)), len(counting) - 1)
    if cut < 1:
        known = "" if len(counting) == len(counted) else f", of which {len(counting)} count and have a known action,"
        raise TableError(
            f"a training period of {len(counted)} request{'s' * (len(counted) != 1)}{known} is too short: some must be kept to validate"
        )
    last = counting[cut:]
    return np.arange(last[0]), last[:: -(-len(last) // validation_requests)]
