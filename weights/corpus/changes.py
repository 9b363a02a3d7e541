"""The log of changes to a corpus since it was written. It stays readable after a crash at any byte.

The log begins with MAGIC. A record is a header (the payload's length as uint32, little-endian; 8 bytes of BLAKE2b of the payload; 8 bytes
of BLAKE2b of the record's offset in the file and those twelve bytes), the payload (`weights.corpus.records`), and END.
The first record names the corpus. A change is acknowledged once its record is on disk.

Only the process that has locked the log of the current corpus may write to its directory or remove anything there.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from model.retrieval.inputs import Change
from weights.corpus.manifest import CorpusManifest
from weights.corpus.records import HEADER_BYTES, decoded, encoded, record, record_at
from weights.corpus.store import load_corpus_manifest
from weights.errors import CheckpointError, LogLost, NotStored, kind_of, reason_of
from weights.format.manifest import MANIFEST_NAME
from weights.format.writer import sync

MAGIC = b"\2\0\0\0changes\n"
AGAIN_SECONDS = 5.0  # after which a log that takes no more changes is to be read again, with its corpus

Identity = tuple[int, ...]


class Undone(NotStored):
    """A record that was read is gone: the disk refused it, and its writer has cut it off again."""


class ChangeLog:
    """The log of one corpus. Call `read` first, then `append`, from one process at a time. Raises CheckpointError, and NotStored if a
    change cannot be written now. Used by one thread at a time."""

    def __init__(self, directory: Path, manifest: CorpusManifest) -> None:
        self.path = directory / f"changes-{manifest.digest[:16]}.log"
        self.passed_over = 0
        """Bytes after the last complete record at the last `read`: a record that a crash cut short."""
        self.mark = manifest.first_mark
        """The mark of the corpus with all changes read and appended so far."""
        self._manifest = manifest
        self._end = 0  # offset after the last complete record
        self._last = 0, b""  # offset and header of the last record that was read
        self._descriptor: int | None = None  # while this process holds the log
        self._broken: CheckpointError | None = None  # why nothing can be appended any more, since when:
        self._broken_at = 0.0
        self._file: Identity | None = None  # device and inode of the file that was read or written
        self._seen: Identity = ()  # its size and modification time then
        self._directory = _place(os.stat(directory))
        self._in_force: Identity | None = None  # of the manifest file last checked to be this corpus's

    def is_in(self, directory: Path) -> bool:
        """Whether it lies in what is now this directory."""
        return _place(os.stat(directory)) == self._directory

    # reading

    def read(self) -> list[Change]:
        """Every acknowledged change not read before, in order. An incomplete record left by a crash is skipped."""
        try:
            with open(self._opened(os.O_RDONLY), "rb") as file:
                status = os.fstat(file.fileno())
                file.seek(self._last[0])
                is_there = file.read(len(self._last[1])) == self._last[1]
                file.seek(self._end)
                raw = file.read()
        except FileNotFoundError:
            if self._file is not None:
                raise self._lost() from None
            return []
        except OSError as error:
            raise self._not_stored(f"cannot be read: {reason_of(error)}") from error
        if not is_there and status.st_size >= self._last[0]:
            raise self._refusal("lacks a record that was read before it was on the disk; read the corpus again", Undone)
        if status.st_size < self._end:
            raise self._lost()
        is_first, payloads = not self._end, self._records(raw)
        self._seen = _state(status)
        if is_first and payloads and payloads.pop(0) != self._name():
            raise self._refusal("belongs to another corpus")
        return [self._decoded(payload) for payload in payloads]

    def follow(self) -> list[Change] | None:
        """The changes of other processes since; None if the caller must read the corpus again: one has rewritten it, or this log has taken
        no changes for a few seconds. Empty if another directory has replaced the corpus's.
        """
        try:
            if not self.is_in(self.path.parent):
                return []
            if not self._is_in_force() or (
                self._broken is not None and time.monotonic() > self._broken_at + AGAIN_SECONDS
            ):
                return None
            if _place(found := os.lstat(self.path)) != self._file or _state(found) != self._seen:
                return self.read()
        except FileNotFoundError:
            if self._file is not None and self._is_in_force():
                raise self._lost() from None
        except CheckpointError as error:
            if self._is_in_force() and (self.is_held or not isinstance(error, Undone)):
                raise
            return None
        except OSError as error:
            raise self._refusal(f"cannot be read: {error.strerror}") from error
        return [] if self._is_in_force() else None

    def _records(self, raw: bytes) -> list[bytes]:
        """The payloads of the complete records at the start of `raw`, the file from `_end` on; moves `_end` behind them."""
        payloads, start, at, length = list[bytes](), self._end, 0, len(raw)
        if not start and raw.startswith(MAGIC):
            at = len(MAGIC)
        elif not start and MAGIC.startswith(raw.rstrip(b"\0")):
            raw = b""  # a crash while the file was being started
        elif not start:
            raise self._refusal("is damaged at byte 0, or in a form that this build does not read")
        while at < len(raw):
            payload, stop = record_at(raw, at, start)
            if not stop:
                raise self._refusal(
                    f"is damaged at byte {start + at}: what follows is not what was written. Restore the file; or, to go on "
                    "without the changes from there on, cut it off at that byte (truncate -s)"
                )
            if payload is None:
                break
            payloads.append(payload)
            self._last, at = (start + at, raw[at : at + HEADER_BYTES]), stop
        if start or payloads:
            self._end += at
        self.passed_over = start + length - self._end
        return payloads

    # writing

    def append(self, change: Change) -> None:
        """Write a change and return once it is on disk. If this raises, the change was not made, unless the error says that it may be."""
        self.hold_as_read()
        self._check_whole()
        self._write([b"", encoded(change)] if self._end else [MAGIC, self._name(), encoded(change)], self._check_whole)
        self.mark = change.mark

    def hold(self) -> list[Change]:
        """Lock the log, so that only this process may change the corpus until `close`. Return what others have changed since `read`.
        Raises NotStored if another process holds it."""
        if self._broken is not None:
            raise type(self._broken)(str(self._broken))
        if self._descriptor is not None:
            return []
        try:
            if not self._is_in_force():
                raise self._replaced()
            self._descriptor = self._opened(os.O_RDWR | (os.O_CREAT if self._file is None else 0))
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._is_in_force():
                raise self._replaced()
            sync(self.path.parent)
            return self.read()  # last: what was read is not read again
        except BaseException as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise self._not_stored("is being written by another process") from None
            if isinstance(error, FileNotFoundError):
                raise self._lost() from None
            if isinstance(error, OSError):
                raise self._refusal(f"cannot be written: {error.strerror}", kind_of(error)) from error
            raise

    def hold_as_read(self) -> None:
        """`hold` for a caller that has read every change. Raises NotStored if others have made changes since."""
        if self.hold():
            self.close()
            self.end("was written by another process")
            self.hold()  # raises it

    @property
    def is_held(self) -> bool:
        """Whether this process may write to the corpus's directory."""
        return self._descriptor is not None

    def begin(self, changes: Sequence[Change]) -> None:
        """Create and hold the log of a corpus that is not current yet. It is on disk when this returns. Raises OSError."""
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._file = _place(os.fstat(self._descriptor))
        self._write([MAGIC, self._name(), *map(encoded, changes)])
        self.mark = changes[-1].mark if changes else self.mark

    def check(self) -> None:
        """Raises LogLost (a NotStored) if the log is not held, its path no longer leads to it, or a part of it was cut off."""
        try:
            found = os.lstat(self.path)
            is_there = self._descriptor is not None and _place(found) == self._file and found.st_size >= self._end
        except OSError:
            is_there = False
        if not is_there:
            raise self._lost()

    def end(self, reason: str = "could not be written before") -> None:
        """Refuse changes from now on: another log may have replaced this one."""
        self._broken, self._broken_at = self._not_stored(f"{reason}; read the corpus again"), time.monotonic()

    def close(self) -> None:
        """Let another process append."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _check_whole(self) -> None:
        """Raises NotStored if the next reader of this corpus would not find what is appended here, or if that cannot be seen now."""
        self.check()
        if not self._is_in_force():
            raise self._replaced()

    def _is_in_force(self) -> bool:
        """Whether the manifest in the directory is still this corpus's. Raises NotStored if it is not there or cannot be read."""
        try:
            found = os.stat(self.path.parent / MANIFEST_NAME)
        except OSError as error:
            raise self._not_stored(f"is left without its corpus: {MANIFEST_NAME}: {error.strerror}") from error
        seen = _place(found) + _state(found)
        if seen != self._in_force:
            try:
                if load_corpus_manifest(self.path.parent).digest != self._manifest.digest:
                    return False
            except CheckpointError as error:
                raise NotStored(str(error)) from error
            self._in_force = seen
        return True

    def _opened(self, flags: int) -> int:
        """Open the log. Raises OSError, and NotStored if it is not a regular file, or not the one seen before."""
        descriptor = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or self._file not in (None, _place(status)):
            os.close(descriptor)
            raise self._lost() if stat.S_ISREG(status.st_mode) else self._not_stored("is no regular file")
        self._file = _place(status)
        return descriptor

    def _write(self, parts: Sequence[bytes], check: Callable[[], None] = lambda: None) -> None:
        """Write `parts[0]` (MAGIC or nothing) and records of the others at the end; cut them off if `check` or the disk refuses them."""
        assert self._descriptor is not None
        end, data, written = self._end, bytearray(parts[0]), 0
        for payload in parts[1:]:
            data += record(payload, end + len(data))
        try:
            _cut(self._descriptor, end)
            while written < len(data):
                written += os.pwrite(self._descriptor, memoryview(data)[written:], end + written)
            os.fsync(self._descriptor)
            self._end, self._seen, self.passed_over = end + len(data), _state(os.fstat(self._descriptor)), 0
            check()
        except (OSError, CheckpointError) as error:
            self._end, is_said = end, isinstance(error, CheckpointError)
            reason = str(error if is_said else self._refusal(f"cannot be written: {reason_of(error)}"))
            try:
                _cut(self._descriptor, end)
                os.fsync(self._descriptor)
            except OSError:  # the disk's content is unknown
                self.end()
                reason += " It could not be cut off again: whoever reads the corpus next may find the change."
            raise kind_of(error)(reason) from error

    # payloads

    def _name(self) -> bytes:
        """The first payload, which names the corpus."""
        return json.dumps({"corpus": self._manifest.digest}).encode()

    def _decoded(self, payload: bytes) -> Change:
        try:
            change = decoded(payload, self._manifest.width, self._manifest.ids)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise self._refusal("holds a record that is not a change") from error
        self.mark = change.mark
        return change

    # errors

    def _lost(self) -> CheckpointError:
        return self._refusal(
            "was deleted, cut or replaced under this process, which still has its changes: restore it, or read the corpus again to go "
            "on without them",
            LogLost,
        )

    def _replaced(self) -> CheckpointError:
        return self._not_stored("belongs to a corpus that has been replaced; read the corpus again")

    def _not_stored(self, reason: str) -> CheckpointError:
        return self._refusal(reason, NotStored)

    def _refusal(self, reason: str, kind: type[CheckpointError] = CheckpointError) -> CheckpointError:
        return kind(f"The log of changes {self.path} {reason}.")


def _cut(descriptor: int, end: int) -> None:
    if os.fstat(descriptor).st_size > end:
        os.ftruncate(descriptor, end)


def _place(found: os.stat_result) -> Identity:
    """Device and inode: unchanged as long as it is the same file, whatever is written to it."""
    return found.st_dev, found.st_ino


def _state(found: os.stat_result) -> Identity:
    """Size and modification time: they change when somebody writes to the file."""
    return found.st_size, found.st_mtime_ns
