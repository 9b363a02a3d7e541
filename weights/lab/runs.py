"""Trains once or several times on one log and keeps the best run: `--seeds`, `--search`, and a second run where counts lead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from model.config import ModelConfig
from model.ranker import Ranker
from weights.format.writer import alone_in
from weights.lab.evaluate.baselines import COUNTS
from weights.lab.evaluate.evaluation import OwnValidation, on_own_validation
from weights.lab.training.choices import COUNTED_IMPRESSIONS, Plan
from weights.lab.training.curve import Followed, TrainedRun
from weights.lab.training.log import Log
from weights.lab.training.run import train
from weights.lab.training.search import difference, trials
from weights.lab.training.settings import TrainSettings
from weights.lab.training.state import STATE_NAME
from weights.lab.training.trainer import Status

SECOND = "second-run"
"""The directory of a second run, in that of the states and that of the event files."""
SECOND_COUNTS_SHARE = 0.9
DIRECTORIES = ("", SECOND, "seed-[0-9]*", "trial-[0-9]*")
"""Where the runs of any command keep their states, as patterns."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What all runs of a command share: the log, the architecture, where training starts and ends, and who watches.

    `state` and `tensorboard` are directories; each of several runs has one of its own in them. `watched()` gives, for the time of a run,
    the function that is called after each of its steps.
    """

    log: Log
    config: ModelConfig
    until_ts: int | None
    score_weights: Mapping[str, float]
    start: Ranker | None = None
    dwell_output: int | None = None
    state: Path | None = None
    tensorboard: Path | None = None
    resume: bool = False
    watched: Callable[[], AbstractContextManager[Callable[[Status], None]]] = lambda: nullcontext(lambda status: None)

    def train(self, settings: TrainSettings, directory: str = "", *, is_first: bool = True) -> TrainedRun:
        """One run. `directory`: its own one in `state` and `tensorboard`; empty where the run has them for itself. Raises as `train`.

        To resume, the first run of the command must have a state. Later ones had perhaps not begun when it was interrupted.
        """
        state = self.state / directory if self.state else None
        tensorboard = self.tensorboard / directory if self.tensorboard else None
        has_state = state is not None and (state / STATE_NAME).exists()
        resume = self.resume and (is_first or has_state)
        with self.watched() as report, closing(Followed(report, state, tensorboard)) as followed:
            ranker = train(
                self.log, self.config, settings, until_ts=self.until_ts, start=self.start, dwell_output=self.dwell_output,
                state=state, resume=resume, report=followed,
            )  # fmt: skip
        return TrainedRun(ranker, settings, followed.status)

    def begin_anew(self) -> None:
        """Remove the states that an earlier command left: to resume, this one must find none but its own.

        Raises BlockingIOError, a sentence, and removes nothing if another process is training in one of their directories.
        """
        state = self.state
        states = [path for name in DIRECTORIES for path in state.glob(str(Path(name, STATE_NAME)))] if state else []
        with ExitStack() as held:
            for path in states:
                held.enter_context(alone_in(path.parent))
            for path in states:
                path.unlink(missing_ok=True)

    def judge(self, run: TrainedRun) -> OwnValidation:
        """How a run's ranker compares with the simple baselines on the requests that the run validated on."""
        return on_own_validation(run.ranker, self.log, run.settings, self.until_ts, self.score_weights)


@dataclass(frozen=True, slots=True, eq=False)
class KeptRun:
    """The run that is kept, how its ranker compares on its own validation, and JSON values for the manifest on all that was tried."""

    run: TrainedRun
    own_validation: OwnValidation
    record: dict[str, Any]


def keep_best(task: Task, plan: Plan, seeds: int = 1, search: int = 1, say: Say = lambda line: None) -> KeptRun:
    """Train as planned, with so many seeds or settings, and keep the run with the best validation loss. `say` gets a line for each.

    If that one is behind counts on its own validation, it trains once more with most of each label from counts. It does not where its
    settings are somebody's choice (a search, a given share of counts, a start from another checkpoint), nor on a log that is too large.
    Raises what `train` does.
    """
    if not task.resume:
        task.begin_anew()
    settings = _settings_of_runs(plan, seeds, search)
    is_search = search > 1
    is_decided = is_search or task.start is not None or "counts_share" in plan.overrides
    may_train_again = (
        not is_decided and len(task.log) <= COUNTED_IMPRESSIONS and plan.settings.counts_share < SECOND_COUNTS_SHARE
    )
    if may_train_again:
        say(
            f"It may train a second time, with {SECOND_COUNTS_SHARE:.0%} of each label from counts, if counts are ahead on its own "
            "validation. The time that is announced is that of one run."
        )
    runs: list[TrainedRun] = []
    for directory, settings_of_run in settings.items():
        runs.append(task.train(settings_of_run, directory if len(settings) > 1 else "", is_first=not runs))
        changed = difference(settings_of_run, plan.settings) if is_search else {}
        with_these = ", ".join(f"{name}={value:.3g}" for name, value in changed.items())
        say(f"With {with_these}. {runs[-1].line()}" if with_these else runs[-1].line())
    best = min(runs, key=lambda run: run.status.best)
    if len(settings) > 1:
        say(_why_kept(runs, best, is_search=is_search))
    kept = kept_of_two(task, best, say) if may_train_again else KeptRun(best, task.judge(best), {})
    record = kept.record | {"settings": asdict(kept.run.settings), "run": kept.run.record()}
    if is_search:
        record["search"] = [difference(run.settings, plan.settings) | run.record() for run in runs]
    return replace(kept, record=record)


def kept_of_two(task: Task, first: TrainedRun, say: Say = lambda line: None) -> KeptRun:
    """The run to keep: `first`, or a second one with most of each label from what counts expect.

    There is a second one if the first ranker is behind counts on its own validation. The better validation loss is kept.
    """
    judged = task.judge(first)
    if not judged.is_behind(COUNTS):
        return KeptRun(first, judged, {})
    say(f"Counts are ahead on its own validation: once more, with {SECOND_COUNTS_SHARE:.0%} of each label from counts.")
    second = task.train(replace(first.settings, counts_share=SECOND_COUNTS_SHARE), SECOND, is_first=False)
    say(second.line())
    record = {"first_run": first.record(), "second_run": second.record()}
    is_better = second.status.best < first.status.best
    say(f"The {'second' if is_better else 'first'} run has the better validation loss and is kept.")
    return KeptRun(second, task.judge(second), record) if is_better else KeptRun(first, judged, record)


def _settings_of_runs(plan: Plan, seeds: int, search: int) -> dict[str, TrainSettings]:
    """The settings of each run of `--seeds` or `--search`, or of the only one, by the name of its directory."""
    if search > 1:
        tried = trials(plan.settings, search, plan.overrides.keys())
        return {f"trial-{number}": settings for number, settings in enumerate(tried, start=1)}
    numbers = range(plan.settings.seed, plan.settings.seed + seeds)
    return {f"seed-{seed}": replace(plan.settings, seed=seed) for seed in numbers}


def _why_kept(runs: Sequence[TrainedRun], best: TrainedRun, *, is_search: bool) -> str:
    """Which of several runs is kept, in a sentence or two."""
    if is_search:
        return (
            f"Trial {runs.index(best) + 1} of {len(runs)} has the best validation loss and is kept. That loss is a little too good, "
            "because it was chosen; eval tells how good the ranker is."
        )
    return (
        f"Seed {best.settings.seed} has the best validation loss and is kept. An average is not: that of the weights is no model, "
        f"and that of the scores would cost {len(runs)} forward passes for each request."
    )
