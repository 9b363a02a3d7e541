"""Reads and writes the columnar log of impressions for training: one row per impression, documented in docs/training.md.

A log of at most IN_MEMORY_ROWS impressions is read into memory. A larger one is sorted on disk by `mapped`, and its columns are mapped.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from model.bounds import LARGEST
from model.inputs import NO_CODES
from weights.lab.training.contexts import ACTION_PREFIX, ServedContexts, open_contexts, read_contexts
from weights.lab.training.texts import Texts
from weights.progress import Update
from weights.table_files import Table, has_directory, open_table, place_of
from weights.tables import (
    CHECKS,
    CODES,
    ID_TYPES,
    Check,
    Place,
    TableError,
    check_values,
    column_of,
    flags_of,
    hashed,
    rows_of_lists,
    texts_of,
)
from weights.text_ids import IdKind
from weights.turns import IMPRESSIONS
from weights.values import (
    action_name_problem,
    problem_of_codes,
    problem_of_positions,
    problem_of_propensities,
    problem_of_surfaces,
    problem_of_weights,
)

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
OPTIONAL_COLUMNS = {
    "position": pa.int64(),
    "propensity": pa.float64(),
    "weight": pa.float32(),
    "context_id": pa.uint64(),
}
"""Columns that a log may have: fields of `Log` of the same names, None where the log has none."""
OPTIONAL_CHECKS: dict[str, Check] = {
    "position": problem_of_positions,
    "propensity": problem_of_propensities,
    "weight": problem_of_weights,
}
NO_IMPRESSIONS = "{} holds no impressions: it needs one row for each post that was shown to a user"
ID_COLUMNS = ("user_id", "post_id", "author_id")
IN_MEMORY_ROWS = 5_000_000
"""The largest log that is read into memory, about 2 GB with nineteen actions."""
IDS_KEY, HASHES = b"phoenix_ranker.ids", b"hashes of texts"
"""In the metadata of a log's Parquet files: its ids are the hashes of texts, as a checkpoint with ids that are texts reads them."""


class HashesError(TableError):
    """A log holds the hashes of texts, and its ids are to be integers."""


