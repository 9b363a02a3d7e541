"""The changes to a corpus since it was written: a log beside it that a crash at any byte leaves readable.

A record is its length (uint32, little-endian), 8 bytes of BLAKE2b of what follows, and that: a JSON object, a line feed, and the
new posts' vectors as float32. The first record names the corpus. A change is acknowledged once its record is on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.inputs import Ids
from model.retrieval.inputs import Change, NewPosts
from weights.corpus.manifest import CorpusManifest
from weights.corpus.store import load_corpus_manifest
from weights.errors import CheckpointError
from weights.format.writer import sync_directory

HEADER_BYTES = 12
NO_IDS = np.empty(0, np.uint64)


class ChangeLog:
    """The log of one corpus. `read` first; then `append`, from one process at a time. Raises CheckpointError."""

    def __init__(self, directory: Path, manifest: CorpusManifest) -> None:
        self.path = directory / f"changes-{manifest.digest[:16]}.log"
        self._manifest = manifest
        self._end = 0  # after the last whole record
        self._descriptor: int | None = None
        self._is_broken = False

    def read(self) -> list[Change]:
        """Every change that was acknowledged, in order. What a crash left of a record that was not is passed over."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._refusal(f"cannot be read: {error.strerror}") from error
        payloads = []
        while (payload := self._next(raw)) is not None:
            payloads.append(payload)
            self._end += HEADER_BYTES + len(payload)
        if payloads and json.loads(payloads[0]) != {"corpus": self._manifest.digest}:
            raise self._refusal("belongs to another corpus")
        return [self._decoded(payload) for payload in payloads[1:]]

    def append(self, change: Change) -> None:
        """Returns when the change is on the disk; where it raises, the change never was."""
        if self._is_broken:
            raise self._refusal("could not be written before; read the corpus again")
        try:
            self.hold()
            record = b"" if self._end else self._first()
            self._write(record + _record(_encoded(change)))
        except OSError as error:
            raise self._refusal(f"cannot be written: {error.strerror}") from error

    def hold(self) -> None:
        """Be the one process that may change the corpus, until `close`. Raises CheckpointError where another one is."""
        if self._descriptor is None:
            try:
                self._descriptor = self._open()
            except OSError as error:
                raise self._refusal(f"cannot be written: {error.strerror}") from error

    def begin(self, changes: Sequence[Change]) -> None:
        """Make the log of a corpus that is not in force yet, and hold it: it is on the disk when this returns."""
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._write(self._first() + b"".join(_record(_encoded(change)) for change in changes))

    def end(self) -> None:
        """From now on refuse changes: another log may have taken the place of this one."""
        self._is_broken = True

    def close(self) -> None:
        """Let another process append."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._refusal("is being written by another process") from None
            if load_corpus_manifest(self.path.parent).digest != self._manifest.digest:
                if not os.fstat(descriptor).st_size:
                    self.path.unlink(missing_ok=True)
                raise self._refusal("belongs to a corpus in whose place there is another; read the corpus again")
            if os.fstat(descriptor).st_size > self._end:
                with open(descriptor, "rb", closefd=False) as file:
                    if self._next(file.read()) is not None:
                        raise self._refusal("was written by another process; read the corpus again")
                os.ftruncate(descriptor, self._end)
            sync_directory(self.path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _write(self, record: bytes) -> None:
        assert self._descriptor is not None
        written = 0
        try:
            while written < len(record):
                written += os.pwrite(self._descriptor, record[written:], self._end + written)
            os.fsync(self._descriptor)
        except OSError:
            self._is_broken = True  # what a failed fsync left on the disk is not known, unless it can be cut off
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
                os.fsync(self._descriptor)
                self._is_broken = False
            raise
        self._end += len(record)

    def _first(self) -> bytes:
        """The record that names the corpus."""
        return _record(json.dumps({"corpus": self._manifest.digest}).encode())

    def _next(self, raw: bytes) -> bytes | None:
        """The payload of the record at the end of those that were read; None where no whole one is left."""
        start = self._end + HEADER_BYTES
        length = int.from_bytes(raw[self._end : self._end + 4], "little")
        payload = raw[start : start + length]
        if length and len(payload) == length and _digest(payload) == raw[start - 8 : start]:
            return payload
        if length and start + length < len(raw):
            raise self._refusal(f"is damaged at byte {self._end}: records follow one that is not what was written")
        return None

    def _decoded(self, payload: bytes) -> Change:
        head, _, vectors = payload.partition(b"\n")
        values: dict[str, Any] = json.loads(head)
        count, width = len(values["post_ids"]), self._manifest.width
        posts = NewPosts(
            np.array(values["post_ids"], np.uint64),
            np.array(values["author_ids"], np.uint64),
            np.array(values["created_at"], np.int64),
            values["topics"],
            np.frombuffer(vectors, np.float32).reshape(count, width).copy(),
        )
        return Change(np.array(values["delete"], np.uint64), posts)

    def _refusal(self, reason: str) -> CheckpointError:
        return CheckpointError(f"The log of changes {self.path} {reason}.")


def no_posts(width: int) -> NewPosts:
    """For a change that only deletes."""
    return NewPosts(NO_IDS, NO_IDS, np.empty(0, np.int64), [], np.empty((0, width), np.float32))


def _encoded(change: Change) -> bytes:
    posts = change.posts
    ids: dict[str, Ids] = {"delete": change.delete, "post_ids": posts.post_ids, "author_ids": posts.author_ids}
    head = {name: values.tolist() for name, values in ids.items()}
    head |= {"created_at": posts.created_at.tolist(), "topics": posts.topics}
    return json.dumps(head).encode() + b"\n" + np.ascontiguousarray(posts.vectors, np.float32).tobytes()


def _record(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + _digest(payload) + payload


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=8).digest()
