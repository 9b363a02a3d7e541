"""Checks the columns of tables of ids (impression logs, the posts of a corpus). `weights.table_files` opens and reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
from numpy.typing import NDArray

from model.bounds import MAX_CODE_LEVELS
from weights.text_ids import TEXT_RULE, IdKind, is_text_id, text_ids
from weights.values import Problem, problem_of_dwells, problem_of_flags, problem_of_stored_ids, problem_of_times

ID_TYPES: dict[IdKind, pa.DataType] = {"uint64": pa.uint64(), "text": pa.string()}


ID_COLUMNS = ("user_id", "post_id", "author_id", "post_ids", "author_ids")
CODES = "codes"
"""A column of lists of content codes. CSV cannot hold lists: where all are null, it stays null."""
Check = Callable[[NDArray[Any]], Problem | None]
CHECKS: dict[str, Check] = {
    **dict.fromkeys(("impression_ts", "created_at"), problem_of_times),
    **dict.fromkeys(ID_COLUMNS, problem_of_stored_ids),
    "dwell_seconds": problem_of_dwells,
}
"""How the values of a column are checked, by its name in a log or in a table of posts."""


class TableError(ValueError):
    """A table that cannot be used; the message names the file and the column."""


def json_error(lines: bytes, options: pyarrow.json.ParseOptions) -> str:
    """What pyarrow says against these lines, empty if nothing."""
    try:
        if lines.strip():
            pyarrow.json.read_json(pa.BufferReader(lines), parse_options=options)
    except pa.ArrowException as error:
        return str(error)
    return ""


def json_problem(line: bytes, before: Sequence[bytes], options: pyarrow.json.ParseOptions) -> str:
    """What is wrong with a line, without its values. `before`: the lines before it, which can be read, but not together with it."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return "is no JSON object; it may be cut off"
    if not isinstance(values, dict):
        return "holds no JSON object"
    if "unexpected field" in json_error(line, options):
        return "has a column that the first rows lack: write every column in every row"
    rows = [*map(json.loads, before), values]
    for name in values:  # pyarrow names the column of some errors only
        column = "\n".join(json.dumps({name: row.get(name)}) for row in rows)
        if json_error(column.encode(), options):
            expected = options.explicit_schema
            is_declared = expected is not None and name in expected.names
            kind = str(expected.field(name).type) if is_declared else "the type of the rows before"
            return f"column {name[:64]} holds a value that does not fit {kind}"
    return "holds a value that does not fit its column"


def check_values(
    columns: Mapping[str, NDArray[Any]], place: Callable[[int], str], checks: Mapping[str, Check] = CHECKS
) -> None:
    """Raises TableError for the first value in these columns, by name, that a request may not have either. `place` names a row."""
    for name, column in columns.items():
        if name in checks and (problem := checks[name](column)):
            raise TableError(f"{place(problem[0])}: {name} {problem[1]}")


Place = Callable[[int], str]
"""Names a row of a table for people: its file, and its number there, from 1."""
Where = str | Callable[[int], str]
"""What errors name: a table, or the place of one of its rows."""


def column_of(
    table: pa.Table, name: str, kind: pa.DataType, where: Where, unknown: float | str | None = None
) -> NDArray[Any]:
    """A column as a numpy array. Nulls become `unknown`, or are refused if that is None. Raises TableError, which names the table or row
    `where`, and repeats no value."""
    column = _whole(table, name, str(kind), where) if unknown is None else table.column(name)
    is_integer = pa.types.is_integer(kind)
    if is_integer and is_text(column.type):
        hint = " (--ids text reads ids that are texts)" if name in ID_COLUMNS else ""
        raise TableError(f"{_at(where, _first_misfit(column, kind))}: column {name} holds texts, not integers{hint}")
    if is_integer and pa.types.is_boolean(column.type):
        raise TableError(f"{_at(where)}: column {name} holds true and false, not integers")
    is_id = kind == pa.uint64()
    is_rounded = is_integer and pa.types.is_floating(column.type) and (is_id or column.type != pa.float64())
    if is_rounded or (is_integer and pa.types.is_temporal(column.type)):
        rule = (
            "write Unix seconds" if not is_rounded else f"a float cannot hold every {'id' if is_id else 'one of them'}"
        )
        raise TableError(f"{_at(where)}: column {name} holds {column.type}, not integers: {rule}")
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if kind == pa.bool_() and is_number and (problem := problem_of_flags(column.to_numpy())):  # else any but 0 is true
        raise TableError(f"{_at(where, problem[0])}: column {name} {problem[1]}, in every row")
    try:
        cast = column.cast(kind)
        values: NDArray[Any] = (cast if unknown is None else cast.fill_null(unknown)).to_numpy()
    except pa.ArrowException as error:
        row = _first_misfit(column, kind)
        raise TableError(f"{_at(where, row)}: column {name} does not fit {kind}; it holds {column.type}") from error
    return values


