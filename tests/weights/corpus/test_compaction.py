"""A corpus written anew with its changes: the same posts, whatever moment a crash comes at, and never half of it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.retrieval.engine import RetrievalEngine, RetrievalOptions
from model.retrieval.inputs import Change, Mark, NewPosts
from tests.app import retrieving
from weights.checkpoint import Encoder, load_encoder
from weights.corpus import compaction as compacting
from weights.corpus.changes import ChangeLog
from weights.corpus.compaction import Compaction, load_changed
from weights.corpus.records import mark_after
from weights.corpus.store import load_corpus, load_corpus_manifest, publish
from weights.errors import CheckpointError, NotStored
from weights.format.writer import write_files

Posts = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return retrieving.written(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def encoder(made: tuple[Path, Path]) -> Encoder:
    return load_encoder(made[0])


@pytest.fixture
def directory(made: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made[1], tmp_path / "corpus"))


def change(encoder: Encoder, delete: list[int], new: list[int]) -> Change:
    ids, authors = np.array(new, np.uint64), np.arange(1, len(new) + 1, dtype=np.uint64)
    vectors = np.zeros((0, encoder.manifest.config.width), np.float32)
    if new:
        vectors = encoder.towers.encode_posts(ids, authors).numpy()
    topics: list[str | None] = ["news", None, "chess"][: len(new)]
    posts = NewPosts(ids, authors, np.arange(len(new)) + 5, topics, vectors)
    return Change(np.array(delete, np.uint64), posts, Mark())


def marked(log: ChangeLog, change: Change) -> Change:
    """As the one that comes next."""
    return replace(change, mark=mark_after(log.mark, change))


def engine_of(directory: Path, encoder: Encoder) -> tuple[RetrievalEngine, ChangeLog]:
    stored, log, changes = load_changed(directory, encoder.manifest)
    engine = RetrievalEngine(encoder.towers, stored.corpus, RetrievalOptions(backend="torch"))
    for one in changes:
        engine.change(one)
    return engine, log


def posts_of(engine: RetrievalEngine) -> Posts:
    """Every post that a search can return, in the order of equal scores."""
    posts = []
    for segment in engine._segments:
        corpus, rows = segment.corpus, segment.shown_rows()
        columns = corpus.post_ids[rows].tolist(), corpus.author_ids[rows].tolist(), segment.times_of(rows).tolist()
        vectors = [vector.tobytes() for vector in corpus.vectors[rows]]
        posts += list(zip(*columns, segment.topics_of(rows), vectors, strict=True))
    return posts


def changed(directory: Path, encoder: Encoder) -> tuple[Compaction, RetrievalEngine]:
    """A corpus that has had three changes, and what is to write it anew."""
    engine, log = engine_of(directory, encoder)
    for one in (change(encoder, [1, 2], [900, 3]), change(encoder, [900], []), change(encoder, [], [901, 902, 903])):
        log.append(one := marked(log, one))
        engine.change(one)
    return Compaction(directory, load_corpus(directory).manifest, log), engine


def compacted(compaction: Compaction, engine: RetrievalEngine, since: list[Change]) -> ChangeLog:
    written = compaction.write(engine.parts(), engine.mark)
    return compaction.commit(written.manifest, since)


def test_it_holds_the_same_posts_in_the_same_order(directory: Path, encoder: Encoder) -> None:
    compaction, engine = changed(directory, encoder)
    since = marked(compaction.log, change(encoder, [4], [904]))
    log = compacted(compaction, engine, [since])
    engine.change(since)
    assert log.mark == since.mark
    new, again = engine_of(directory, encoder)
    assert posts_of(new) == posts_of(engine)
    assert (new.posts, new.changes) == (engine.posts, 1)
    manifest = load_corpus(directory, encoder.manifest).manifest
    assert (manifest.version, manifest.posts) == ("v1+3", 300 - 1 - 2 + 3)
    assert manifest.topics == (*retrieving.TOPICS, "chess")
    assert {path.name for path in directory.iterdir()} == {"manifest.json", *manifest.files, log.path.name}
    with pytest.raises(CheckpointError, match="is being written by another process"):
        again.append(since)
    log.append(change(encoder, [905], []))
    assert engine_of(directory, encoder)[0].changes == 2
    assert manifest.mark == manifest.first_mark
    assert (manifest.mark.sequence, since.mark.sequence) == (3, 4)
    for version, sequence, label in (
        ("v1", 7, "v1+7"),
        ("v1+7", 12, "v1+12"),
        ("a+b", 1, "a+b+1"),
        ("v1+7", 0, "v1+7"),
    ):
        assert replace(manifest, version=version).label(Mark(sequence)) == label


def test_columns_that_the_corpus_lacked_come_with_its_changes(tmp_path: Path) -> None:
    checkpoint, directory = retrieving.written(tmp_path, leave_out=("topics", "created_at"))
    encoder = load_encoder(checkpoint)
    compaction, engine = changed(directory, encoder)
    compacted(compaction, engine, [])
    assert posts_of(engine_of(directory, encoder)[0]) == posts_of(engine)


def crash(work: Callable[[], object], at: int, *, power: bool) -> bool:
    """Do it in a child that is killed before its `at`-th call that changes the disk; whether it was. `power`: what was not
    synced by then is gone, files as well as names."""
    child = os.fork()
    if child == 0:
        left = at
        synced: set[str] = set()

        def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal left
                if left == 0:
                    if power:
                        _lose(synced)
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                result = real(*arguments, **options)
                if name == "fsync":
                    synced.add(os.readlink(f"/proc/self/fd/{arguments[0]}"))
                return result

            return call

        def _lose(kept: set[str]) -> None:
            for path in Path(DIRECTORY[0]).glob("*-*"):
                if str(path) not in kept and path.stat().st_ctime_ns > BEGAN[0]:
                    os.truncate(path, path.stat().st_size // 2)

        for name in ("fsync", "rename", "unlink", "pwrite"):
            setattr(os, name, counted(name, getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


DIRECTORY: list[Path] = []
BEGAN: list[int] = []


@pytest.mark.parametrize("power", [False, True])
def test_a_crash_at_any_step_leaves_the_old_corpus_or_the_new_one(
    directory: Path, encoder: Encoder, power: bool
) -> None:
    compaction, engine = changed(directory, encoder)
    since = marked(compaction.log, change(encoder, [5], [906]))
    compaction.log.append(since)
    compaction.log.close()
    snapshot, mark = engine.parts(), engine.mark
    engine.change(since)
    expected, versions = posts_of(engine), set()
    pristine = Path(shutil.copytree(directory, directory.with_name("pristine")))

    def work() -> None:
        _, log, _ = load_changed(directory, encoder.manifest)
        again = Compaction(directory, load_corpus(directory).manifest, log)
        again.commit(again.write(snapshot, mark).manifest, [since])

    for at in range(100):
        shutil.rmtree(directory)
        shutil.copytree(pristine, directory)
        DIRECTORY[:], BEGAN[:] = [directory], [max(path.stat().st_ctime_ns for path in directory.iterdir())]
        was_killed = crash(work, at, power=power)
        found, log = engine_of(directory, encoder)
        assert posts_of(found) == expected, at
        versions.add(load_corpus(directory).manifest.version)
        log.append(six := marked(log, change(encoder, [6], [])))  # and it goes on
        assert found.posts == len(expected)
        after = Compaction(directory, load_corpus(directory).manifest, log)
        found.change(six)
        compacted(after, found, []).close()
        assert len(list(directory.iterdir())) == 4, "two files, a manifest, a log: nothing else is left"
        log.close()
        if not was_killed:
            break
    assert at > 8
    assert versions == {"v1", "v1+3"}


def test_a_new_manifest_is_on_the_disk_before_anything_is_said(
    directory: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could bring the old one back, whose log lacks what was acknowledged since."""
    compaction, engine = changed(directory, encoder)
    written, done, rename, sync = compaction.write(engine.parts(), engine.mark), list[str](), os.rename, os.fsync

    def renaming(*names: str, **options: Any) -> None:
        done.append("renamed")
        rename(*names, **options)

    def syncing(descriptor: int) -> None:
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "rename", renaming)
    monkeypatch.setattr(os, "fsync", syncing)
    compaction.commit(written.manifest, []).close()
    at = done.index("renamed")
    assert str(directory) in done[:at], "the files that it lists"
    assert done[at + 1 :].count(str(directory)) == 1


