"""Changes of a corpus: nothing acknowledged is lost or undone, whatever happens to the process, the disk or the file."""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.retrieval.inputs import Change, Mark
from tests.support import corpora
from tests.weights.call import run
from tests.weights.corpus import changing
from weights.checkpoint import load_manifest
from weights.corpus.changes import ChangeLog, load_changed, mark_after, no_posts, read_changes
from weights.corpus.store import changes_file, load_corpus_manifest
from weights.errors import CheckpointError, LogLost, NotStored, StorageFull

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    """A retrieval checkpoint, and a corpus of its vectors with the posts 1 to 300, but for some."""
    return corpora.written(tmp_path)


@pytest.fixture
def corpus(paths: tuple[Path, Path]) -> Path:
    return paths[1]


def test_changes_that_differ_only_in_codes_have_different_marks() -> None:
    """So two replicas whose posts have other codes do not look alike. Codes of 0 are none, and leave older marks as they were."""
    made = changing.first(2, Mark())[1]
    rows = [
        replace(made.posts, codes=np.full((len(made.posts), levels), code))
        for levels, code in ((0, 0), (2, 0), (2, 3), (2, 4))
    ]
    none, zeros, three, four = (mark_after(Mark(), replace(made, posts=posts)).digest for posts in rows)
    assert none == zeros
    assert len({none, three, four}) == 3


def opened(corpus: Path, *, may_change: bool = True, before: ChangeLog | None = None) -> tuple[ChangeLog, Change]:
    encoder = load_manifest(corpus.with_name("towers-v1"))
    _, changes, read = load_changed(corpus, encoder, may_change=may_change, before=before)
    return changes, read


def file_of(corpus: Path) -> Path:
    return changes_file(corpus, load_corpus_manifest(corpus))


def written(corpus: Path, count: int) -> list[Change]:
    """Record so many changes, one at a time."""
    changes, _ = opened(corpus)
    made = changing.first(count, changes.mark)
    for one in made:
        changes.record([one])
    changes.close()
    return made


@pytest.mark.parametrize("together", [1, 7])
def test_what_changes_leave_is_read_back_in_order(corpus: Path, together: int) -> None:
    changes, nothing = opened(corpus)
    assert (len(nothing.posts), len(nothing.delete)) == (0, 0)
    assert not file_of(corpus).exists(), "a corpus that nobody changes has no file for it"
    made = changing.first(30, changes.mark)
    for start in range(0, 30, together):
        changes.record(made[start : start + together])
        changing.check(corpus, made[: start + together])
    changes.close()
    changes, read = opened(corpus)
    assert changes.mark == read.mark == made[-1].mark
    changes.close()
    changing.check(corpus, made)


def test_texts_positions_and_times_are_kept(tmp_path: Path) -> None:
    _, corpus = corpora.written(tmp_path, ids="text")
    changes, _ = opened(corpus)
    one = changing.first(2, changes.mark)[1]
    texts = [(f"post {post}", "é" * 64) for post in one.posts.post_ids]
    one = Change(one.delete, one.posts.__class__(**{n: getattr(one.posts, n) for n in one.posts.__slots__} | {"texts": texts}),
                 one.mark._replace(position="1764000000000-7"), ["a", "b"])  # fmt: skip
    changes.record([one])
    changes.close()
    read = read_changes(corpus, load_corpus_manifest(corpus))
    assert (read.posts.texts, read.mark) == (texts, one.mark)


def test_repeated_changes_do_not_grow_the_file(corpus: Path) -> None:
    """Posts that came and went leave nothing: the file has a row for each post that differs from the corpus as it was built."""
    changes, _ = opened(corpus)
    made = changing.first(1200, changes.mark)
    changes.record(made[:300])
    size = file_of(corpus).stat().st_size
    for start in range(300, 1200, 100):
        changes.record(made[start : start + 100])
    assert file_of(corpus).stat().st_size <= size + 4096
    gone = np.concatenate((10**6 + np.arange(changing.POOL, dtype=np.uint64), np.array([2**64 - 1], np.uint64)))
    last = Change(gone, no_posts(changing.WIDTH), made[-1].mark._replace(sequence=1201))
    changes.record([last])
    changes.close()
    with closing(sqlite3.connect(file_of(corpus))) as database:
        (rows,) = database.execute("SELECT count(*) FROM posts").fetchone()
    assert rows <= 60, "posts of the corpus alone"


