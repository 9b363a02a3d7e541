"""Parts of the log of what was served, as files: opened, filled, closed under their names, and removed when they are old.

Used by one thread. `weights.served` says what a part holds. A part has its name only when it is whole and on the disk, so `kill -9` loses
at most the parts that are open. Names are drawn at random: any number of processes may write into one directory.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from weights.served import OPEN_SUFFIX, SUFFIX, ContextName, RowBatch
from weights.values import DAY_SECONDS

GROUP_BYTES = 8 * 2**20
"""A part's rows are written when they take this much memory."""
TOUCH_SECONDS = 60.0
"""An open file is touched so often, so that other processes see that somebody writes it. Unlike a lock, this works on every file system."""
ABANDONED_SECONDS = 3600.0  # without a touch, after which a file was left open by a process that was killed
OUR_FOLDER = re.compile(r"date=\d{4}-\d{2}-\d{2}", re.ASCII)
OUR_FILE = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{16}(\.[0-9a-f]{8}\.forget)?\.parquet(\.open)?", re.ASCII)
"""The names of parts, open parts, and of those that `weights.forget` writes again."""
COMPRESSION = "lz4"  # a third of the time of zstd, and little longer


class Part:
    """A part that is being written, and the rows that it will hold. Each method raises OSError where the disk does not take it."""

    def __init__(
        self, directory: Path, day: int, kind: pa.Schema, now: float, release: Callable[[RowBatch], None]
    ) -> None:
        """Open a file of the directory for rows of this UTC day, counted since 1970, with this schema. `now`: Unix seconds. `release` gets
        each batch whose rows are in the file. An error leaves no file and no descriptor."""
        self.opened = self._touched = now
        self.rows = 0
        folder = directory / _folder_of(day * DAY_SECONDS)
        make_directory(directory)
        make_directory(folder)
        stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ")
        self.path = folder / f"{stamp}-{secrets.token_hex(8)}{SUFFIX}"
        self.open_path = self.path.with_name(self.path.name.removesuffix(SUFFIX) + OPEN_SUFFIX)
        self._kind = kind
        self._contexts: set[ContextName] = set()  # that the part holds
        self._release = release
        self._waiting: list[pa.RecordBatch] = []
        self._batches: list[RowBatch] = []  # that hold the memory of the rows that wait
        self._waiting_bytes = 0
        with ExitStack() as undo:  # of what is done where the rest fails, as on a full disk
            self._descriptor = os.open(self.open_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            undo.callback(self.open_path.unlink, missing_ok=True)
            undo.callback(self._close_descriptor)
            self._file = pa.OSFile(str(self.open_path), "wb")
            undo.callback(self._file.close)
            # Without dictionaries and statistics, which take more time than all the rest. Checksums take a twelfth.
            self._writer = pq.ParquetWriter(
                self._file,
                kind,
                compression=COMPRESSION,
                use_dictionary=False,
                write_statistics=False,
                write_page_checksum=True,
            )
            undo.pop_all()

    @property
    def size_bytes(self) -> int:
        """Bytes in the file, and of the rows that wait to be written."""
        written: int = self._file.tell()
        return written + self._waiting_bytes

    def add(self, batch: RowBatch) -> None:
        """Take rows into memory. The disk has no part in this. Raises whatever is wrong with a value; the part is then as it was."""
        rows = batch.encode(self._kind, self._contexts)
        self.rows += len(rows)
        self._waiting.append(rows)
        self._batches.append(batch)
        self._waiting_bytes += rows.nbytes

    def touch(self, now: float) -> None:
        """Let other processes see that the part is being written, once in a while. `now`: Unix seconds."""
        if abs(now - self._touched) >= TOUCH_SECONDS:
            self._touched = now
            os.utime(self._descriptor)

    def flush(self) -> None:
        """Write the rows that wait, if they are many."""
        if self._waiting_bytes >= GROUP_BYTES:
            self._write()

    def close(self) -> int:
        """Put the part on the disk under its name; return its size in bytes."""
        self._write()
        self._writer.close()
        size: int = self._file.tell()
        self._file.close()
        os.fsync(self._descriptor)
        self._close_descriptor()
        os.rename(self.open_path, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return size

    def abandon(self) -> None:
        """Give the part up, and remove its file if that is possible."""
        self._writer.is_open = False  # else it would write a footer when it is freed
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._close_descriptor()
        with suppress(OSError):
            self.open_path.unlink()

    def _close_descriptor(self) -> None:
        """Close it once: its number may by then be that of another file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _write(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting), row_group_size=self.rows)
            self._waiting, self._waiting_bytes = [], 0
            for batch in self._batches:
                self._release(batch)
            self._batches = []


def make_directory(path: Path) -> None:
    """Make a directory that only this user can read, unless it is there. Raises OSError."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)


def remove_old(directory: Path, keep_days: int, now: float) -> int:
    """Remove the parts of days that ended more than `keep_days` ago, of none where it is 0, and files that a killed process left open.
    `now`: Unix seconds.

    Return how many files were removed. What has another name is not ours, and stays. Raises OSError where a file cannot be removed.
    """
    removed = 0
    first_kept = _folder_of(now - keep_days * DAY_SECONDS)
    for folder in directory.glob("date=*"):
        if not OUR_FOLDER.fullmatch(folder.name):
            continue
        is_old = keep_days > 0 and folder.name < first_kept
        for path in [path for path in folder.glob("*") if OUR_FILE.fullmatch(path.name)]:
            try:
                if is_old or (path.suffix == ".open" and path.stat().st_mtime < now - ABANDONED_SECONDS):
                    path.unlink()
                    removed += 1
            except FileNotFoundError:  # another process removed it first, or closed the part
                continue
        if is_old:
            with suppress(OSError):  # something of another name is in it
                folder.rmdir()
    return removed


def _folder_of(unix_seconds: float) -> str:
    """The name of the folder of the day that this time is in."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("date=%Y-%m-%d")
