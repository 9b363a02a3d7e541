"""The format of the log of what was served: parts in Parquet, one row a ranking. `app.served` writes them; `read_part` reads one back.

A part is a file `date=YYYY-MM-DD/NAME.parquet` below the log's directory, where the date is the UTC day of its rows. A file is whole from
the moment that it has this name: a part that is still being written is called `NAME.parquet.open`. All rows of a part are of one model.

Values are those that the model has read: after hashing, clipping and truncation. The columns of the history and of the candidates are the
arrays of `model.inputs.Context` and `model.inputs.Candidates`, so a new input of the model becomes a column here by itself. An array with
more than one axis is flattened row by row; the sizes of its other axes, in the first row, are in the metadata of its field, under `SIZES`.
A matrix may have another width in another row: the number of its values divided by the number of events or candidates.

A part of an earlier version may lack a column that may be null: it is read as null in every row. So a new column must be one that may be
null.

Needs pyarrow, which is imported when a function here is called.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from model.inputs import Candidates, Context

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

FORMAT = "1"
FORMAT_KEY = "phoenix_ranker.served"
"""The key of the format's number in the metadata of a part's schema."""
SIZES = b"sizes"
"""The key, in the metadata of a field, of the sizes of its axes after the first: JSON, such as `[19]`."""
PARTS = "date=*/*.parquet"
"""The pattern of the names of all parts, below the log's directory."""
SUFFIX, OPEN_SUFFIX = ".parquet", ".parquet.open"
READ_ROWS = 256


class Column:
    """One column: its type in Arrow, as the name of a function of pyarrow; whether it is a list; whether it may be null; what it holds."""

    def __init__(self, kind: str, text: str, *, is_list: bool = False, is_nullable: bool = False) -> None:
        self.kind = kind
        self.text = text
        self.is_list = is_list
        self.is_nullable = is_nullable


# C: candidates of the row, in the order in which they were sent; A: actions; Z: continuous outputs; h: events of the history.
COLUMNS: Mapping[str, Column] = {
    "request_id": Column(
        "string", "The name of the ranking, as the reply tells it; unique within a call of /rank/batch."
    ),
    "served_us": Column("int64", "When it was ranked, in microseconds of Unix time."),
    "endpoint": Column("string", "The route that was called, such as /rank."),
    "key": Column("string", "The name of the caller's API key; null where the service has no keys.", is_nullable=True),
    "model_name": Column("string", "Name of the checkpoint."),
    "model_version": Column("string", "Version of the checkpoint."),
    "model_digest": Column("string", "Digest of the checkpoint."),
    "action_names": Column(
        "string", "Names of the A actions, in the order of the weights and probabilities.", is_list=True
    ),
    "continuous_names": Column("string", "Names of the Z continuous outputs.", is_list=True),
    "user_id": Column("uint64", "The user as the model reads it (a text id is hashed); 0 is anonymous."),
    "impression_ts": Column(
        "int64", "When the posts were to be shown, in Unix seconds, as the request says; 0 if it does not."
    ),
    "context_id": Column("string", "32 hex digits: rows with the same one have the same user and history."),
    "history_length": Column("int64", "h, the number of events that the model read."),
    "history_dropped": Column("int64", "How many older events did not fit the model's window."),
    "history": Column(
        "struct",
        "The events, oldest first: one list for each array of `Context`. Null where an earlier row of this part has the same context_id.",
        is_nullable=True,
    ),
    "candidates": Column("struct", "The posts that were ranked: one list for each array of `Candidates`."),
    "created_at": Column(
        "int64", "When each candidate was created, in Unix seconds, as the request says; 0 unknown. [C]", is_list=True
    ),
    "scores": Column("float64", "The combined score of each candidate. [C]", is_list=True),
    "ranks": Column("int64", "The rank of each candidate; 1 is best. [C]", is_list=True),
    "returned": Column("int64", "How many candidates the reply held: those with the ranks 1 … returned."),
    "weights": Column(
        "float64", "The weights in force: [A], or [A + Z] where they weigh the continuous outputs too.", is_list=True
    ),
    "score_form": Column("string", "`sum` or `offset`: how the scores were made from the weighted sum."),
    "temperature": Column(
        "float64", "The temperature of exploration; null where the order is that of the scores.", is_nullable=True
    ),
    "propensities": Column(
        "float64",
        "The probability that each candidate got its rank, given those above it; null without exploration. [C]",
        is_list=True,
        is_nullable=True,
    ),
    "probabilities": Column(
        "float32",
        "The probability of each action. [C, A]; null where the log leaves them out.",
        is_list=True,
        is_nullable=True,
    ),
    "continuous": Column(
        "float32",
        "The continuous outputs in their units. [C, Z]; null where the log leaves them out.",
        is_list=True,
        is_nullable=True,
    ),
}
"""The columns of a part, in their order."""
INPUTS: Mapping[str, type] = {"history": Context, "candidates": Candidates}
"""The columns that hold one list for each array of a class of the model's inputs."""
REQUIRED = {name for name, column in COLUMNS.items() if name in INPUTS or not column.is_nullable}
"""The columns that every part has."""