def test_a_kill_at_any_moment_loses_and_undoes_nothing(paths: tuple[Path, Path]) -> None:
    """Of a process that makes changes as fast as it can. What it said before the end is there; one more change may be."""
    corpus, delay, known = paths[1], random.Random(1), 0
    for _ in range(15):
        with changing.process(*paths) as (child, output):
            said = [int(output.readline())]
            assert said[0] == known + 1, "it goes on where the last one ended"
            time.sleep(delay.uniform(0, 0.1))
            child.kill()
            said += [int(line) for line in output]
        known = read_changes(corpus, load_corpus_manifest(corpus)).mark.sequence
        assert said[-1] <= known <= said[-1] + 1
        changing.check(corpus, changing.first(known, load_corpus_manifest(corpus).first_mark))
    assert known >= 15


def test_files_that_may_not_grow_take_no_change_and_lose_none(paths: tuple[Path, Path]) -> None:
    with changing.process(*paths, most_bytes=25_000) as (_, output):
        *said, refused = output
    assert refused == "NotStored: The corpus's changes cannot be written: the disk reports an error.\n"
    assert len(said) > 5
    changing.check(paths[1], changing.first(len(said), load_corpus_manifest(paths[1]).first_mark))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(filler: Path) -> None:
    """Write until the disk is full."""
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1024))


@pytest.mark.parametrize("count", [0, 3])
def test_a_full_disk_takes_no_change_and_loses_none(small_disk: Path, count: int) -> None:
    _, corpus = corpora.written(small_disk)
    changes, _ = opened(corpus)
    made, filler, said = changing.first(40, changes.mark), small_disk / "filler", ""
    for one in made[:count]:
        changes.record([one])
    fill(filler)
    while not said:
        try:
            changes.record(made[count : count + 1])
            count += 1
        except StorageFull as error:
            said = str(error)
    assert re.search(r"cannot be written: .*(full|No space)", said)
    with pytest.raises(StorageFull):
        changes.record(made[count : count + 1])
    changing.check(corpus, made[:count])
    filler.unlink()
    changes.record(made[count:])
    changes.close()
    changing.check(corpus, made)


def test_a_disk_that_is_read_only_is_served_and_takes_no_change(small_disk: Path) -> None:
    _, corpus = corpora.written(small_disk)
    made = written(corpus, 3)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, capture_output=True)
    both = [opened(corpus) for _ in range(2)]
    for changes, read in both:
        assert read.mark == made[-1].mark
        with pytest.raises(StorageFull, match="the directory is read-only"):
            changes.record(changing.first(1, changes.mark))
        changes.close()


def test_one_flipped_byte_is_refused_or_harmless(corpus: Path) -> None:
    """In the header and anywhere behind it: what is read is what was written, or nothing."""
    made, path = written(corpus, 12), file_of(corpus)
    raw, refused = path.read_bytes(), 0
    with path.open("r+b", buffering=0) as file:
        for at in (*range(100), *range(100, len(raw), 19)):
            os.pwrite(file.fileno(), bytes([raw[at] ^ 1 << at % 8]), at)
            try:
                changing.check(corpus, made)
            except CheckpointError:
                refused += 1
            os.pwrite(file.fileno(), raw[at : at + 1], at)
    changing.check(corpus, made)
    assert refused > 200


def test_a_file_that_was_cut_is_refused(corpus: Path) -> None:
    written(corpus, 3)
    for left in (4096, 100, 0):
        os.truncate(file_of(corpus), left)
        with pytest.raises(CheckpointError, match="is damaged or in a form that this version does not read"):
            opened(corpus)
    file_of(corpus).unlink()
    changes, read = opened(corpus)  # as the sentence says
    assert read.mark == load_corpus_manifest(corpus).first_mark
    changes.close()


def test_a_row_that_somebody_edited_is_refused(corpus: Path) -> None:
    for edit in (
        "UPDATE posts SET author_id = 1", "DELETE FROM posts WHERE place = 0", "UPDATE state SET position = '9-9'", "DELETE FROM state",
        "UPDATE posts SET vector = NULL WHERE vector IS NOT NULL", "PRAGMA user_version = 2", "DROP TABLE posts",
    ):  # fmt: skip
        written(corpus, 5)
        with closing(sqlite3.connect(file_of(corpus), isolation_level=None)) as database:
            database.execute(edit)
        with pytest.raises(CheckpointError, match="is damaged"):
            opened(corpus)
        file_of(corpus).unlink()