@dataclass(frozen=True, slots=True, eq=False)
class Log:
    """Impressions in time order, all columns of length n. The arrays may be mapped from disk: do not write to them.

    `request_id` uint64: impressions shown together share it. `impression_ts`, `created_at`: Unix seconds, 0 unknown.
    `user_id`, `post_id`, `author_id` uint64; a user of 0 is nobody, an author of 0 is unknown. `product_surface` int64.
    `dwell_seconds` float32, 0 unknown.
    `actions` bool `[n, A]` with names `action_names`. `unknown` bool `[n, A]`: where nobody knows whether the action was taken, and
    `actions` is False; None: all are known. `texts`: of the ids, if they are texts.

    None, or: `position` int64, 1 is the first place, 0 unknown. `propensity` float64, how probable it was that the post got its place,
    0 unknown. `weight` float32, how often the row counts in training. `context_id` uint64: the context that the model read for the
    row's request, in `contexts`; 0 where the log has none and the history is reconstructed from its rows.

    `codes`: the content codes of the posts, int64 `[n, q]`, 0 for none; `[n, 0]` if the log has none.
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
    texts: Texts | None = None
    unknown: NDArray[np.bool_] | None = None
    position: NDArray[np.int64] | None = None
    propensity: NDArray[np.float64] | None = None
    weight: NDArray[np.float32] | None = None
    context_id: NDArray[np.uint64] | None = None
    contexts: ServedContexts | None = None
    codes: NDArray[np.int64] = field(default_factory=lambda: NO_CODES)

    def __post_init__(self) -> None:
        if self.codes is NO_CODES:
            object.__setattr__(self, "codes", np.zeros((len(self.request_id), 0), np.int64))

    def __len__(self) -> int:
        return len(self.request_id)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Log:
        """These rows, in this order; with a slice, as views."""
        columns = {name: getattr(self, name)[rows] for name in (*COLUMNS, "actions", CODES)}
        optional = {name: getattr(self, name) for name in (*OPTIONAL_COLUMNS, "unknown")}
        columns |= {name: values[rows] for name, values in optional.items() if values is not None}
        return replace(self, **columns)

    def before(self, until_ts: int | None) -> Log:
        """The impressions shown before this time, Unix seconds; None: all."""
        return self if until_ts is None else self.take(slice(0, int(np.searchsorted(self.impression_ts, until_ts))))

    def since(self, from_ts: int) -> Log:
        """The impressions shown at this time, Unix seconds, or later."""
        return self.take(slice(int(np.searchsorted(self.impression_ts, from_ts)), len(self)))

    def known_rows(self, action: int) -> NDArray[np.bool_]:
        """The rows of which it is known whether the action, by its place, was taken, bool `[n]`."""
        return np.ones(len(self), bool) if self.unknown is None else ~self.unknown[:, action]

    @property
    def known_actions(self) -> NDArray[np.bool_]:
        """The actions of which it is known for some row whether they were taken, `[A]`."""
        return np.ones(len(self.action_names), bool) if self.unknown is None else np.asarray(~self.unknown.all(0))

    @property
    def counted_requests(self) -> NDArray[np.bool_]:
        """The requests that say something to training: a row of theirs counts, and of it some action is known, bool `[R]`."""
        if self.unknown is None and self.weight is None:
            return np.ones(self.requests, bool)
        counted = np.ones(len(self), bool)
        if self.unknown is not None:
            counted &= ~self.unknown.all(1)
        if self.weight is not None:
            counted &= self.weight > 0
        return np.asarray(np.logical_or.reduceat(counted, self.request_starts))

    @property
    def taught_actions(self) -> NDArray[np.bool_]:
        """The actions that training on these rows teaches: known of some row that counts, bool `[A]`."""
        if self.weight is None:
            return self.known_actions
        counts = self.weight > 0
        return np.array([bool((counts & self.known_rows(action)).any()) for action in range(len(self.action_names))])

    @property
    def shares(self) -> NDArray[np.float64]:
        """How often each action was taken, of the rows where that is known, float64 `[A]`; 0 where it is known of none."""
        if self.unknown is None:
            return np.asarray(self.actions.mean(0))
        return np.asarray(self.actions.sum(0) / np.maximum(len(self) - self.unknown.sum(0), 1))

    @property
    def people(self) -> NDArray[np.int64]:
        """Who is who, numbers from 0, int64 `[n]`: one for each user, and of nobody one for each request, since each may be of somebody
        else."""
        nobody = self.user_id == 0
        ids = np.unique(np.where(nobody, self.request_id, self.user_id), return_inverse=True)[1]
        return np.unique(2 * ids + nobody, return_inverse=True)[1]  # a user may have the number of a request

    @property
    def request_starts(self) -> NDArray[np.int64]:
        """The first row of each request, int64 `[R]`; the rows of one are adjacent."""
        return np.flatnonzero(np.append(True, self.request_id[1:] != self.request_id[:-1])[: len(self)])

    @property
    def requests(self) -> int:
        """The number of requests."""
        return len(self.request_starts)

    def ids(self, name: str, rows: NDArray[np.int64]) -> list[str]:
        """The ids of one column as callers write them: texts or decimals."""
        return self.written(getattr(self, name)[rows])

    def written(self, ids: NDArray[np.uint64]) -> list[str]:
        """These ids, which the log holds, as callers write them: texts or decimals."""
        return self.texts.of(ids).to_pylist() if self.texts else list(map(str, ids.tolist()))

    @property
    def span(self) -> str:
        """The first and the last time as `1997-09-20 … 1998-04-22`, with Unix seconds where one day holds both."""
        first, last = int(self.impression_ts[0]), int(self.impression_ts[-1])
        days = date_of(first), date_of(last)
        return f"{days[0]} … {days[1]}" if days[0] != days[1] else f"{days[0]}, Unix seconds {first} … {last}"


def distinct(ids: NDArray[np.uint64]) -> pa.UInt64Array:
    """These ids without repetitions, in no order. Hashing takes a tenth of the time that numpy takes to sort."""
    return pa.array(ids).unique()


def date_of(unix_seconds: int) -> str:
    """The day of a time, in UTC, as `1998-04-22`."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d")


def time_words(unix_seconds: int) -> str:
    """A time as `1998-04-22 (Unix seconds 893286638)`."""
    return f"{date_of(unix_seconds)} (Unix seconds {unix_seconds})"


def write_log(path: Path, log: Log) -> None:
    """Write the impressions as Parquet; with one version of pyarrow, equal logs give equal bytes. Contexts as served are not written."""
    arrays = {name: pa.array(getattr(log, name), kind) for name, kind in COLUMNS.items()}
    if log.texts:
        arrays |= {name: log.texts.of(getattr(log, name)) for name in ID_COLUMNS}
    for name, kind in OPTIONAL_COLUMNS.items():
        if getattr(log, name) is not None:
            arrays[name] = pa.array(getattr(log, name), kind)
    if log.codes.shape[1]:
        arrays[CODES] = pa.array(log.codes.tolist(), pa.list_(pa.int32()))
    for index, name in enumerate(log.action_names):
        mask = None if log.unknown is None else log.unknown[:, index]
        arrays[ACTION_PREFIX + name] = pa.array(log.actions[:, index], mask=mask)
    pq.write_table(pa.table(arrays), path, compression="zstd")