@cache
def arrays_of(kind: type) -> Mapping[str, np.dtype[Any]]:
    """The dtypes of the arrays that a class of the model's inputs holds, by name; an array may be optional."""
    dtypes: dict[str, np.dtype[Any]] = {}
    for name, hint in get_type_hints(kind).items():
        for choice in (hint, *get_args(hint)):
            if get_origin(choice) is np.ndarray:
                dtypes[name] = np.dtype(get_args(get_args(choice)[1])[0])
    return dtypes


def schema(sizes: Mapping[str, tuple[int, ...]] | None = None) -> pa.Schema:
    """The schema of a part. `sizes`: of the axes after the first, by a name such as `history.actions`."""
    import pyarrow as pa

    sizes = sizes or {}

    def listed(name: str, kind: pa.DataType, is_nullable: bool) -> pa.Field:
        metadata = {SIZES: json.dumps(sizes[name])} if sizes.get(name) else None
        return pa.field(name.rpartition(".")[2], pa.list_(kind), is_nullable, metadata)

    fields: list[pa.Field] = []
    for name, column in COLUMNS.items():
        if name in INPUTS:
            children = [
                listed(f"{name}.{child}", pa.from_numpy_dtype(dtype), True)
                for child, dtype in arrays_of(INPUTS[name]).items()
            ]
            fields.append(pa.field(name, pa.struct(children), column.is_nullable))
        elif column.is_list:
            fields.append(listed(name, getattr(pa, column.kind)(), column.is_nullable))
        else:
            fields.append(pa.field(name, getattr(pa, column.kind)(), column.is_nullable))
    return pa.schema(fields, {FORMAT_KEY: FORMAT})


class ServedRanking(msgspec.Struct, eq=False, kw_only=True):
    """One row. The fields have the names, units and shapes of `COLUMNS`; `context` and `candidates` are as the engine was given them."""

    request_id: str
    served_us: int
    endpoint: str
    key: str | None
    model_name: str
    model_version: str
    model_digest: str
    action_names: tuple[str, ...]
    continuous_names: tuple[str, ...]
    impression_ts: int
    context: Context
    candidates: Candidates
    created_at: NDArray[np.int64]
    scores: NDArray[np.float64]
    ranks: NDArray[np.int64]
    returned: int
    weights: NDArray[np.float64]
    score_form: str
    temperature: float | None = None
    propensities: NDArray[np.float64] | None = None
    probabilities: NDArray[np.float32] | None = None
    continuous: NDArray[np.float32] | None = None


ContextName = tuple[int, str]
"""A user, and the `context_id` of a context of that user."""
_MODEL = ("model_name", "model_version", "model_digest")
_OF_THE_MODEL = (*_MODEL, "action_names", "continuous_names")
_OF_THE_CONTEXT = ("user_id", "context_id", "history_length", "history_dropped")
_SCALARS = tuple(
    name
    for name, column in COLUMNS.items()
    if not column.is_list and name not in (*INPUTS, *_OF_THE_MODEL, *_OF_THE_CONTEXT)
)
_LISTS = tuple(name for name, column in COLUMNS.items() if column.is_list and name not in _OF_THE_MODEL)
_HISTORY, _CANDIDATES = tuple(arrays_of(Context)), tuple(arrays_of(Candidates))
_scalars_of, _lists_of = attrgetter(*_SCALARS), attrgetter(*_LISTS)
_history_of, _candidates_of = attrgetter(*_HISTORY), attrgetter(*_CANDIDATES)


