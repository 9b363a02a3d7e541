"""Opens tables of ids in Parquet or JSON lines (impression logs, the posts of a corpus), reads them in pieces and checks them."""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.json
from numpy.typing import NDArray

from model.bounds import MAX_CODE_LEVELS
from weights.git_lfs import HEAD_BYTES, pointer_problem
from weights.text_ids import TEXT_RULE, IdKind, is_text_id, text_ids
from weights.values import Problem, problem_of_dwells, problem_of_flags, problem_of_stored_ids, problem_of_times

JSON_LINES = (".json", ".jsonl", ".ndjson")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4", ".br")
MARKS = ("_SUCCESS", "_metadata", "_common_metadata", "_delta_log")
"""Files without rows that Spark, pyarrow and others write beside their data."""
LINES_AT_ONCE = 4096
ID_TYPES: dict[IdKind, pa.DataType] = {"uint64": pa.uint64(), "text": pa.string()}


ID_COLUMNS = ("user_id", "post_id", "author_id", "post_ids", "author_ids")
Check = Callable[[NDArray[Any]], Problem | None]
CHECKS: dict[str, Check] = {
    **dict.fromkeys(("impression_ts", "created_at"), problem_of_times),
    **dict.fromkeys(ID_COLUMNS, problem_of_stored_ids),
    "dwell_seconds": problem_of_dwells,
}
"""How the values of a column are checked, by its name in a log or in a table of posts."""


class LogError(ValueError):
    """A table that cannot be used; the message names the file and the column."""


def open_table(path: Path, columns: Mapping[str, pa.DataType]) -> ds.FileSystemDataset:
    """Open a Parquet file, a JSON lines file (.jsonl), or a directory of either, for reading in pieces. `columns`: types of these columns
    in JSON lines.

    Raises LogError, which names the file, and in JSON lines the line; also for a file that is neither, and for columns that the first
    file, or the first megabyte of JSON lines, lacks: they would be lost.
    """
    if not path.exists():
        raise LogError(f"{path} is not there")
    files = [file for file in sorted(path.rglob("*")) if _is_data(file)] if path.is_dir() else [path]
    if not files:
        raise LogError(f"{path} holds no Parquet files")
    formats = {file: _format_of(file) for file in files}
    is_json = formats[files[0]] == "json"
    for file, form in formats.items():
        if form != formats[files[0]]:
            raise LogError(f"{file} is not of the same format as {files[0]}: Parquet and JSON lines do not mix")
    names, where = [str(file) for file in files], files[0]
    source: ds.FileSystemDataset | None = None
    try:
        source = ds.dataset(names, format="json" if is_json else "parquet")
        if is_json:  # pyarrow guesses types from the first megabyte, and integers above 2^63 as floats
            source = ds.dataset(names, pa.schema([_declared(field, columns) for field in source.schema]), "json")
        strict = pyarrow.json.ParseOptions(explicit_schema=source.schema, unexpected_field_behavior="error")
        for piece in source.get_fragments():
            where = Path(piece.path)
            if is_json:
                deque(pyarrow.json.open_json(piece.path, parse_options=strict), maxlen=0)
            elif late := set(piece.physical_schema.names) - set(source.schema.names):
                raise LogError(f"{piece.path} has columns that {source.files[0]} lacks: {', '.join(sorted(late))}")
    except (OSError, pa.ArrowException) as error:
        if is_json:
            raise _bad_json(files, columns, source) from error
        raise LogError(f"{where} cannot be read as Parquet: {_reason(error)}") from error
    for name in source.schema.names:
        if name != name.strip():
            raise LogError(f"{source.files[0]}: the name of the column {name!r} begins or ends with a blank: rename it")
    return source


def _is_data(path: Path) -> bool:
    """Whether a file of a directory is to be read: not if its name begins with a dot, or is a mark that Spark and others leave."""
    return path.is_file() and not path.name.startswith(".") and path.name not in MARKS


