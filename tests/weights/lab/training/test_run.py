"""A run: torch is left as it was, a state belongs to one run at a time, an interrupted run ends with the same bits, splits are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")

from model.synthetic import random_ranker
from tests.weights.lab.training.small_run import TRAINING, small_config
from weights.lab.counts import smoothed_labels
from weights.lab.training.contexts import ServedContexts
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log, read_log, write_log
from weights.lab.training.run import split, train
from weights.lab.training.state import STATE_NAME, StateError
from weights.lab.training.trainer import Status
from weights.lab.world.simulate import World
from weights.tables import TableError

SHORT = replace(TRAINING, epochs=0.2, evaluate_every=4)


def test_training_leaves_torch_as_it_was(world: World) -> None:
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    train(world.log, small_config(), replace(TRAINING, epochs=0.1, threads=threads + 1))
    assert (torch.get_num_threads(), torch.get_deterministic_debug_mode()) == (threads, mode)


@pytest.mark.parametrize("dwell", ["known", "seldom known, and weights averaged"])
def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(dwell: str, world: World, tmp_path: Path) -> None:
    log, settings = world.log, replace(SHORT, averaging=0.5 if "averaged" in dwell else 0.0)
    if "seldom" in dwell:  # its head has no gradient in some steps, and has done fewer than the others
        seconds = np.where(log.request_id % 20 == 0, log.dwell_seconds, 0).astype(np.float32)
        log = replace(log, dwell_seconds=seconds)

    def stop(status: Status) -> None:
        if status.step == 6:
            raise KeyboardInterrupt

    whole = train(log, small_config(), settings, dwell_output=0).state_dict()
    with pytest.raises(KeyboardInterrupt):
        train(log, small_config(), settings, dwell_output=0, state=tmp_path, report=stop)
    seen: list[int] = []
    rest = train(
        log, small_config(), settings, dwell_output=0, state=tmp_path, resume=True, report=lambda s: seen.append(s.step)
    ).state_dict()
    assert seen[0] == 5, "the state was kept after step 4"
    assert all(torch.equal(whole[name], rest[name]) for name in whole)
    other = train(log, small_config(), replace(settings, seed=2), dwell_output=0).state_dict()
    assert not all(torch.equal(whole[name], other[name]) for name in whole)


def test_a_state_belongs_to_one_run_at_a_time(world: World, tmp_path: Path) -> None:
    """Two wrote one file at once, and renamed what was half of each."""

    def second(status: Status) -> None:
        with pytest.raises(BlockingIOError, match="is being written by another process: wait for its end"):
            train(world.log, small_config(), replace(TRAINING, epochs=0.1), state=tmp_path)

    train(world.log, small_config(), replace(TRAINING, epochs=0.1), state=tmp_path, report=second)


@pytest.mark.parametrize("content", [None, b"not a state", "another architecture"])
def test_a_state_that_cannot_go_on_is_refused(content: bytes | str | None, world: World, tmp_path: Path) -> None:
    if isinstance(content, str):
        train(world.log, replace(small_config(), width=32), replace(TRAINING, epochs=0.05), state=tmp_path)
    elif content is not None:
        (tmp_path / STATE_NAME).write_bytes(content)
    with pytest.raises(StateError, match=STATE_NAME):
        train(world.log, small_config(), SHORT, state=tmp_path, resume=True)


def dealt_anew(log: Log, column: str) -> Log:
    """The log with the values of a column in another order: as many actions taken, the same posts."""
    order = np.random.default_rng(1).permutation(len(log))
    return replace(log, **{column: getattr(log, column)[order]})


OTHER_RUNS: dict[str, Callable[[World], dict[str, Any]]] = {
    "until_ts": lambda world: {"until_ts": world.settings.test_ts},
    "learning_rate": lambda world: {"settings": replace(SHORT, learning_rate=1e-4)},
    "history_length": lambda world: {"config": replace(small_config(), history_length=12)},
    "impressions": lambda world: {"log": world.log.since(int(world.log.impression_ts[0]) + 86_400)},
    "log": lambda world: {"log": replace(world.log, actions=world.log.actions & (world.log.post_id % 2 == 0)[:, None])},
    "log, of as many actions": lambda world: {"log": dealt_anew(world.log, "actions")},
    "log, of other posts": lambda world: {"log": dealt_anew(world.log, "post_id")},
    "log, of other codes": lambda world: {"log": replace(world.log, codes=np.ones((len(world.log), 1), np.int64))},
    "log, of less knowledge": lambda world: {"log": replace(world.log, unknown=~world.log.actions)},
    "start": lambda world: {"start": random_ranker(small_config(), 1)},
}  # fmt: skip


@pytest.fixture(scope="module")
def state_of_a_run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("state")
    train(world.log, small_config(), SHORT, state=state)
    return state


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_the_state_of_another_run_is_refused(name: str, world: World, state_of_a_run: Path) -> None:
    before = (state_of_a_run / STATE_NAME).read_bytes()
    other = {"log": world.log, "config": small_config(), "settings": SHORT} | OTHER_RUNS[name](world)
    with pytest.raises(
        StateError, match=rf"{STATE_NAME} is of another run: .*\b{name.partition(',')[0]} was .*leave out --resume"
    ):
        train(**other, state=state_of_a_run, resume=True)
    assert (state_of_a_run / STATE_NAME).read_bytes() == before


def test_the_state_of_an_earlier_version_is_refused(world: World, state_of_a_run: Path, tmp_path: Path) -> None:
    """It did not say of which log it is."""
    state = torch.load(state_of_a_run / STATE_NAME, weights_only=True)
    del state["identity"]["log"]
    state["identity"]["actions_taken"] = "1234"
    torch.save(state, tmp_path / STATE_NAME)
    with pytest.raises(
        StateError, match=f"{STATE_NAME} is of an earlier version, .*: leave out --resume to begin anew"
    ):
        train(world.log, small_config(), SHORT, state=tmp_path, resume=True)


@pytest.mark.parametrize("of_contexts", [False, True])
def test_a_state_is_of_the_log_however_it_is_read(of_contexts: bool, world: World, tmp_path: Path) -> None:
    """In memory or mapped from a sorted copy, with contexts as served or without. Other contexts are another log."""
    write_log(tmp_path / "log.parquet", world.log)
    logs = [read_log(tmp_path / "log.parquet", cache=cache) for cache in (None, tmp_path / "cache")]
    if of_contexts:
        ids, events = np.arange(1, 3, dtype=np.uint64), slice(0, 4)
        log = logs[0].take(events)
        served = ServedContexts(
            ids, np.array([0, 2]), np.array([2, 4]), log.post_id, log.author_id, log.product_surface, log.dwell_seconds,
            log.actions.astype(np.float32), log.codes,
        )  # fmt: skip
        logs = [replace(log, context_id=np.zeros(len(log), np.uint64), contexts=served) for log in logs]
    run: dict[str, Any] = {"config": small_config(), "settings": SHORT, "state": tmp_path / "state"}
    train(logs[0], **run)
    train(logs[1], **run, resume=True)
    if of_contexts:
        other = replace(logs[0], contexts=replace(served, post_ids=served.post_ids[::-1].copy()))
        with pytest.raises(StateError, match="is of another run: log was"):
            train(other, **run, resume=True)


def test_a_run_from_a_checkpoint_goes_on_from_its_state(world: World, tmp_path: Path) -> None:
    run: dict[str, Any] = {"log": world.log, "config": small_config(), "settings": SHORT, "state": tmp_path}
    whole = train(**run, start=random_ranker(small_config(), 1)).state_dict()
    again = train(**run, start=random_ranker(small_config(), 1), resume=True).state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    with pytest.raises(StateError, match=r"is of another run: start was "):
        train(**run, start=random_ranker(small_config(), 2), resume=True)


def test_a_split_outside_the_log_is_refused_with_the_logs_range(world: World) -> None:
    for until in (0, int(world.log.impression_ts[0]), int(world.log.impression_ts[-1]) + 1):
        with pytest.raises(TableError, match="2026-06-01 … 2026-06-10"):
            train(world.log, small_config(), SHORT, until_ts=until)
    with pytest.raises(TableError, match=r"milliseconds.*2026-06-01 … 2026-06-10"):
        train(world.log, small_config(), SHORT, until_ts=int(world.log.impression_ts[9]) * 1000)


def test_the_last_requests_validate_and_one_alone_is_too_few() -> None:
    kept, validation = split(np.ones(1000, bool), 10)
    assert kept.tolist() == list(range(970))
    assert validation.tolist() == list(range(970, 1000, 3))
    assert [part.tolist() for part in split(np.ones(2, bool), 10)] == [[0], [1]]
    with pytest.raises(TableError, match="1 request is too short"):
        split(np.ones(1, bool), 10)


@pytest.mark.parametrize("why", ["unknown", "no weight"])
def test_requests_that_say_nothing_validate_nothing(why: str, world: World) -> None:
    """Such as those of the last day, whose labels have not come yet. A loss of 0 on them would be the best one there is."""
    log = world.log
    begins = int(log.impression_ts[int(0.7 * len(log))])
    says_nothing = log.impression_ts >= begins
    unknown = np.repeat(says_nothing[:, None], len(log.action_names), 1)
    log = replace(
        log,
        **(
            {"unknown": unknown, "actions": log.actions & ~unknown}
            if why == "unknown"
            else {"weight": np.where(says_nothing, 0, 1).astype(np.float32)}
        ),
    )
    seen: list[Status] = []
    trained = train(log, small_config(), SHORT, report=seen.append)
    assert seen[-1].best > 0.01
    if why == "unknown":
        before = train(log.before(begins), small_config(), SHORT)
        assert all(torch.equal(value, trained.state_dict()[name]) for name, value in before.state_dict().items())
    with pytest.raises(TableError, match="of which 0 count"):
        train(log.since(begins), small_config(), SHORT)


@pytest.mark.slow
def test_labels_smoothed_by_counts_keep_their_mean(world: World) -> None:
    examples = Examples(world.log, small_config())
    rows = int(examples.stops[len(examples) // 2])
    happened = world.log.actions[:rows]
    smoothed = smoothed_labels(examples, rows, 0.5)
    assert smoothed.mean(0) == pytest.approx(happened.mean(0), abs=0.02)
    assert (smoothed[happened] >= 0.5).all()
    assert (smoothed[~happened] <= 0.5).all()
    assert np.array_equal(smoothed_labels(examples, rows, 0.0), happened)


def test_smoothed_labels_count_each_row_by_its_weight(world: World) -> None:
    """Such as where one in five of the impressions that were passed over is kept, with a weight of 5."""
    log, rows = world.log, len(world.log)
    action = log.action_names.index("favorite")
    happened = log.actions[:, action]
    weight = np.where(happened, 1, 5).astype(np.float32)
    examples = Examples(replace(log, weight=weight), small_config())
    smoothed = smoothed_labels(examples, rows, 1.0)[:, action]
    expected = np.average(happened, weights=weight)
    assert np.average(smoothed, weights=weight) == pytest.approx(expected, rel=0.1)
    assert happened.mean() > 2 * expected
    small = Examples(replace(log, weight=weight / weight.sum()), small_config())
    assert smoothed_labels(small, rows, 1.0)[:, action] == pytest.approx(smoothed, abs=1e-3)


@pytest.mark.slow
def test_smoothed_labels_know_nothing_of_later_rows(world: World) -> None:
    examples = Examples(world.log, small_config())
    rows = int(examples.stops[len(examples) // 2])
    later = world.log.actions.copy()
    later[rows:] = ~later[rows:]
    other = Examples(replace(world.log, actions=later), small_config())
    assert np.array_equal(smoothed_labels(examples, rows, 0.5), smoothed_labels(other, rows, 0.5))


@pytest.mark.slow
def test_a_run_learns_smoothed_labels_and_validates_on_hard_ones(world: World) -> None:
    def run(counts_share: float) -> list[Status]:
        seen: list[Status] = []
        settings = replace(SHORT, counts_share=counts_share)
        train(world.log, small_config(), settings, dwell_output=0, report=seen.append)
        return seen

    hard, smooth = run(0.0), run(1.0)
    assert hard[-1].loss != smooth[-1].loss
    assert hard[-1].validation == pytest.approx(smooth[-1].validation, rel=0.1)


@pytest.mark.slow
def test_a_trunk_in_bfloat16_learns_what_one_in_float32_does(world: World) -> None:
    losses: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for dtype, seen in losses.items():
        run = replace(TRAINING, epochs=0.6, dtype=dtype)
        ranker = train(world.log, small_config(), run, report=lambda status, seen=seen: seen.append(status.loss))
        assert {p.dtype for p in ranker.parameters()} == {torch.float32}
    plain, rounded = losses.values()
    assert plain != rounded
    assert plain == pytest.approx(rounded, rel=0.03)
    assert rounded[-1] < 0.9 * rounded[0]
