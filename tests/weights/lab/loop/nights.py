"""Nights of a small world as a service logs them, with the events that followed, in ways that go wrong too. Not a test itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import structs

from model.inputs import Candidates
from tests.support.parts import write_rows
from tests.weights.lab.training.small_run import TRAINING, small_config
from weights.actions import DWELL_TIME, default_score_weights
from weights.checkpoint import save_checkpoint
from weights.fetch import point
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log, date_of
from weights.lab.training.run import train
from weights.lab.world.settings import DAY_SECONDS, WorldSettings
from weights.lab.world.simulate import simulate
from weights.served import ServedRanking

WORLD = WorldSettings(users=80, new_users=0, authors=24, days=9, test_days=1, slots=12, sessions_per_day=2.2)
FIRST_DAY = 5
"""Days before it have trained the checkpoint that serves at first."""
DAYS = WORLD.days - FIRST_DAY
TRAINING_SET = ("--set", "batch_contexts=16", "--set", "evaluate_every=20", "--set", "epochs=1")
BOUNDS = ("min_rankings=100", "min_lead=-0.03", "max_entropy_loss=0.05", "max_calibration_loss=0.5")
OPTIONS = ("--window", "1h", *TRAINING_SET, *(word for bound in BOUNDS for word in ("--bound", bound)))
"""A night is so small here that two models which are as good differ by a hundredth."""


@dataclass(frozen=True)
class Nights:
    """A log of impressions in time order, its examples, and a checkpoint trained on the first days."""

    log: Log
    examples: Examples
    checkpoint: Path

    def serve(
        self,
        root: Path,
        day: int,
        *,
        is_empty: bool = False,
        is_for_one_time: bool = False,
        change: Callable[[ServedRanking], ServedRanking] = lambda row: row,
    ) -> None:
        """Write what was served on a day as a part. `is_empty`: every history was left out by mistake; `is_for_one_time`: all
        rankings are for the beginning of the day; `change`: of each ranking, such as that of another model."""
        rows = [change(self._ranking(index, is_empty)) for index in self._requests(day)]
        if is_for_one_time:
            rows = [structs.replace(row, impression_ts=self.start_ts(day)) for row in rows]
        folder = root / "served" / f"date={date_of(self.start_ts(day))}"
        folder.mkdir(parents=True)
        write_rows(folder / "part.parquet", rows)

    def act(
        self,
        root: Path,
        day: int,
        *,
        share: float = 1.0,
        is_shuffled: bool = False,
        late_seconds: int = 0,
        never: str = "",
    ) -> None:
        """Write what people did that day as events. `share`: of the events, the others are lost; `is_shuffled`: what they did is dealt out
        among all impressions of the day; `late_seconds`: how far the clock of the events is ahead."""
        rng = np.random.default_rng(day)
        log, starts, stops = self.log, self.examples.starts, self.examples.stops
        requests = self._requests(day)
        rows = np.concatenate([np.arange(starts[index], stops[index]) for index in requests])
        actions = log.actions[rows][rng.permutation(len(rows))] if is_shuffled else log.actions[rows]
        place, action = np.nonzero(actions)
        names = np.array(log.action_names)[action]
        at = log.impression_ts[rows][place] + rng.integers(2, 600, len(place)) + late_seconds
        events = pa.table(
            {
                "request_id": [f"feed-{number}" for number in log.request_id[rows][place].tolist()],
                "post_id": log.post_id[rows][place],
                "action": names.tolist(),
                "event_ts": at,
                "value": np.where(names == "dwell_time", log.dwell_seconds[rows][place].astype(np.float64), np.nan),
            }
        ).filter(pa.array((rng.random(len(place)) < share) & (names != never)))
        end = {
            "request_id": ["none"],
            "post_id": [1],
            "action": ["favorite"],
            "event_ts": [self.start_ts(day + 1) + 3600],
        }
        whole = pa.concat_tables(
            [events, pa.table(end).cast(pa.schema([*events.schema][:4]))], promote_options="default"
        )
        (root / "events").mkdir(exist_ok=True)
        pq.write_table(whole, root / "events" / f"day-{day}.parquet")

    def link(self, root: Path) -> Path:
        """A link of this root to the first checkpoint."""
        point(root / "current", str(self.checkpoint))
        return root / "current"

    def start_ts(self, day: int) -> int:
        """When a day begins, Unix seconds."""
        return WORLD.start_ts + (FIRST_DAY + day) * DAY_SECONDS

    def _requests(self, day: int) -> list[int]:
        times = self.examples.times
        return [*range(*np.searchsorted(times, (self.start_ts(day), self.start_ts(day + 1))).tolist())]

    def _ranking(self, index: int, is_empty: bool) -> ServedRanking:
        log, rows = self.log, self.examples.rows(index)
        context, served_ts = self.examples.context(index), int(self.examples.times[index])
        if is_empty:
            context = context.rows(slice(0))
        candidates = self.examples.candidates(rows)
        assert isinstance(candidates, Candidates)
        count = len(rows)
        fields: dict[str, Any] = {
            "request_id": f"feed-{log.request_id[rows[0]]}", "served_us": served_ts * 1_000_000, "endpoint": "/rank",
            "key": None, "model_name": "small", "model_version": "1", "model_digest": "ab" * 32,
            "action_names": log.action_names, "continuous_names": ("dwell_time",), "impression_ts": served_ts,
            "context": context, "candidates": candidates, "created_at": log.created_at[rows],
            "scores": -np.arange(count, dtype=np.float64), "ranks": np.arange(count) + 1, "returned": count,
            "weights": np.ones(len(log.action_names)), "score_form": "sum",
        }  # fmt: skip
        return ServedRanking(**fields)


def make_nights(directory: Path) -> Nights:
    """Draw the world and train the first checkpoint in this directory."""
    log = simulate(WORLD).log
    config = replace(small_config(), history_length=20)
    until_ts = WORLD.start_ts + FIRST_DAY * DAY_SECONDS
    settings = replace(TRAINING, epochs=4.0, evaluate_every=40)
    ranker = train(log, config, settings, until_ts=until_ts, dwell_output=0)
    save_checkpoint(
        directory / "first",
        ranker,
        name="small",
        action_names=log.action_names,
        continuous=(DWELL_TIME,),
        score_weights=default_score_weights(log.action_names),
    )
    return Nights(log, Examples(log, config), directory / "first")


def printing_into(connection: Connection, command: list[str]) -> None:
    """Run a command of `python -m weights` in this process, which prints into the connection and ends with the command's exit code."""
    from weights.command_line import app
    from weights.commands.console import run

    for stream in (1, 2):
        os.dup2(connection.fileno(), stream)
    connection.close()
    sys.argv = ["weights", *command]
    run(app, "weights")