def _format_of(file: Path) -> str:
    """`parquet` or `json`, by a file's first bytes and its ending. Raises LogError, which says what to do, for anything else."""
    try:
        with file.open("rb") as opened:
            head = opened.read(max(HEAD_BYTES, 1024))
    except OSError as error:
        raise LogError(f"{file} cannot be read: {error.strerror}") from error
    if problem := pointer_problem(head):
        raise LogError(f"{file} {problem}")
    if head.startswith(b"PAR1"):
        return "parquet"
    if not head:
        raise LogError(f"{file} is empty: remove it")
    if head.startswith(b"\x1f\x8b") or file.suffix in COMPRESSED:
        raise LogError(f"{file} is compressed: unpack it first")
    if file.suffix not in JSON_LINES:
        raise LogError(f"{file} is neither Parquet nor JSON lines (.jsonl): move it elsewhere, or convert it")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        raise LogError(
            f"{file}, line 1: holds a JSON array; write one object in each line, without brackets and commas"
        )
    return "json"


def _bad_json(files: list[Path], columns: Mapping[str, pa.DataType], source: ds.FileSystemDataset | None) -> LogError:
    """The error for the first line of these files that cannot be read. It repeats no value. `source`: with the types of its columns, if
    they could be found out."""
    schema = pa.schema(list(columns.items())) if source is None else source.schema
    others = "infer" if source is None else "error"
    options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others)
    for file in files:
        number = 0
        with file.open("rb") as opened:
            while lines := list(islice(opened, LINES_AT_ONCE)):
                if json_error(b"".join(lines), options):
                    good, bad = 0, len(lines)  # the first `good` lines can be read, the first `bad` cannot
                    while bad - good > 1:
                        middle = (good + bad) // 2
                        is_good = not json_error(b"".join(lines[:middle]), options)
                        good, bad = (middle, bad) if is_good else (good, middle)
                    return LogError(f"{file}, line {number + bad}: {json_problem(lines[bad - 1], options)}")
                number += len(lines)
    return LogError(f"{files[0]} cannot be read as JSON lines")


def json_error(lines: bytes, options: pyarrow.json.ParseOptions) -> str:
    """What pyarrow says against these lines, empty if nothing."""
    try:
        if lines.strip():
            pyarrow.json.read_json(pa.BufferReader(lines), parse_options=options)
    except pa.ArrowException as error:
        return str(error)
    return ""


def json_problem(line: bytes, options: pyarrow.json.ParseOptions) -> str:
    """What is wrong with a line, without its values."""
    try:
        if not isinstance(json.loads(line), dict):
            return "holds no JSON object"
    except (ValueError, RecursionError):
        return "is no JSON object; it may be cut off"
    error = json_error(line, options)
    if "unexpected field" in error:
        return "has a column that the first rows lack: write every column in every row"
    name = re.search(r"Column\(/([^)]*)\)", error)
    where = f"column {name[1]}" if name else "a column"
    return f"{where} holds another type than in the rows before, or a number that does not fit"


def _reason(error: Exception) -> str:
    """What pyarrow says, less the name of the file, which it repeats."""
    return str(error).rpartition("': ")[2]


def _declared(field: pa.Field, columns: Mapping[str, pa.DataType]) -> pa.Field:
    """A field of JSON lines with its declared type, unless its values are of another kind, which is refused where they are read."""
    wanted, is_ = columns.get(field.name, field.type), pa.types
    if is_.is_string(wanted):
        fits = is_.is_temporal(field.type)  # "2026-11-25" is a text
    else:
        fits = is_.is_integer(field.type) or (is_.is_floating(field.type) and wanted != pa.int64())
    return field.with_type(wanted) if fits or is_.is_null(field.type) else field


def check_values(
    columns: Mapping[str, NDArray[Any]], place: Callable[[int], str], checks: Mapping[str, Check] = CHECKS
) -> None:
    """Raises LogError for the first value in these columns, by name, that a request may not have either. `place` names a row."""
    for name, column in columns.items():
        if name in checks and (problem := checks[name](column)):
            raise LogError(f"{place(problem[0])}: {name} {problem[1]}")


