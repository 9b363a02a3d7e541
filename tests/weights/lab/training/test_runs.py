"""Several runs of one command: each keeps its state, and what an earlier command kept is in no one's way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from tests.weights.lab.training.small_run import small_config
from weights.actions import default_score_weights
from weights.format.writer import alone_in
from weights.lab.runs import Task, keep_best
from weights.lab.training.choices import Plan, plan
from weights.lab.training.state import StateError
from weights.lab.training.trainer import Status
from weights.lab.world.simulate import World

SETTINGS = {"epochs": 0.2, "batch_contexts": 16, "evaluate_every": 2, "validation_requests": 10}
SEVERAL = {"second-run": (1, 1), "seed-2": (2, 1), "trial-2": (1, 2)}
"""How many seeds and settings a command has, by the directory of one of its runs."""


class Interrupted(Exception):
    """In place of a kill."""


@contextmanager
def interrupted() -> Iterator[Callable[[Status], None]]:
    """Ends a run at its first evaluation, when its state is kept."""

    def report(status: Status) -> None:
        if status.evaluated:
            raise Interrupted

    yield report


@pytest.fixture(scope="module")
def made(world: World) -> Plan:
    return plan(world.log, overrides=SETTINGS)


@pytest.fixture
def task(world: World, made: Plan, tmp_path: Path) -> Task:
    weights = default_score_weights(world.log.action_names)
    return Task(world.log, small_config(), made.until_ts, weights, state=tmp_path / "state")


def states(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.glob("**/state.pt")}


@pytest.mark.slow
@pytest.mark.parametrize("directory", SEVERAL)
def test_a_command_resumes_whatever_was_kept_before_it(directory: str, made: Plan, task: Task, tmp_path: Path) -> None:
    """It finished its first run, and then refused what another command had kept for the second."""
    several = SEVERAL[directory]
    keep_best(task, made, *several)
    assert (tmp_path / "state" / directory / "state.pt").exists()
    another = replace(task, until_ts=None)
    with pytest.raises(Interrupted):
        keep_best(replace(another, watched=interrupted), made, *several)
    resumed = keep_best(replace(another, resume=True), made, *several)
    assert resumed.record == keep_best(replace(another, state=None), made, *several).record


@pytest.mark.slow
@pytest.mark.parametrize("left", [(1, 1), (1, 2)], ids=["one run", "search"])
def test_a_state_of_another_command_is_not_resumed(left: tuple[int, int], made: Plan, task: Task) -> None:
    """It began anew without a word."""
    with pytest.raises(Interrupted):
        keep_best(replace(task, watched=interrupted), made, *left)
    with pytest.raises(StateError, match=r"seed-1/state\.pt cannot be read"):
        keep_best(replace(task, resume=True), made, 2)


@pytest.mark.slow
def test_no_command_removes_the_state_of_one_that_runs(made: Plan, task: Task, tmp_path: Path) -> None:
    keep_best(task, made)
    (tmp_path / "state/seed-old").mkdir()
    (tmp_path / "state/seed-old/state.pt").write_text("somebody's own")
    kept = states(tmp_path / "state")
    with (
        alone_in(tmp_path / "state/second-run"),
        pytest.raises(BlockingIOError, match="second-run is being written by another process"),
    ):
        keep_best(task, made)
    assert states(tmp_path / "state") == kept
    keep_best(task, made, 2)
    assert (tmp_path / "state/seed-old/state.pt").read_text() == "somebody's own"
