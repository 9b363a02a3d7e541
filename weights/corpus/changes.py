"""The changes to a corpus since it was written: a log beside it that a crash at any byte leaves readable.

A record is a header, a payload and 8 bytes of BLAKE2b of both. The header is `chg2`, the payload's length (uint32, little-endian) and
8 bytes of BLAKE2b of these two; the payload is a JSON object, a line feed, and the new posts' vectors as float32. The first record
names the corpus. A change is acknowledged once its record is on the disk. Logs of older builds begin with records of another form
(length, 8 bytes of BLAKE2b of the payload, payload); those are read, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model.inputs import Ids
from model.retrieval.inputs import Change, NewPosts
from weights.corpus.manifest import CorpusManifest
from weights.corpus.store import load_corpus_manifest
from weights.errors import CheckpointError, LogLost, kind_of
from weights.format.writer import sync_directory

MAGIC = b"chg2"
HEADER_BYTES = 16
DIGEST_BYTES = 8
OLD_HEADER_BYTES = 12
RECORD = re.compile(rb"chg2|(?s:.{12})(?=\{\")")  # where a record may begin, of this form or the older one
LOST = "was deleted, cut or replaced beside a process that serves its changes: put it back, or compact or import the corpus anew"
NO_IDS = np.empty(0, np.uint64)


class ChangeLog:
    """The log of one corpus. `read` first; then `append`, from one process at a time. Raises CheckpointError."""

    def __init__(self, directory: Path, manifest: CorpusManifest) -> None:
        self.path = directory / f"changes-{manifest.digest[:16]}.log"
        self.torn_bytes = 0
        """What `read` has passed over at the end: of a record that was not acknowledged."""
        self._manifest = manifest
        self._end = 0  # after the last whole record
        self._descriptor: int | None = None
        self._is_broken = False

    def read(self) -> list[Change]:
        """Every change that was acknowledged since the last `read`, in order. What a crash left of a record that was not is passed over."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._end)
                raw = file.read()
        except FileNotFoundError:
            raw = b""
        except OSError as error:
            raise self._refusal(f"cannot be read: {error.strerror}") from error
        payloads, end = self._records(raw)
        if not self._end and payloads and json.loads(payloads.pop(0)) != {"corpus": self._manifest.digest}:
            raise self._refusal("belongs to another corpus")
        changes = [self._decoded(payload) for payload in payloads]
        self._end += end
        self.torn_bytes = len(raw) - end
        return changes

    def append(self, change: Change) -> None:
        """Returns when the change is on the disk; where it raises, the change never was."""
        if self._is_broken:
            raise self._refusal("could not be written before; read the corpus again")
        try:
            self.hold()
            record = b"" if self._end else self._first()
            self._write(record + _record(_encoded(change)))
        except OSError as error:
            raise self._refusal(f"cannot be written: {error.strerror}", kind_of(error)) from error

    def hold(self) -> None:
        """Be the one process that may change the corpus, until `close`. Raises CheckpointError where another one is."""
        if self._descriptor is None:
            try:
                self._descriptor = self._open()
            except OSError as error:
                raise self._refusal(f"cannot be written: {error.strerror}", kind_of(error)) from error

    @property
    def is_held(self) -> bool:
        """Whether this is the process that may change the corpus."""
        return self._descriptor is not None

    def check(self) -> None:
        """Raises LogLost unless the file is held and has its name still, and holds every change that was read or appended."""
        try:
            if self._descriptor is None:
                raise self._refusal("is not held", LogLost)
            held, named = os.fstat(self._descriptor), os.stat(self.path, follow_symlinks=False)
            if os.path.samestat(held, named) and named.st_size >= self._end:
                return
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._refusal(f"cannot be looked at: {error.strerror}", LogLost) from error
        raise self._refusal(LOST, LogLost)

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
        create = 0 if self._end else os.O_CREAT  # one that held changes is never made anew
        try:
            descriptor = os.open(self.path, os.O_RDWR | create | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            self._check_corpus()
            raise self._refusal(LOST, LogLost) from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._refusal("is being written by another process") from None
            try:
                self._check_corpus()
            except CheckpointError:
                if not os.fstat(descriptor).st_size:
                    self.path.unlink(missing_ok=True)
                raise
            if (size := os.fstat(descriptor).st_size) < self._end:
                raise self._refusal(LOST, LogLost)
            if size > self._end:
                if self._records(os.pread(descriptor, size - self._end, self._end))[0]:
                    raise self._refusal("was written by another process; read the corpus again")
                os.ftruncate(descriptor, self._end)
            sync_directory(self.path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check_corpus(self) -> None:
        if load_corpus_manifest(self.path.parent).digest != self._manifest.digest:
            raise self._refusal("belongs to a corpus in whose place there is another; read the corpus again")

    def _write(self, record: bytes) -> None:
        assert self._descriptor is not None
        written = 0
        try:
            self.check()
            while written < len(record):
                written += os.pwrite(self._descriptor, record[written:], self._end + written)
            os.fsync(self._descriptor)
            self.check()
        except (OSError, LogLost):
            self._is_broken = True  # what a failed fsync left on the disk is not known, unless it can be cut off
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
                os.fsync(self._descriptor)
                self._is_broken = False
            raise
        self._end += len(record)

    def _first(self) -> bytes:
        """The record that names the corpus."""
        return _record(self._name())

    def _name(self) -> bytes:
        return json.dumps({"corpus": self._manifest.digest}).encode()

    def _records(self, raw: bytes) -> tuple[list[bytes], int]:
        """The payloads of all whole records of what follows `_end`, and where the last of them ends.

        Raises CheckpointError for a record that is not what was written, unless it ends as one whose writing a crash has cut: with
        fewer bytes than it has, or with zeros.
        """
        payloads, end = [], 0
        old_form = not self._end and raw[:4] == len(self._name()).to_bytes(4, "little")
        while end < len(raw):
            is_old = old_form and raw[end : end + 4] != MAGIC
            found = _old_record(raw, end) if is_old else _new_record(raw, end)
            if found is None:
                self._check_torn(raw, end, is_old)
                break
            payload, end = found
            payloads.append(payload)
        return payloads, end

    def _check_torn(self, raw: bytes, start: int, is_old: bool) -> None:
        """Raises CheckpointError unless what begins at `start` is what a crash has left of one record."""
        if is_old:
            end = start + OLD_HEADER_BYTES + int.from_bytes(raw[start : start + 4], "little")
            is_torn = end > len(raw) or end == start + OLD_HEADER_BYTES or end == len(raw)
        else:
            end = _end_of(raw, start)
            is_short = len(raw) - start < HEADER_BYTES or end > len(raw)
            is_torn = is_short or not any(raw[-DIGEST_BYTES:]) or (end == len(raw) and _ends_in_zeros(raw, start))
        follows = (
            _old_record(raw, at.start()) or _new_record(raw, at.start()) for at in RECORD.finditer(raw, start + 1)
        )
        if not is_torn or any(follows):
            raise self._refusal(f"is damaged at byte {self._end + start}: a record there is not what was written")

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

    def _refusal(self, reason: str, kind: type[CheckpointError] = CheckpointError) -> CheckpointError:
        return kind(f"The log of changes {self.path} {reason}.")


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
    head = MAGIC + len(payload).to_bytes(4, "little")
    whole = head + _digest(head) + payload
    return whole + _digest(whole)


def _end_of(raw: bytes, start: int) -> int:
    """Where the record at `start` ends, by its own header; `start` where that is not one."""
    head = raw[start : start + 8]
    if head[:4] != MAGIC or _digest(head) != raw[start + 8 : start + HEADER_BYTES]:
        return start
    return start + HEADER_BYTES + int.from_bytes(head[4:], "little") + DIGEST_BYTES


def _ends_in_zeros(raw: bytes, start: int) -> bool:
    """Whether the digest that ends `raw` was written in part and the rest reads as zeros. One bit more is no such end."""
    stored, right = raw[-DIGEST_BYTES:], _digest(raw[start:-DIGEST_BYTES])
    differing = (int.from_bytes(stored, "big") ^ int.from_bytes(right, "big")).bit_count()
    return right.startswith(stored.rstrip(b"\0")) and differing > 1


def _new_record(raw: bytes, start: int) -> tuple[bytes, int] | None:
    """The payload of the whole record at `start` and where it ends; None where there is none."""
    end = _end_of(raw, start)
    if start == end or end > len(raw) or _digest(raw[start : end - DIGEST_BYTES]) != raw[end - DIGEST_BYTES : end]:
        return None
    return raw[start + HEADER_BYTES : end - DIGEST_BYTES], end


def _old_record(raw: bytes, start: int) -> tuple[bytes, int] | None:
    """As `_new_record`, of the older form."""
    begin = start + OLD_HEADER_BYTES
    end = begin + int.from_bytes(raw[start : start + 4], "little")
    if begin == end or end > len(raw) or _digest(raw[begin:end]) != raw[begin - DIGEST_BYTES : begin]:
        return None
    return raw[begin:end], end


def _digest(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).digest()
