"""Writes the result of a join as a log with contexts as served: the directories `impressions` and `contexts`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from weights.lab.joining.reading import ReadPart, number_of
from weights.lab.training.contexts import ACTION_PREFIX, LISTS
from weights.lab.training.log import HASHES, IDS_KEY
from weights.progress import Update
from weights.tables import CODES
from weights.text_ids import IdKind, text_ids
from weights.turns import CONTEXTS, IMPRESSIONS

PART_ROWS = 1_000_000
BATCH_ROWS = 16_384
CONTEXT_ROWS = 256

LABELLED = """
CREATE TABLE labelled AS
SELECT shown.*, labels.* EXCLUDE (ranking, place) FROM shown LEFT JOIN labels USING (ranking, place)
"""
ROWS = """
CREATE TABLE rows AS
SELECT labelled.*, request_id, served_us, log_ts, user_id, context_id FROM labelled JOIN rankings USING (ranking)
"""
"""Of two large tables at a time: the hash tables of several joins in one statement share the memory and do not make room for each other."""
SORTED_ROWS = "SELECT * FROM rows ORDER BY log_ts, ranking, place"
"""A statement of its own, so that the sort has the memory of the join."""
CONTEXT_PLACES = """
SELECT part, min(ranking - first_ranking) AS place, context_id
FROM rankings
JOIN (SELECT part, min(ranking) AS first_ranking FROM rankings GROUP BY part) USING (part)
WHERE has_history AND context_id IN (SELECT context_id FROM rankings WHERE ranking IN (SELECT ranking FROM shown))
GROUP BY part, context_id
QUALIFY row_number() OVER (PARTITION BY context_id ORDER BY part) = 1
ORDER BY part, place
"""


class Parts:
    """Parquet files `part-00000.parquet …` of a directory, which it makes, each of about `part_rows` rows. A context manager."""

    def __init__(self, directory: Path, part_rows: int = PART_ROWS) -> None:
        directory.mkdir()
        self.rows = 0
        self._directory, self._part_rows = directory, part_rows
        self._writer: pq.ParquetWriter | None = None
        self._number, self._part = 0, 0

    def write(self, table: pa.Table) -> None:
        """Add rows."""
        if self._writer is None:
            path = self._directory / f"part-{self._number:05}.parquet"
            self._writer = pq.ParquetWriter(path, table.schema, compression="zstd")
        self._writer.write_table(table)
        self.rows += len(table)
        self._part += len(table)
        if self._part >= self._part_rows:
            self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer, self._part, self._number = None, 0, self._number + 1

    def __enter__(self) -> Parts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()


def write_impressions(
    database: duckdb.DuckDBPyConnection,
    out: Path,
    names: Sequence[str],
    observed: Sequence[bool],
    ids: IdKind,
    label: str,
    progress: Update,
) -> int:
    """Write the table `shown` with its `labels`. `observed` `[A]`: the actions whose absence means no; that of others is null. `label`:
    as `JoinSettings` has it. Return the number of rows."""
    metadata = {IDS_KEY: HASHES} if ids == "text" else None
    rows = number_of(database, "SELECT count(*) FROM shown")
    for statement in (LABELLED, ROWS):
        database.execute(statement)
    with Parts(out / IMPRESSIONS) as parts:
        for batch in database.sql(SORTED_ROWS).to_arrow_reader(BATCH_ROWS):
            parts.write(_impressions(batch, names, np.array(observed, bool), label).replace_schema_metadata(metadata))
            progress("Writing impressions", parts.rows, rows)
    return parts.rows


def _impressions(batch: pa.RecordBatch, names: Sequence[str], observed: NDArray[np.bool_], label: str) -> pa.Table:
    words = [
        pc.fill_null(batch.column(f"taken_{word}"), 0).to_numpy(zero_copy_only=False)
        for word in range(-(-len(names) // 64))
    ]
    flags = np.unpackbits(np.stack(words, 1).view(np.uint8), 1, count=len(names), bitorder="little").astype(bool)
    rankings = pc.binary_join_element_wise(batch.column("request_id"), batch.column("served_us").cast(pa.string()), " ")
    columns: dict[str, Any] = {
        "request_id": _numbers(rankings),
        "impression_ts": batch.column("log_ts"),
        **{name: batch.column(name) for name in ("user_id", "post_id", "author_id", "product_surface", "created_at")},
        "dwell_seconds": batch.column("dwell_seconds").cast(pa.float32()).fill_null(0),
        "position": batch.column("position"),
        "propensity": batch.column("propensity").fill_null(0),
        "context_id": _numbers(batch.column("context_id"), label),
        CODES: batch.column("codes"),  # also where no post has any, so that all nights have the same columns
    }
    for place, name in enumerate(names):
        mask = None if observed[place] else ~flags[:, place]
        columns[ACTION_PREFIX + name] = pa.array(flags[:, place], pa.bool_(), mask=mask)
    return pa.table(columns)


def _numbers(texts: pa.StringArray, label: str = "") -> NDArray[np.uint64]:
    """Texts, each with the label behind it, as 64-bit numbers, never 0, as ids that are texts are hashed."""
    coded = texts.dictionary_encode()
    labelled = [f"{text} {label}" if label else text for text in coded.dictionary.to_pylist()]
    return np.asarray(text_ids(labelled)[coded.indices.to_numpy()])


def write_contexts(
    database: duckdb.DuckDBPyConnection,
    out: Path,
    parts: Sequence[ReadPart],
    names: Sequence[str],
    label: str,
    progress: Update,
) -> int:
    """Write the context of each ranking of the table `shown`, once. `parts`: by their numbers. `label`: as `JoinSettings` has it. Return
    how many. Raises LostPart."""
    with Parts(out / CONTEXTS, PART_ROWS // 10) as written:
        for done, (part, places) in enumerate(_places(database)):
            for table in _contexts(parts[part], places, names, label):
                written.write(table)
            progress("Writing contexts", done, len(parts))
    return written.rows


def _places(database: duckdb.DuckDBPyConnection) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Each part that has contexts to write, and the places of their rows in it."""
    part, places = -1, list[NDArray[np.int64]]()
    for batch in database.sql(CONTEXT_PLACES).to_arrow_reader(BATCH_ROWS):
        of_row, place = batch.column("part").to_numpy(), batch.column("place").to_numpy()
        for number in np.unique(of_row).tolist():
            if number != part and places:
                yield part, np.concatenate(places)
                places = []
            part = number
            places.append(place[of_row == number])
    if places:
        yield part, np.concatenate(places)


