"""A checkpoint appears complete or not at all, and nothing is overwritten unasked."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from weights.checkpoint import load_checkpoint
from weights.errors import CheckpointError
from weights.format import writer
from weights.format.writer import write_checkpoint
from weights.published.importer import labels_for
from weights.synthetic.random_weights import mini_config, random_pieces

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
CONFIG = mini_config(0, (20, 21, 22))
LABELS = labels_for(CONFIG, "x")


def write(path: Path, seed: int = 0, **options: object) -> str:
    return write_checkpoint(path, CONFIG, random_pieces(CONFIG, seed), LABELS, **options).digest  # type: ignore[arg-type]


def test_an_empty_directory_is_used_and_others_may_read_it(tmp_path: Path) -> None:
    os.umask(0o022)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")
    digest = write(tmp_path / "a" / "b" / "c")
    assert load_checkpoint(tmp_path / "empty").manifest.digest == digest
    assert stat.S_IMODE((tmp_path / "a" / "b" / "c").stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / "a" / "b" / "c" / "manifest.json").stat().st_mode) == 0o644


def test_replacing_keeps_other_files(tmp_path: Path) -> None:
    old = write(tmp_path / "c", extras={"example.json": b"1"})
    (tmp_path / "c" / "notes.md").write_text("mine")
    (tmp_path / "c" / "left.safetensors").write_text("an old table")
    with pytest.raises(CheckpointError, match="--replace"):
        write(tmp_path / "c", seed=1)
    new = write(tmp_path / "c", seed=1, replace=True, extras={"example.json": b"2"})
    assert load_checkpoint(tmp_path / "c").manifest.digest == new != old
    assert (tmp_path / "c" / "notes.md").read_text() == "mine"
    assert (tmp_path / "c" / "example.json").read_text() == "2"
    assert not (tmp_path / "c" / "left.safetensors").exists()
    assert os.listdir(tmp_path) == ["c"]


def test_what_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    (tmp_path / "file").write_text("dear")
    write(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("home", "file", "link"):
        with pytest.raises(CheckpointError, match="is not written"):
            write(tmp_path / name, replace=True)
    assert (tmp_path / "home" / "letter").read_text() == "dear"
    assert sorted(os.listdir(tmp_path)) == ["file", "home", "link", "real"]


FAULTS = {
    "nan": "tensor tables.user holds a NaN",
    "short": "tensor tables.user has fewer values than its shape",
    "long": "tensor tables.user has more values than its shape",
    "full disk": "No space left on device",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_is_told_and_leaves_the_old_one_and_no_rest(tmp_path: Path, fault: str) -> None:
    digest = write(tmp_path / "c")
    good = random_pieces(CONFIG, 1)

    def pieces(name: str) -> Iterator[Tensor]:
        if name != "tables.user":
            yield from good(name)
        elif fault == "full disk":
            raise OSError(28, "No space left on device")
        else:
            values = torch.ones(20 * 128 + {"nan": 0, "short": -1, "long": 1}[fault])
            yield from (values * torch.nan if fault == "nan" else values).split(999)

    with pytest.raises(CheckpointError, match=FAULTS[fault]):
        write_checkpoint(tmp_path / "c", CONFIG, pieces, LABELS, replace=True)
    assert load_checkpoint(tmp_path / "c").manifest.digest == digest
    assert os.listdir(tmp_path) == ["c"]


def test_a_failed_rename_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = write(tmp_path / "c")
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write(tmp_path / "c", seed=1, replace=True)
    assert load_checkpoint(tmp_path / "c").manifest.digest == digest
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("renames", [2, 3, 4])
def test_a_replacement_that_was_killed_is_ended_by_the_next_run(tmp_path: Path, renames: int) -> None:
    """Killed with the old one moved aside, with the new one in its place, or with half of the other files kept."""

    def replaced(by: str) -> None:
        with writer.written_beside(tmp_path / "c", replace=True) as partial:
            (partial / "manifest.json").write_text(by)

    replaced("old")
    (tmp_path / "c" / "example.json").write_text("1")
    (tmp_path / "c" / "notes.md").write_text("2")
    child = os.fork()
    if not child:
        left, rename = iter(range(renames)), Path.rename
        Path.rename = lambda self, to: os._exit(9) if next(left, None) is None else rename(self, to)  # type: ignore[method-assign]
        replaced("killed")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (tmp_path / ".c.d.01234567.old").mkdir()  # of c.d
    replaced("new")
    kept = {file.name: file.read_text() for file in (tmp_path / "c").iterdir()}
    assert kept == {"manifest.json": "new", "example.json": "1", "notes.md": "2"}
    assert sorted(os.listdir(tmp_path)) == [".c.d.01234567.old", "c"]


def test_what_another_process_has_written_meanwhile_stays(tmp_path: Path) -> None:
    others: list[str] = []

    def pieces(name: str) -> Iterator[Tensor]:
        others.extend([] if others else [write(tmp_path / "c", seed=1)])
        yield from random_pieces(CONFIG, 0)(name)

    with pytest.raises(CheckpointError, match="c is not written: another process has written it meanwhile"):
        write_checkpoint(tmp_path / "c", CONFIG, pieces, LABELS)
    assert [load_checkpoint(tmp_path / "c").manifest.digest] == others
    assert os.listdir(tmp_path) == ["c"]
    asked = write_checkpoint(tmp_path / "c", CONFIG, random_pieces(CONFIG, 0), LABELS, replace=True)
    assert load_checkpoint(tmp_path / "c").manifest.digest == asked.digest


def test_leavings_of_a_dead_process_go_and_of_a_living_one_stay(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with writer.written_beside(tmp_path / "c") as partial:
            (partial / "half").write_text("much")
            os.write(writing, partial.name.encode())
            time.sleep(600)
    try:
        half = os.read(reading, 200).decode()
        write(tmp_path / "other")
        (tmp_path / "other").rename(tmp_path / "c2")
        with writer.written_beside(tmp_path / "c") as partial:
            assert sorted(os.listdir(tmp_path)) == sorted([half, partial.name, "c2"])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert sorted(os.listdir(tmp_path)) == sorted([half, "c", "c2"])
    write(tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["c", "c2"]


def test_what_a_killed_change_of_the_manifest_left_goes(tmp_path: Path) -> None:
    write(tmp_path / "c")
    before, manifest = set(os.listdir(tmp_path / "c")), load_checkpoint(tmp_path / "c").manifest
    child = os.fork()
    if not child:
        os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
        writer.replace_manifest(tmp_path / "c", manifest)
    os.waitpid(child, 0)
    assert before < set(os.listdir(tmp_path / "c"))
    writer.replace_manifest(tmp_path / "c", manifest)
    assert set(os.listdir(tmp_path / "c")) == before


def test_a_directory_of_a_process_killed_before_it_had_a_lock_goes(tmp_path: Path) -> None:
    (tmp_path / ".c.0123abcd.fresh").mkdir()
    write(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


def test_nobody_removes_a_directory_that_was_made_just_now(tmp_path: Path) -> None:
    """Each begins by removing what has no lock, while the others make theirs."""

    def write_often(_: int) -> int:
        written = 0
        for _ in range(300):
            with contextlib.suppress(ZeroDivisionError), writer.written_beside(tmp_path / "c") as partial:
                (partial / "half").write_text("much")
                written += 1
                raise ZeroDivisionError
        return written

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(write_often, range(4))] == [300] * 4
    assert os.listdir(tmp_path) == []


def test_bad_names_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    def pieces(name: str) -> Iterator[Tensor]:
        raise AssertionError("weights were asked for")

    with pytest.raises(CheckpointError, match="needs 19 different action names"):
        write_checkpoint(tmp_path / "c", CONFIG, pieces, labels_for(CONFIG, "x", "", ["only"]))
    assert not list(tmp_path.iterdir())
