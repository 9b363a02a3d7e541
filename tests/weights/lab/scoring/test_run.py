"""A run's files hold every row once, whatever its partitions and however often it was killed; another run's files are left alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from tests.weights.call import run
from tests.weights.lab.scoring.test_scorer import DEMO, as_table, by_key
from weights.lab.scoring.run import RunError, score_log
from weights.lab.scoring.scorer import Scorer
from weights.lab.world.simulate import World
from weights.tables import TableError

PARTS = 5


@pytest.fixture(scope="module")
def log(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "log.parquet"
    pq.write_table(as_table(world), path, row_group_size=1000)
    return path


@pytest.fixture(scope="module")
def whole(scorer: Scorer, log: Path) -> Any:
    return by_key(scorer.score_table(pq.read_table(log)))


@pytest.fixture(scope="module")
def finished(scorer: Scorer, log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in five parts."""
    out = tmp_path_factory.mktemp("finished") / "out"
    score_log(log, out, scorer, 0, PARTS)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, times of its files included."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


def written(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("part-*.parquet"))}


def read(out: Path) -> Any:
    return by_key(pa.concat_tables([pq.read_table(path) for path in sorted(out.glob("part-*.parquet"))]))


def test_partitions_together_are_the_whole(scorer: Scorer, log: Path, whole: Any, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    assert score_log(log, tmp_path / "out", scorer, 0, PARTS, lambda *now: told.append(now)) == len(whole)
    assert read(tmp_path / "out").equals(whole)
    assert len(written(tmp_path / "out")) == PARTS
    assert not (tmp_path / "out/.split").exists()
    assert told[0][0] == "Splitting by user"
    assert told[-1] == ("Scoring", len(whole), len(whole))


def test_a_directory_of_logs_is_one_log(scorer: Scorer, log: Path, whole: Any, tmp_path: Path) -> None:
    table, logs = pq.read_table(log), tmp_path / "logs"
    logs.mkdir()
    for place, part in enumerate((table.slice(0, 4000), table.slice(4000))):
        pq.write_table(part, logs / f"{place}.parquet")
    score_log(logs, tmp_path / "out", scorer, 0, 2)
    assert read(tmp_path / "out").equals(whole)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_killed_job_is_taken_up_without_a_hole_or_a_row_twice(
    scorer: Scorer, log: Path, finished: Path, tmp_path: Path
) -> None:
    """Killed while it splits, and again while it scores the third partition: the files are those of a run that nobody killed."""
    for awaited in (".split.new", "part-00001.parquet"):

        def kill(*_: object, awaited: Path = tmp_path / "killed" / awaited) -> None:
            if awaited.exists():
                os.kill(os.getpid(), signal.SIGKILL)

        arguments = (log, tmp_path / "killed", scorer, 0, PARTS, kill)
        run = multiprocessing.get_context("fork").Process(target=score_log, args=arguments, daemon=True)
        run.start()
        run.join(60)
        assert run.exitcode == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("part-*.parquet")}
    score_log(log, tmp_path / "killed", scorer, 0, PARTS)
    assert len(before) == 2
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())  # not computed again
    assert written(tmp_path / "killed") == written(finished)


def test_what_belongs_to_another_job_is_left_alone(scorer: Scorer, log: Path, out: Path, tmp_path: Path) -> None:
    before = written(out)
    for since_ts, parts, other in ((1, PARTS, "since_ts"), (0, 3, "partitions")):
        with pytest.raises(RunError, match=rf"another run \({other} differ\)"):
            score_log(log, out, scorer, since_ts, parts)
    assert written(out) == before
    (tmp_path / "mine").mkdir()
    for name, content in (("letter.txt", "dear"), ("run.json", "[]"), ("run.json", '{"log": [')):
        (tmp_path / "mine" / name).write_text(content)
        with pytest.raises(RunError, match="holds something else"):
            score_log(log, tmp_path / "mine", scorer)


def test_a_job_killed_as_it_described_itself_is_taken_up(
    scorer: Scorer, log: Path, finished: Path, tmp_path: Path
) -> None:
    (unfinished := tmp_path / "killed/.run.json.0123abcd.partial").mkdir(parents=True)
    (unfinished / "run.json").write_text('{"lo')
    score_log(log, tmp_path / "killed", scorer, 0, PARTS)
    assert written(tmp_path / "killed") == written(finished)


def test_a_second_job_in_one_place_is_refused_meanwhile(
    scorer: Scorer, log: Path, finished: Path, tmp_path: Path
) -> None:
    said: list[str] = []

    def second(what: str, done: int, total: int) -> None:
        with pytest.raises(BlockingIOError) as refused:
            score_log(log, tmp_path / "out", scorer, 0, PARTS)
        said.append(str(refused.value))

    score_log(log, tmp_path / "out", scorer, 0, PARTS, second)
    assert set(said) == {f"{tmp_path}/out is being written by another process: wait for its end"}
    assert written(tmp_path / "out") == written(finished)


def test_a_log_that_changes_while_it_is_read_is_refused(scorer: Scorer, log: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copy(log, tmp_path / "log.parquet"))
    with pytest.raises(TableError, match=r"log\.parquet was changed while it was read"):
        score_log(mine, tmp_path / "out", scorer, 0, PARTS, lambda *_: mine.touch())
    assert not written(tmp_path / "out")


def test_what_a_kill_left_of_the_split_log_is_made_anew(scorer: Scorer, log: Path, out: Path) -> None:
    """A finished run was killed while it removed the split log, and a part was deleted later."""
    before = written(out)
    (out / ".split").mkdir()
    (out / ".split" / "part-00004.arrow").write_text("")
    (out / "part-00001.parquet").unlink()
    score_log(log, out, scorer, 0, PARTS)
    assert written(out) == before
    assert not (out / ".split").exists()


def test_a_split_log_that_the_disk_refused_is_not_resumed_from(
    scorer: Scorer, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int) -> None:
        if "part-" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(OSError, match="Input/output error"):
        score_log(log, tmp_path / "out", scorer, 0, PARTS)
    assert not (tmp_path / "out" / ".split").exists()


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_what_a_request_may_not_have_a_log_may_not_either(
    scorer: Scorer, log: Path, tmp_path: Path, suffix: str
) -> None:
    """The file and its row are named."""
    rows = pq.read_table(log).slice(0, 40).to_pylist()
    rows[25]["created_at"] *= 1000
    for name, part in (("a", rows[:20]), ("b", rows[20:])):
        file = tmp_path / f"logs/{name}{suffix}"
        file.parent.mkdir(exist_ok=True)
        if suffix == ".jsonl":
            file.write_text("\n".join(map(json.dumps, part)))
        else:
            pq.write_table(pa.Table.from_pylist(part, pq.read_schema(log)), file)
    with pytest.raises(TableError, match=rf"b{suffix}, (line|row) 6: created_at must be Unix seconds, .*milliseconds"):
        score_log(tmp_path / "logs", tmp_path / "out", scorer)


def test_a_beginning_in_milliseconds_scores_nothing_and_says_so(log: Path, tmp_path: Path) -> None:
    words = ("score", "--checkpoint", DEMO, "--log", log, "--out", tmp_path / "out", "--since", 1_780_000_000_000)
    code, said = run(*words)
    assert code == 1
    assert "The time 1780000000000 must be Unix seconds" in said
    assert "milliseconds" in said
    assert not (tmp_path / "out").exists()