def place_of(source: ds.FileSystemDataset, row: int) -> str:
    """Where row `row` of a table is, for people, who count from 1: `log.jsonl, line 7` or `log.parquet, row 7`."""
    for piece in source.get_fragments():
        if row < (rows := piece.count_rows()):
            return f"{piece.path}, {'line' if piece.path.endswith(JSON_LINES) else 'row'} {row + 1}"
        row -= rows
    raise IndexError(row)


def files_of(source: ds.FileSystemDataset) -> list[tuple[str, int, int]]:
    """Path, size in bytes and modification time of each file."""
    return [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in source.files]


def check_unchanged(source: ds.FileSystemDataset, before: list[tuple[str, int, int]]) -> None:
    """Raises LogError if a file is not as it was when `files_of` gave this."""
    if changed := [file for file, then, now in zip(source.files, before, files_of(source), strict=True) if now != then]:
        raise LogError(f"{changed[0]} was changed while it was read: begin again, in another place")


def tables_of(source: ds.FileSystemDataset, rows: int, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Yield a table in pieces of about `rows` rows; all columns if `columns` is None. Raises LogError."""
    batches: list[pa.RecordBatch] = []
    try:
        for batch in source.to_batches(columns=columns, batch_readahead=2, fragment_readahead=1):
            batches.append(batch)
            if sum(map(len, batches)) >= rows:
                yield pa.Table.from_batches(batches)
                batches = []
    except (OSError, pa.ArrowException) as error:
        raise LogError(f"{_unreadable(source)} cannot be read: {_reason(error)}") from error
    if batches:
        yield pa.Table.from_batches(batches)


def _unreadable(source: ds.FileSystemDataset) -> str:
    """The first file of a table that cannot be read to its end."""
    for piece in source.get_fragments():
        try:
            deque(piece.to_batches(schema=source.schema), maxlen=0)
        except (OSError, pa.ArrowException):
            return str(piece.path)
    return str(source.files[0])


Place = Callable[[int], str]
"""Names a row of a table for people: its file, and its number there, from 1."""
Where = str | Callable[[int], str]
"""What errors name: a table, or the place of one of its rows."""


def column_of(
    table: pa.Table, name: str, kind: pa.DataType, where: Where, unknown: int | str | None = None
) -> NDArray[Any]:
    """A column as a numpy array. Nulls become `unknown`, or are refused if that is None. Raises LogError, which names the table or row
    `where`, and repeats no value."""
    column = _whole(table, name, str(kind), where) if unknown is None else table.column(name)
    is_integer = pa.types.is_integer(kind)
    if is_integer and _is_text(column.type):
        hint = " (--ids text reads ids that are texts)" if name in ID_COLUMNS else ""
        raise LogError(f"{_at(where)}: column {name} holds texts, not integers{hint}")
    if is_integer and pa.types.is_boolean(column.type):
        raise LogError(f"{_at(where)}: column {name} holds true and false, not integers")
    is_rounded = kind == pa.uint64() and pa.types.is_floating(column.type)
    if is_rounded or (is_integer and pa.types.is_temporal(column.type)):
        rule = "a float cannot hold every id" if is_rounded else "write Unix seconds"
        raise LogError(f"{_at(where)}: column {name} holds {column.type}, not integers: {rule}")
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if kind == pa.bool_() and is_number and (problem := problem_of_flags(column.to_numpy())):  # else any but 0 is true
        raise LogError(f"{_at(where, problem[0])}: column {name} {problem[1]}, in every row")
    try:
        cast = column.cast(kind)
        values: NDArray[Any] = (cast if unknown is None else cast.fill_null(unknown)).to_numpy()
    except pa.ArrowException as error:
        row = _first_misfit(column, kind)
        raise LogError(f"{_at(where, row)}: column {name} does not fit {kind}; it holds {column.type}") from error
    return values


def flags_of(table: pa.Table, name: str, where: Where) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """A column that says of each row whether an action was taken, and where it is null, which is unknown; bool `[n]` both, False where
    unknown. Raises LogError."""
    column = table.column(name)
    unknown: NDArray[np.bool_] = column.is_null().to_numpy()
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if is_number and (problem := problem_of_flags(column.fill_null(0).to_numpy())):  # else any but 0 is true
        raise LogError(
            f"{_at(where, problem[0])}: column {name} {problem[1]}, in every row; null says that it is unknown"
        )
    try:
        taken: NDArray[np.bool_] = column.cast(pa.bool_()).fill_null(False).to_numpy()
    except pa.ArrowException as error:
        row = _first_misfit(column, pa.bool_())
        raise LogError(f"{_at(where, row)}: column {name} does not fit bool; it holds {column.type}") from error
    return taken, unknown


def rows_of_lists(table: pa.Table, name: str, where: Where, levels: int = 0) -> NDArray[np.int64]:
    """A column of lists of content codes as rows, int64 `[n, q]`: q is that of the longest list, at least `levels`, and shorter lists get
    zeros. A null is an empty list. Raises LogError."""
    column = table.column(name).combine_chunks()
    is_list = (
        pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type)
    )
    if not is_list and not pa.types.is_null(column.type):
        raise LogError(f"{_at(where)}: column {name} holds {column.type}, not lists of integers")
    try:
        lists = column.cast(pa.list_(pa.int64()))
    except pa.ArrowException as error:
        raise LogError(f"{_at(where)}: column {name} does not fit lists of integers: {error}") from error
    lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = lists.flatten()
    if values.null_count:
        raise LogError(f"{_at(where)}: column {name} has nulls in its lists; write 0 for none")
    longest = int(lengths.max(initial=0))
    if longest > MAX_CODE_LEVELS:
        raise LogError(
            f"{_at(where)}: column {name} holds a list of {longest} codes, at most {MAX_CODE_LEVELS} are read"
        )
    rows = np.zeros((len(lengths), max(longest, levels)), np.int64)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = values.to_numpy(zero_copy_only=False)
    return rows


def texts_of(table: pa.Table, name: str, where: Where) -> pa.DictionaryArray:
    """A column of text ids, dictionary-encoded: each text is stored once. Raises LogError."""
    column = _whole(table, name, "string", where)
    if not _is_text(column.type):
        raise LogError(f"{_at(where)}: column {name} holds {column.type}, not texts, which its ids are")
    coded = column.cast(pa.large_string()).combine_chunks().dictionary_encode()
    for code, text in enumerate(coded.dictionary.to_pylist()):
        if not is_text_id(text):
            row = int(np.argmax(coded.indices.to_numpy() == code))
            raise LogError(f"{_at(where, row)}: column {name} holds a text that is no id; an id {TEXT_RULE}")
    return coded


def _at(where: Where, row: int = 0) -> str:
    return where if isinstance(where, str) else where(row)


def _first_misfit(column: pa.ChunkedArray, kind: pa.DataType) -> int:
    """The first row whose value cannot be cast to `kind`; one of them cannot."""
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
    """A column of ids of this kind, as a model reads them. Raises LogError."""
    return hashed(texts_of(table, name, where)) if kind == "text" else column_of(table, name, pa.uint64(), where)


def _whole(table: pa.Table, name: str, kind: str, where: Where) -> pa.ChunkedArray:
    if table.schema.get_field_index(name) < 0:  # `column_names` makes a list of all of them
        raise LogError(f"{_at(where)} lacks the column {name} ({kind})")
    column = table.column(name)
    if column.null_count:
        rule = "every row needs an id" if name in ID_COLUMNS else "write 0 (or false) for unknown"
        row = int(np.argmax(column.is_null().to_numpy()))
        raise LogError(f"{_at(where, row)}: column {name} has {column.null_count} nulls; {rule}")
    return column


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))
