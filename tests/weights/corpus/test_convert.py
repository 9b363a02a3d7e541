"""The log of earlier versions: refused with the command that converts it, converted once, and never with less than it held."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from model.retrieval.inputs import Change
from tests.support import corpora
from tests.weights.corpus import changing
from tests.weights.corpus.old_log import log_file, log_of
from weights.checkpoint import load_manifest
from weights.corpus.changes import load_changed, read_changes
from weights.corpus.convert import convert
from weights.corpus.manifest import CorpusManifest
from weights.corpus.snapshot import write_snapshot
from weights.corpus.store import load_corpus_manifest
from weights.errors import CheckpointError, NotStored


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return corpora.written(tmp_path)[1]


@pytest.fixture
def manifest(corpus: Path) -> CorpusManifest:
    return load_corpus_manifest(corpus)


def test_a_directory_with_the_old_log_is_refused_until_it_is_converted(corpus: Path, manifest: CorpusManifest) -> None:
    made = changing.first(30, manifest.first_mark)
    log_file(corpus, manifest).write_bytes(log_of(manifest, made))
    encoder = load_manifest(corpus.with_name("towers-v1"))
    for read in (
        lambda: load_changed(corpus, encoder),
        lambda: read_changes(corpus, manifest),
        lambda: write_snapshot(corpus, corpus.with_name("copy")),
    ):
        with pytest.raises(CheckpointError, match=f"run `phoenix-ranker corpus convert {corpus}` once"):
            read()
    assert convert(corpus) == 30
    changing.check(corpus, made)
    assert convert(corpus) == 0
    changing.check(corpus, made)
    _, changes, _ = load_changed(corpus, encoder)
    changes.record([changing.change(30, changes.mark)])
    changes.close()
    changing.check(corpus, changing.first(31, manifest.first_mark))


def test_text_ids_are_converted(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    _, corpus = corpora.written(tmp_path / "texts", ids="text")
    manifest = load_corpus_manifest(corpus)
    one = changing.first(2, manifest.first_mark)[1]
    texts = [(f"post {post}", "é") for post in one.posts.post_ids]
    posts = one.posts.__class__(**{n: getattr(one.posts, n) for n in one.posts.__slots__} | {"texts": texts})
    log_file(corpus, manifest).write_bytes(log_of(manifest, [Change(one.delete, posts, one.mark, ["post:9", "b"])]))
    assert convert(corpus) == 1
    read = read_changes(corpus, manifest)
    assert (read.posts.texts, len(read.delete), read.mark) == (texts, 1, one.mark)


@pytest.mark.parametrize("tail", ["cut", "zeros"])
def test_a_record_that_a_crash_cut_short_is_left_out(corpus: Path, manifest: CorpusManifest, tail: str) -> None:
    made = changing.first(4, manifest.first_mark)
    raw, whole = log_of(manifest, made), len(log_of(manifest, made[:3]))
    for end in range(whole, len(raw) - 1, 97):
        log_file(corpus, manifest).write_bytes(raw[:end] + (bytes(len(raw) - end) if tail == "zeros" else b""))
        assert convert(corpus) == 3
        changing.check(corpus, made[:3])
        for file in corpus.glob("changes-*"):
            file.unlink()


def test_damage_is_refused_and_nothing_is_converted(corpus: Path, manifest: CorpusManifest) -> None:
    raw = log_of(manifest, changing.first(3, manifest.first_mark))
    for at in (*range(0, len(raw), 31), len(raw) - 1):
        log_file(corpus, manifest).write_bytes(raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :])
        with pytest.raises(CheckpointError, match="damaged at byte"):
            convert(corpus)
        assert not list(corpus.glob("*.sqlite"))
    log_file(corpus, manifest).write_bytes(log_of(load_other(corpus), []))
    with pytest.raises(CheckpointError, match="belongs to another corpus"):
        convert(corpus)


def load_other(corpus: Path) -> CorpusManifest:
    (corpus.parent / "other").mkdir()
    return load_corpus_manifest(corpora.written(corpus.parent / "other", seed=1)[1])


def test_a_conversion_that_was_interrupted_is_made_again(corpus: Path, manifest: CorpusManifest) -> None:
    made = changing.first(9, manifest.first_mark)
    log_file(corpus, manifest).write_bytes(log_of(manifest, made))
    assert convert(corpus) == 9
    (log,) = corpus.glob("*.log.converted")
    log.rename(log_file(corpus, manifest))  # as if the crash came before it was set aside
    assert convert(corpus) == 9
    changing.check(corpus, made)


def test_a_log_that_a_service_holds_is_not_converted(corpus: Path, manifest: CorpusManifest) -> None:
    log_file(corpus, manifest).write_bytes(log_of(manifest, []))
    with log_file(corpus, manifest).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(NotStored, match="in use by a service of an earlier version: stop it first"):
            convert(corpus)
    assert convert(corpus) == 0
    changing.check(corpus, [])