def read_log(
    path: Path | str,
    ids: IdKind = "uint64",
    surfaces: int = LARGEST["product_surfaces"],
    cache: Path | None = None,
    progress: Update = lambda what, done, total: None,
) -> Log:
    """Read and check a log, sorted by time, then request. `surfaces`: how many product surfaces the model knows.

    `path`: a file, a directory, or an fsspec address. A directory with the directories `impressions` and `contexts` also has contexts as
    served. `cache`: a directory that keeps the log, sorted, for the next time. Without it, a log of more than IN_MEMORY_ROWS is kept in
    `mapped.default_cache()`, and a smaller one is read into memory.

    Raises TableError, which names the file and the row, for a log that cannot be used; HashesError as `open_log`.
    """
    source = open_log(path, ids)
    contexts = open_contexts(path)
    try:
        rows = source.count_rows()
        if cache is None and rows <= IN_MEMORY_ROWS:
            log = log_of(source.to_table(), str(path), ids, surfaces, partial(place_of, source))
            served = read_contexts(contexts, log.action_names) if contexts else None
        else:
            from weights.lab.training.mapped import mapped_log  # DuckDB is needed for large logs alone

            log, served = mapped_log(source, contexts, str(path), ids, surfaces, cache, progress)
    except MemoryError as error:
        raise TableError(f"{path} does not fit into this machine's memory: give --cache, a directory for it") from error
    except (OSError, pa.ArrowException) as error:
        raise TableError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if served is None:
        return log
    if log.context_id is None:
        raise TableError(f"{path} has contexts, but its impressions lack the column context_id, which names them")
    served.check(log.context_id, log.request_id, str(path))
    return replace(log, contexts=served)


def open_log(path: Path | str, ids: IdKind = "uint64") -> Table:
    """Open the impressions of a log for reading in pieces. Raises TableError; HashesError for hashes of texts where `ids` are integers."""
    inner = f"{str(path).rstrip('/')}/{IMPRESSIONS}"
    kinds = COLUMNS | OPTIONAL_COLUMNS | dict.fromkeys(ID_COLUMNS, ID_TYPES[ids])
    source = open_table(inner if has_directory(path, IMPRESSIONS) else path, kinds, in_every_row=True)
    kind_of(source.schema, str(path), ids)
    return source


def log_of(
    table: pa.Table,
    where: str,
    ids: IdKind = "uint64",
    surfaces: int = LARGEST["product_surfaces"],
    place: Place | None = None,
) -> Log:
    """Check the columns of a table and sort its rows by time, then request.

    Raises TableError, which names the table `where`, and a row as `place` names it.
    """
    names = action_names(table.schema, where)
    if not len(table):
        raise TableError(NO_IMPRESSIONS.format(where))
    place = place or (lambda row: f"{where}, row {row + 1}")
    columns, texts = checked_columns(table, where, ids, surfaces, place)
    unknown = columns.pop("unknown")
    order = np.lexsort((columns["request_id"], columns["impression_ts"]))
    log = Log(**columns, action_names=names, texts=texts, unknown=unknown if unknown.any() else None).take(order)
    check_requests(log, lambda row: place(int(order[row])))
    return log


def checked_columns(
    table: pa.Table, where: str, ids: IdKind, surfaces: int, place: Place, code_levels: int = 0
) -> tuple[dict[str, Any], Texts | None]:
    """The columns of some rows of a log by the names of the fields of `Log`, in the table's order, and the texts of their ids.
    `code_levels`: how many levels the content codes have at least.

    Raises TableError.
    """
    names = action_names(table.schema, where)
    ids = kind_of(table.schema, where, ids)
    if "user_id" in table.column_names:
        table = _with_nobody(table, ids)
    optional = {name: kind for name, kind in OPTIONAL_COLUMNS.items() if name in table.column_names}
    coded = {name: texts_of(table, name, place) for name in ID_COLUMNS} if ids == "text" else {}
    columns: dict[str, Any] = {
        name: hashed(coded[name]) if name in coded else column_of(table, name, kind, place)
        for name, kind in (COLUMNS | optional).items()
    }
    if ids == "text":
        columns["user_id"] = np.where(columns["user_id"] == NOBODY_ID, np.uint64(0), columns["user_id"])
    flags = [flags_of(table, ACTION_PREFIX + name, place) for name in names]
    columns["actions"], columns["unknown"] = (np.stack([pair[side] for pair in flags], 1) for side in (0, 1))
    columns[CODES] = NO_CODES
    if CODES in table.column_names:
        columns[CODES] = rows_of_lists(table, place, code_levels)
    check_values(columns, place, log_checks(surfaces))
    return columns, Texts.of_columns(coded.values(), where) if coded else None


