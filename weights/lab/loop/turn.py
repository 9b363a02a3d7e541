"""One nightly turn: join what is new, train on from the serving checkpoint, judge both, publish or refuse. Also the way back.

Every step leaves whole files, so a turn that was killed goes on where it was. The link names a whole checkpoint at any time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from model.inputs import codes_fitting
from model.ranker import Ranker
from weights.actions import dwell_output
from weights.checkpoint import Checkpoint, load_checkpoint, load_manifest, save_checkpoint
from weights.errors import CheckpointError
from weights.fetch import ALONGSIDE
from weights.format.manifest import Manifest
from weights.format.writer import alone_in, write_whole
from weights.lab.agreement import score_weights
from weights.lab.evaluate.predict import predict
from weights.lab.joining.counts import JoinCounts, NothingJoins
from weights.lab.joining.join import COUNTS_NAME, JoinSettings, first_day_ts, join, latest_ts
from weights.lab.loop.gate import (
    ABOUT_THE_NIGHT,
    ENOUGH,
    EVENTS,
    Check,
    GateSettings,
    check_labels,
    check_model,
    check_night,
    distance_from_chance,
)
from weights.lab.loop.judge import Judgement, judge
from weights.lab.loop.night import Night, facts_of, has_some_of, requests_of, with_known_surfaces, without_log
from weights.lab.loop.report import left_out_lines, write_turn
from weights.lab.loop.state import (
    STATE_NAME,
    Done,
    NightRecord,
    Outcome,
    State,
    Version,
    forget_turn,
    leads_to,
    name_of,
    problem_of_link,
    settle,
    switch,
    take_up,
    with_present_version,
    write_json,
)
from weights.lab.training.choices import plan
from weights.lab.training.curve import CURVE_NAME, Followed, TrainedRun, curve_lines
from weights.lab.training.examples import Examples
from weights.lab.training.log import IN_MEMORY_ROWS, Log, read_log, time_words
from weights.lab.training.run import train
from weights.lab.training.state import STATE_NAME as TRAINING_STATE
from weights.lab.training.state import StateError
from weights.lab.training.trainer import Status, TrainingError
from weights.progress import Update
from weights.tables import TableError
from weights.turns import CHECKPOINTS, CONTEXTS, IMPRESSIONS, LOGS, OUTCOME_NAME, TURNS, WORK
from weights.values import problem_of_codes

CONTINUED: Mapping[str, Any] = {"epochs": 2.0, "learning_rate": 1e-3, "counts_share": 0.0, "evaluations": 8}
"""What differs from training from scratch: the serving checkpoint already knows most of it."""
JUDGED_REQUESTS = 20_000
"""Most held-out requests that are judged, an even sample."""
STALE_WINDOWS = 2
"""Events that end so many windows before the newest ranking are missing, not late."""
NOTHING_NEW = "Nothing new: no ranking has joined since the last turn"
TURN_NAME = "turn.json"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Paths:
    """Where a turn reads and writes: the log of what was served, the events, the link to the serving checkpoint, and the root of the
    turns."""

    served: Path
    events: str
    link: Path
    root: Path


@dataclass(frozen=True, slots=True)
class TurnSettings:
    """`join`: how to join; its `since_ts`, `ids`, `actions` and `label` are set by the turn. `nights`: train on so many, the newest;
    `held_out`: the share of the newest night's requests that both models are judged on; `keep`: how many versions are remembered, the
    present one among them, and their checkpoints are kept; `training`: settings of the run by the names that `--set` takes."""

    join: JoinSettings = field(default_factory=JoinSettings)
    bounds: GateSettings = field(default_factory=GateSettings)
    nights: int = 7
    held_out: float = 0.2
    keep: int = 5
    seed: int = 1
    training: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """How a run ended: `decision` is `published`, `refused`, `nothing new` or `back`; `report` is the directory of the report, if any."""

    decision: str
    sentence: str
    report: Path | None = None


def refresh(
    paths: Paths,
    settings: TurnSettings,
    say: Say = lambda line: None,
    progress: Update = lambda what, done, total: None,
) -> Result:
    """Take a turn, or finish the one that was interrupted. A second run at the same time raises BlockingIOError, a sentence.

    Raises TableError, TrainingError, StateError, CheckpointError, ValueError, OSError; the link then names what it named before. After the
    first three the next turn joins the night anew.
    """
    _check_link(paths.link)
    with alone_in(paths.root):
        state, finished, was_pending = settle(paths.root, paths.link, settings.keep)
        if finished:
            _clean(paths, settings, state)
            say(f"Turn {name_of(finished.turn)} was interrupted after its decision, and is finished now.")
            return _result(paths.root, finished)
        if was_pending:
            say(
                f"{paths.link} names version {state.versions[-1].version} now: a run was interrupted when it switched it."
            )
        _check_through(paths.root, state)
        turn = _Turn(paths, settings, state, load_checkpoint(paths.link), say, progress)
        try:
            outcome = turn.take()
        except (TableError, TrainingError, StateError):
            turn.forget()  # the next turn begins anew: with what has come since, or from events that were mended
            raise
        if isinstance(outcome, str):
            turn.forget()
            return Result("nothing new", outcome)
        if problem := problem_of_link(paths.link, outcome.serving):
            turn.forget()
            raise CheckpointError(problem)
        state = with_present_version(paths.link, state)
        write_json(turn.directory / OUTCOME_NAME, outcome)
        say("Decided.")
        state = take_up(paths.root, state, outcome, settings.keep)
        if state.pending:
            state = switch(paths.root, paths.link, state)
        say("Switched." if outcome.publish else "Not switched.")
        _clean(paths, settings, state)
        return _result(paths.root, outcome)


def back(paths: Paths, keep: int) -> Result:
    """Point the link to the version before the present one. The next turn does not publish the present one again: it needs a new night.

    Raises CheckpointError where there is no version before.
    """
    _check_link(paths.link)
    if not (paths.root / STATE_NAME).exists():
        raise CheckpointError(f"{paths.root} holds no turns, so there is no version to go back to.")
    with alone_in(paths.root):
        state, _, _ = settle(paths.root, paths.link, keep)
        versions = state.versions
        is_ours = bool(versions) and leads_to(paths.link, versions[-1].target)
        earlier = versions[:-1] if is_ours else versions
        if not earlier:
            raise CheckpointError(f"{paths.root} knows no version before the present one.")
        target = paths.link.parent / earlier[-1].target
        if not target.is_dir():
            raise CheckpointError(f"The version before, {earlier[-1].target}, is not there any more.")
        version = load_manifest(target).version  # which may have been changed in place
        state = msgspec.structs.replace(
            state, versions=earlier, pending=earlier[-1].target, serving=load_manifest(paths.link).digest
        )
        write_json(paths.root / STATE_NAME, state)
        switch(paths.root, paths.link, state)
    return Result("back", f"{paths.link} names version {version} again")


def _check_link(link: Path) -> None:
    if not link.is_symlink():
        raise CheckpointError(
            f"{link} is not a link to a checkpoint: refresh publishes by switching a link, such as phoenix-ranker fetch --link makes"
        )


def _check_through(root: Path, state: State) -> None:
    """Raises CheckpointError where rankings of the future count as done: no ranking would be new until then."""
    if state.through_ts is not None and state.through_ts > latest_ts():
        raise CheckpointError(
            f"{root / STATE_NAME} says that rankings are done up to {time_words(state.through_ts)}, which is in the future: a clock or "
            f"--until was wrong; set its through_ts to that of the last turn with a right one, in {root / TURNS / 'NAME' / OUTCOME_NAME}, "
            "or to when the newest ranking was served that has trained"
        )


def _result(root: Path, outcome: Outcome) -> Result:
    decision = "published" if outcome.publish else "refused"
    return Result(decision, outcome.sentence, root / TURNS / name_of(outcome.turn))


def _clean(paths: Paths, settings: TurnSettings, state: State) -> None:
    """Remove nights that no later turn reads, checkpoints that nothing goes back to, and what turns worked with."""
    nights = {night.name for night in state.nights[-settings.nights :]}
    for log in (paths.root / LOGS).glob("[0-9]*"):
        if log.name not in nights:
            shutil.rmtree(log, ignore_errors=True)
    used = {(paths.link.parent / version.target).resolve() for version in state.versions} | {paths.link.resolve()}
    for checkpoint in (paths.root / CHECKPOINTS).glob("[0-9]*"):
        if checkpoint.resolve() not in used:
            shutil.rmtree(checkpoint, ignore_errors=True)
    for work in (paths.root / TURNS).glob(f"*/{WORK}"):
        shutil.rmtree(work, ignore_errors=True)


class _Turn:
    """The work of one turn, up to its decision."""

    def __init__(
        self, paths: Paths, settings: TurnSettings, state: State, serving: Checkpoint, say: Say, progress: Update
    ) -> None:
        self.paths, self.settings, self.state, self.serving = paths, settings, state, serving
        self.say, self.progress = say, progress
        self.number = state.turns + 1
        self.name = name_of(self.number)
        self.directory = paths.root / TURNS / self.name
        self.log = paths.root / LOGS / self.name
        self.checkpoint = paths.root / CHECKPOINTS / self.name
        self.join_settings = replace(
            settings.join,
            since_ts=state.through_ts,
            read_before=self._read_before(),
            ids=serving.manifest.ids,
            actions=serving.manifest.action_names,
            label=f"night {self.name}",
        )
        self.weights: NDArray[np.float32] = score_weights(serving.manifest)
        actions = serving.manifest.action_names
        self.usual = state.usual(actions)
        earlier = state.nights[max(len(state.nights) - settings.nights + 1, 0) :]
        self.nights = [night for night in earlier if night.actions == actions]
        self.left_out_nights = [night.name for night in earlier if night.actions != actions]
        self.left_out_rankings = 0
        self.through_ts = state.through_ts

    def take(self) -> Outcome | str:
        """The decision, with its report written; or, in a sentence, why there is nothing to do."""
        self._begin()
        try:
            counts = self._joined()
        except NothingJoins as error:
            if not self.state.turns and error.counts.rankings == error.counts.other_model_rankings:
                raise  # at the first turn, the place or the model is more likely wrong
            self._tell(error.counts)
            return self._without_log(error.counts)
        self.through_ts = counts.until_ts - self.join_settings.window_seconds
        log = self._read(counts)
        for line in left_out_lines(self.left_out_nights, self.left_out_rankings):
            self.say(f"  {line}")
        if not has_some_of(log, self.log):
            return NOTHING_NEW
        examples = Examples(log, self.serving.manifest.config)
        requests = requests_of(examples, self.log)
        held_out, until_ts = self._held_out(examples, requests)
        of_serving = self._predicted(self.serving.ranker, self.serving.manifest, examples, held_out)
        night = facts_of(counts, examples, requests, self.weights, of_serving.mean(0))
        checks = check_night(night, self.usual, self.settings.bounds)
        judged = None
        if all(check.passed for check in checks):
            self.say("Training.")
            new = self._trained(log, until_ts)
            self.say("Judging.")
            of_new = self._predicted(new.ranker, new.manifest, examples, held_out)
            judged = judge(examples, held_out, (of_serving, of_new), self.weights, until_ts)
            checks += [
                check_labels(judged, self.usual, self.settings.bounds),
                *check_model(judged, self.settings.bounds),
            ]
        return self._decided(counts, night, checks, judged)

    def _begin(self) -> None:
        """Make the turn's directory. What an interrupted turn left there counts only if it had the same task."""
        join_task = {
            name: value for name, value in asdict(self.join_settings).items() if name not in ("memory", "read_before")
        }
        task = json.dumps(
            {
                "served": str(self.paths.served), "events": self.paths.events, "join": join_task,
                "serving": self.serving.manifest.digest, "nights": self.settings.nights,
                "held_out": self.settings.held_out, "seed": self.settings.seed, "training": dict(self.settings.training),
            },
            indent=1,
        )  # fmt: skip
        path = self.directory / TURN_NAME
        if not path.exists() or path.read_text() != task:
            self.forget()
            self.directory.mkdir(parents=True)
            write_whole(path, lambda new: new.write_text(task))
        for folder in (self.log.parent, self.checkpoint.parent, self.directory / WORK):
            folder.mkdir(parents=True, exist_ok=True)

    def forget(self) -> None:
        """Remove what the turn has made."""
        forget_turn(self.paths.root, self.name)

    def _joined(self) -> JoinCounts:
        """The counts of the night's join, which may be one of an interrupted turn. Raises NothingJoins."""
        if self.log.exists():
            counts = JoinCounts(**json.loads((self.log / COUNTS_NAME).read_text()))
        else:
            self.say("Joining.")
            counts = join(self.paths.served, self.paths.events, self.log, self.join_settings, self.progress)
        self._tell(counts)
        return counts

    def _tell(self, counts: JoinCounts) -> None:
        """Say what was joined and what was left out."""
        for line in counts.lines():
            self.say(f"  {line}")

    def _read_before(self) -> Mapping[str, int] | None:
        """The parts that the earlier night had read, if this one reads the same days. Others were open then, or were copied later."""
        before, since_ts = self.state.done, self.state.through_ts
        if not before or since_ts is None:
            return None
        return before.parts if before.from_ts == first_day_ts(since_ts, self.settings.join.window_seconds) else None

    def _without_log(self, counts: JoinCounts) -> Outcome | str:
        """Nothing joined: because nothing is new, because events ended, or because none of them fits."""
        if not counts.rankings_never_shown:
            window = self.join_settings.window_seconds
            if counts.events_reach_ts + STALE_WINDOWS * window >= counts.newest_ranking_ts:
                return NOTHING_NEW
            hours = (counts.newest_ranking_ts - counts.events_reach_ts) / 3600
            reason = f"the newest ranking that an event names is {hours:,.1f} hours older than the newest ranking"
            if counts.ambiguous_rankings:
                reason = f"of {counts.ambiguous_rankings:,} rankings several have the same request_id, so no event can name them; {reason}"
            ended = Check(EVENTS, False, reason)
            return self._decided(counts, without_log(counts), [ended], None)
        self.through_ts = counts.until_ts - self.join_settings.window_seconds
        night = without_log(counts)
        checks = check_night(night, self.usual, self.settings.bounds)
        return self._decided(counts, night, checks, None)

    def _read(self, counts: JoinCounts) -> Log:
        """The last nights as one log: a directory of links to their files. Codes that the serving model does not have count as none, as
        they do when it ranks. Rankings on product surfaces that it does not have are left out and counted."""
        names = [night.name for night in self.nights]
        both = self.directory / WORK / "log"
        shutil.rmtree(both, ignore_errors=True)
        for kind in (IMPRESSIONS, CONTEXTS):
            (both / kind).mkdir(parents=True)
            for name in (*names, self.name):
                for part in sorted((self.paths.root / LOGS / name / kind).glob("*.parquet")):
                    (both / kind / f"{name}-{part.name}").symlink_to(part.absolute())
        rows = counts.impressions + sum(night.impressions for night in self.nights)
        cache = self.directory / WORK / "sorted" if rows > IN_MEMORY_ROWS else None
        config = self.serving.manifest.config
        log = read_log(both, self.serving.manifest.ids, cache=cache, progress=self.progress)
        log, self.left_out_rankings = with_known_surfaces(log, config.product_surfaces)
        if problem_of_codes(log.codes, config.code_levels, config.code_values):
            log = replace(log, codes=codes_fitting(log.codes, len(log), config))
        return log

    def _held_out(self, examples: Examples, requests: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """The night's newest requests, at most JUDGED_REQUESTS of them, and the time from which on they are, Unix seconds. None of them was
        seen by the training of the checkpoint that serves, which may have been made elsewhere. Raises TableError where it saw all."""
        first = requests[min(int(len(requests) * (1 - self.settings.held_out)), len(requests) - 1)]
        seen_until_ts = self.serving.manifest.trained_until_ts or 0
        until_ts = max(int(examples.times[first]), seen_until_ts)
        if until_ts > examples.times[requests[-1]]:
            raise TableError(
                f"{self.paths.link} was trained until {time_words(seen_until_ts)}, and the newest joined ranking is older: wait for "
                "newer ones, for by no others can the two models be judged"
            )
        held_out = requests[examples.times[requests] >= until_ts]
        return held_out[:: -(-len(held_out) // JUDGED_REQUESTS)], until_ts

    def _predicted(
        self, ranker: Ranker, manifest: Manifest, examples: Examples, requests: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """The probabilities of the rows of these requests, float32 `[n, A]`."""
        return predict(
            ranker,
            examples,
            requests,
            progress=lambda done, total: self.progress("Scoring", done, total),
            corrections=manifest.corrections,
        ).probabilities

    def _trained(self, log: Log, until_ts: int) -> Checkpoint:
        """The checkpoint that was trained on, which may be one of an interrupted turn."""
        if self.checkpoint.exists():
            return load_checkpoint(self.checkpoint)
        manifest = self.serving.manifest
        decided = plan(log, self.settings.seed, until_ts, True, {**CONTINUED, **self.settings.training})
        state = self.directory / WORK / "training"
        followed = Followed(self._training_progress, state)
        ranker = train(
            log,
            manifest.config,
            decided.settings,
            until_ts=until_ts,
            start=self.serving.ranker,
            dwell_output=dwell_output(manifest.continuous),
            state=state,
            resume=(state / TRAINING_STATE).exists(),
            report=followed,
        )
        run = TrainedRun(ranker, decided.settings, followed.status)
        self.say(f"  {run.line()}")
        record = decided.record() | {"run": run.record(), "turn": self.name, "start": manifest.digest}
        beside = {name: self.serving.path / name for name in ALONGSIDE}
        extras = {name: path.read_bytes() for name, path in beside.items() if path.is_file()}
        save_checkpoint(
            self.checkpoint,
            ranker,
            name=manifest.name,
            action_names=manifest.action_names,
            continuous=manifest.continuous,
            score_weights=manifest.score_weights,
            ids=manifest.ids,
            training=record,
            extras=extras | {CURVE_NAME: curve_lines(run.status.curve)},
        )
        return load_checkpoint(self.checkpoint)

    def _training_progress(self, status: Status) -> None:
        self.progress("Training", status.step, status.steps)

    def _decided(self, counts: JoinCounts, night: Night, checks: list[Check], judged: Judgement | None) -> Outcome:
        """The outcome by the checks. Writes the report."""
        failed = tuple(check.name for check in checks if not check.passed)
        record, publish = None, None
        if judged and not {*failed} & {*ABOUT_THE_NIGHT}:
            distance = max(distance_from_chance(figure.value) for figure in judged.order)
            actions = self.serving.manifest.action_names
            record = NightRecord(self.name, counts.impressions, night.activity, distance, actions)
        if judged and not failed:
            parent = self.paths.link.parent.resolve()
            version = load_manifest(self.checkpoint).version
            publish = Version(os.path.relpath(self.checkpoint.resolve(), parent), version)
        is_to_wait = failed == (ENOUGH,)
        through_ts = self.state.through_ts if is_to_wait else self.through_ts  # the next night then holds this one too
        is_through = through_ts != self.state.through_ts
        done = Done(counts.done_from_ts, counts.done_rankings, counts.done_parts) if is_through else self.state.done
        serving = self.serving.manifest.version
        if publish:
            sentence = f"Turn {self.name} published version {publish.version}, trained on from {serving}"
        else:
            sentence = f"Turn {self.name} is refused: {', '.join(failed)}. Version {serving} goes on serving"
        for check in checks:
            self.say(f"  {check.name:<9} {'passed' if check.passed else 'FAILED'}: {check.sentence}")
        digest = self.serving.manifest.digest
        outcome = Outcome(self.number, failed, through_ts, sentence, record, publish, done, digest)
        write_turn(
            self.directory,
            outcome,
            counts,
            night,
            checks,
            judged,
            serving,
            self.left_out_nights,
            self.left_out_rankings,
        )
        return outcome