def test_a_change_on_a_damaged_file_is_refused(corpus: Path) -> None:
    changes, _ = opened(corpus)
    made = changing.first(3, changes.mark)
    changes.record(made[:1])
    raw = file_of(corpus).read_bytes()
    file_of(corpus).write_bytes(bytes(len(raw)))
    with pytest.raises(NotStored, match="damaged"):
        changes.record(made[1:])
    file_of(corpus).write_bytes(raw)
    changes.record(made[1:])
    changing.check(corpus, made)


def test_a_second_process_is_refused(paths: tuple[Path, Path]) -> None:
    changes, _ = opened(paths[1])
    with changing.process(*paths) as (_, output):
        (said,) = output
    assert re.match("NotStored: Corpus .* is in use by another process", said)
    with pytest.raises(NotStored, match="in use by another process"):
        opened(paths[1], may_change=False)
    changes.close()
    shared = [opened(paths[1], may_change=False)[0] for _ in range(2)]
    with pytest.raises(NotStored, match="in use by another process"):
        opened(paths[1])
    with pytest.raises(StorageFull, match="shared with other processes"):
        shared[0].record(changing.first(1, shared[0].mark))
    for each in shared:
        each.close()
        each.close()
    opened(paths[1])[0].close()


def test_one_process_may_read_its_directory_again(corpus: Path) -> None:
    """The lock passes from the changes that serve to those that will."""
    first, _ = opened(corpus)
    made = changing.first(3, first.mark)
    first.record(made[:1])
    second, read = opened(corpus, before=first)
    assert read.mark == made[0].mark
    first.close()
    with pytest.raises(NotStored, match="in use"):
        opened(corpus)
    second.record(made[1:])
    second.close()
    changing.check(corpus, made)


@pytest.mark.parametrize("how", ["removed", "replaced", "came back"])
def test_a_file_that_goes_under_its_process_takes_no_change(corpus: Path, how: str) -> None:
    changes, _ = opened(corpus)
    made, path = changing.first(4, changes.mark), file_of(corpus)
    changes.record(made[:1])
    shutil.copy(path, corpus / "older")
    changes.record(made[1:2])
    path.rename(corpus / "aside")
    if how == "replaced":
        (corpus / "older").rename(path)
    for _ in range(2):
        with pytest.raises(LogLost, match="was removed or replaced under this process"):
            changes.record(made[2:])
    if how == "came back":
        (corpus / "aside").rename(path)
        changes.record(made[2:])
        changing.check(corpus, made)
    else:
        again, read = opened(corpus, before=changes)  # without what is lost
        assert read.mark.sequence == (1 if how == "replaced" else 0)
        again.close()
    changes.close()


def test_a_file_that_somebody_else_wrote_is_not_written_over(corpus: Path) -> None:
    made = written(corpus, 2)
    path = file_of(corpus).rename(corpus / "aside")
    changes, _ = opened(corpus)
    path.rename(file_of(corpus))
    with pytest.raises(NotStored, match="that this process has not read"):
        changes.record(changing.first(1, changes.mark))
    changes.close()
    changing.check(corpus, made)
    changes, _ = opened(corpus)
    older = file_of(corpus).read_bytes()
    changes.record([changing.change(2, changes.mark)])
    file_of(corpus).write_bytes(older)
    with pytest.raises(NotStored, match="that this process has not read"):
        changes.record([changing.change(3, changes.mark)])
    changes.close()


def test_a_corpus_that_was_replaced_takes_no_change(corpus: Path, tmp_path: Path) -> None:
    changes, _ = opened(corpus)
    made = changing.first(2, changes.mark)
    changes.record(made[:1])
    corpus.rename(tmp_path / "old")
    for put in (lambda: None, lambda: shutil.copytree(tmp_path / "old", corpus)):
        put()
        with pytest.raises(NotStored, match="was replaced on the disk; read it again"):
            changes.record(made[1:])
    assert not changes.is_in(corpus)
    changing.check(tmp_path / "old", made[:1])
    other, read = opened(corpus, before=changes)
    assert read.mark == made[0].mark
    other.close()
    changes.close()


def test_a_link_that_is_turned_while_a_change_is_written_is_told(corpus: Path, tmp_path: Path) -> None:
    """A reader keeps the transaction from its end until the link is turned."""
    link = tmp_path / "link"
    link.symlink_to(corpus)
    shutil.copytree(corpus, tmp_path / "next")
    _, changes, _ = load_changed(link, load_manifest(corpus.with_name("towers-v1")))
    made = changing.first(2, changes.mark)
    changes.record(made[:1])
    with closing(sqlite3.connect(file_of(corpus), isolation_level=None)) as reader, ThreadPoolExecutor() as pool:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM posts").fetchone()
        recording = pool.submit(changes.record, made[1:])
        journal = Path(f"{file_of(corpus)}-journal")
        while not (journal.exists() and journal.stat().st_size):
            time.sleep(0.001)
        time.sleep(0.1)
        link.unlink()
        link.symlink_to(tmp_path / "next")
        reader.execute("COMMIT")
        with pytest.raises(NotStored, match="only the one that was replaced has it"):
            recording.result(10)
    changes.close()
    changing.check(corpus, made)
    changing.check(tmp_path / "next", [])


