"""The columnar log of impressions that training reads: Parquet, one row an impression, documented in docs/training.md."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from numpy.typing import NDArray

ACTION_PREFIX = "action."
COLUMNS = {
    "request_id": pa.uint64(),
    "impression_ts": pa.int64(),
    "user_id": pa.uint64(),
    "post_id": pa.uint64(),
    "author_id": pa.uint64(),
    "product_surface": pa.int64(),
    "created_at": pa.int64(),
    "dwell_seconds": pa.float32(),
}


class LogError(ValueError):
    """A log that cannot be used; the message names the file and the column."""


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """Where the requests of a log are, in time order, each array `[R]`. Request i begins at row `starts[i]`, of `users[i]` at `times[i]`,
    and has the history `events[first[i] : last[i]]`; `events` are the rows with an action, by user, then time.

    `surfaces` is one more than the largest `product_surface`; `fingerprint` has a checksum of each column.
    """

    starts: NDArray[np.int64]
    times: NDArray[np.int64]
    users: NDArray[np.uint64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    events: Log
    surfaces: int
    fingerprint: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """Impressions in time order, all columns of length n.

    `request_id` uint64: impressions shown together share it. `impression_ts`, `created_at`: Unix seconds, 0 unknown.
    `user_id`, `post_id`, `author_id` uint64. `product_surface` int64. `dwell_seconds` float32, 0 unknown.
    `actions` bool `[n, A]` with names `action_names`.
    """

    request_id: NDArray[np.uint64]
    impression_ts: NDArray[np.int64]
    user_id: NDArray[np.uint64]
    post_id: NDArray[np.uint64]
    author_id: NDArray[np.uint64]
    product_surface: NDArray[np.int64]
    created_at: NDArray[np.int64]
    dwell_seconds: NDArray[np.float32]
    actions: NDArray[np.bool_]
    action_names: tuple[str, ...]
    index: Index | None = None  # of a log on disk; one in memory has none yet

    def __len__(self) -> int:
        return len(self.request_id)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Log:
        """The given rows, in the given order."""
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        return Log(**columns, actions=self.actions[rows], action_names=self.action_names)


def fingerprint(log: Log) -> dict[str, int]:
    """A checksum of each column, and of the actions: equal logs have equal ones."""
    return {name: zlib.crc32(np.ascontiguousarray(getattr(log, name)).data) for name in (*COLUMNS, "actions")}


def write_log(path: Path, log: Log) -> None:
    """Write Parquet; equal logs make equal bytes with one version of pyarrow."""
    arrays = {name: pa.array(getattr(log, name), kind) for name, kind in COLUMNS.items()}
    for index, name in enumerate(log.action_names):
        arrays[ACTION_PREFIX + name] = pa.array(log.actions[:, index])
    pq.write_table(pa.table(arrays), path, compression="zstd")


def read_log(path: Path) -> Log:
    """Read and check a log, sorted by time, then request. Raises LogError for a missing or unusable column."""
    try:
        return log_of(pq.read_table(path), str(path))
    except (OSError, pa.ArrowException) as error:
        raise LogError(f"{path} cannot be read as Parquet: {error}") from error


def open_log(path: Path) -> ds.FileSystemDataset:
    """A Parquet file, or a directory of such, to be read in pieces. Raises LogError."""
    try:
        source = ds.dataset(path, format="parquet")
    except (OSError, pa.ArrowException) as error:
        raise LogError(f"{path} cannot be read as Parquet: {error}") from error
    if not source.files:
        raise LogError(f"{path} holds no Parquet files")
    return source


def tables_of(source: ds.FileSystemDataset, rows: int, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """A log in pieces of about so many rows; all columns where None."""
    batches: list[pa.RecordBatch] = []
    for batch in source.to_batches(columns=columns, batch_readahead=2, fragment_readahead=1):
        batches.append(batch)
        if sum(map(len, batches)) >= rows:
            yield pa.Table.from_batches(batches)
            batches = []
    if batches:
        yield pa.Table.from_batches(batches)


def log_of(table: pa.Table, where: str) -> Log:
    """As `read_log`, from a table; `where` is what its sentences call it."""
    log = unsorted(table, where)
    if not len(log):
        raise LogError(f"{where} holds no impressions")
    log = log.take(np.lexsort((log.request_id, log.impression_ts)))
    check_requests(log, where)
    return log


def unsorted(table: pa.Table, where: str) -> Log:
    """The rows of a table as they come, checked one by one."""
    actions = action_names(table.schema, where)
    columns: dict[str, Any] = {name: _column(table, name, kind, where) for name, kind in COLUMNS.items()}
    flags = [_column(table, ACTION_PREFIX + name, pa.bool_(), where) for name in actions]
    log = Log(**columns, actions=np.stack(flags, 1), action_names=actions)
    _check(log, where)
    return log


def action_names(schema: pa.Schema, where: str) -> tuple[str, ...]:
    """The actions of a log with these columns. Raises LogError for one without any, or with columns that no log has."""
    actions = tuple(name.removeprefix(ACTION_PREFIX) for name in schema.names if name.startswith(ACTION_PREFIX))
    if not actions:
        raise LogError(f"{where} has no column {ACTION_PREFIX}…: one boolean column an action is needed")
    unknown = set(schema.names) - set(COLUMNS) - {ACTION_PREFIX + name for name in actions}
    if unknown:
        raise LogError(f"{where} has unknown columns: {', '.join(sorted(unknown))}")
    return actions


def aligned(log: Log, names: tuple[str, ...]) -> Log:
    """A log with its actions in the checkpoint's order. Raises LogError where it lacks one, or lies sorted on disk in another order."""
    if names == log.action_names:
        return log
    if missing := set(names) - set(log.action_names):
        raise LogError(f"the log lacks actions of the checkpoint: {', '.join(sorted(missing))}")
    if log.index:
        raise LogError(f"the sorted log has its actions in another order than the checkpoint: {', '.join(names)}")
    order = [log.action_names.index(name) for name in names]
    return replace(log, actions=log.actions[:, order], action_names=names)


