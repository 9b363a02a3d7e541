"""Reads and writes the columnar log of impressions for training: one row per impression, documented in docs/training.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from numpy.typing import NDArray

from model.bounds import LARGEST
from model.inputs import NO_CODES
from weights.tables import (
    CHECKS,
    ID_TYPES,
    Check,
    LogError,
    check_values,
    column_of,
    hashed,
    open_table,
    place_of,
    rows_of_lists,
    texts_of,
)
from weights.text_ids import IdKind
from weights.values import action_name_problem, problem_of_codes, problem_of_surfaces

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
CODES = "codes"
"""An optional column: a list of content codes for each impression."""
ID_COLUMNS = ("user_id", "post_id", "author_id")
MAX_IMPRESSIONS = 25_000_000
"""The largest log that is read whole, into about 9 GB of memory with nineteen actions."""


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """Impressions in time order, all columns of length n.

    `request_id` uint64: impressions shown together share it. `impression_ts`, `created_at`: Unix seconds, 0 unknown.
    `user_id`, `post_id`, `author_id` uint64. `product_surface` int64. `dwell_seconds` float32, 0 unknown.
    `actions` bool `[n, A]` with names `action_names`. `texts`: the texts of the three id columns if ids are texts; else empty. `codes`: the
    content codes of the posts, int64 `[n, q]`, 0 for none; `[n, 0]` if the log has none.
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
    texts: Mapping[str, pa.DictionaryArray] = field(default_factory=dict)
    codes: NDArray[np.int64] = field(default_factory=lambda: NO_CODES)

    def __post_init__(self) -> None:
        if self.codes is NO_CODES:
            object.__setattr__(self, "codes", np.zeros((len(self.request_id), 0), np.int64))

    def __len__(self) -> int:
        return len(self.request_id)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Log:
        """The given rows, in the given order."""
        columns = {name: getattr(self, name)[rows] for name in COLUMNS}
        texts = {name: column.take(pa.array(np.arange(len(self))[rows])) for name, column in self.texts.items()}
        names, codes = self.action_names, self.codes[rows]
        return Log(**columns, actions=self.actions[rows], action_names=names, texts=texts, codes=codes)

    def before(self, until_ts: int) -> Log:
        """The impressions shown before this time, Unix seconds."""
        return self.take(self.impression_ts < until_ts)

    def ids(self, name: str, rows: NDArray[np.int64]) -> list[str]:
        """The ids of one column as callers write them: texts or decimals."""
        if self.texts:
            return list(map(str, self.texts[name].take(pa.array(rows)).to_pylist()))
        return list(map(str, getattr(self, name)[rows].tolist()))

    @property
    def span(self) -> str:
        """The first and the last time as `1997-09-20 … 1998-04-22`, with Unix seconds where one day holds both."""
        first, last = int(self.impression_ts[0]), int(self.impression_ts[-1])
        days = date_of(first), date_of(last)
        return f"{days[0]} … {days[1]}" if days[0] != days[1] else f"{days[0]}, Unix seconds {first} … {last}"


