"""Reads parts of the log of what was served, and events, into tables of DuckDB.

`rankings` has a row for each ranking, `candidates` one for each of its posts, `events`
one for each event.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from model.inputs import CLOCK_SKEW_SECONDS
from weights.lab.joining.counts import JoinCounts, NothingJoins
from weights.lab.training.log import date_of
from weights.progress import Update
from weights.served import OPEN_SUFFIX, PARTS, DamagedPart, open_part, with_later_columns
from weights.table_files import Table, open_table, tables_of
from weights.tables import Place, TableError, column_of
from weights.text_ids import TEXT_RULE, IdKind, text_ids
from weights.values import ID_RULE, Problem, id_problem, problem_of_times

EVENT_COLUMNS = {
    "request_id": pa.string(),
    "post_id": pa.uint64(),
    "action": pa.string(),
    "event_ts": pa.int64(),
    "value": pa.float64(),
}
REQUIRED = ("request_id", "post_id", "action", "event_ts")
PIECE_ROWS = 200_000
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)

PIECE_RANKINGS = 2048
COLUMNS = (
    "request_id", "served_us", "impression_ts", "user_id", "context_id", "history.post_ids", "returned", "model_digest",
    "candidates", "scores", "created_at", "ranks", "propensities",
)  # fmt: skip

TABLES = """
CREATE TABLE rankings (
    ranking BIGINT, part BIGINT, request_id VARCHAR, served_us BIGINT, served_ts BIGINT, log_ts BIGINT, user_id UBIGINT,
    context_id VARCHAR, has_history BOOLEAN, model_digest VARCHAR, is_ahead BOOLEAN
);
CREATE TABLE candidates (
    ranking BIGINT, place BIGINT, post_id UBIGINT, author_id UBIGINT, product_surface BIGINT, created_at BIGINT, position BIGINT,
    propensity DOUBLE, codes BIGINT[], is_returned BOOLEAN, is_first BOOLEAN
);
CREATE TABLE events (
    request_id VARCHAR, post_id UBIGINT, action VARCHAR, event_ts BIGINT, value DOUBLE
);
"""
READ_RANKINGS = """
INSERT INTO rankings
SELECT $first + row_number, $part, request_id, served_us, served_us // 1000000,
    CASE WHEN impression_ts > 0 AND NOT is_ahead THEN impression_ts ELSE served_us // 1000000 END,
    user_id, context_id, history IS NOT NULL, model_digest, is_ahead
