"""What a hurried user mistakes on the lab's command line: one sentence that names the file, and the row where it is one."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")
import pyarrow.csv  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from loadtest.machine import ROOT  # noqa: E402
from loadtest.server import wait_until  # noqa: E402
from tests.support.full_disk import full_disk  # noqa: E402
from tests.support.random_models import random_model, retrieval_config  # noqa: E402
from tests.weights.call import call, run  # noqa: E402
from tests.weights.lab.training.small_run import WORLD, small_config  # noqa: E402
from weights.actions import DWELL_TIME, default_score_weights  # noqa: E402
from weights.checkpoint import save_checkpoint  # noqa: E402
from weights.lab.training.log import write_log  # noqa: E402
from weights.lab.world.behaviour import ACTION_NAMES  # noqa: E402
from weights.lab.world.simulate import World  # noqa: E402

ROWS = 600
Change = Callable[[Any], Any]
"""Of a table in Arrow, or of the bytes of a file."""


@pytest.fixture(scope="module")
def desk(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a log, a ranker and towers whose weights are random."""
    desk, training = tmp_path_factory.mktemp("desk"), {"until_ts": WORLD.test_ts}
    write_log(desk / "log.parquet", world.log)
    save_checkpoint(
        desk / "ranker", random_model(small_config(), 1), name="ranker", action_names=ACTION_NAMES,
        continuous=(DWELL_TIME,), score_weights=default_score_weights(ACTION_NAMES), training=training,
    )  # fmt: skip
    towers = random_model(retrieval_config(small_config()), 1)
    save_checkpoint(desk / "towers", towers, name="towers", action_names=ACTION_NAMES, training=training)
    return desk


def commands(desk: Path, log: Path, out: Path) -> dict[str, tuple[object, ...]]:
    """Each command that reads a log, by its name."""
    ranker = desk / "ranker"
    return {
        "log": (log,),
        "train": ("--log", log, "--out", out),
        "train-towers": ("--log", log, "--out", out),
        "eval": ("--checkpoint", ranker, "--log", log, "--out", out),
        "eval-retrieval": (desk / "towers", "--log", log, "--out", out),
        "calibrate": (ranker, "--log", log),
        "posts": (log, "--out", out),
        "score": ("--checkpoint", ranker, "--log", log, "--out", out),
        "example": (ranker, "--log", log),
        "compare": (ranker, ranker, "--log", log, "--out", out),
        "off-policy": ("--checkpoint", ranker, "--log", log, "--temperature", "0.5"),
    }


COMMANDS = tuple(commands(Path(), Path(), Path()))
OF_CHECKPOINTS = ("eval", "eval-retrieval", "calibrate", "score", "example", "compare", "off-policy")
LEARNING = ("log", "train", "train-towers")