def test_what_a_crashed_one_left_is_gone_before_more_is_written(
    directory: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    compaction, engine = changed(directory, encoder)
    left = [directory / "vectors-00000000.safetensors", directory / ".manifest.json.00000000.partial"]
    for path in left:
        path.touch()
    write = Compaction._written

    def writing(*arguments: Any) -> Any:
        assert not any(path.exists() for path in left)
        return write(*arguments)

    monkeypatch.setattr(Compaction, "_written", writing)
    compacted(compaction, engine, []).close()


def test_nobody_reads_what_is_not_in_force(directory: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    compaction, engine = changed(directory, encoder)
    written = compaction.write(engine.parts(), engine.mark)
    expected = posts_of(engine)
    for name in written.manifest.files:
        for cut in range(0, written.manifest.files[name].bytes, 997):
            os.truncate(directory / name, cut)
            assert posts_of(engine_of(directory, encoder)[0]) == expected
    real = Compaction._written

    def cut_short(*arguments: Any) -> Any:
        manifest = real(*arguments)
        os.truncate(directory / manifest.tensors["vectors"].file, 1000)
        return manifest

    monkeypatch.setattr(Compaction, "_written", cut_short)
    with pytest.raises(CheckpointError, match=r"is not compacted: .* is 1000 bytes long instead of"):
        compaction.write(engine.parts(), engine.mark)


def test_only_who_may_change_the_corpus_may_compact_it(directory: Path, encoder: Encoder) -> None:
    compaction, engine = changed(directory, encoder)
    other = load_changed(directory, encoder.manifest)[1]
    second = Compaction(directory, compaction.old, other)
    with pytest.raises(CheckpointError, match="is being written by another process"):
        second.write(engine.parts(), 3)
    log = compacted(compaction, engine, [])
    compaction.log.close(), log.close()
    with pytest.raises(CheckpointError, match="that has been replaced; read the corpus again"):
        other.append(change(encoder, [7], []))
    assert not other.path.exists()
    with pytest.raises(CheckpointError, match="could not be written before"):
        compaction.log.append(change(encoder, [7], []))


def test_a_compaction_that_is_refused_removes_nothing(directory: Path, encoder: Encoder) -> None:
    """Another process asks for one at each step of one that goes on."""
    compaction, engine = changed(directory, encoder)
    second = Compaction(directory, compaction.old, load_changed(directory, encoder.manifest)[1])

    def refused() -> None:
        before = {path.name for path in directory.iterdir()}
        with pytest.raises(NotStored, match="is being written by another process"):
            second.write(engine.parts(), 3)
        second.drop()
        assert {path.name for path in directory.iterdir()} == before

    refused()
    real = Compaction._check_there

    def between(self: Compaction, *arguments: Any) -> None:
        refused()  # its new log and manifest lie there and are not in force
        real(self, *arguments)

    written = compaction.write(engine.parts(), engine.mark)
    refused()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compaction, "_check_there", between)
        log = compaction.commit(written.manifest, [])
    log.append(change(encoder, [4], []))
    again, _ = engine_of(directory, encoder)
    assert (again.changes, load_corpus(directory).manifest.version) == (1, "v1+3")
    assert {path.name for path in directory.iterdir()} == {"manifest.json", *written.manifest.files, log.path.name}


@pytest.mark.parametrize("gone", ["vectors", "posts", "cut", "new log", "old log"])
def test_a_compaction_puts_nothing_in_force_that_is_not_there(
    directory: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    compaction, engine = changed(directory, encoder)
    written, expected = compaction.write(engine.parts(), engine.mark), posts_of(engine)
    names = {tensor: directory / entry.file for tensor, entry in written.manifest.tensors.items()}
    real = Compaction._check_there

    def after(self: Compaction, directory: int, manifest: Any, log: ChangeLog) -> None:
        if gone == "cut":
            os.truncate(names["vectors"], 1000)
        else:
            lost = {
                "vectors": names["vectors"],
                "posts": names["post_ids"],
                "new log": log.path,
                "old log": self.log.path,
            }
            lost[gone].unlink()
        real(self, directory, manifest, log)

    monkeypatch.setattr(Compaction, "_check_there", after)
    with pytest.raises(CheckpointError, match=r"is not compacted: .*(removed|replaced|instead of)"):
        compaction.commit(written.manifest, [])
    assert load_corpus(directory).manifest.version == "v1"
    if gone != "old log":
        assert posts_of(engine_of(directory, encoder)[0]) == expected
        assert len(list(directory.iterdir())) == 4, "what it made is gone, and nothing else"


def test_who_has_lost_the_corpus_leaves_what_he_made(directory: Path, encoder: Encoder) -> None:
    """The process ends, another one holds the log: what is there is that one's to tidy up."""
    compaction, engine = changed(directory, encoder)
    written = compaction.write(engine.parts(), engine.mark)
    compaction.log.close()
    compaction.drop()
    assert all((directory / name).exists() for name in written.manifest.files)
    with pytest.raises(CheckpointError):
        compaction.commit(written.manifest, [])
    found, log = engine_of(directory, encoder)
    compacted(Compaction(directory, compaction.old, log), found, []).close()
    assert len(list(directory.iterdir())) == 4


def test_a_corpus_that_was_replaced_meanwhile_stays(directory: Path, encoder: Encoder, tmp_path: Path) -> None:
    compaction, engine = changed(directory, encoder)
    written = compaction.write(engine.parts(), engine.mark)
    directory.rename(tmp_path / "old")
    other = retrieving.written(tmp_path / "other", seed=3, version="v9")[1]
    other.rename(directory)
    names = {path.name for path in directory.iterdir()}
    with pytest.raises(CheckpointError, match="another corpus has taken its place meanwhile"):
        compaction.commit(written.manifest, [])
    assert load_corpus(directory).manifest.version == "v9"
    assert {path.name for path in directory.iterdir()} == names


def test_too_many_open_files_are_a_reason_that_may_pass(
    directory: Path, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left, refusals = os.open, 0, list[CheckpointError]()

    def failing(*arguments: Any, **options: Any) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            raise OSError(24, "Too many open files")
        return real(*arguments, **options)

    for fails_at in range(1, 100):
        compaction, engine = changed(Path(shutil.copytree(directory, tmp_path / str(fails_at))), encoder)
        with monkeypatch.context() as patch:
            left = fails_at
            patch.setattr(os, "open", failing)
            try:
                compacted(compaction, engine, []).close()
            except CheckpointError as error:
                refusals.append(error)
        if left > 0:
            break
    assert len(refusals) > 5
    assert [str(error) for error in refusals if not isinstance(error, NotStored)] == []


def test_a_full_disk_leaves_the_old_corpus(directory: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    compaction, engine = changed(directory, encoder)
    expected, names = posts_of(engine), {path.name for path in directory.iterdir()}
    sync, fails_at = os.fsync, 0
    for fails_at in range(5):
        calls = iter(range(100))

        def failing(descriptor: int, calls: Any = calls, fails_at: int = fails_at) -> None:
            if next(calls) == fails_at:
                raise OSError(28, "No space left on device")
            sync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            with pytest.raises(CheckpointError, match=r"is not compacted: .*No space left on device"):
                compacted(compaction, engine, [])
        assert {path.name for path in directory.iterdir()} == names, fails_at
        assert posts_of(engine_of(directory, encoder)[0]) == expected
    compacted(compaction, engine, []).close()
    gone = Change(np.array([post[0] for post in expected], np.uint64), change(encoder, [], []).posts, Mark())
    engine.change(gone)
    _, log, _ = load_changed(directory, encoder.manifest)
    with pytest.raises(CheckpointError, match="no post is left"):
        Compaction(directory, load_corpus(directory).manifest, log).write(engine.parts(), 1)


def test_a_topic_that_no_post_has_any_more_goes(directory: Path, encoder: Encoder) -> None:
    """Else topics that come and go would add up to more than a corpus may have, and no compaction would succeed again."""
    compaction, engine = changed(directory, encoder)
    log = compacted(compaction, engine, [])
    assert "chess" in load_corpus(directory).manifest.topics
    engine, _ = engine_of(directory, encoder)
    log.append(one := marked(log, change(encoder, [903], [])))
    engine.change(one)
    before = posts_of(engine)
    compacted(Compaction(directory, load_corpus(directory).manifest, log), engine, []).close()
    assert load_corpus(directory).manifest.topics == retrieving.TOPICS
    assert posts_of(engine_of(directory, encoder)[0]) == before


@pytest.mark.parametrize("most", [3, 4])
def test_more_topics_than_can_be_written_are_said_before_anything_is_written(
    directory: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    compaction, engine = changed(directory, encoder)  # with a fourth topic
    before = sorted(path.name for path in directory.iterdir())
    writes: list[object] = []

    def noting(*given: Any) -> Any:
        writes.append(given)
        return write_files(*given)

    monkeypatch.setattr(compacting, "MAX_TOPICS", most)
    monkeypatch.setattr(compacting, "write_files", noting)
    if most == 3:
        with pytest.raises(
            CheckpointError, match="its posts have 4 topics, and at most 3 can be written: delete posts"
        ):
            compaction.write(engine.parts(), engine.mark)
    else:
        compacted(compaction, engine, []).close()
    assert len(writes) == (most == 4)
    assert (sorted(path.name for path in directory.iterdir()) == before) == (most == 3)


def test_a_snapshot_is_what_was_compacted_and_stays(directory: Path, encoder: Encoder, tmp_path: Path) -> None:
    compaction, engine = changed(directory, encoder)
    log = compacted(compaction, engine, [])
    log.append(marked(log, change(encoder, [5], [])))
    path, manifest = publish(directory, tmp_path / "snapshots")
    assert path.name == "posts@3"
    assert {file.name for file in path.iterdir()} == {"manifest.json", *manifest.files}, (
        "the changes since are in the feed"
    )
    copied, _, changes = load_changed(path, encoder.manifest)
    assert (copied.manifest.digest, changes) == (load_corpus(directory).manifest.digest, [])
    before = path.stat().st_ino
    assert publish(directory, tmp_path / "snapshots")[0].stat().st_ino == before
    there = load_corpus_manifest(path)
    (path / "manifest.json").write_bytes(replace(there, mark=there.mark._replace(position="7-0")).to_json())
    assert publish(directory, tmp_path / "snapshots")[1].mark.position == "7-0", (
        "another replica's, of the same changes"
    )
    (path / "manifest.json").write_bytes(replace(there, mark=there.mark._replace(digest="0" * 32)).to_json())
    with pytest.raises(CheckpointError, match="one of another corpus is there"):
        publish(directory, tmp_path / "snapshots")


def test_a_snapshot_of_a_damaged_corpus_is_refused(directory: Path, tmp_path: Path) -> None:
    file = next(directory.glob("vectors*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not written"):
        publish(directory, tmp_path / "snapshots")
    assert not list((tmp_path / "snapshots").glob("posts@*"))