def _column(table: pa.Table, name: str, kind: pa.DataType, where: str) -> NDArray[Any]:
    if name not in table.column_names:
        raise LogError(f"{where} lacks the column {name} ({kind})")
    column = table.column(name)
    if column.null_count:
        raise LogError(f"{where}: column {name} has {column.null_count} nulls; write 0 (or false) for unknown")
    try:
        values: NDArray[Any] = column.cast(kind).to_numpy()
    except pa.ArrowInvalid as error:
        raise LogError(f"{where}: column {name} does not fit {kind}: {error}") from error
    return values


def _check(log: Log, where: str) -> None:
    for name in ("user_id", "post_id", "author_id"):
        if (getattr(log, name) == 0).any():
            raise LogError(f"{where}: column {name} holds the id 0, which means padding")
    if not np.isfinite(log.dwell_seconds).all() or (log.dwell_seconds < 0).any():
        raise LogError(f"{where}: column dwell_seconds must be finite and not negative")
    if (log.product_surface < 0).any():
        raise LogError(f"{where}: column product_surface must not be negative")


def check_requests(log: Log, where: str) -> None:
    """Raises LogError where impressions of one request differ in what they must share. The log is sorted and holds some."""
    request, user, time = log.request_id, log.user_id, log.impression_ts  # by time: those of one request lie together
    begins = request[1:] != request[:-1]
    differs = ~begins & ((user[1:] != user[:-1]) | (time[1:] != time[:-1]))
    if differs.any() or len(np.unique(request[1:][begins])) < begins.sum() or (request[1:][begins] == request[0]).any():
        raise LogError(f"{where}: impressions of one request_id differ in user_id or impression_ts")
