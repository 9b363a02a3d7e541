"""Writes a corpus with its changes as a corpus of its own: for a new replica to start from, or to begin anew with an empty table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.retrieval.corpus import ROWS_PER_STEP, Corpus, packed
from model.retrieval.inputs import Change, joined_codes
from weights.corpus.changes import read_changes
from weights.corpus.manifest import CODES, TEXTS, VECTORS, CorpusManifest, corpus_tensors
from weights.corpus.store import check_loads, load_corpus, load_corpus_manifest
from weights.errors import CheckpointError
from weights.format.manifest import MANIFEST_NAME
from weights.format.writer import check_target, refused_writing, write_file, write_files, written_beside


def write_snapshot(directory: Path, out: Path) -> CorpusManifest:
    """Write what a search can return now to `out`, a new directory, in one step. A service may change the corpus meanwhile.

    Posts keep their order and their bits, so that searches of both give the same. The mark in the new manifest says which changes it has.
    Raises CheckpointError.
    """
    stored = load_corpus(directory)
    change = read_changes(directory, stored.manifest)
    if load_corpus_manifest(directory).digest != stored.manifest.digest:
        raise CheckpointError(f"Corpus {directory} was replaced while it was read; try again.")
    corpus = stored.corpus
    gone = np.concatenate((change.delete, change.posts.post_ids))
    rows = np.flatnonzero(~corpus.hidden & ~np.isin(corpus.post_ids, gone))
    columns, topics = _columns(corpus, rows, change)
    with refused_writing(f"Snapshot {out}"):
        check_target(out, replace=None)
        if not (posts := len(rows) + len(change.posts)):
            raise CheckpointError("no post is left in the corpus")
        text_width = columns[TEXTS][0].shape[2] if TEXTS in columns else 0
        dtype = stored.manifest.tensors[VECTORS].dtype
        code_levels = columns[CODES][0].shape[1] if CODES in columns else 0
        tensors = corpus_tensors(columns, posts, corpus.width, dtype, text_width=text_width, code_levels=code_levels)

        def pieces(name: str) -> Iterator[Tensor]:
            if name != VECTORS:
                yield from (torch.from_numpy(part.copy()) for part in columns[name])
                return
            for start in range(0, len(rows), ROWS_PER_STEP):
                yield torch.from_numpy(corpus.vectors[rows[start : start + ROWS_PER_STEP]])
            yield torch.from_numpy(change.posts.vectors.copy())

        with written_beside(out) as partial:
            files = write_files(partial, tensors, pieces)
            manifest = msgspec.structs.replace(
                stored.manifest,
                version=stored.manifest.label(change.mark),
                posts=posts,
                topics=topics,
                files=files,
                tensors=tensors,
                mark=change.mark,
            )
            write_file(partial / MANIFEST_NAME, manifest.to_json())
            check_loads(partial)
        return manifest


Columns = dict[str, tuple[NDArray[Any], NDArray[Any]]]
"""By name: the part of the corpus, and that of the new posts."""


def _columns(corpus: Corpus, rows: NDArray[np.int64], change: Change) -> tuple[Columns, tuple[str, ...]]:
    """The columns as they are stored, and the topics that one of them indexes: only those that a post has."""
    new = change.posts
    columns: Columns = {
        "post_ids": (corpus.post_ids[rows].view(np.int64), new.post_ids.view(np.int64)),
        "author_ids": (corpus.author_ids[rows].view(np.int64), new.author_ids.view(np.int64)),
    }
    if corpus.created_at is not None or new.created_at.any():
        old = np.zeros(len(rows), np.int64) if corpus.created_at is None else corpus.created_at[rows]
        columns["created_at"] = old, new.created_at
    indexes = np.full(len(rows), -1, np.int32) if corpus.topics is None else corpus.topics[rows]
    names = [corpus.topic_names[index] for index in np.unique(indexes).tolist() if index >= 0]
    names = [*dict.fromkeys([*names, *(topic for topic in new.topics if topic is not None)])]
    if names:
        places = {name: place for place, name in enumerate(names)}
        moved = np.array([*(places.get(name, -1) for name in corpus.topic_names), -1], np.int32)  # -1 is the last
        columns["topics"] = moved[indexes], np.array([places.get(topic or "", -1) for topic in new.topics], np.int32)
    codes = joined_codes([(corpus.codes_of(rows), len(rows)), (new.codes, len(new))]).astype(np.int32)
    if codes.size:
        columns[CODES] = codes[: len(rows)], codes[len(rows) :]
    if corpus.texts is not None:
        old_texts, width = (
            corpus.texts_of(rows),
            max(corpus.texts.shape[2], packed(new.texts).shape[2] if new.texts else 0),
        )
        columns[TEXTS] = packed(old_texts, width), packed(new.texts, width)
    return columns, tuple(names)