def test_what_belongs_to_another_corpus_is_refused(corpus: Path, tmp_path: Path) -> None:
    written(corpus, 1)
    (tmp_path / "b").mkdir()
    _, other = corpora.written(tmp_path / "b", seed=1)
    file_of(corpus).rename(file_of(other))
    with pytest.raises(CheckpointError, match="is damaged"):
        opened(other)


def foreign_log() -> bytes:
    """The write-ahead log of another SQLite file, whose pages would replace those of any file beside it."""
    with tempfile.TemporaryDirectory() as place, closing(sqlite3.connect(f"{place}/other")) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("CREATE TABLE other (number)")
        other.executemany("INSERT INTO other VALUES (?)", [(number,) for number in range(1000)])
        other.commit()
        return Path(f"{place}/other-wal").read_bytes()


@pytest.mark.parametrize("content", [foreign_log(), b"x" * 4096, b""], ids=["a log", "no log", "empty"])
def test_a_foreign_write_ahead_log_is_set_aside(corpus: Path, content: bytes) -> None:
    made = written(corpus, 3)
    log = Path(f"{file_of(corpus)}-wal")
    log.write_bytes(content)
    code, said = run("corpus", "snapshot", corpus, "--out", corpus.with_name("copy"))
    assert code == 0, said
    assert f"after {made[-1].mark.sequence} changes" in said
    assert log.with_name(f"{file_of(corpus).name}-foreign-wal").read_bytes() == content
    log.write_bytes(content)
    changes, _ = opened(corpus)
    changes.record([changing.change(3, changes.mark)])
    changes.close()
    changing.check(corpus, changing.first(4, load_corpus_manifest(corpus).first_mark))


def test_the_log_of_a_file_in_wal_mode_is_its_own(corpus: Path) -> None:
    """Somebody opened the file with SQLite's shell, which left it in that mode after a crash."""
    made, file = written(corpus, 3), file_of(corpus)
    with closing(sqlite3.connect(file)) as shell:
        shell.execute("PRAGMA journal_mode = WAL")
        shell.execute("UPDATE posts SET place = place")
        shell.commit()
        for name in (file.name, f"{file.name}-wal"):
            shutil.copy(file.with_name(name), corpus.with_name(name))
    for name in (file.name, f"{file.name}-wal"):
        shutil.copy(corpus.with_name(name), file.with_name(name))
    changing.check(corpus, made)
    assert not file.with_name(f"{file.name}-foreign-wal").exists()


class LateError(sqlite3.Connection):
    """Tells of an error once it has committed, as SQLite does where the directory cannot be synced."""

    def execute(self, statement: str, *more: Any) -> sqlite3.Cursor:
        done = super().execute(statement, *more)
        if statement == "COMMIT":
            raise sqlite3.OperationalError("disk I/O error")
        return done


def test_an_error_after_all_is_written_is_no_failure(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, _ = opened(corpus)
    made = changing.first(3, changes.mark)
    changes.record(made[:1])
    changes.close()
    changes, _ = opened(corpus)
    connect = sqlite3.connect
    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", lambda *more, **named: connect(*more, **named | {"factory": LateError}))
        changes.record(made[1:2])
    changes.record(made[2:])
    changing.check(corpus, made)


def test_a_reader_of_many_changes_holds_no_writer_up(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `corpus snapshot` beside a service: the rows are checked while the next change is made."""
    changes, _ = opened(corpus)
    made = changing.first(3, changes.mark)
    changes.record(made[:2])
    connect, waited = sqlite3.connect, []

    class Slow(sqlite3.Connection):
        def execute(self, statement: str, *more: Any) -> sqlite3.Cursor:
            if statement.startswith("SELECT * FROM posts"):
                began = time.monotonic()
                changes.record(made[2:])
                waited.append(time.monotonic() - began)
            return super().execute(statement, *more)

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", lambda *more, **named: connect(*more, **named | {"factory": Slow}))
        read = read_changes(corpus, load_corpus_manifest(corpus))
    assert read.mark == made[1].mark
    assert max(waited) < 5
    changing.check(corpus, made)