def flags_of(table: pa.Table, name: str, where: Where) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """A column that says of each row whether an action was taken, and where it is null, which is unknown; bool `[n]` both, False where
    unknown. Raises TableError."""
    column = table.column(name)
    unknown: NDArray[np.bool_] = column.is_null().to_numpy()
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if is_number and (problem := problem_of_flags(column.fill_null(0).to_numpy())):  # else any but 0 is true
        raise TableError(
            f"{_at(where, problem[0])}: column {name} {problem[1]}, in every row; null says that it is unknown"
        )
    try:
        taken: NDArray[np.bool_] = column.cast(pa.bool_()).fill_null(False).to_numpy()
    except pa.ArrowException as error:
        row = _first_misfit(column, pa.bool_())
        raise TableError(f"{_at(where, row)}: column {name} does not fit bool; it holds {column.type}") from error
    return taken, unknown


def rows_of_lists(table: pa.Table, where: Where, levels: int = 0) -> NDArray[np.int64]:
    """The column of lists of content codes as rows, int64 `[n, q]`: q is that of the longest list, at least `levels`, and shorter lists get
    zeros. A null is an empty list. Raises TableError."""
    column = table.column(CODES).combine_chunks()
    is_list = (
        pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type)
    )
    if not is_list and not pa.types.is_null(column.type):
        raise TableError(
            f"{_at(where)}: column {CODES} holds {column.type}, not lists of integers, which Parquet and JSON lines can hold and CSV cannot"
        )
    try:
        lists = column.cast(pa.list_(pa.int64()))
    except pa.ArrowException as error:
        row = _first_misfit(table.column(CODES), pa.list_(pa.int64()))
        raise TableError(f"{_at(where, row)}: column {CODES} does not fit lists of integers: {error}") from error
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = lists.flatten()
    if values.null_count:
        first = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        row = int(np.searchsorted(np.cumsum(lengths), first, side="right"))
        raise TableError(f"{_at(where, row)}: column {CODES} has nulls in its lists; write 0 for none")
    longest = int(lengths.max(initial=0))
    if longest > MAX_CODE_LEVELS:
        raise TableError(
            f"{_at(where, int(lengths.argmax()))}: column {CODES} holds a list of {longest} codes, at most {MAX_CODE_LEVELS} are read"
        )
    rows = np.zeros((len(lengths), max(longest, levels)), np.int64)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = values.to_numpy(zero_copy_only=False)
    return rows


def texts_of(table: pa.Table, name: str, where: Where) -> pa.DictionaryArray:
    """A column of text ids, dictionary-encoded: each text is stored once. Raises TableError."""
    column = _whole(table, name, "string", where)
    if not is_text(column.type):
        raise TableError(f"{_at(where)}: column {name} holds {column.type}, not texts, which its ids are")
    coded = column.cast(pa.large_string()).combine_chunks().dictionary_encode()
    for code, text in enumerate(coded.dictionary.to_pylist()):
        if not is_text_id(text):
            row = int(np.argmax(coded.indices.to_numpy() == code))
            raise TableError(f"{_at(where, row)}: column {name} holds a text that is no id; an id {TEXT_RULE}")
    return coded


def _at(where: Where, row: int = 0) -> str:
    return where if isinstance(where, str) else where(row)


def _first_misfit(column: pa.ChunkedArray, kind: pa.DataType) -> int:
    """The first row whose value cannot be cast to `kind`; row 0 if all can."""
    try:
        column.cast(kind)
        return 0
    except pa.ArrowException:
        good, bad = 0, len(column)
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            column.slice(good, middle - good).cast(kind)
            good = middle
        except pa.ArrowException:
            bad = middle
    return good


def hashed(texts: pa.DictionaryArray) -> NDArray[np.uint64]:
    """The 64-bit ids that a model reads for these texts, uint64 `[n]`."""
    ids: NDArray[np.uint64] = text_ids(texts.dictionary.to_pylist())[texts.indices.to_numpy()]
    return ids


def ids_of(table: pa.Table, name: str, kind: IdKind, where: Where) -> NDArray[np.uint64]:
    """A column of ids of this kind, as a model reads them. Raises TableError."""
    return hashed(texts_of(table, name, where)) if kind == "text" else column_of(table, name, pa.uint64(), where)


def _whole(table: pa.Table, name: str, kind: str, where: Where) -> pa.ChunkedArray:
    if table.schema.get_field_index(name) < 0:  # `column_names` makes a list of all of them
        raise TableError(f"{_at(where)} lacks the column {name} ({kind})")
    column = table.column(name)
    if column.null_count:
        rule = "every row needs an id" if name in ID_COLUMNS else "write 0 (or false) for unknown"
        row = int(np.argmax(column.is_null().to_numpy()))
        raise TableError(f"{_at(where, row)}: column {name} has {column.null_count} nulls; {rule}")
    return column


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds texts: Polars writes string views, pandas large strings and dictionaries."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