def with_values(name: str, change: Callable[[list[Any]], object]) -> Change:
    """A table with a column whose values are changed in place."""

    def changed(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        change(values)
        return table.set_column(table.column_names.index(name), name, pa.array(values))

    return changed


def without_actions(table: pa.Table) -> pa.Table:
    for name in [name for name in table.column_names if name.startswith("action.")]:
        table = table.set_column(table.column_names.index(name), name, pa.array([False] * len(table)))
    return table


def milliseconds(values: list[int]) -> None:
    values[6] *= 1000


def lines(table: pa.Table) -> bytes:
    return "\n".join(map(json.dumps, table.slice(0, ROWS).to_pylist())).encode()


def csv(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table.slice(0, ROWS), sink)
    return sink.getvalue().to_pybytes()


def parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def text_in_row_3(text: bytes) -> bytes:
    return re.sub(rb"^((?:.*\n){3}\d+,)\d+", rb"\1yesterday", text)


MISTAKES: dict[str, tuple[str, Change, str, tuple[str, ...]]] = {
    "times in milliseconds": (
        "log.parquet", lambda table: parquet(with_values("impression_ts", milliseconds)(table)),
        r"log\.parquet, row 7: impression_ts must be Unix seconds.*milliseconds", COMMANDS,
    ),
    "a text in a column of numbers": (
        "log.csv", lambda table: text_in_row_3(csv(table)),
        r"log\.csv, row 3: column impression_ts holds texts", COMMANDS,
    ),
    "a line of JSON cut short": (
        "log.jsonl", lambda table: lines(table)[:-40], rf"log\.jsonl, line {ROWS}: is no JSON object", COMMANDS,
    ),
    "Parquet cut short": ("log.parquet", lambda table: parquet(table)[:-99], r"log\.parquet cannot be read", COMMANDS),
    "gzip under the name of CSV": (
        "log.csv", lambda table: gzip.compress(csv(table)), r"log\.csv is compressed with gzip", COMMANDS,
    ),
    "an empty file": ("log.parquet", lambda table: b"", r"log\.parquet is empty", COMMANDS),
    "other actions": (
        "log.parquet",
        lambda table: parquet(
            table.rename_columns([name.replace("action.reply", "action.answer") for name in table.column_names])
        ),
        r"log\.parquet.*lacks actions of the checkpoint: reply", OF_CHECKPOINTS,
    ),
    "no action that was taken": (
        "log.parquet", lambda table: parquet(without_actions(table)),
        r"log\.parquet: .* holds no action that was ever taken", LEARNING,
    ),
    "one user": (
        "log.parquet",
        lambda table: parquet(table.filter(pa.compute.equal(table["user_id"], table["user_id"][0]))),
        r"log\.parquet: .* holds only one user", LEARNING,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("mistake", "command"), [(mistake, command) for mistake, (*_, which) in MISTAKES.items() for command in which]
)
def test_a_wrong_log_is_one_sentence_that_names_it(mistake: str, command: str, desk: Path, tmp_path: Path) -> None:
    name, change, reason, _ = MISTAKES[mistake]
    (tmp_path / name).write_bytes(change(pq.read_table(desk / "log.parquet")))
    before = sorted(os.listdir(desk / "ranker"))
    code, said = run(command, *commands(desk, tmp_path / name, tmp_path / "out")[command])
    assert (code, said.count("\n")) == (1, 1), said
    assert re.search(reason, said), said
    assert not (tmp_path / "out").exists()
    assert sorted(os.listdir(desk / "ranker")) == before


def test_a_mended_log_is_scored_at_the_same_place(desk: Path, tmp_path: Path) -> None:
    table, log = pq.read_table(desk / "log.parquet"), tmp_path / "log.parquet"
    words = commands(desk, log, tmp_path / "out")["score"]
    log.write_bytes(parquet(with_values("impression_ts", milliseconds)(table)))
    assert run("score", *words)[0] == 1
    log.write_bytes(parquet(table))
    code, said = run("score", *words)
    assert code == 0, said


@pytest.mark.parametrize("option", ["--state", "--tensorboard", "--cache"])
def test_a_file_for_a_directory_is_refused_before_training(option: str, desk: Path, tmp_path: Path) -> None:
    absent, out = tmp_path / "nowhere.parquet", tmp_path / "out"
    code, said = run("train", "--log", absent, "--out", out, option, desk / "log.parquet")
    assert (code, "nothing can be written at" in said) == (2, True), said


@pytest.mark.slow
def test_a_state_that_is_not_there_is_a_sentence(desk: Path, tmp_path: Path) -> None:
    words = ("train", "--log", desk / "log.parquet", "--out", tmp_path / "out", "--state", tmp_path / "state")
    code, said = run(*words, "--resume")
    assert code == 1, said
    assert said.splitlines()[-1] == f"{tmp_path}/state/state.pt cannot be read: No such file or directory"


def test_a_link_to_nowhere_is_named_without_its_number(desk: Path, tmp_path: Path) -> None:
    """The error is the system's own."""
    (tmp_path / "state").symlink_to(tmp_path / "absent" / "directory")
    words = ("train", "--log", desk / "log.parquet", "--out", tmp_path / "out", "--state", tmp_path / "state")
    code, said = run(*words)
    assert code == 1, said
    assert "Errno" not in said.splitlines()[-1], said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_log_that_is_not_there_is_named(command: str, desk: Path, tmp_path: Path) -> None:
    code, said = run(command, *commands(desk, tmp_path / "nowhere.parquet", tmp_path / "out")[command])
    assert (code, said) == (1, f"{tmp_path}/nowhere.parquet is not there\n")


@pytest.mark.parametrize("command", OF_CHECKPOINTS)
@pytest.mark.parametrize("place", ["nowhere", "log.parquet", "other"])
def test_what_is_no_checkpoint_is_named(command: str, place: str, desk: Path, tmp_path: Path) -> None:
    """`other`: a ranker in place of towers, or towers in place of a ranker."""
    right = desk / ("towers" if command == "eval-retrieval" else "ranker")
    wrong = desk / ({"towers": "ranker", "ranker": "towers"}[right.name] if place == "other" else place)
    words = commands(desk, desk / "log.parquet", tmp_path / "out")[command]
    code, said = run(command, *(wrong if word == right else word for word in words))
    assert (code, said.count("\n")) == (1, 1), said
    assert said.startswith(f"Checkpoint {wrong} "), said


@pytest.mark.parametrize("command", ["posts", "eval-retrieval"])
@pytest.mark.parametrize("place", ["a directory", "below a file"])
def test_a_place_for_a_file_is_refused_before_any_work(command: str, place: str, desk: Path, tmp_path: Path) -> None:
    """The log is not there, which would be said first if the place was looked at last."""
    (tmp_path / "file").write_text("")
    out = tmp_path if place == "a directory" else tmp_path / "file" / "out.parquet"
    code, said = run(command, *commands(desk, tmp_path / "nowhere.parquet", out)[command])
    assert code == 2, said
    words = " ".join(said.replace("│", " ").split())
    assert ("is a directory: name a file" if out == tmp_path else "nothing can be written at") in words, said


def test_posts_are_written_over_those_of_yesterday(desk: Path, tmp_path: Path) -> None:
    for _ in range(2):
        code, said = run("posts", desk / "log.parquet", "--out", tmp_path / "posts.parquet")
        assert code == 0, said


@pytest.mark.parametrize("since", ["2030-01-01", "1780273617000"])
@pytest.mark.parametrize("command", ["posts", "compare", "eval", "eval-retrieval", "calibrate"])
def test_a_beginning_after_the_log_writes_nothing(command: str, since: str, desk: Path, tmp_path: Path) -> None:
    words = commands(desk, desk / "log.parquet", tmp_path / "out")[command]
    code, said = run(command, *words, "--since", since)
    assert (code, said.count("\n")) == (1, 1), said
    assert ("looks like milliseconds" in said) is (len(since) > 10), said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("day", "warned"), [("2026-06-01", True), ("1980-01-01", True), ("", False)])
@pytest.mark.parametrize("command", ["eval", "eval-retrieval", "calibrate"])
def test_requests_that_training_has_seen_are_warned_of(
    command: str, day: str, warned: bool, desk: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(desk / "ranker", tmp_path / "ranker")
    words = [
        own if word == desk / "ranker" else word
        for word in commands(desk, desk / "log.parquet", tmp_path / "out")[command]
    ]
    _, said = run(command, *words, *(["--since", day] if day else []))
    assert ("it may have learned from what is measured here" in said) is warned, said


def test_posts_leave_a_file_of_another_name_alone(desk: Path, tmp_path: Path) -> None:
    (tmp_path / "posts.new").write_text("mine")
    code, said = run("posts", desk / "log.parquet", "--out", tmp_path / "posts.parquet")
    assert code == 0, said
    assert (tmp_path / "posts.new").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"posts.new", "posts.parquet"}


@pytest.mark.parametrize("command", ["posts", "eval-retrieval"])
def test_a_file_that_the_disk_cannot_hold_is_as_before(command: str, desk: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("of yesterday")
    with full_disk(64):
        code, said = run(command, *commands(desk, desk / "log.parquet", tmp_path / "out")[command])
    assert (code, said) == (1, f"{tmp_path}/out: File too large; the file is as before\n")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out", "of yesterday")]


def short_run(desk: Path, *options: object) -> tuple[object, ...]:
    """The words of a training of seconds."""
    sizes = ("epochs=0.3", "width=16", "query_heads=2", "kv_heads=1", "head_width=8", "counts_share=0")
    assigned = [word for size in (*sizes, "evaluate_every=5") for word in ("--set", size)]
    return ("train", "--log", desk / "log.parquet", *options, *assigned)


@pytest.mark.slow
def test_a_state_that_the_disk_cannot_hold_is_as_before(desk: Path, tmp_path: Path) -> None:
    """torch raises a RuntimeError about positions in a file, whatever the system said."""
    state = tmp_path / "state/state.pt"
    words = [*short_run(desk, "--out", tmp_path / "out", "--state", state.parent), "--set", "epochs=3"]
    with subprocess.Popen([sys.executable, "-m", "weights", *map(str, words)], cwd=ROOT) as process:
        wait_until(state.exists, 60)
        process.kill()
    before, files = state.read_bytes(), {path.name for path in state.parent.iterdir()}
    for size in (64, 40_000):
        with full_disk(size):
            result = call(*words, "--resume")
        assert (result.exit_code, result.stderr) == (1, f"{state}: File too large; the file is as before\n")
        assert state.read_bytes() == before
        assert {path.name for path in state.parent.iterdir()} <= files
    assert call(*words, "--resume").exit_code == 0


@pytest.mark.parametrize(("command", "named"), [("world", "out/log.parquet"), ("score", "out/.split")])
def test_what_the_disk_cannot_hold_is_named(command: str, named: str, desk: Path, tmp_path: Path) -> None:
    sizes = ("users=40", "new_users=4", "authors=24", "days=10", "test_days=2", "slots=12")
    words = {
        "world": ("--out", tmp_path / "out", *[word for size in sizes for word in ("--set", size)]),
        "score": commands(desk, desk / "log.parquet", tmp_path / "out")["score"],
    }
    with full_disk(3000):
        result = call(command, *words[command])
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1), result.output
    assert re.match(rf"{tmp_path}/{named}.*: File too large", result.stderr), result.stderr


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        *[("train-towers", setting) for setting in (
            "warmup_steps=0", "steps=0", "batch_requests=0", "temperature=0", "temperature=nan", "negatives_by=x",
            "hidden_post_share=2", "learning_rate=nan", "threads=0",
        )],
        *[("world", setting) for setting in ("users=-5", "users=0", "days=-1", "days=3", "topics=2", "slots=0")],
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_refused_before_any_work(command: str, setting: str, tmp_path: Path) -> None:
    """The log is not there, which would be said first if the setting was looked at last."""
    log = ("--log", tmp_path / "nowhere.parquet") if command == "train-towers" else ()
    code, said = run(command, *log, "--out", tmp_path / "out", "--set", setting)
    named = "test_days" if setting == "days=3" else setting.partition("=")[0]
    assert (code, said.count("\n")) == (1, 1), said
    assert said.startswith(f"{named} must be "), said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("until", "day"),
    [
        ("48010", "1970-01-01"),
        ("30000101", "1970-12-14"),
        ("19709999", "1970-08-17"),
        ("19700102", "1970-01-02"),
        ("1970-01-02", "1970-01-02"),
    ],
)
def test_digits_that_are_no_day_are_seconds(until: str, day: str, world: World, tmp_path: Path) -> None:
    times = world.log.impression_ts - world.log.impression_ts[0]
    late = np.where(times < np.median(times), 0, 50_000_000)
    write_log(tmp_path / "log.parquet", replace(world.log, impression_ts=times + late))
    code, said = run("log", tmp_path / "log.parquet", "--until", until)
    assert code == 0, said
    assert f"split given: {day} " in said


