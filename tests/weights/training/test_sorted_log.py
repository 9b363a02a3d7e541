"""A log sorted on disk trains with the bits of one in memory, whatever its partitions, and takes no memory for its rows."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq

from loadtest.bench.offline import copies
from tests.weights.call import run
from tests.weights.training.small_run import TRAINING, small_config
from weights.tables import LogError
from weights.training import sorted_log
from weights.training.examples import Examples, index_of
from weights.training.log import COLUMNS, aligned, read_log, write_log
from weights.training.run import train
from weights.training.sorted_log import open_sorted, sort_log
from weights.training.world.settings import WorldSettings
from weights.training.world.simulate import World, simulate


@pytest.fixture
def shuffled(world: World, tmp_path: Path) -> Path:
    """The world's log in two files, its rows in no order."""
    order = np.random.default_rng(1).permutation(len(world.log))
    source = tmp_path / "log"
    source.mkdir()
    for number, rows in enumerate(np.array_split(order, 2)):
        write_log(source / f"{number}.parquet", world.log.take(rows))
    return source


@pytest.mark.parametrize("partition_rows", [500, 100_000])
def test_a_sorted_log_has_every_bit_of_one_in_memory(
    partition_rows: int,
    world: World,
    shuffled: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sorted_log, "PARTITION_ROWS", partition_rows)
    assert sort_log(shuffled, tmp_path / "sorted") == len(world.log)
    log = open_sorted(tmp_path / "sorted")
    found = Examples(log, small_config())
    expected = Examples(read_log(shuffled), small_config())
    assert found.fingerprint == expected.fingerprint != Examples(world.log, small_config()).fingerprint
    for name in ("starts", "stops", "times", "users", "first", "last"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name
    for name in (*COLUMNS, "actions"):
        assert np.array_equal(getattr(found.log, name), getattr(expected.log, name)), name
        assert np.array_equal(getattr(found.events, name), getattr(expected.events, name)), name
    largest = int(world.log.product_surface.max())
    assert open_sorted(tmp_path / "sorted").index.surfaces == index_of(read_log(shuffled)).surfaces == largest + 1
    Examples(log, replace(small_config(), product_surfaces=largest + 1))
    with pytest.raises(LogError, match=f"must be below {largest}, got {largest}"):
        Examples(log, replace(small_config(), product_surfaces=largest))
    assert {path.name for path in (tmp_path / "sorted").iterdir()} == {
        "events.bin", "first.npy", "impressions.bin", "last.npy", "log.json", "starts.npy", "users.npy", "times.npy"
    }  # fmt: skip


def test_a_log_is_sorted_by_one_process_at_a_time(shuffled: Path, tmp_path: Path) -> None:
    """Whatever a killed one left is swept away."""
    work = tmp_path / "out.unfinished"
    (work / "by-time").mkdir(parents=True)
    (work / "by-time/0").write_bytes(b"left")
    said: list[str] = []

    def second(*_: object) -> None:
        with pytest.raises(BlockingIOError) as refused:
            sort_log(shuffled, tmp_path / "out")
        said.append(str(refused.value))

    rows = sort_log(shuffled, tmp_path / "out", second)
    assert set(said) == {f"{work} is being written by another process: wait for its end"}
    assert len(open_sorted(tmp_path / "out")) == rows
    assert not work.exists()


def test_a_log_that_changes_while_it_is_sorted_is_refused(shuffled: Path, tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"1\.parquet was changed while it was read"):
        sort_log(shuffled, tmp_path / "out", lambda *_: (shuffled / "1.parquet").touch())
    assert not (tmp_path / "out").exists()


def test_training_from_a_sorted_log_gives_the_same_bits_and_another_seed_does_not(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorted_log, "PARTITION_ROWS", 700)
    write_log(tmp_path / "log.parquet", world.log)
    sort_log(tmp_path / "log.parquet", tmp_path / "sorted")
    log = open_sorted(tmp_path / "sorted")
    plain, mapped = Examples(world.log, small_config()), Examples(log, small_config())
    assert mapped.fingerprint == plain.fingerprint
    assert mapped.fingerprint != Examples(world.log.take(np.arange(5000)), small_config()).fingerprint
    until = int(plain.times[len(plain) // 2])
    settings = replace(TRAINING, epochs=0.3, init="unit")
    runs = ((world.log, settings), (log, settings), (log, replace(settings, seed=2)))
    plain_run, same, other = (train(each, small_config(), how, until_ts=until).state_dict() for each, how in runs)
    assert all(torch.equal(plain_run[name], same[name]) for name in plain_run)
    assert not all(torch.equal(plain_run[name], other[name]) for name in plain_run)


def test_what_cannot_be_used_is_refused_and_leaves_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sorted_log, "PARTITION_ROWS", 700)
    times = world.log.impression_ts.copy()
    times[world.log.request_id == world.log.request_id[0]] -= (
        np.arange(np.sum(world.log.request_id == world.log.request_id[0])) * 400_000
    )
    write_log(tmp_path / "log.parquet", replace(world.log, impression_ts=times))
    with pytest.raises(LogError, match="one request_id differ in user_id or impression_ts"):
        sort_log(tmp_path / "log.parquet", tmp_path / "sorted")
    assert not (tmp_path / "sorted").exists()
    pq.write_table(pq.read_table(tmp_path / "log.parquet").slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(LogError, match="holds no impressions"):
        sort_log(tmp_path / "empty.parquet", tmp_path / "sorted")
    write_log(tmp_path / "log.parquet", world.log)
    sort_log(tmp_path / "log.parquet", tmp_path / "sorted")
    with pytest.raises(LogError, match="exists already"):
        sort_log(tmp_path / "log.parquet", tmp_path / "sorted")
    names = world.log.action_names
    log = open_sorted(tmp_path / "sorted")
    assert aligned(log, names) is log
    with pytest.raises(LogError, match="other order"):
        aligned(log, names[::-1])
    (tmp_path / "sorted" / "events.bin").unlink()
    with pytest.raises(LogError, match="not a log that sort-log wrote"):
        open_sorted(tmp_path / "sorted")


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from loadtest.bench.offline import copies
from tests.weights.call import run
from tests.weights.training.small_run import TRAINING, small_config
from dataclasses import replace
from weights.training.log import read_log
from weights.training.run import train
from weights.training.sorted_log import open_sorted, sort_log
how, log, limit = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    if how == "stream":
        sort_log(log, log.with_name("sorted"))
        log = open_sorted(log.with_name("sorted"))
    else:
        log = read_log(log)
    train(log, small_config(), replace(TRAINING, epochs=0.0001))
except (MemoryError, RuntimeError) as error:
    sys.exit(f"no memory: {error}")
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_log_that_does_not_fit_into_memory_trains(tmp_path: Path) -> None:
    """The world at ten times the demo's size, and a process that may hold less than its rows."""
    write_log(tmp_path / "one.parquet", simulate(WorldSettings()).log)
    copies(tmp_path / "one.parquet", 10, tmp_path / "log")
    rows = 10 * pq.read_metadata(tmp_path / "one.parquet").num_rows
    limit = 1500 * 2**20

    def run(how: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", LIMITED, how, str(tmp_path / "log"), str(limit)], capture_output=True, text=True
        )

    assert rows * 79 > limit
    held = run("memory")
    assert held.returncode, "the control: in memory it does not fit"
    done = run("stream")
    assert done.returncode == 0, done.stderr


def test_a_log_whose_last_request_follows_all_events_is_read(world: World, tmp_path: Path) -> None:
    """One user's, who did nothing at the last one."""
    log = world.log.take(world.log.user_id == world.log.user_id[0])
    log.actions[log.impression_ts == log.impression_ts.max()] = 0
    write_log(tmp_path / "log.parquet", log)
    sort_log(tmp_path / "log.parquet", tmp_path / "sorted")
    index = open_sorted(tmp_path / "sorted").index
    assert index is not None
    assert index.last.max() == len(index.events) > 0


@pytest.mark.parametrize("name", ["impressions.bin", "events.bin"])
def test_a_sorted_log_that_was_copied_in_part_is_refused(name: str, shuffled: Path, tmp_path: Path) -> None:
    sort_log(shuffled, tmp_path / "sorted")
    row = sorted_log._row_type(open_sorted(tmp_path / "sorted").action_names).itemsize
    path = tmp_path / "sorted" / name
    os.truncate(path, path.stat().st_size // row // 2 * row)
    with pytest.raises(LogError, match="is cut off"):
        open_sorted(tmp_path / "sorted")


def test_a_disk_without_room_for_the_last_rows_is_refused(shuffled: Path, tmp_path: Path) -> None:
    assert run("sort-log", "--log", shuffled, "--out", tmp_path / "whole")[0] == 0
    most = max(path.stat().st_size for path in (tmp_path / "whole").iterdir()) - 100  # less than a block of a file
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        ended = run("sort-log", "--log", shuffled, "--out", tmp_path / "cut")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended == (1, "[Errno 27] File too large\n")
    assert not (tmp_path / "cut").exists()
    assert (
        run("sort-log", "--log", shuffled, "--out", tmp_path / "cut")[0] == 0
    )  # what the refused run left is no obstacle


def test_a_disk_that_refuses_what_was_written_leaves_no_sorted_log(
    shuffled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refused)
        with pytest.raises(OSError, match="Input/output error"):
            sort_log(shuffled, tmp_path / "sorted")
    assert not (tmp_path / "sorted").exists()
    assert sort_log(shuffled, tmp_path / "sorted")
