"""Changes of a small corpus, the same for the same numbers, and a process that makes them. Not a test itself."""

from __future__ import annotations

import multiprocessing
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import numpy as np

from model.retrieval.inputs import Change, Mark, NewPosts
from tests.support import corpora
from weights.checkpoint import load_manifest
from weights.corpus.changes import load_changed, mark_after, read_changes
from weights.corpus.store import load_corpus_manifest
from weights.errors import CheckpointError

WIDTH = 32
POOL = 40  # new posts, which come and go
Posts = dict[int, tuple[int, int, str | None, bytes]]


def change(number: int, mark: Mark) -> Change:
    """Deletes some posts, of the corpus and new ones, and adds some; every third only deletes."""
    chance = np.random.default_rng(number)
    known = np.array([*range(1, 60), *range(10**6, 10**6 + POOL), 2**64 - 1], np.uint64)
    delete, ids = np.split(chance.permutation(known)[: 2 + (number % 3) * 2], [2])
    vectors = chance.standard_normal((len(ids), WIDTH)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    topics = [None if post % np.uint64(2) else "tópic" for post in ids]
    posts = NewPosts(ids, ids % np.uint64(40) + np.uint64(1), chance.integers(0, 9, len(ids)), topics, vectors)
    made = Change(delete, posts, mark)
    return Change(delete, posts, mark_after(mark, made))


def after(changes: list[Change], built: set[int]) -> tuple[Posts, set[int]]:
    """What is left: the new posts in order, and the posts of the corpus that are deleted."""
    new, gone = Posts(), set[int]()
    for one in changes:
        for post in one.delete.tolist():
            new.pop(post, None)
            gone.add(post)
        for post, row in content(one.posts).items():
            new.pop(post, None)
            gone.discard(post)
            new[post] = row
    return new, gone & built


def content(posts: NewPosts) -> Posts:
    """Each post's author, time, topic and vector, in order."""
    vectors = [vector.tobytes() for vector in posts.vectors]
    columns = zip(posts.author_ids.tolist(), posts.created_at.tolist(), posts.topics, vectors, strict=True)
    return dict(zip(posts.post_ids.tolist(), columns, strict=True))


def first(count: int, mark: Mark) -> list[Change]:
    """The first changes of a corpus with this mark."""
    changes: list[Change] = []
    for number in range(count):
        changes.append(change(number, changes[-1].mark if changes else mark))
    return changes


def check(corpus: Path, made: list[Change]) -> None:
    """What is read back is what these changes leave, in order."""
    manifest = load_corpus_manifest(corpus)
    read = read_changes(corpus, manifest)
    new, gone = after(made, set(corpora.columns()["post_ids"].view(np.uint64).tolist()))
    assert list(content(read.posts).items()) == list(new.items())
    assert set(read.delete.tolist()) == gone
    assert read.mark == (made[-1].mark if made else manifest.first_mark)


@contextmanager
def process(towers: Path, corpus: Path, most_bytes: int = -1) -> Iterator[tuple[BaseProcess, TextIO]]:
    """A process that makes one change after the other, and its output: the number of each change once it is recorded, until it is killed
    or one is refused. No file of it may grow beyond `most_bytes`."""
    reading, writing = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=_make, args=(towers, corpus, most_bytes, writing))
    child.start()
    os.close(writing)
    with os.fdopen(reading) as said:
        try:
            yield child, said
        finally:
            child.kill()
            child.join()


def _make(towers: Path, corpus: Path, most_bytes: int, said: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, -1))
    try:
        _, kept, _ = load_changed(corpus, load_manifest(towers))
        while True:
            kept.record([change(kept.mark.sequence, kept.mark)])
            os.write(said, f"{kept.mark.sequence}\n".encode())
    except CheckpointError as error:
        os.write(said, f"{type(error).__name__}: {error}\n".encode())
