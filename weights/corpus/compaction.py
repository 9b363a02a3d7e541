"""Rewrites a corpus with its changes in its own directory, while others read it, and makes it current in one step.

The new files and the new log have their own names; nobody reads them until a manifest that lists them is renamed over the old
one. So after any crash the directory holds either the old corpus with its log or the new one with its own. The next compaction
removes leftovers. Only the process that holds the log of the current corpus removes anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.retrieval.corpus import ROWS_PER_STEP, Corpus, packed
from model.retrieval.inputs import Change, Mark
from weights.corpus.changes import ChangeLog
from weights.corpus.manifest import MAX_TOPICS, TEXTS, VECTORS, CorpusManifest, corpus_tensors, file_of
from weights.corpus.store import StoredCorpus, load_corpus, load_corpus_manifest, read_corpus
from weights.errors import CheckpointError, kind_of, reason_of
from weights.format.manifest import MANIFEST_NAME, Manifest
from weights.format.reader import MappedFiles, check_length, open_directory, read_manifest
from weights.format.writer import write_file, write_files

LEFT_BEHIND = re.compile(
    rf"(vectors|posts)(-[0-9a-f]{{8}})?\.safetensors|changes-[0-9a-f]{{16}}\.log|\.{re.escape(MANIFEST_NAME)}\.[0-9a-f]{{8}}\.partial"
)
Part = tuple[Corpus, NDArray[np.int64]]
"""A corpus and the rows of it to keep, in order."""


def load_changed(path: Path, encoder: Manifest) -> tuple[StoredCorpus, ChangeLog, list[Change]]:
    """Read a corpus and its changes consistently: if a compaction comes between, read both again. Raises CheckpointError."""
    while True:
        digest = load_corpus_manifest(path).digest
        try:
            stored = load_corpus(path, encoder)
            log = ChangeLog(path, stored.manifest)
            found = stored, log, log.read()
        except (CheckpointError, OSError):
            if load_corpus_manifest(path).digest == digest:
                raise
            continue
        if load_corpus_manifest(path).digest == stored.manifest.digest:
            return found


@dataclass(slots=True, eq=False)
class Compaction:
    """Rewrites one corpus: call `write`, then `commit` or `drop`. If one raises CheckpointError, the old corpus stays current."""

    directory: Path
    old: CorpusManifest
    log: ChangeLog
    """The log of the old corpus. Held from `write` on, so that no other process changes it meanwhile."""
    mark: str = ""
    """Part of the names of the files that this compaction makes."""

    def write(self, parts: Sequence[Part], mark: Mark) -> StoredCorpus:
        """Write these rows as the corpus with this mark, then read and check it. It is not current yet."""
        try:
            self.log.hold_as_read()
            self._remove_others(self.old, self.log)
            self.mark = secrets.token_hex(4)
            manifest = self._written(parts, mark)
            mapped = MappedFiles()
            with open_directory(self.directory) as directory:
                return StoredCorpus(self.directory, manifest, read_corpus(directory, manifest, mapped), mapped)
        except (OSError, CheckpointError, MemoryError) as error:
            self.drop()
            raise self._refusal(error) from error

    def commit(self, new: CorpusManifest, changes: Sequence[Change]) -> ChangeLog:
        """Make the written corpus current, with the changes since. Return the log of these, held and on disk."""
        log, partial = ChangeLog(self.directory, new), f".{MANIFEST_NAME}.{self.mark}.partial"
        try:
            with open_directory(self.directory) as directory:
                if read_manifest(directory, CorpusManifest.from_json).digest != self.old.digest:
                    raise CheckpointError("another corpus has taken its place meanwhile")
                log.begin(changes)
                write_file(self.directory / partial, new.to_json())
                os.fsync(directory)
                self._check_there(directory, new, log)
                os.rename(partial, MANIFEST_NAME, src_dir_fd=directory, dst_dir_fd=directory)
                self.log.end()  # a crash may keep either manifest: acknowledge no change that its log lacks
                os.fsync(directory)
        except (OSError, CheckpointError) as error:
            self.drop(log)
            log.close()
            raise self._refusal(error) from error
        self._remove_others(new, log)
        return log

    def drop(self, log: ChangeLog | None = None) -> None:
        """Remove what this compaction has made, unless it is current. `log`: the log that it began, if any."""
        names = [file_of(name, self.mark) for name in (VECTORS, "posts")] + [f".{MANIFEST_NAME}.{self.mark}.partial"]
        made = names + ([log.path.name] if log is not None and log.is_held else [])
        with contextlib.suppress(OSError, CheckpointError):
            if self.mark and self.log.is_held and load_corpus_manifest(self.directory).digest == self.old.digest:
                for name in made:
                    (self.directory / name).unlink(missing_ok=True)

    def _check_there(self, directory: int, new: CorpusManifest, log: ChangeLog) -> None:
        """Raises CheckpointError if a file that the new manifest lists is gone, or if a log is no longer ours."""
        self.log.check()
        log.check()
        for name, entry in new.files.items():
            try:
                length = os.stat(name, dir_fd=directory, follow_symlinks=False).st_size
            except FileNotFoundError:
                raise CheckpointError(f"{name} was removed meanwhile") from None
            check_length(length, entry)

    def _written(self, parts: Sequence[Part], mark: Mark) -> CorpusManifest:
        old, posts = self.old, sum(len(rows) for _, rows in parts)
        if not posts:
            raise CheckpointError("no post is left in it")
        topics = {name: place for place, name in enumerate(_topics(old, parts))}
        if len(topics) > MAX_TOPICS:
            raise CheckpointError(
                f"its posts have {len(topics)} topics, and at most {MAX_TOPICS} can be written: delete posts, or give them other topics"
            )
        columns = ["post_ids", "author_ids"]
        if any(corpus.created_at is not None for corpus, _ in parts):
            columns.append("created_at")
        if topics:
            columns.append("topics")
        text_width = max(0 if corpus.texts is None else corpus.texts.shape[2] for corpus, _ in parts)
        if old.ids == "text":
            columns.append(TEXTS)
        tensors = corpus_tensors(columns, posts, old.width, old.tensors[VECTORS].dtype, self.mark, text_width)

        def chunks(name: str) -> Iterator[Tensor]:
            for corpus, rows in parts:
                for start in range(0, len(rows), ROWS_PER_STEP):
                    some = rows[start : start + ROWS_PER_STEP]
                    if name == TEXTS:
                        yield torch.from_numpy(packed(corpus.texts_of(some), text_width).copy())
                    else:
                        yield torch.from_numpy(_column(name, corpus, some, topics))

        files = write_files(self.directory, tensors, chunks)
        return msgspec.structs.replace(
            old, version=old.label(mark), posts=posts, topics=tuple(topics), files=files, tensors=tensors, mark=mark
        )

    def _remove_others(self, kept: CorpusManifest, log: ChangeLog) -> None:
        """Remove the leftovers of crashed compactions and the logs of corpora before `kept`, whose log is held."""
        kept_names = {*kept.files, log.path.name}
        with contextlib.suppress(OSError, CheckpointError):  # the next compaction removes what stays
            log.check()
            if load_corpus_manifest(self.directory).digest != kept.digest:
                return  # the directory no longer holds our corpus
            for path in self.directory.iterdir():
                if LEFT_BEHIND.fullmatch(path.name) and path.name not in kept_names:
                    path.unlink()

    def _refusal(self, error: Exception) -> CheckpointError:
        return kind_of(error)(f"Corpus {self.directory} is not compacted: {reason_of(error)}.")


def _topics(old: CorpusManifest, parts: Sequence[Part]) -> list[str]:
    """The topics that some row has, in order, the old corpus's first. Unused topics are dropped, or there would soon be too many."""
    used = {
        corpus.topic_names[place]
        for corpus, rows in parts
        if corpus.topics is not None
        for place in np.unique(corpus.topics[rows]).tolist()
        if place >= 0
    }
    named = dict.fromkeys([*old.topics, *(name for corpus, _ in parts for name in corpus.topic_names)])
    return [name for name in named if name in used]


def _column(name: str, corpus: Corpus, rows: NDArray[np.int64], topics: dict[str, int]) -> NDArray[np.generic]:
    """Some rows of one tensor, as stored."""
    if name == "created_at":
        return np.zeros(len(rows), np.int64) if corpus.created_at is None else corpus.created_at[rows]
    if name == "topics":
        if corpus.topics is None:
            return np.full(len(rows), -1, np.int32)
        places = np.array([*(topics.get(topic, -1) for topic in corpus.topic_names), -1], np.int32)
        return places[corpus.topics[rows]]  # -1 indexes the last place, which is -1
    if name == VECTORS:
        return corpus.vectors[rows]
    ids: NDArray[np.generic] = (corpus.post_ids if name == "post_ids" else corpus.author_ids)[rows].view(np.int64)
    return ids
