"""The log of changes: nothing acknowledged is lost, nothing half written is read, whatever byte a crash came at."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.retrieval.inputs import Change, NewPosts
from weights.corpus.changes import ChangeLog, no_posts
from weights.corpus.manifest import COLUMNS, CorpusManifest, file_of
from weights.errors import CheckpointError, LogLost
from weights.format.manifest import MANIFEST_NAME, FileEntry, TensorEntry

WIDTH = 3


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
    return Change(rng.integers(1, 2**64, 2, np.uint64), posts)


def seen(changes: list[Change]) -> list[Any]:
    return [
        (one.delete.tolist(), one.posts.post_ids.tolist(), one.posts.author_ids.tolist(), one.posts.created_at.tolist(),
         one.posts.topics, one.posts.vectors.tobytes())
        for one in changes
    ]  # fmt: skip


def written(directory: Path, count: int) -> Path:
    log = ChangeLog(directory, manifest())
    assert log.read() == []
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
        log.append(change(7))
        log.close()
        assert seen(ChangeLog(tmp_path, manifest()).read()) == seen([change(seed) for seed in (*range(whole), 7)]), cut


def test_damage_before_the_last_record_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    raw = bytearray(path.read_bytes())
    raw[140] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="is damaged at byte"):
        ChangeLog(tmp_path, manifest()).read()


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
    with pytest.raises(CheckpointError, match="No space left"):
        log.append(change(7))
    with pytest.raises(CheckpointError, match="could not be written before"):
        log.append(change(8))


def test_each_flipped_bit_is_harmless_or_refused_and_never_silent(tmp_path: Path) -> None:
    """A change that was acknowledged is read, or its log is refused with a sentence: no flip makes it vanish."""
    log = ChangeLog(tmp_path, manifest())
    for seed in (1, 2, 3):
        log.append(change(seed))
    log.close()
    whole = log.path.read_bytes()
    refused = 0
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        log.path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"damaged at byte|belongs to another corpus"):
            ChangeLog(tmp_path, manifest()).read()
        refused += 1
    assert refused == 8 * len(whole)
    log.path.write_bytes(whole[:-5])  # as a crash leaves it
    torn = ChangeLog(tmp_path, manifest())
    assert len(torn.read()) == 2
    assert torn.torn_bytes > 0


def test_nothing_is_acknowledged_into_a_log_that_has_lost_its_name(tmp_path: Path) -> None:
    log = ChangeLog(tmp_path, manifest())
    log.append(change(1))
    log.path.unlink()
    with pytest.raises(LogLost, match="deleted, cut or replaced"):
        log.append(change(2))


def test_a_log_that_another_process_appends_to_is_read_on(tmp_path: Path) -> None:
    writer, reader = ChangeLog(tmp_path, manifest()), ChangeLog(tmp_path, manifest())
    writer.append(change(1))
    assert [len(reader.read()), len(reader.read())] == [1, 0]
    writer.append(change(2))
    writer.append(change(3))
    assert [len(reader.read()), len(reader.read())] == [2, 0]