class RowBatch:
    """Some next rows of a part, all of one model, column by column.

    `add` copies the numbers of a row to the ends of its columns. So nothing else of a request stays in memory, and whoever encodes the
    batch has no work for each row. Objects that live for a second would cost the event loop far more than copying them does.
    A batch in which `add` failed is not whole and must be thrown away.
    """

    def __init__(self, first: ServedRanking) -> None:
        """`first`: any row of the batch, which tells its model and the sizes of its arrays. It is not added."""
        self._history, self._candidates, self._lists = (
            [_ListColumn() for _ in names] for names in (_HISTORY, _CANDIDATES, _LISTS)
        )
        self.begin(first)

    def begin(self, first: ServedRanking) -> None:
        """Become empty, for other rows. The memory is kept and used again, so nothing that `encode` returned may be alive."""
        self.model = first.model_name, first.model_version, first.model_digest
        self._outputs = {"action_names": first.action_names, "continuous_names": first.continuous_names}
        self._axes = _axes_of(first)
        self._scalars: list[tuple[Any, ...]] = []
        self._contexts: dict[ContextName, int] = {}  # the contexts of the batch in the order of their first rows
        self._of_contexts: list[
            tuple[int, str, int, int, int | None]
        ] = []  # the last: the context to store with the row
        for column in (*self._history, *self._candidates, *self._lists):
            column.clear()

    @property
    def rows(self) -> int:
        """How many rows were added."""
        return len(self._scalars)

    def is_of_model(self, row: ServedRanking) -> bool:
        """Whether a row is of the model of this batch."""
        return self.model == (row.model_name, row.model_version, row.model_digest)

    def add(self, row: ServedRanking) -> None:
        """Copy a row to the end of the batch."""
        context = row.context
        arrays = _history_of(context)
        name = context.user_id, _hash_of(context.user_id, arrays)
        stored = None
        if name not in self._contexts:
            stored = self._contexts[name] = len(self._contexts)
            _append(self._history, arrays)
        self._of_contexts.append((*name, len(context), context.dropped, stored))
        _append(self._candidates, _candidates_of(row.candidates))
        _append(self._lists, _lists_of(row))
        self._scalars.append(_scalars_of(row))

    def schema(self) -> pa.Schema:
        """The schema of a part that begins with this batch."""
        return schema(self._axes)

    def encode(self, kind: pa.Schema, stored: set[ContextName]) -> pa.RecordBatch:
        """The rows in Arrow, by the schema of their part. `stored`: the contexts that the part holds already; those of the batch are added
        to it. Call it once: the columns are not copied. Raises if a value does not fit its column; then `stored` is as it was."""
        import pyarrow as pa

        names = [*self._contexts]
        *of_contexts, places = zip(*self._of_contexts, strict=True)
        fresh = [None if place is None or names[place] in stored else place for place in places]
        values = dict(zip(_SCALARS, zip(*self._scalars, strict=True), strict=True))
        values |= dict(zip(_OF_THE_CONTEXT, of_contexts, strict=True))
        columns: dict[str, pa.Array] = {}
        for name, text in zip(_MODEL, self.model, strict=True):
            columns[name] = pa.repeat(text, self.rows)
        for name, texts in self._outputs.items():
            columns[name] = _repeated(texts, kind.field(name).type, self.rows)
        for name, cells in values.items():
            columns[name] = pa.array(cells, kind.field(name).type)
        for name, column in zip(_LISTS, self._lists, strict=True):
            columns[name] = column.encode(kind.field(name).type)
        columns["candidates"] = _structs(self._candidates, kind.field("candidates").type)
        histories = _structs(self._history, kind.field("history").type)
        columns["history"] = histories.take(pa.array(fresh, pa.int32()))
        batch = pa.RecordBatch.from_arrays([columns[name] for name in kind.names], schema=kind)
        stored.update(names)
        return batch