FROM (SELECT *, impression_ts > served_us // 1000000 + $skew AS is_ahead FROM piece)
"""
"""`is_ahead`: the clock of the caller was, by more than clocks differ."""
READ_CANDIDATES = """
INSERT INTO candidates
SELECT ranking, place, post_id, author_id, product_surface, CASE WHEN age_bucket = 0 THEN 0 ELSE created_at END, position,
    propensity, all_codes[place * levels + 1 : (place + 1) * levels], position <= returned,
    row_number() OVER (PARTITION BY ranking, post_id ORDER BY position) = 1
FROM (
    SELECT $first + row_number AS ranking, returned, unnest(range(len(scores))) AS place,
        unnest(candidates.post_ids) AS post_id, unnest(candidates.author_ids) AS author_id,
        unnest(candidates.surfaces) AS product_surface, unnest(candidates.age_buckets) AS age_bucket,
        unnest(created_at) AS created_at, unnest(ranks) AS position, unnest(propensities) AS propensity,
        {codes} AS all_codes, len({codes}) // greatest(len(scores), 1) AS levels
    FROM piece
)
"""


class LostPart(TableError):
    """A part that was whole when it was read, and now is removed, changed or damaged. The message names the file."""


class ReadPart:
    """A part that was read. It can be read again as long as it is the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp = _stamp_of(path)

    @contextmanager
    def again(self) -> Iterator[pq.ParquetFile]:
        """Open it. Raises LostPart, at the end of the block at the latest."""
        try:
            with open_part(self.path) as part:
                yield part
            is_same = _stamp_of(self.path) == self._stamp
        except (DamagedPart, FileNotFoundError):
            is_same = False
        if not is_same:
            raise LostPart(f"{self.path} was removed, changed or damaged while it was joined: join again")


def _stamp_of(path: Path) -> tuple[int, int, int]:
    """What tells a file from another one that took its place."""
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def read_parts(
    database: duckdb.DuckDBPyConnection,
    directory: Path,
    model: str,
    actions: tuple[str, ...],
    first_ts: int | None,
    counts: JoinCounts,
    progress: Update,
    *,
    is_thorough: bool = False,
) -> tuple[list[ReadPart], tuple[str, ...]]:
    """Read every closed part of a log of what was served. Return the parts that were read and the names of the model's actions.

    `first_ts`: parts of days that ended before this, Unix seconds, are not read; None: all are. `is_thorough`: also look at the columns
    that only `write_contexts` needs, so that a part where one of them is damaged is left out.

    `model`: the version or the beginning of the digest of the model whose rankings are read; if empty, all, which must have the same
    actions. `actions`: if there are any, only rankings of models with just these are read. Files that are no parts, and parts
    that were cut short or are damaged, are left out and counted. Raises TableError; NothingJoins where no
    part is left to be joined.
    """
    database.execute(TABLES)
    counts.done_parts = {}
    paths = sorted(directory.glob(PARTS))
    others = set(directory.rglob("*")).difference(paths)
    for path in sorted(filter(Path.is_file, others)):
        if path.name.endswith(OPEN_SUFFIX):
            counts.open_parts += 1
        else:
            counts.foreign_files.append(str(path))
    if first_ts is not None:
        first_day = f"date={date_of(first_ts)}"
        recent = [path for path in paths if path.parent.name >= first_day]
        if paths and not recent:
            raise NothingJoins(f"{directory} holds no rankings of {date_of(first_ts)} or later", counts)
        paths = recent
    read, names, named_by = list[ReadPart](), None, Path()
    for done, path in enumerate(paths):
        progress("Reading what was served", done, len(paths))
        try:
            whole = ReadPart(path)
            with open_part(path) as part:
                one = _first_row(part)
                if one is None:
                    continue
                of_part, rows = tuple(one["action_names"]), part.metadata.num_rows
                label = f"{one['model_name']} {one['model_version']}"
                is_asked_for = not model or model == one["model_version"] or one["model_digest"].startswith(model)
                is_read = is_asked_for and (not actions or actions == of_part)
                if is_read and names not in (None, of_part):
                    raise TableError(
                        f"{path}, row 1: the actions of {label} are not those of the model in {named_by}: choose one with --model"
                    )
                if is_read:
                    _insert(database, path, part, len(read), counts.rankings, None if is_thorough else COLUMNS)
        except TableError:
            raise
        except DamagedPart:
            counts.cut_parts.append(str(path))
            continue
        except FileNotFoundError:
            counts.gone_parts += 1
            continue
        except OSError as error:
            raise TableError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            if "of another format" in str(error):
                raise TableError(str(error)) from error
            counts.foreign_files.append(str(path))
            continue
        counts.parts += 1
        counts.rankings += rows
        counts.done_parts[str(path.relative_to(directory))] = rows
        counts.models[label] = counts.models.get(label, 0) + rows
        if not is_read:
            counts.other_model_rankings += rows
            continue
        if names is None:
            names, named_by = of_part, path
        read.append(whole)
    if names is None:
        model_asked_for = f"model {model}" if model else "a model with the actions of the one that serves"
        which = f" of {model_asked_for}" if counts.rankings else ""
        reasons = counts.left_out_files()
        if counts.models:
            reasons.append(f"it has those of {', '.join(sorted(counts.models))}")
        elif not counts.cut_parts:
            reasons.append(f"its parts are files {PARTS.replace('*/*', 'YYYY-MM-DD/NAME')}")
        raise NothingJoins(f"{directory} holds no rankings{which}: {'; '.join(reasons)}", counts)
    return read, names


def _first_row(part: pq.ParquetFile) -> dict[str, Any] | None:
    """What the first row says of the model of all rows; None if there is no row."""
    columns = ["action_names", "model_name", "model_version", "model_digest"]
    first = next(part.iter_batches(1, columns=columns), None)
    return None if first is None or not len(first) else first.to_pylist()[0]


def _insert(
    database: duckdb.DuckDBPyConnection,
    path: Path,
    part: pq.ParquetFile,
    number: int,
    first: int,
    columns: Sequence[str] | None,
) -> None:
    """Insert a whole part or nothing of it. `number`: of the part. `first`: of its first ranking. Raises DamagedPart."""
    has_codes = part.schema_arrow.field("candidates").type.get_field_index("codes") >= 0
    read_candidates = READ_CANDIDATES.format(codes="candidates.codes" if has_codes else "CAST([] AS BIGINT[])")
    done = 0
    database.begin()
    try:
        for batch in part.iter_batches(PIECE_RANKINGS, columns=columns):
            rows = with_later_columns(batch, part.schema_arrow)
            piece = pa.table(rows).append_column("row_number", pa.array(range(len(batch)), pa.int64()))
            database.register("piece", piece)
            of_part = {"part": number, "first": first + done, "skew": CLOCK_SKEW_SECONDS}
            database.execute(READ_RANKINGS, of_part)
            database.execute(read_candidates, {"first": first + done})
            done += len(batch)
        database.commit()
    except (duckdb.DataError, duckdb.InvalidInputException) as error:  # a value that is none
        database.rollback()
        raise DamagedPart(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from error
    except duckdb.Error:  # the disk or the memory; there may be no transaction any more
        raise
    except BaseException:
        database.rollback()
        raise
    finally:
        database.unregister("piece")


def read_events(
    database: duckdb.DuckDBPyConnection,
    path: Path | str,
    ids: IdKind,
    since_ts: int | None,
    counts: JoinCounts,
    progress: Update,
) -> None:
    """Read and check events. Those before `since_ts`, Unix seconds, are checked and left out. Raises TableError, which names the file and
    the row."""
    columns = EVENT_COLUMNS | ({"post_id": pa.string()} if ids == "text" else {})
    source = open_table(path, columns, may_lack=["value"])
    if missing := [name for name in REQUIRED if name not in source.schema.names]:
        raise TableError(f"{source.files[0]} lacks the column {missing[0]}: an event has {', '.join(REQUIRED)}")
    rows, done = source.count_rows(), 0
    for table, place in tables_of(source, PIECE_ROWS):
        checked = _checked_events(table, source, ids, place)
        done += len(table)
        if since_ts is not None:
            checked = checked.filter(pc.greater_equal(checked.column("event_ts"), since_ts - CLOCK_SKEW_SECONDS))
        database.register("piece", checked)
        database.execute("INSERT INTO events SELECT * FROM piece")
        database.unregister("piece")
        counts.events += len(checked)
        counts.earlier_events += len(table) - len(checked)
        progress("Reading events", done, rows)
    if not done:
        raise TableError(f"{path} holds no events")


def _checked_events(table: pa.Table, source: Table, ids: IdKind, place: Place) -> pa.Table:
    """The columns of EVENT_COLUMNS, with posts as a model reads them."""
    where = source.files[0]
    for name in ("request_id", "action"):
        kind = table.column(name).type
        if not pa.types.is_string(kind):
            raise TableError(f"{where}: column {name} holds {kind}, not texts")
    times = table.column("event_ts")
    if pa.types.is_floating(times.type) and not times.null_count:
        table = table.set_column(table.column_names.index("event_ts"), "event_ts", pc.floor(times))
    event_ts: NDArray[np.int64] = column_of(table, "event_ts", pa.int64(), place)
    problem: Problem | None = problem_of_times(event_ts)
    if problem:
        raise TableError(f"{place(problem[0])}: event_ts {problem[1]}")
    value = pa.nulls(len(table), pa.float64())
    if "value" in table.column_names:
        value = _finite(pa.chunked_array([column_of(table, "value", pa.float64(), place, math.nan)]))
    return pa.table(
        {
            "request_id": table.column("request_id").fill_null(""),
            "post_id": _post_ids(table, where, ids, place),
            "action": table.column("action").fill_null(""),
            "event_ts": event_ts,
            "value": value,
        }
    )


def _finite(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """The numbers, with null for what is not finite as a float32."""
    return pc.if_else(pc.less_equal(pc.abs(values), LARGEST_FLOAT32), values, None)


def _post_ids(table: pa.Table, where: str, ids: IdKind, place: Place) -> NDArray[np.uint64]:
    """The posts as a model reads them: integers, decimals in texts (as replies write them), or hashed texts. Raises TableError."""
    column = table.column("post_id")
    if not pa.types.is_string(column.type):
        if ids == "text":
            raise TableError(f"{where}: column post_id holds {column.type}, not texts, which its ids are")
        integers: NDArray[np.uint64] = column_of(table, "post_id", pa.uint64(), place)
        return integers
    coded = column.combine_chunks().fill_null("").dictionary_encode()
    texts, places = coded.dictionary.to_pylist(), coded.indices.to_numpy()
    for number, text in enumerate(texts):
        if id_problem(text, ids):
            rule = TEXT_RULE if ids == "text" else f"{ID_RULE} (--ids text reads texts)"
            raise TableError(f"{place(int((places == number).argmax()))}: post_id {text[:60]!r} {rule}")
    numbers = text_ids(texts) if ids == "text" else np.array([*map(int, texts)], np.uint64)
    return np.asarray(numbers[places])


def number_of(database: duckdb.DuckDBPyConnection, question: str) -> int:
    """The one number that a query gives."""
    ((number,),) = database.execute(question).fetchall()
    return int(number)