@pytest.mark.slow
def test_a_reader_that_has_enough_ends_a_command_silently(desk: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)  # as `head` does
    program = [sys.executable, "-m", "weights", "log", str(desk / "log.parquet")]
    ended = subprocess.run(program, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=90)
    os.close(writes)
    assert (ended.returncode, "Errno" in ended.stderr, "Traceback" in ended.stderr) == (1, False, False), ended.stderr


@pytest.mark.parametrize(("repeated", "is_cached"), [(0, False), (1, True), (500, False)])
def test_rows_that_come_again_are_counted(repeated: int, is_cached: bool, world: World, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    write_log(
        tmp_path / "log/day.parquet", replace(world.log, post_id=np.arange(1, len(world.log) + 1, dtype=np.uint64))
    )
    table = pq.read_table(tmp_path / "log/day.parquet")
    pq.write_table(table.slice(len(table) // 2, repeated), tmp_path / "log/copy.parquet")
    code, said = run("log", tmp_path / "log", *(("--cache", tmp_path / "cache") if is_cached else ()))
    line = f"  {repeated} impressions have the request_id and the post_id of an earlier row: "
    assert (code, line in said, "of an earlier row" in said) == (0, bool(repeated), bool(repeated)), said


@pytest.mark.parametrize(("first", "per_second", "warned"), [("2026", 1e-3, True), ("1997-09-20", 1, False)])
def test_times_that_were_divided_by_too_much_are_warned_of(
    first: str, per_second: float, warned: bool, world: World, tmp_path: Path
) -> None:
    """Seconds that were divided by 1,000 once more lie in 1970. MovieLens is of 1997."""
    moved = 0 if first == "2026" else int(np.datetime64(first, "s").astype(int) - world.log.impression_ts[0])
    times = ((world.log.impression_ts + moved) * per_second).astype(np.int64)
    write_log(tmp_path / "log.parquet", replace(world.log, impression_ts=times))
    code, said = run("log", tmp_path / "log.parquet")
    assert (code, "WARNING: every impression_ts lies before 1990 (1970-01-21" in said) == (0, warned), said