class _ListColumn:
    """Arrays, one after the other. `write` takes the next one and returns its size in bytes, which belongs into `sizes`; -1 is null."""

    __slots__ = ("_bytes", "sizes", "write")

    def __init__(self) -> None:
        self._bytes = BytesIO()
        self.write: Callable[[Any], int] = self._bytes.write
        self.sizes: list[int] = []

    def clear(self) -> None:
        """Forget the arrays and keep the memory. Raises BufferError while something that `encode` returned is alive."""
        self._bytes.seek(0)
        self.sizes.clear()

    def encode(self, kind: pa.ListType) -> pa.ListArray:
        """One list for each array, which is flattened. The arrays have the dtype of the lists' elements."""
        import pyarrow as pa

        sizes = np.array(self.sizes, np.int64)
        is_null = sizes < 0
        offsets = np.zeros(len(sizes) + 1, np.int32)
        np.cumsum(np.where(is_null, 0, sizes) // (kind.value_type.bit_width // 8), out=offsets[1:])
        values = pa.Array.from_buffers(kind.value_type, int(offsets[-1]), [None, pa.py_buffer(self._bytes.getbuffer())])
        return pa.ListArray.from_arrays(
            pa.array(offsets), values, kind, mask=pa.array(is_null) if is_null.any() else None
        )


def _append(columns: Sequence[_ListColumn], arrays: Sequence[NDArray[Any] | None]) -> None:
    """Add one array to each column."""
    for column, array in zip(columns, arrays, strict=True):
        if array is None:
            column.sizes.append(-1)
            continue
        try:
            column.sizes.append(column.write(array))
        except (BufferError, ValueError):  # a view with gaps
            column.sizes.append(column.write(array.tobytes()))


_SEED = int.from_bytes(os.urandom(8), "little")
"""Of the ids of contexts: nobody who sends requests can find two contexts with one id."""


def _hash_of(user_id: int, arrays: Sequence[NDArray[Any] | None]) -> str:
    """32 hex digits from the user and every array of the history."""
    pieces: list[Any] = [user_id.to_bytes(8, "little"), *[array for array in arrays if array is not None]]
    try:
        joined = b"".join(pieces)
    except (BufferError, TypeError):  # one is a view with gaps
        joined = b"".join([piece if isinstance(piece, bytes) else piece.tobytes() for piece in pieces])
    return xxhash.xxh3_128_hexdigest(joined, _SEED)


def _axes_of(row: ServedRanking) -> dict[str, tuple[int, ...]]:
    """The sizes of the axes after the first, of each array of the row that has such axes."""
    arrays = {"probabilities": row.probabilities, "continuous": row.continuous}
    for column, inputs in (("history", row.context), ("candidates", row.candidates)):
        arrays |= {f"{column}.{name}": getattr(inputs, name) for name in arrays_of(INPUTS[column])}
    return {name: array.shape[1:] for name, array in arrays.items() if array is not None and array.ndim > 1}


def _structs(columns: Sequence[_ListColumn], kind: pa.StructType) -> pa.StructArray:
    """One struct of lists for each of the model's inputs."""
    import pyarrow as pa

    children = [column.encode(child.type) for column, child in zip(columns, kind, strict=True)]
    return pa.StructArray.from_arrays(children, fields=list(kind))


def _repeated(texts: Sequence[str], kind: pa.ListType, count: int) -> pa.ListArray:
    """The same list of texts `count` times."""
    import pyarrow as pa

    offsets = np.arange(count + 1, dtype=np.int32) * len(texts)
    values = pa.array(texts, kind.value_type).take(pa.array(np.tile(np.arange(len(texts)), count)))
    return pa.ListArray.from_arrays(pa.array(offsets), values, kind)


class DamagedPart(ValueError):
    """A part that was cut or damaged. The message names the file."""


@contextmanager
def open_part(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a part. What is read from it is checked where the part has checksums, as those have that the service writes.

    Raises DamagedPart, also from what is read in the block; ValueError for a file that is no part of this format; OSError where the system
    does not give the file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as part:
            check_format(path, part.schema_arrow)
            yield part
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DamagedPart(f"{path} cannot be read as Parquet: {str(error).partition(chr(10))[0]}") from error


@contextmanager
def hold(directory: Path, waits: Callable[[], None], *, alone: bool) -> Iterator[bool]:
    """Have a log of what was served as it is while the block runs, or change it `alone`: those who read it wait for who changes it, and the
    other way round. Services that write new parts or remove old ones wait for nobody.

    `waits` is called if somebody else has to end first. Yields False where the file system has no locks for directories, as some network
    file systems. Raises OSError where the directory cannot be read.
    """
    held, kind = os.open(directory, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    try:
        yield _has_lock(held, kind, waits)
    finally:
        os.close(held)


def _has_lock(held: int, kind: int, waits: Callable[[], None]) -> bool:
    try:
        fcntl.flock(held, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        waits()
        fcntl.flock(held, kind)
    except OSError:
        return False
    return True


def read_part(path: Path) -> Iterator[ServedRanking]:
    """Yield the rows of a part, in their order. Raises ValueError for a file that is no whole part of this format, and OSError."""
    histories: dict[str, pa.StructScalar] = {}  # by context_id
    with open_part(path) as part:
        sizes = _stored_sizes(part.schema_arrow)
        for piece in part.iter_batches(READ_ROWS):
            batch = with_later_columns(piece, part.schema_arrow)
            for place in range(len(batch)):
                row = {name: batch.column(name)[place] for name in COLUMNS}
                if row["history"].is_valid:
                    histories[row["context_id"].as_py()] = row["history"]
                row["history"] = histories[row["context_id"].as_py()]
                yield _ranking(row, sizes)


def with_later_columns(rows: pa.RecordBatch, stored: pa.Schema) -> pa.RecordBatch:
    """Rows of a part with a column of nulls for each of `COLUMNS` that is not in `stored`, the schema of the part."""
    import pyarrow as pa

    for column in schema():
        if column.name not in stored.names:
            rows = rows.append_column(column, pa.nulls(len(rows), column.type))
    return rows


def check_format(path: Path, stored: pa.Schema) -> None:
    """Raise ValueError unless this is the schema of a part of this format."""
    number = (stored.metadata or {}).get(FORMAT_KEY.encode())
    if number is None or not {*stored.names} >= REQUIRED:
        raise ValueError(f"{path} is no part of a log of what was served")
    if number != FORMAT.encode():
        raise ValueError(
            f"{path} is of another format, {number.decode(errors='replace')[:20]}: this version reads {FORMAT}"
        )


def _stored_sizes(stored: pa.Schema) -> dict[str, tuple[int, ...]]:
    """The sizes of the axes after the first, by the names of the arrays."""
    fields = {field.name: field for field in stored}
    for name in INPUTS:
        fields |= {f"{name}.{child.name}": child for child in fields.pop(name).type}
    return {name: tuple(json.loads((field.metadata or {}).get(SIZES, b"[]"))) for name, field in fields.items()}


def _ranking(row: Mapping[str, pa.Scalar], sizes: Mapping[str, tuple[int, ...]]) -> ServedRanking:
    """One row as numpy arrays and plain values. `row`: its cells by column, with the history where the part has it further up."""

    def array(name: str, cell: pa.ListScalar | None, length: int) -> NDArray[Any] | None:
        if cell is None or not cell.is_valid:
            return None
        values: NDArray[Any] = cell.values.to_numpy(zero_copy_only=False)
        if len(axes := sizes.get(name, ())) == 1 and length:
            axes = (len(values) // length,)  # content codes have a width of 0 where a request came without any
        return values.reshape(length, *axes) if axes else values

    def inputs(name: str, length: int) -> dict[str, Any]:
        stored = row[name]
        return {child: array(f"{name}.{child}", stored.get(child), length) for child in arrays_of(INPUTS[name])}

    count = len(row["scores"])
    context = Context(
        row["user_id"].as_py(),
        **inputs("history", row["history_length"].as_py()),
        dropped=row["history_dropped"].as_py(),
    )
    fields: dict[str, Any] = {"context": context, "candidates": Candidates(**inputs("candidates", count))}
    for name in {*ServedRanking.__struct_fields__} - fields.keys():
        cell, column = row[name], COLUMNS[name]
        if not column.is_list:
            fields[name] = cell.as_py()
        elif column.kind == "string":
            fields[name] = tuple(cell.as_py())
        else:
            fields[name] = array(name, cell, count)
    return ServedRanking(**fields)
