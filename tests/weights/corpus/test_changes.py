"""The log of changes: nothing acknowledged is lost, nothing half written is read, whatever byte a crash came at."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.retrieval.inputs import Change, Mark, NewPosts
from weights.corpus.changes import ChangeLog
from weights.corpus.manifest import COLUMNS, CorpusManifest, file_of
from weights.corpus.records import HEADER_BYTES, no_posts
from weights.errors import CheckpointError, LogLost, NotStored, StorageFull
from weights.format.manifest import MANIFEST_NAME, FileEntry, TensorEntry

WIDTH = 3


@functools.cache
def manifest(version: str = "v1") -> CorpusManifest:
    tensors = {name: TensorEntry(file_of(name), dtype, (5,)) for name, dtype in COLUMNS.items()}
    tensors["vectors"] = TensorEntry(file_of("vectors"), "float32", (5, WIDTH))
    files = {file_of(name): FileEntry("0" * 64, 1) for name in tensors}
    return CorpusManifest("posts", version, "e", "towers v1", 5, WIDTH, ("a",), files, tensors)


@pytest.fixture(autouse=True)
def corpus(tmp_path: Path) -> None:
    """The corpus that the logs belong to, as far as a log looks at it."""
    (tmp_path / MANIFEST_NAME).write_bytes(manifest().to_json())


def change(seed: int) -> Change:
    rng = np.random.default_rng(seed)
    count = seed % 3
    posts = NewPosts(
        rng.integers(1, 2**64, count, np.uint64), rng.integers(1, 2**64, count, np.uint64), rng.integers(0, 9, count),
        [None, "tópic"][:count], rng.standard_normal((count, WIDTH)).astype(np.float32),
    )  # fmt: skip
    return Change(rng.integers(1, 2**64, 2, np.uint64), posts, Mark(seed))


def seen(changes: list[Change]) -> list[Any]:
    return [
        (one.delete.tolist(), one.posts.post_ids.tolist(), one.posts.author_ids.tolist(), one.posts.created_at.tolist(),
         one.posts.topics, one.posts.vectors.tobytes())
        for one in changes
    ]  # fmt: skip


def written(directory: Path, count: int) -> Path:
    log = ChangeLog(directory, manifest())
    assert (log.read(), log.passed_over) == ([], 0)
    for seed in range(count):
        log.append(change(seed))
    log.close()
    return log.path


def test_changes_are_read_back(tmp_path: Path) -> None:
    written(tmp_path, 4)
    log = ChangeLog(tmp_path, manifest())
    assert seen(log.read()) == seen([change(seed) for seed in range(4)])
    log.append(change(9))
    assert seen(ChangeLog(tmp_path, manifest()).read()) == seen([change(seed) for seed in (0, 1, 2, 3, 9)])
    assert no_posts(WIDTH).vectors.shape == (0, WIDTH)


@pytest.mark.parametrize("tail", ["cut", "zeros"])
def test_a_crash_at_any_byte_loses_nothing_that_was_acknowledged(tmp_path: Path, tail: str) -> None:
    """The file ends anywhere, or the rest of it was never written and reads as zeros."""
    path = written(tmp_path, 3)
    raw, ends = path.read_bytes(), []
    for count in range(4):
        (tmp_path / str(count)).mkdir()
        shutil.copy(tmp_path / MANIFEST_NAME, tmp_path / str(count))
        ends.append(len(written(tmp_path / str(count), count).read_bytes()) if count else 0)
    assert ends[-1] == len(raw)
    for cut in range(len(raw) + 1):
        path.write_bytes(raw[:cut] + (bytes(len(raw) - cut) if tail == "zeros" else b""))
        whole = max(count for count, end in enumerate(ends) if end <= cut)
        if tail == "zeros" and raw[cut:].count(0) == len(raw) - cut:
            whole = 3  # those bytes were zeros anyway
        log = ChangeLog(tmp_path, manifest())
        try:
            assert seen(log.read()) == seen([change(seed) for seed in range(whole)]), cut
        except CheckpointError:
            assert tail == "zeros", cut  # zeros inside of a record with others after it are damage, and refused
            assert whole < 2
            continue
        assert not whole or log.passed_over == (len(raw) if tail == "zeros" else cut) - ends[whole]
        log.append(change(7))
        log.close()
        assert seen(ChangeLog(tmp_path, manifest()).read()) == seen([change(seed) for seed in (*range(whole), 7)]), cut


def test_damage_before_the_last_record_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    raw = bytearray(path.read_bytes())
    start = raw.index(b'{"delete"') - HEADER_BYTES
    raw[140] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=rf"is damaged at byte {start}: .* cut it off at that byte"):
        ChangeLog(tmp_path, manifest()).read()
    os.truncate(path, start)
    assert ChangeLog(tmp_path, manifest()).read() == [], "as the sentence says"


def test_no_flipped_bit_loses_a_change(tmp_path: Path) -> None:
    """Each by itself is refused with a sentence: nothing in a log is without meaning."""
    path = written(tmp_path, 3)
    raw = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for bit in range(8 * len(raw)):
            os.pwrite(file.fileno(), bytes([raw[bit // 8] ^ 1 << bit % 8]), bit // 8)
            with pytest.raises(CheckpointError):
                ChangeLog(tmp_path, manifest()).read()
            os.pwrite(file.fileno(), raw[bit // 8 : bit // 8 + 1], bit // 8)
    assert len(ChangeLog(tmp_path, manifest()).read()) == 3


def test_a_length_of_zero_loses_no_change(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    raw = path.read_bytes()
    for at in (0, *(found.start() - HEADER_BYTES for found in re.finditer(rb'{"(corpus|delete)"', raw))):
        path.write_bytes(raw[:at] + bytes(4) + raw[at + 4 :])
        with pytest.raises(CheckpointError, match=f"is damaged at byte {at}"):
            ChangeLog(tmp_path, manifest()).read()


def test_a_log_of_a_form_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    without_magic = path.read_bytes()[12:]  # as logs began until November 2026
    for begin in (b"chg2" + bytes(40), b"\xff" * 100, b"chg3\xff\xff\xff\x7f" + b"x" * 50, without_magic):
        path.write_bytes(begin)
        with pytest.raises(CheckpointError, match="is damaged at byte 0, or in a form that this build does not read"):
            ChangeLog(tmp_path, manifest()).read()


@pytest.mark.parametrize("kind", ["pipe", "directory", "link", "gone", "another"])
def test_a_log_that_is_not_the_file_it_was_takes_no_change(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, 2)
    holder, reader, first = (ChangeLog(tmp_path, manifest()) for _ in range(3))
    holder.read(), reader.read()
    holder.append(change(2))
    path.rename(tmp_path / "aside")
    make = {"pipe": os.mkfifo, "directory": Path.mkdir, "link": lambda path: path.symlink_to("aside"),
            "another": lambda path: shutil.copy(tmp_path / "aside", path), "gone": lambda path: None}  # fmt: skip
    make[kind](path)
    for log in (holder, reader):
        for _ in range(2):
            with pytest.raises(LogLost if kind in ("gone", "another") else NotStored):
                log.append(change(3))
        with pytest.raises(CheckpointError):
            log.follow()
    if kind in ("pipe", "directory", "link"):
        with pytest.raises(CheckpointError):
            first.read()


@pytest.mark.parametrize("left", [0, 20, -1])
def test_a_log_that_was_cut_takes_no_change(tmp_path: Path, left: int) -> None:
    """Its writer would put the next record behind a hole, where no start reads it."""
    written(tmp_path, 2)
    log = ChangeLog(tmp_path, manifest())
    log.read()
    log.append(change(2))
    whole = log.path.read_bytes()
    os.truncate(log.path, left % len(whole))
    for _ in range(2):
        with pytest.raises(LogLost):
            log.append(change(3))
        with pytest.raises(LogLost):
            log.follow()
    assert log.path.read_bytes() == whole[:left]


def test_others_changes_are_followed(tmp_path: Path) -> None:
    """To the last whole record, and again when the rest of it is there; who follows may go on with the log itself."""
    writer, reader = ChangeLog(tmp_path, manifest()), ChangeLog(tmp_path, manifest())
    assert (writer.read(), reader.read(), reader.follow()) == ([], [], [])
    for seed in range(3):
        writer.append(change(seed))
        assert seen(reader.follow() or []) == seen([change(seed)])
        assert reader.follow() == []
    raw = writer.path.read_bytes()
    writer.append(change(3))
    whole = writer.path.read_bytes()
    for cut in range(len(raw), len(whole)):
        os.truncate(writer.path, cut)
        assert reader.follow() == []
        with writer.path.open("r+b") as file:
            file.write(whole[: cut + 1])
    assert seen(reader.follow() or []) == seen([change(3)])
    writer.append(change(4)), writer.close()
    assert seen(reader.hold()) == seen([change(4)])
    reader.append(change(5))
    assert seen(ChangeLog(tmp_path, manifest()).read()) == seen([change(seed) for seed in range(6)])


def test_a_corpus_in_place_of_the_one_that_is_followed(tmp_path: Path) -> None:
    """Written anew in the same directory it is to be read again; another directory is nobody's wish yet, but takes no change."""
    directory = tmp_path / "corpus"
    directory.mkdir()
    shutil.copy(tmp_path / MANIFEST_NAME, directory)
    written(directory, 1)
    log = ChangeLog(directory, manifest())
    log.read()
    (tmp_path / "next").write_bytes(manifest("v2").to_json())
    (tmp_path / "next").rename(directory / MANIFEST_NAME)
    assert log.follow() is None
    log.path.unlink()
    assert log.follow() is None
    with pytest.raises(NotStored, match="that has been replaced"):
        log.append(change(1))
    (directory / MANIFEST_NAME).unlink()
    with pytest.raises(NotStored, match="is left without its corpus"):
        log.follow()
    directory.rename(tmp_path / "old")
    directory.mkdir()
    (directory / MANIFEST_NAME).write_bytes(manifest("v3").to_json())
    assert log.follow() == []
    assert not list(directory.glob("changes-*")), "and nothing is made there"