def _contexts(read: ReadPart, places: NDArray[np.int64], names: Sequence[str], label: str) -> Iterator[pa.Table]:
    """The contexts in these rows of a part, in pieces."""
    before = 0
    with read.again() as part:
        for batch in part.iter_batches(CONTEXT_ROWS, columns=["context_id", "history"]):
            first, last = np.searchsorted(places, (before, before + len(batch)))
            if last > first:
                yield _table(batch.take(pa.array(places[first:last] - before)), names, label)
            before += len(batch)


def _table(batch: pa.RecordBatch, names: Sequence[str], label: str) -> pa.Table:
    history = batch.column("history")
    events = {
        name: pc.struct_field(history, name)
        for name in ("post_ids", "author_ids", "surfaces", "dwell_seconds", "actions")
    }
    offsets = np.append(0, np.cumsum(pc.list_value_length(events["post_ids"]).to_numpy())).astype(np.int32)

    def lists(values: NDArray[Any] | pa.Array, kind: pa.DataType) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))

    columns: dict[str, Any] = {"context_id": _numbers(batch.column("context_id"), label)}
    for name, kind in LISTS.items():
        columns[name] = lists(events[name.removeprefix("product_")].flatten(), kind)
    actions = events["actions"].flatten().to_numpy().reshape(-1, len(names))
    for place, name in enumerate(names):
        columns[ACTION_PREFIX + name] = lists(np.ascontiguousarray(actions[:, place]), pa.float32())
    columns[CODES] = pa.ListArray.from_arrays(pa.array(offsets), _codes(history, len(actions)))
    return pa.table(columns)


def _codes(history: pa.StructArray, events: int) -> pa.ListArray:
    """The content codes of each of these events, a list for each; empty where the part has none."""
    if history.type.get_field_index("codes") < 0:
        return pa.array([[]] * events, pa.list_(pa.int64()))
    codes = pc.struct_field(history, "codes").flatten()
    levels = len(codes) // events if events else 0
    return pa.ListArray.from_arrays(pa.array(np.arange(events + 1, dtype=np.int32) * levels), codes)
