"""The changes of a corpus since it was built: an SQLite file beside it, with one row for each post that was changed.

A search sees the corpus as it was built, with these changes. A change is on the disk before it is acknowledged. Every row has a digest,
and the row of the table `state` has one of them all, so that a damaged file is refused. A process that may change a corpus locks its
manifest: no other process may serve or change the same directory meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import numpy as np

from model.inputs import NO_IDS
from model.retrieval.inputs import Change, Mark, NewPosts, PostChange, PostRows, rows_of_codes
from weights.corpus.manifest import CorpusManifest
from weights.corpus.store import StoredCorpus, changes_file, load_corpus
from weights.errors import CheckpointError, LogLost, NotStored, StorageFull, kind_of
from weights.format.manifest import MANIFEST_NAME, Manifest
from weights.format.writer import sync

FORM = 1  # of the tables
BUSY_SECONDS = 10.0  # how long to wait while another process reads the file
TABLES = """
CREATE TABLE posts (
    post_id INTEGER PRIMARY KEY, -- the 64 bits of the id, as a signed integer
    sequence INTEGER,            -- of the change that wrote this row
    place INTEGER,               -- in that change
    author_id INTEGER,           -- from here to `vector`: NULL for a post of the corpus that was deleted
    created_at INTEGER,
    topic TEXT,                  -- NULL for none
    post_text TEXT,              -- NULL unless ids are texts
    author_text TEXT,
    vector BLOB,                 -- float32; then, as int32, the content codes, if the post has any
    digest INTEGER
);
CREATE TABLE state (             -- one row
    corpus TEXT,                 -- the digest of the corpus's manifest
    sequence INTEGER,            -- this and the next two: the mark of the corpus with these changes
    digest TEXT,
    position TEXT,
    rows INTEGER,                -- the digests of all rows of `posts`, combined by exclusive or
    own INTEGER                  -- the digest of the columns before it
);
"""
PUT_ROW = "INSERT OR REPLACE INTO posts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
SAVE_STATE = "INSERT INTO state VALUES (?, ?, ?, ?, ?, ?)"
DURABLE = "PRAGMA journal_mode = DELETE; PRAGMA synchronous = EXTRA"
"""`DELETE` works on network file systems, too. `EXTRA` is `FULL` and syncs the directory when the journal goes: without it a power cut
could bring the journal back, and undo the last change."""

ROLLBACK_JOURNAL = b"\1\1"
"""Bytes 18 and 19 of an SQLite file that uses no write-ahead log (https://sqlite.org/fileformat.html, 1.3.3)."""

NOT_READ = "The corpus has changes on the disk that this process has not read; read the corpus again."
_REASONS = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_READONLY: "the file or its directory is read-only",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened, or its directory takes no other file",
    sqlite3.SQLITE_BUSY: "another program is using the file",
    sqlite3.SQLITE_IOERR: "the disk reports an error",
}
_NO_PLACE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)


class StateRow(NamedTuple):
    """The row of the table `state`, less its own digest."""

    corpus: str
    sequence: int
    digest: str
    position: str
    rows: int

    @property
    def mark(self) -> Mark:
        """The mark of the corpus with these changes."""
        return Mark(self.sequence, self.digest, self.position)


