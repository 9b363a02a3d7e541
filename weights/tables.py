"""Checks the columns of tables of ids (impression logs, the posts of a corpus). `weights.table_files` opens and reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from weights.text_ids import TEXT_RULE, IdKind, is_text_id, text_ids
from weights.values import Problem, problem_of_dwells, problem_of_flags, problem_of_stored_ids, problem_of_times

ID_TYPES: dict[IdKind, pa.DataType] = {"uint64": pa.uint64(), "text": pa.string()}
ID_COLUMNS = ("user_id", "post_id", "author_id", "post_ids", "author_ids")
Check = Callable[[NDArray[Any]], Problem | None]
Place = Callable[[int], str]
"""Names a row of a table for people: its file, and its number there, from 1."""
CHECKS: dict[str, Check] = {
    **dict.fromkeys(("impression_ts", "created_at"), problem_of_times),
    **dict.fromkeys(ID_COLUMNS, problem_of_stored_ids),
    "dwell_seconds": problem_of_dwells,
}
"""How the values of a column are checked, by its name in a log or in a table of posts."""


class LogError(ValueError):
    """A table that cannot be used; the message names the file and the column."""


def check_values(columns: Mapping[str, NDArray[Any]], place: Place, checks: Mapping[str, Check] = CHECKS) -> None:
    """Raises LogError for the first value in these columns, by name, that a request may not have either. `place` names a row."""
    for name, column in columns.items():
        if name in checks and (problem := checks[name](column)):
            raise LogError(f"{place(problem[0])}: {name} {problem[1]}")


def column_of(
    table: pa.Table,
    name: str,
    kind: pa.DataType,
    where: str,
    unknown: int | str | None = None,
    place: Place | None = None,
) -> NDArray[Any]:
    """A column as a numpy array. Nulls become `unknown`, or are refused if that is None. Raises LogError, which names the table `where`
    or, with `place`, the row."""
    column = _whole(table, name, str(kind), where, place) if unknown is None else table.column(name)
    if kind == pa.uint64() and _is_text(column.type):
        hint = " (--ids text reads ids that are texts)" if name in ID_COLUMNS else ""
        raise LogError(f"{where}: column {name} holds texts, not integers{hint}")
    is_rounded = kind == pa.uint64() and pa.types.is_floating(column.type)
    if is_rounded or (pa.types.is_integer(kind) and pa.types.is_temporal(column.type)):
        rule = "a float cannot hold every id" if is_rounded else "write Unix seconds"
        raise LogError(f"{where}: column {name} holds {column.type}, not integers: {rule}")
    try:
        column = column.cast(kind)
        values: NDArray[Any] = (column if unknown is None else column.fill_null(unknown)).to_numpy()
    except pa.ArrowException as error:
        at = place(_first_unfit(column, kind)) if place else where
        raise LogError(f"{at}: column {name} does not fit {kind}: {error}") from error
    return values


def flags_of(
    table: pa.Table, name: str, where: str, place: Place | None = None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """A column that says of each row whether an action was taken, and where it is null, which is unknown; bool `[n]` both, False where
    unknown. Raises LogError."""
    column = table.column(name)
    unknown: NDArray[np.bool_] = column.is_null().to_numpy()
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if is_number and (problem := problem_of_flags(column.fill_null(0).to_numpy())):  # else any but 0 is true
        at = place(problem[0]) if place else where
        raise LogError(f"{at}: column {name} {problem[1]}, in every row; null says that it is unknown")
    try:
        taken: NDArray[np.bool_] = column.cast(pa.bool_()).fill_null(False).to_numpy()
    except pa.ArrowException as error:
        raise LogError(f"{where}: column {name} does not fit bool: {error}") from error
    return taken, unknown


def texts_of(table: pa.Table, name: str, where: str, place: Place | None = None) -> pa.DictionaryArray:
    """A column of text ids, dictionary-encoded: each text is stored once. Raises LogError."""
    column = _whole(table, name, "string", where, place)
    if not _is_text(column.type):
        raise LogError(f"{where}: column {name} holds {column.type}, not texts, which its ids are")
    coded = column.cast(pa.large_string()).combine_chunks().dictionary_encode()
    for number, text in enumerate(coded.dictionary.to_pylist()):
        if not is_text_id(text):
            at = place(int((coded.indices.to_numpy() == number).argmax())) if place else where
            raise LogError(f"{at}: column {name} holds {text[:60]!r}; an id {TEXT_RULE}")
    return coded


def hashed(texts: pa.DictionaryArray) -> NDArray[np.uint64]:
    """The 64-bit ids that a model reads for these texts, uint64 `[n]`."""
    ids: NDArray[np.uint64] = text_ids(texts.dictionary.to_pylist())[texts.indices.to_numpy()]
    return ids


def ids_of(table: pa.Table, name: str, kind: IdKind, where: str, place: Place | None = None) -> NDArray[np.uint64]:
    """A column of ids of this kind, as a model reads them. Raises LogError."""
    if kind == "text":
        return hashed(texts_of(table, name, where, place))
    return column_of(table, name, pa.uint64(), where, place=place)


def _whole(table: pa.Table, name: str, kind: str, where: str, place: Place | None) -> pa.ChunkedArray:
    if table.schema.get_field_index(name) < 0:  # `column_names` makes a list of all of them
        raise LogError(f"{where} lacks the column {name} ({kind})")
    column = table.column(name)
    if column.null_count:
        rule = "every row needs an id" if name in ID_COLUMNS else "write 0 for unknown"
        at = place(pc.index(column.is_null(), True).as_py()) if place else where
        raise LogError(f"{at}: column {name} has {column.null_count} nulls; {rule}")
    return column


def _first_unfit(column: pa.ChunkedArray, kind: pa.DataType) -> int:
    """The first row whose value does not fit a type, by halving."""
    first, rest = 0, column
    while len(rest) > 1:
        half = len(rest) // 2
        try:
            rest.slice(0, half).cast(kind)
            first, rest = first + half, rest.slice(half)
        except pa.ArrowException:
            rest = rest.slice(0, half)
    return first


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