def test_a_corpus_that_is_replaced_while_its_log_is_locked_takes_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 1)
    log, lock = ChangeLog(tmp_path, manifest()), fcntl.flock
    log.read()

    def locking(descriptor: int, operation: int) -> None:
        (tmp_path / MANIFEST_NAME).write_bytes(manifest("v3").to_json())
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", locking)
    with pytest.raises(NotStored, match="belongs to a corpus that has been replaced"):
        log.append(change(2))
    assert not log.is_held


def test_others_may_read_a_log_and_one_that_is_refused_is_closed(tmp_path: Path) -> None:
    before = os.umask(0o022)
    path = written(tmp_path, 1)
    os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    path.unlink()
    os.mkfifo(path)
    opened = os.listdir("/proc/self/fd")
    with pytest.raises(NotStored, match="is no regular file"):
        ChangeLog(tmp_path, manifest()).read()
    assert os.listdir("/proc/self/fd") == opened


def test_a_change_is_not_acknowledged_that_nobody_will_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log goes while the record is written."""
    written(tmp_path, 1)
    log = ChangeLog(tmp_path, manifest())
    log.read()
    log.hold()
    sync = os.fsync

    def removing(descriptor: int) -> None:
        sync(descriptor)
        log.path.unlink(missing_ok=True)

    monkeypatch.setattr(os, "fsync", removing)
    with pytest.raises(NotStored, match="was deleted, cut or replaced"):
        log.append(change(1))


@pytest.mark.parametrize("options", ["size=16k", "ro"])
def test_a_disk_that_is_full_or_read_only_takes_no_change_and_loses_none(tmp_path: Path, options: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        shutil.copy(tmp_path / MANIFEST_NAME, disk)
        written(disk, 1)
        log = ChangeLog(disk, manifest())
        log.read()
        count = 1
        if options == "ro":
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, capture_output=True)
        said = ""
        while not said and count < 1000:
            try:
                log.append(change(count))
            except StorageFull as error:
                said = str(error)
            else:
                count += 1
        assert ("No space left" if options != "ro" else "Read-only file system") in said
        log.close()
        assert seen(ChangeLog(disk, manifest()).read()) == seen([change(seed) for seed in range(count)])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_log_of_another_corpus_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path, 1)
    other = ChangeLog(tmp_path, manifest("v2"))
    assert other.read() == [], "it has a name of its own"
    path.rename(other.path)
    with pytest.raises(CheckpointError, match="belongs to another corpus"):
        other.read()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    first, second = ChangeLog(tmp_path, manifest()), ChangeLog(tmp_path, manifest())
    first.read(), second.read()
    first.append(change(1))
    with pytest.raises(CheckpointError, match="is being written by another process"):
        second.append(change(2))
    first.close()
    with pytest.raises(CheckpointError, match="was written by another process; read the corpus again"):
        second.append(change(2))
    third = ChangeLog(tmp_path, manifest())
    assert len(third.read()) == 1
    third.append(change(2))


def test_a_disk_that_fails_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, 2)
    log = ChangeLog(tmp_path, manifest())
    log.read()
    failures = iter([True, False])
    sync = os.fsync

    def failing(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(log.path) and next(failures, False):
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device"):
        log.append(change(5))
    assert len(ChangeLog(tmp_path, manifest()).read()) == 2
    log.append(change(6))
    assert seen(ChangeLog(tmp_path, manifest()).read()) == seen([change(0), change(1), change(6)])
    failures = iter([True, True])
    with pytest.raises(CheckpointError, match=r"No space left.* It could not be cut off again: whoever reads .* find"):
        log.append(change(7))
    with pytest.raises(CheckpointError, match="could not be written before"):
        log.append(change(8))


def test_a_change_refused_after_it_was_written_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the log is still in its place cannot be seen for a moment, once the record is on the disk."""
    written(tmp_path, 2)
    log = ChangeLog(tmp_path, manifest())
    log.read()
    log.hold()
    look, looks = os.lstat, iter([False, True])

    def failing(path: Path) -> os.stat_result:
        if next(looks, False):
            raise OSError(5, "Input/output error")
        return look(path)

    monkeypatch.setattr(os, "lstat", failing)
    with pytest.raises(NotStored):
        log.append(change(5))
    assert len(ChangeLog(tmp_path, manifest()).read()) == 2