class ChangeLog:
    """The changes of one corpus directory, from `load_changed`. Used by one thread at a time.

    Raises CheckpointError for a file that cannot be read, NotStored while another process uses the directory.
    """

    def __init__(self, stored: StoredCorpus, *, may_change: bool = True, before: ChangeLog | None = None) -> None:
        """`may_change`: this process alone uses the directory until `close`; without, it shares it with others that do not change it.
        `before`: of the same process, which holds the directory already and is closed later."""
        self.mark = stored.manifest.first_mark
        """The mark of the corpus with every change that was read or recorded."""
        self._stored = stored
        self._path = changes_file(stored.path, stored.manifest)
        self._file: os.stat_result | None = None  # that was read or written
        self._database: sqlite3.Connection | None = None
        self._lock: FileIO  # lets go when it is closed, or collected
        self._may_change: bool
        if before is not None and before.is_in(stored.path):
            self._lock, self._may_change = FileIO(os.dup(before._lock.fileno())), before._may_change
        else:
            self._lock, self._may_change = _locked(stored.path, may_change)

    def read(self) -> Change:
        """All changes as one, which makes of the corpus as it was built what it is now."""
        self._file = _status_of(self._path)
        change = read_changes(self._stored.path, self._stored.manifest)
        if not self.is_in(self._stored.path):
            raise NotStored(f"Corpus {self._stored.path} was replaced while it was read; read it again.")
        self.mark = change.mark
        return change

    def is_in(self, directory: Path) -> bool:
        """Whether the corpus of these changes is what lies in this directory now."""
        status = _status_of(directory / MANIFEST_NAME)
        return status is not None and not self._lock.closed and os.path.samestat(status, os.fstat(self._lock.fileno()))

    def record(self, changes: Sequence[Change]) -> None:
        """Write changes in order, and return once they are on the disk. If this raises, the corpus that lies in the directory has none of
        them; one that was replaced meanwhile may have all."""
        if not self._may_change:
            raise StorageFull(
                "This process may not change the corpus: the directory is read-only, or shared with other processes."
            )
        self._check_place()
        try:
            database = self._opened()
            database.execute("BEGIN IMMEDIATE")
            state = _state_of(database, self._stored.manifest)
            if state.mark != self.mark:
                raise NotStored(NOT_READ)
            for change in changes:
                state = self._put(database, state, change)
            database.execute("DELETE FROM state")
            database.execute(SAVE_STATE, (*state, _digest(state)))
            self._check_place()
            self._commit(database, state)
            if not self.is_in(self._stored.path):
                raise NotStored(
                    "The corpus was replaced on the disk while the change was written: only the one that was replaced has it. Make the "
                    "change again."
                )
            self._check_place()
        except BaseException as error:
            self._disconnect()  # which rolls back
            if isinstance(error, (sqlite3.Error, OSError, ValueError, TypeError)):
                raise _not_written(error) from error
            raise
        self.mark = state.mark

    def close(self) -> None:
        """Let another process use the directory."""
        self._disconnect()
        self._lock.close()

    def _commit(self, database: sqlite3.Connection, state: StateRow) -> None:
        """End the transaction. What is on the disk decides whether it failed: SQLite may tell of an error once all is written."""
        try:
            database.execute("COMMIT")
        except sqlite3.Error:
            self._disconnect()  # which rolls back what is not written
            with closing(_connected(self._path, "rw")) as after:
                if _state_of(after, self._stored.manifest) != state:
                    raise
            sync(self._path.parent)

    def _put(self, database: sqlite3.Connection, state: StateRow, change: Change) -> StateRow:
        """Write one change. A deleted post keeps a row only if the corpus as it was built has the post."""
        corpus, rows = self._stored.corpus, state.rows
        built = set(corpus.post_ids[corpus.rows_of(change.delete)].view(np.int64).tolist())
        gone = ((post, (None,) * 6) for post in change.delete.view(np.int64).tolist())
        for place, (post, columns) in enumerate((*gone, *_columns_of(change.posts))):
            row_before = database.execute("SELECT digest FROM posts WHERE post_id = ?", (post,)).fetchone()
            rows ^= row_before[0] if row_before else 0
            if columns[-1] is None and post not in built:
                database.execute("DELETE FROM posts WHERE post_id = ?", (post,))
                continue
            row = (post, change.mark.sequence, place, *columns)
            digest = _digest(row)
            rows ^= digest
            database.execute(PUT_ROW, (*row, digest))
        return StateRow(state.corpus, *change.mark, rows)

    def _opened(self) -> sqlite3.Connection:
        if self._database is None:
            if self._file is None:
                if self._path.exists():
                    raise NotStored(NOT_READ)
                _create(self._path, self._stored.manifest)
                self._file = _status_of(self._path)
            self._database = _connected(self._path, "rw")
        return self._database

    def _disconnect(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()

    def _check_place(self) -> None:
        """Raises NotStored unless whoever reads the corpus next will find what is written here."""
        if not self.is_in(self._stored.path):
            raise NotStored("The corpus was replaced on the disk; read it again.")
        if self._file is not None and not ((status := _status_of(self._path)) and os.path.samestat(status, self._file)):
            raise LogLost(
                "The file of the corpus's changes was removed or replaced under this process, which still has them: put it back, or read "
                "the corpus again to go on without them."
            )


def load_changed(
    path: Path, encoder: Manifest, *, may_change: bool = True, before: ChangeLog | None = None
) -> tuple[StoredCorpus, ChangeLog, Change]:
    """Load a corpus, lock its directory (see `ChangeLog`) and read its changes as one. Raises CheckpointError."""
    stored = load_corpus(path, encoder)
    changes = ChangeLog(stored, may_change=may_change, before=before)
    try:
        return stored, changes, changes.read()
    except BaseException:
        changes.close()
        raise


def read_changes(directory: Path, manifest: CorpusManifest) -> Change:
    """All changes as one, as `ChangeLog.read`, without a lock: also beside the process that makes them. Raises CheckpointError."""
    path = changes_file(directory, manifest)
    if not path.exists():
        return Change(NO_IDS, no_posts(manifest.width), manifest.first_mark)
    try:
        with closing(sqlite3.connect(":memory:")) as copy:
            with closing(_connected(path, "rw" if os.access(path, os.W_OK) else "ro")) as database:
                # a service may be changing the corpus: it waits for a copy, and not until every row is checked
                database.execute("BEGIN")
                database.execute("SELECT 1 FROM sqlite_master").fetchone()  # `backup` itself would wait for ever
                database.backup(copy)
            if copy.execute("PRAGMA quick_check(1)").fetchall() != [("ok",)]:
                raise ValueError("SQLite finds an error in its file")
            state = _state_of(copy, manifest)
            return _change_of(copy, state, manifest)
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in _REASONS:
            raise NotStored(f"Corpus {directory}: {path.name} cannot be read: {_REASONS[code]}.") from error
        raise CheckpointError(
            f"Corpus {directory}: {path.name}, which has its changes, is damaged or in a form that this version does not read. Restore "
            "the file from a copy; or remove it, to go on without these changes."
        ) from error


def mark_after(mark: Mark, change: Change | PostChange) -> Mark:
    """The mark after one more change. Its digest does not cover the vectors, which follow from the ids and the towers."""
    posts: NewPosts | PostRows = change.upsert if isinstance(change, PostChange) else change.posts
    post_ids, author_ids = zip(*posts.texts, strict=True) if posts.texts else (posts.post_ids, posts.author_ids)
    ids = {"delete": change.delete_texts or change.delete, "post_ids": post_ids, "author_ids": author_ids}
    content: dict[str, Any] = {
        name: column.tolist() if isinstance(column, np.ndarray) else list(column) for name, column in ids.items()
    }
    content |= {"created_at": posts.created_at.tolist(), "topics": list(posts.topics)}
    if posts.codes.any():
        content["codes"] = posts.codes.tolist()
    digest = hashlib.blake2b(mark.digest.encode() + json.dumps(content).encode(), digest_size=16).hexdigest()
    return Mark(mark.sequence + 1, digest, mark.position)


def no_posts(width: int) -> NewPosts:
    """Empty posts, for a change that only deletes."""
    return NewPosts(NO_IDS, NO_IDS, np.empty(0, np.int64), [], np.empty((0, width), np.float32))


def _change_of(database: sqlite3.Connection, state: StateRow, manifest: CorpusManifest) -> Change:
    """Every row of the table as one change. Raises ValueError for rows that are not what was written."""
    gone, new, vectors, combined = list[int](), list[list[Any]](), bytearray(), 0
    codes: list[list[int]] = []
    for *row, digest in database.execute("SELECT * FROM posts ORDER BY sequence, place"):
        if _digest(row) != digest:
            raise ValueError("a row is not what was written")
        combined ^= digest
        if row[-1] is None:
            gone.append(row[0])
        else:
            blob = row.pop()
            vectors += blob[: 4 * manifest.width]
            codes.append(np.frombuffer(blob[4 * manifest.width :], np.int32).tolist())
            new.append(row)
    if combined != state.rows:
        raise ValueError("some rows are missing, or too many")
    posts = NewPosts(
        np.array([row[0] for row in new], np.int64).view(np.uint64),
        np.array([row[3] for row in new], np.int64).view(np.uint64),
        np.array([row[4] for row in new], np.int64),
        [row[5] for row in new],
        np.frombuffer(vectors, np.float32).reshape(len(new), manifest.width),
        [(row[6], row[7]) for row in new] if manifest.ids == "text" else [],
        rows_of_codes(codes),
    )
    return Change(np.array(gone, np.int64).view(np.uint64), posts, state.mark)


def _columns_of(posts: NewPosts) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """The id of each post, and its columns from `author_id` to `vector`."""
    texts: Sequence[tuple[str | None, str | None]] = posts.texts or [(None, None)] * len(posts)
    ids, authors = (column.view(np.int64).tolist() for column in (posts.post_ids, posts.author_ids))
    columns = zip(
        ids, authors, posts.created_at.tolist(), posts.topics, texts, posts.vectors.astype(np.float32), strict=True
    )
    codes = posts.codes.astype(np.int32) if posts.codes.any() else np.zeros((len(posts), 0), np.int32)
    for (post, author, created, topic, (post_text, author_text), vector), own in zip(columns, codes, strict=True):
        blob = vector.tobytes() + (own.tobytes() if own.any() else b"")
        yield post, (author, created, topic, post_text, author_text, blob)


def _state_of(database: sqlite3.Connection, manifest: CorpusManifest) -> StateRow:
    """Raises ValueError for a state that is not what was written, or of another corpus."""
    (form,) = database.execute("PRAGMA user_version").fetchone()
    ((*columns, own),) = database.execute("SELECT * FROM state").fetchall()
    state = StateRow(*columns)
    if form != FORM or own != _digest(state) or state.corpus != manifest.digest:
        raise ValueError("the state is not what was written")
    return state


def _create(path: Path, manifest: CorpusManifest) -> None:
    """Make the file with empty tables in one step: one that a crash left empty would look like one that lost its changes."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    try:
        with closing(_connected(new, "rwc")) as database:
            state = StateRow(manifest.digest, *manifest.first_mark, 0)
            database.executescript(f"{TABLES} PRAGMA user_version = {FORM}")
            database.execute(SAVE_STATE, (*state, _digest(state)))
        Path(f"{path}-journal").unlink(missing_ok=True)  # of a file that somebody removed
        new.rename(path)
        sync(path.parent)
    finally:
        new.unlink(missing_ok=True)


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    _set_foreign_log_aside(path)
    database = sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        uri=True,
    )
    if mode != "ro":
        database.executescript(DURABLE)
    return database


def _set_foreign_log_aside(path: Path) -> None:
    """Rename a write-ahead log that lies beside the file and is not its own: SQLite would apply its pages to the file. Raises NotStored.

    A file whose header names the rollback journal has no such log: SQLite removes the log before it writes that header. So the log is
    looked for first, and the header read after it.
    """
    log = path.with_name(f"{path.name}-wal")
    if not log.exists():
        return
    try:
        with path.open("rb") as file:
            is_foreign = file.read(20)[18:] == ROLLBACK_JOURNAL
        if is_foreign:
            log.rename(path.with_name(f"{path.name}-foreign-wal"))
    except OSError as error:
        raise NotStored(f"{log} belongs to another database and cannot be renamed: remove it.") from error


def _digest(values: Sequence[Any]) -> int:
    """BLAKE2b of a row's values and their types, as a signed 64-bit integer."""
    digest = hashlib.blake2b(msgspec.msgpack.encode(values), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _status_of(path: Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def _locked(directory: Path, may_change: bool) -> tuple[FileIO, bool]:
    """The manifest of a directory, locked, and whether this process may change what lies there."""
    path = directory / MANIFEST_NAME
    try:
        try:
            lock = FileIO(path, "r+" if may_change else "r")
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            lock, may_change = FileIO(path), False
        fcntl.flock(lock, fcntl.LOCK_NB | (fcntl.LOCK_EX if may_change else fcntl.LOCK_SH))
    except BlockingIOError as error:
        lock.close()
        raise NotStored(
            f"Corpus {directory} is in use by another process, and only one that alone uses a directory may change it: give each process "
            "a directory of its own."
        ) from error
    except OSError as error:
        raise CheckpointError(f"Corpus {directory} cannot be locked: {error.strerror}.") from error
    return lock, may_change


def _not_written(error: Exception) -> CheckpointError:
    """A refusal that repeats nothing of what SQLite says."""
    if isinstance(error, OSError):
        kind, reason = kind_of(error), error.strerror or "the disk reports an error"
    else:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        kind = StorageFull if code in _NO_PLACE else NotStored
        reason = _REASONS.get(code, "the file of its changes is damaged")
    return kind(f"The corpus's changes cannot be written: {reason}.")