NOBODY = "\N{NULL}nobody"
NOBODY_ID = hashed(pa.array([NOBODY]).dictionary_encode())[0]
"""What stands for the user of an impression of nobody in a column of texts while it is read."""


def _with_nobody(table: pa.Table, ids: IdKind) -> pa.Table:
    """The table with impressions of nobody, whose user is null or an empty text, under one id that is no user's."""
    column = table.column("user_id")
    if pa.types.is_null(column.type):
        column = column.cast(ID_TYPES[ids])
    if ids == "text" and pa.types.is_string(column.type):
        column = pc.if_else(pc.equal(column.fill_null(""), ""), NOBODY, column)
    elif column.null_count and (pa.types.is_integer(column.type) or pa.types.is_decimal(column.type)):
        column = column.fill_null(0)
    else:
        return table
    return table.set_column(table.column_names.index("user_id"), "user_id", column)


def kind_of(schema: pa.Schema, where: str, ids: IdKind) -> IdKind:
    """The kind of the ids in a log's columns, for a checkpoint with ids of this kind: a log may hold the hashes of texts.

    Raises HashesError, which names the log `where`, if it does and the ids are to be integers.
    """
    if (schema.metadata or {}).get(IDS_KEY) != HASHES:
        return ids
    if ids != "text":
        raise HashesError(
            f"{where} holds the hashes of texts, as `join --ids text` writes them: give --ids text, or a checkpoint whose ids are texts"
        )
    return "uint64"


def log_checks(surfaces: int) -> dict[str, Check]:
    """How the values of a log's columns are checked, by name, for a model that knows so many product surfaces."""
    checks = CHECKS | OPTIONAL_CHECKS | {CODES: problem_of_codes}
    checks["product_surface"] = partial(problem_of_surfaces, surfaces=surfaces)
    may_be_unknown = ("user_id", "author_id")  # 0 is nobody, and an unknown author
    return {name: check for name, check in checks.items() if name not in may_be_unknown}


def action_names(schema: pa.Schema, where: str) -> tuple[str, ...]:
    """The actions of a log with these columns. Raises TableError if there are none, for a name that no checkpoint may have, and for
    unknown columns."""
    actions = tuple(name.removeprefix(ACTION_PREFIX) for name in schema.names if name.startswith(ACTION_PREFIX))
    if not actions:
        raise TableError(f"{where} has no column {ACTION_PREFIX}…: it needs one boolean column for each action")
    for name in actions:
        if problem := action_name_problem(name):
            raise TableError(f"{where}: the action name {name[:64]!r} {problem}")
    unknown = set(schema.names) - {*COLUMNS, *OPTIONAL_COLUMNS, CODES} - {ACTION_PREFIX + name for name in actions}
    if unknown:
        raise TableError(f"{where} has unknown columns: {', '.join(sorted(unknown))}")
    return actions


def aligned(log: Log, names: tuple[str, ...]) -> Log:
    """A log with its actions in the checkpoint's order. Raises TableError if it lacks one."""
    if names == log.action_names:
        return log
    if missing := set(names) - set(log.action_names):
        raise TableError(f"the log lacks actions of the checkpoint: {', '.join(sorted(missing))}")
    order = [log.action_names.index(name) for name in names]
    unknown = None if log.unknown is None else log.unknown[:, order]
    contexts = None if log.contexts is None else log.contexts.with_actions(order)
    return replace(log, actions=log.actions[:, order], action_names=names, unknown=unknown, contexts=contexts)


def check_requests(log: Log, place: Place) -> None:
    """Raises TableError, which names a row by `place`, if impressions of one request differ in user, time or context. The log must be
    sorted and not empty."""
    request, one = log.request_id, "impressions of one request_id differ in"
    begins = request[1:] != request[:-1]  # by time: a request's rows are adjacent
    columns = {"user_id": log.user_id, "context_id": log.context_id, "impression_ts": log.impression_ts}
    for name, values in columns.items():
        if values is not None and (differs := ~begins & (values[1:] != values[:-1])).any():
            raise TableError(f"{place(int(differs.argmax()) + 1)}: {one} {name}")
    first = log.request_starts
    met, count = np.unique(request[first], return_counts=True)
    if len(met) < len(first):
        again = np.flatnonzero(request[first] == met[count > 1][0])[1]
        raise TableError(f"{place(int(first[again]))}: {one} impression_ts")