def test_no_change_of_another_process_is_lost_where_the_log_cannot_be_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ChangeLog(tmp_path, manifest())
    log.read()
    written(tmp_path, 2)
    sync, failures = os.fsync, iter([True])

    def failing(descriptor: int) -> None:
        if next(failures, False):
            raise OSError(5, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(NotStored, match="cannot be written: Input/output error"):
        log.hold()
    assert seen(log.hold()) == seen([change(0), change(1)])


def test_a_log_that_cannot_be_read_is_refused_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, 2)
    log = ChangeLog(tmp_path, manifest())

    def failing(descriptor: int) -> os.stat_result:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", failing)
        with pytest.raises(NotStored, match=r"log cannot be read: Input/output error\."):
            log.read()
    assert len(log.read()) == 2


def test_a_change_is_taken_once_the_manifest_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ChangeLog(tmp_path, manifest())
    log.read()
    log.append(change(1))
    os.utime(tmp_path / MANIFEST_NAME, (1, 1))  # so that it has to be read
    opened = os.open

    def failing(path: str, *said: int, **more: int) -> int:
        if path == MANIFEST_NAME:
            raise OSError(24, "Too many open files")
        return opened(path, *said, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        with pytest.raises(NotStored, match="Too many open files"):
            log.append(change(2))
    log.append(change(3))
    assert seen(ChangeLog(tmp_path, manifest()).read()) == seen([change(1), change(3)])


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_change_that_the_disk_refused_after_another_process_had_read_it(
    goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has to read the corpus again, also where the next record is as long as the one that was cut off."""
    writer, reader = ChangeLog(tmp_path, manifest()), ChangeLog(tmp_path, manifest())
    writer.read(), writer.append(change(1)), reader.read()
    sync, failures = os.fsync, iter([True])

    def failing(descriptor: int) -> None:
        if next(failures, False):
            assert seen(reader.follow() or []) == seen([change(2)])
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageFull):
        writer.append(change(2))
    if goes_on:
        writer.append(change(5))
    assert reader.follow() is None
    writer.close()
    with pytest.raises(NotStored, match="read the corpus again"):
        reader.hold()
    assert len(ChangeLog(tmp_path, manifest()).read()) == 1 + goes_on
