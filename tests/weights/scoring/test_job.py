"""A job's files hold every row once, whatever its partitions and however often it was killed; another job's files are left alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from tests.weights.scoring.test_scorer import DEMO, as_table, by_key
from tests.zygote import zygote
from weights.scoring import job
from weights.scoring.job import JobError, partition_of, score_log
from weights.scoring.scorer import Scorer
from weights.tables import LogError
from weights.world.simulate import World

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
    """A finished job in five parts."""
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


def test_partitions_together_are_the_whole(
    scorer: Scorer, log: Path, whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "ROUND_ROWS", 3000)
    told: list[tuple[str, int, int]] = []
    assert score_log(log, tmp_path / "out", scorer, 0, PARTS, lambda *now: told.append(now)) == len(whole)
    assert read(tmp_path / "out").equals(whole)
    assert len(written(tmp_path / "out")) == PARTS
    assert not (tmp_path / "out/.split").exists()
    assert told[-1] == ("scored", len(whole), len(whole))
    assert next(done for what, done, _ in told if what == "split by user") < len(whole) / 2  # in rounds


def test_a_directory_of_logs_is_one_log(scorer: Scorer, log: Path, whole: Any, tmp_path: Path) -> None:
    table, logs = pq.read_table(log), tmp_path / "logs"
    logs.mkdir()
    for place, part in enumerate((table.slice(0, 4000), table.slice(4000))):
        pq.write_table(part, logs / f"{place}.parquet")
    score_log(logs, tmp_path / "out", scorer, 0, 2)
    assert read(tmp_path / "out").equals(whole)


def test_a_user_is_in_one_partition_and_consecutive_ids_are_spread() -> None:
    ids = np.arange(1, 100_001, dtype=np.uint64)
    assert np.bincount(partition_of(ids, 16)).min() > 0.9 * len(ids) / 16
    assert np.array_equal(partition_of(ids[::-1], 16)[::-1], partition_of(ids, 16))


def test_a_killed_job_is_taken_up_without_a_hole_or_a_row_twice(
    scorer: Scorer, log: Path, finished: Path, tmp_path: Path
) -> None:
    """Killed while it splits, and again between two partitions: the files are those of a run that nobody killed."""
    command = [sys.executable, "-m", "weights", "score", "--checkpoint", str(DEMO), "--log", str(log)]
    command += ["--partitions", str(PARTS), "--threads", "1", "--out", str(tmp_path / "killed")]
    for awaited in (".split.new", "part-00001.parquet"):
        running = zygote.begin(command)
        while not (tmp_path / "killed" / awaited).exists() and running.poll() is None:
            time.sleep(0.001)
        running.send_signal(signal.SIGKILL)
        running.wait()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("part-*.parquet")}
    score_log(log, tmp_path / "killed", scorer, 0, PARTS)
    assert len(before) >= 1
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())  # not computed again
    assert written(tmp_path / "killed") == written(finished)


@pytest.mark.parametrize("harm", ["flipped", "cut", "unlisted"])
def test_a_finished_part_that_was_damaged_since_is_computed_again(
    scorer: Scorer, log: Path, out: Path, harm: str
) -> None:
    assert subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=out, capture_output=True, check=False).returncode == 0
    before, times = written(out), {path.name: path.stat().st_mtime_ns for path in out.glob("part-*")}
    part = out / "part-00001.parquet"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content[:-5] if harm == "cut" else content)
    if harm == "unlisted":
        (out / "SHA256SUMS").write_bytes(b"\xff\n")
    told: list[str] = []
    score_log(log, out, scorer, 0, PARTS, warn=told.append)
    assert written(out) == before
    assert any("part-00001.parquet" in what for what in told)
    again = {path.name for path in out.glob("part-*") if path.stat().st_mtime_ns != times[path.name]}
    assert again == ({"part-00001.parquet"} if harm != "unlisted" else set(before))


def test_what_belongs_to_another_job_is_left_alone(scorer: Scorer, log: Path, out: Path, tmp_path: Path) -> None:
    before = written(out)
    for since_ts, parts, other in ((1, PARTS, "since_ts"), (0, 3, "partitions")):
        with pytest.raises(JobError, match=rf"another job \({other} differ\)"):
            score_log(log, out, scorer, since_ts, parts)
    assert written(out) == before
    (tmp_path / "mine").mkdir()
    for name, content in (("letter.txt", "dear"), ("job.json", "[]"), ("job.json", '{"log": [')):
        (tmp_path / "mine" / name).write_text(content)
        with pytest.raises(JobError, match="holds something else"):
            score_log(log, tmp_path / "mine", scorer)


def test_a_job_killed_as_it_described_itself_is_taken_up(
    scorer: Scorer, log: Path, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed/job.new").write_text('{"lo')
    score_log(log, tmp_path / "killed", scorer, 0, PARTS)
    assert written(tmp_path / "killed") == written(finished)


def test_a_second_job_in_the_same_place_is_refused_while_the_first_runs(
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
    with pytest.raises(LogError, match=r"log\.parquet was changed while it was read"):
        score_log(mine, tmp_path / "out", scorer, 0, PARTS, lambda *_: mine.touch())
    assert not written(tmp_path / "out")


def test_a_log_that_is_none_is_refused_with_a_sentence(scorer: Scorer, tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_bytes(b"nothing of the kind")
    for log, said in ((tmp_path / "no.parquet", "cannot be read as Parquet"), (tmp_path / "absent", "cannot be read")):
        with pytest.raises(LogError, match=said):
            score_log(log, tmp_path / "out", scorer)


def test_what_a_kill_left_of_the_split_log_is_made_anew(scorer: Scorer, log: Path, out: Path) -> None:
    """A finished job was killed while it removed the split log, and a part is damaged later."""
    before = written(out)
    (out / ".split").mkdir()
    (out / ".split" / "part-00004.arrow").write_text("")
    (out / "part-00001.parquet").write_bytes(b"damaged")
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