def date_of(unix_seconds: int) -> str:
    """The day of a time, in UTC, as `1998-04-22`."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d")


def write_log(path: Path, log: Log) -> None:
    """Write Parquet; with one version of pyarrow, equal logs give equal bytes."""
    arrays = {name: pa.array(getattr(log, name), kind) for name, kind in COLUMNS.items()} | dict(log.texts)
    if log.codes.shape[1]:
        arrays[CODES] = pa.array(log.codes.tolist(), pa.list_(pa.int32()))
    for index, name in enumerate(log.action_names):
        arrays[ACTION_PREFIX + name] = pa.array(log.actions[:, index])
    pq.write_table(pa.table(arrays), path, compression="zstd")


def read_log(path: Path, ids: IdKind = "uint64", surfaces: int = LARGEST["product_surfaces"]) -> Log:
    """Read and check a log, sorted by time, then request. `surfaces`: how many product surfaces the model knows.

    Raises LogError for a missing or unusable column, and for a log of more than MAX_IMPRESSIONS or too large for this machine's memory.
    """
    source = open_log(path, ids)
    rows = source.count_rows()
    if rows > MAX_IMPRESSIONS:
        raise LogError(
            f"{path} holds {rows:,} impressions, but at most {MAX_IMPRESSIONS:,} are read: keep the newest days"
        )
    try:
        return log_of(source.to_table(), str(path), ids, surfaces, partial(place_of, source))
    except MemoryError as error:
        raise LogError(
            f"{path} holds {rows:,} impressions, too many for this machine's memory: keep the newest days"
        ) from error
    except (OSError, pa.ArrowException) as error:
        raise LogError(f"{path} cannot be read: {error}") from error


def open_log(path: Path, ids: IdKind = "uint64") -> ds.FileSystemDataset:
    """Open a Parquet file, a JSON lines file, or a directory of either, for reading in pieces. Raises LogError."""
    return open_table(path, COLUMNS | dict.fromkeys(ID_COLUMNS, ID_TYPES[ids]))


def log_of(
    table: pa.Table,
    where: str,
    ids: IdKind = "uint64",
    surfaces: int = LARGEST["product_surfaces"],
    place: Callable[[int], str] | None = None,
) -> Log:
    """Check the columns of a table and sort its rows by time, then request.

    Raises LogError, which names the table `where`, and a row as `place` names it.
    """
    actions = action_names(table.schema, where)
    texts = {name: texts_of(table, name, where) for name in ID_COLUMNS} if ids == "text" else {}
    columns: dict[str, Any] = {
        name: hashed(texts[name]) if name in texts else column_of(table, name, kind, where)
        for name, kind in COLUMNS.items()
    }
    if not len(table):
        raise LogError(f"{where} holds no impressions: it needs one row for each post that was shown to a user")
    flags = [column_of(table, ACTION_PREFIX + name, pa.bool_(), where) for name in actions]
    codes = rows_of_lists(table, CODES, where) if CODES in table.schema.names else NO_CODES
    log = Log(**columns, actions=np.stack(flags, 1), action_names=actions, texts=texts, codes=codes)
    place = place or (lambda row: f"{where}, row {row + 1}")
    check_values(columns, place, log_checks(surfaces))
    check_values({CODES: codes}, place, {CODES: problem_of_codes})
    log = log.take(np.lexsort((log.request_id, log.impression_ts)))
    _check_requests(log, where)
    return log


def log_checks(surfaces: int) -> dict[str, Check]:
    """How the values of a log's columns are checked, by name, for a model that knows so many product surfaces."""
    return CHECKS | {"product_surface": partial(problem_of_surfaces, surfaces=surfaces)}


def action_names(schema: pa.Schema, where: str) -> tuple[str, ...]:
    """The actions of a log with these columns. Raises LogError if there are none, for a name that no checkpoint may have, and for
    unknown columns."""
    actions = tuple(name.removeprefix(ACTION_PREFIX) for name in schema.names if name.startswith(ACTION_PREFIX))
    if not actions:
        raise LogError(f"{where} has no column {ACTION_PREFIX}…: it needs one boolean column for each action")
    for name in actions:
        if problem := action_name_problem(name):
            raise LogError(f"{where}: the action name {name[:64]!r} {problem}")
    unknown = set(schema.names) - {*COLUMNS, CODES} - {ACTION_PREFIX + name for name in actions}
    if unknown:
        raise LogError(f"{where} has unknown columns: {', '.join(sorted(unknown))}")
    return actions


def aligned(log: Log, names: tuple[str, ...]) -> Log:
    """A log with its actions in the checkpoint's order. Raises LogError if it lacks one."""
    if names == log.action_names:
        return log
    if missing := set(names) - set(log.action_names):
        raise LogError(f"the log lacks actions of the checkpoint: {', '.join(sorted(missing))}")
    order = [log.action_names.index(name) for name in names]
    return replace(log, actions=log.actions[:, order], action_names=names)


def _check_requests(log: Log, where: str) -> None:
    """Raises LogError if impressions of one request differ in user or time. The log must be sorted and not empty."""
    request, user, time = log.request_id, log.user_id, log.impression_ts  # by time: a request's rows are adjacent
    begins = request[1:] != request[:-1]
    differs = ~begins & ((user[1:] != user[:-1]) | (time[1:] != time[:-1]))
    if differs.any() or len(np.unique(request[1:][begins])) < begins.sum() or (request[1:][begins] == request[0]).any():
        raise LogError(f"{where}: impressions of one request_id differ in user_id or impression_ts")
