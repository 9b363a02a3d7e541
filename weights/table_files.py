"""Opens tables of ids (impression logs, the posts of a corpus) in Parquet, JSON lines or CSV, and reads them in pieces.

A table is a file or a directory of files, here or at an fsspec address such as `s3://bucket/log`. JSON lines and CSV may be compressed with
gzip or zstd. The columns are checked by `weights.tables`.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.fs
import pyarrow.json
import pyarrow.parquet as pq

from weights.git_lfs import pointer_problem
from weights.tables import CODES, Place, TableError, is_text, json_error, json_problem

FORMATS = {".parquet": "Parquet", ".csv": "CSV", **dict.fromkeys((".json", ".jsonl", ".ndjson"), "JSON lines")}
"""The format of a file by the end of its name, before that of a compression."""
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
COMPRESSION_MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
"""How the bytes of a compressed file begin, by the end of its name."""
OTHER_COMPRESSIONS = (".bz2", ".xz", ".zip", ".lz4", ".br", ".snappy")
PARQUET_MAGIC = b"PAR1"
UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
"""What often separates the values of a text that is called CSV."""
CHECKED_BYTES = 1024
"""How much of a file is read to know its format, and whether it is empty."""
ADDRESS = re.compile(r"[a-z][a-z0-9+.-]+://?")
LINES_AT_ONCE = 4096
OURS = b"phoenix_ranker."
"""How the keys of the metadata begin that say something about a table; others say who wrote it."""
SHORT_FLOATS = (pa.float16(), pa.float32())
"""They cannot hold every time."""
BATCH_ROWS = 65_536
MOST_TEXT_BYTES = 65_536
OPEN_QUOTE = "is there a quotation mark that is opened and not closed?"
BLOCK_BYTES = 2**20
"""How much text is parsed at a time, at least the longest line. The first block tells the columns and their types."""

Unchanged = list[tuple[str, int, int | str | None]]
"""Path, size in bytes and mark of each file: its modification time in nanoseconds, or what else its file system says that changes with it;
None if it says nothing."""
MARKS = {"etag", "lastmodified", "updated", "modified", "generation", "md5hash", "contentmd5", "digest"}
"""What fsspec's file systems call what changes with a file, in small letters alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A file of a table. `open_batches()` reads it; `rows`: None until they are counted."""

    path: str
    format: str
    schema: pa.Schema
    open_batches: Callable[[list[str] | None], Iterator[pa.RecordBatch]]
    rows: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _File:
    """A file to open. `columns` and `may_lack` as in `open_table`; `first`: the columns of the first file, None for that one itself."""

    filesystem: pa.fs.FileSystem
    path: str
    columns: Mapping[str, pa.DataType]
    first: pa.Schema | None
    may_lack: Collection[str] | None

    def open(self) -> pa.NativeFile:
        """Its bytes as they are, at any place."""
        return self.filesystem.open_input_file(self.path)

    def stream(self) -> pa.NativeFile:
        """Its text, decompressed.

        Do not close it under a reader of JSON or CSV, which reads ahead in a thread of its own: that thread would go on with the
        descriptor's number, and take the next file's bytes. It closes itself when the reader and its thread have let go of it.
        """
        return self.filesystem.open_input_stream(self.path, compression=COMPRESSIONS.get(Path(self.path).suffix))


@dataclass(slots=True, eq=False)
class Table:
    """A table on disk or at an address. `schema`: of all files, texts as `string`; `files`: in the order in which they are read."""

    schema: pa.Schema
    pieces: list[Piece]
    filesystem: pa.fs.FileSystem
    _counts: dict[str, int] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """The paths of the files."""
        return [piece.path for piece in self.pieces]

    def count_rows(self) -> int:
        """The number of rows. Parquet and JSON lines know it; CSV is read to count. Raises TableError."""
        return sum(map(self.rows_of, self.pieces))

    def rows_of(self, piece: Piece) -> int:
        """The number of rows of one of the files. Raises TableError."""
        if piece.rows is not None:
            return piece.rows
        if piece.path not in self._counts:
            with _readable(piece.path, piece.format):
                self._counts[piece.path] = sum(map(len, piece.open_batches(None)))
        return self._counts[piece.path]

    def batches(self, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows in batches, in their order; all columns if `columns` is None. Raises TableError."""
        fields = [self.schema.field(name) for name in columns or self.schema.names]
        schema = pa.schema(fields, self.schema.metadata)
        for piece in self.pieces:
            there = [name for name in schema.names if name in piece.schema.names]
            absent = [one for one in schema if one.name not in there]
            with _readable(piece.path, piece.format):
                for batch in piece.open_batches(there):
                    for one in absent:
                        batch = batch.append_column(one.name, pa.nulls(len(batch), one.type))
                    ordered = batch.select(schema.names)
                    if ordered.schema.types == schema.types:
                        yield pa.RecordBatch.from_arrays(ordered.columns, schema=schema)
                    else:
                        yield ordered.cast(schema)

    def to_table(self) -> pa.Table:
        """All rows. Raises TableError."""
        return pa.Table.from_batches([*self.batches()], self.schema)


def open_table(
    path: Path | str,
    columns: Mapping[str, pa.DataType],
    *,
    in_every_row: bool = False,
    may_lack: Collection[str] | None = None,
) -> Table:
    """Open a file, or a directory of files and directories, for reading in pieces. `columns`: types of these columns in JSON lines and CSV.
    `in_every_row`: the first line of JSON must have every field that a later one has. `may_lack`: if given, columns that are not in
    `columns` are passed over, and these may be absent from some files or lines.

    Raises TableError, also for columns that the first file, or the first part of JSON lines, lacks: they would be lost. And for columns of
    which files have types that have none in common without loss. Names that begin with a dot are passed over, and so are those that begin
    with an underscore, unless they end as a table does. Beside others, files that are empty but for blanks are passed over too.
    """
    filesystem, place = filesystem_of(path)
    infos = _files(filesystem, place, str(path))
    formats = {info.path: _format_of(filesystem, info.path) for info in infos}
    formats = {file: kind for file, kind in formats.items() if kind}
    if not formats:
        raise TableError(f"{infos[0].path} is empty: remove it")
    if len(set(formats.values())) > 1:
        first = {kind: file for file, kind in reversed(formats.items())}
        names = " and ".join(f"{kind} ({file})" for kind, file in sorted(first.items()))
        raise TableError(f"{path} holds files of several formats, {names}: put one format into a directory")
    pieces: list[Piece] = []
    for file_path, kind in formats.items():
        with _readable(file_path, kind):
            open_piece = {"Parquet": _parquet, "CSV": _csv, "JSON lines": _json_lines}[kind]
            file = _File(filesystem, file_path, columns, pieces[0].schema if pieces else None, may_lack)
            pieces.append(open_piece(file))
            if in_every_row and kind == "JSON lines":
                _check_first_line(file, pieces[0].schema)
        if pieces[-1].schema.metadata != pieces[0].schema.metadata:
            raise TableError(
                f"of {file_path} and {pieces[0].path}, one alone holds the hashes of texts: read them apart"
            )
        if late := set(pieces[-1].schema.names) - {*pieces[0].schema.names, *(may_lack or ())}:
            raise TableError(f"{file_path} has columns that {pieces[0].path} lacks: {', '.join(sorted(late))}")
        if lost := set(pieces[0].schema.names) - {*pieces[-1].schema.names, *(may_lack or ())}:
            raise TableError(f"{file_path} lacks the columns {', '.join(sorted(lost))}, which {pieces[0].path} has")
    for piece in pieces:
        if problem := _names_problem(piece.schema.names):
            raise TableError(f"{piece.path}{problem}")
    return Table(_common_schema(pieces, columns), pieces, filesystem)


def _common_schema(pieces: list[Piece], columns: Mapping[str, pa.DataType]) -> pa.Schema:
    """The columns of the files with types that hold the values of all, and with columns that may have nulls. Raises TableError."""
    fields = []
    for name in dict.fromkeys(name for piece in pieces for name in piece.schema.names):
        common, named_by = pa.null(), ""
        for piece in pieces:
            if name not in piece.schema.names:
                continue
            kind = _plain(piece.schema.field(name).type)
            joined = _common_type(common, kind, columns.get(name))
            if joined is None:
                raise TableError(
                    f"{piece.path}: column {name} holds {kind}, and that of {named_by} {common}: write one type in all files"
                )
            if joined != common or not named_by:
                common, named_by = joined, piece.path
        fields.append(pa.field(name, common))
    return pa.schema(fields, pieces[0].schema.metadata)


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type, or the one that stands for it: whoever wrote a file chose among several of texts and of lists."""
    kinds = pa.types
    if is_text(kind):
        return pa.string()
    if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type))
    return kind


def _common_type(one: pa.DataType, other: pa.DataType, declared: pa.DataType | None) -> pa.DataType | None:
    """The type that holds the values of both; None if there is none. Nulls alone fit any type.

    `declared`: that of the column, if it has one; else it may say yes and no, also as 1 and 0.
    """
    kinds = pa.types
    if one == other or kinds.is_null(other):
        return one
    if kinds.is_null(one):
        return other
    if kinds.is_list(one) and kinds.is_list(other):
        declared_inner = declared.value_type if declared is not None and kinds.is_list(declared) else declared
        inner = _common_type(one.value_type, other.value_type, declared_inner)
        return None if inner is None else pa.list_(inner)
    both = (one, other)
    numbers = [kind for kind in both if kinds.is_integer(kind) or kinds.is_floating(kind)]
    if declared is None and len(numbers) == 1 and any(map(kinds.is_boolean, both)):
        return numbers[0]
    if len(numbers) < 2:
        return None
    if all(map(kinds.is_integer, both)):
        return pa.uint64() if any(map(kinds.is_unsigned_integer, both)) else pa.int64()
    is_rounded = declared is not None and kinds.is_integer(declared) and any(kind in SHORT_FLOATS for kind in both)
    is_id = declared == pa.uint64() and any(map(kinds.is_integer, both))  # a float cannot hold every id
    return None if is_id or is_rounded else pa.float64()


def _names_problem(names: list[str]) -> str:
    """What is wrong with the names of a file's columns, to follow the file's name; empty if nothing."""
    if len(names) == 1 and (separator := next((letter for letter in SEPARATORS if letter in names[0]), "")):
        return f": its values are separated by {SEPARATORS[separator]}; separate them by commas"
    for name, count in Counter(names).items():
        if count > 1:
            return f" has several columns with the name {name[:64]!r}; the first line of CSV must hold the names"
        if name != name.strip():
            return f": the name of the column {name[:64]!r} begins or ends with a blank: rename it"
    return ""


def place_of(source: Table, row: int) -> str:
    """Where row `row` of a table is, for people, who count from 1: `log.jsonl, line 7` or `log.parquet, row 7`."""
    for piece in source.pieces:
        if row < (rows := source.rows_of(piece)):
            return f"{piece.path}, {'line' if piece.format == 'JSON lines' else 'row'} {row + 1}"
        row -= rows
    raise IndexError(row)


def files_of(source: Table) -> Unchanged:
    """Path, size in bytes and mark of each file, as they are now."""
    if isinstance(source.filesystem, pa.fs.PyFileSystem):
        source.filesystem.handler.fs.invalidate_cache()
    infos = source.filesystem.get_file_info(source.files)
    return [(info.path, info.size, info.mtime_ns or _mark_of(source.filesystem, info.path)) for info in infos]


def _mark_of(filesystem: pa.fs.FileSystem, path: str) -> str | None:
    """What an fsspec file system says that changes with a file; None if it says nothing."""
    if not isinstance(filesystem, pa.fs.PyFileSystem):
        return None
    remote = filesystem.handler.fs
    said = {name: value for name, value in remote.info(path).items() if re.sub("[^a-z0-9]", "", name.lower()) in MARKS}
    if not any(said.values()):
        with suppress(NotImplementedError):
            said = {"modified": remote.modified(path)}
    return json.dumps(said, default=str, sort_keys=True) if any(said.values()) else None


def check_unchanged(source: Table, before: Unchanged) -> None:
    """Raises TableError if a file is not as it was when `files_of` gave this."""
    if changed := [file for file, then, now in zip(source.files, before, files_of(source), strict=True) if now != then]:
        raise TableError(f"{changed[0]} was changed while it was read: begin again, in another place")


def tables_of(source: Table, rows: int, columns: list[str] | None = None) -> Iterator[tuple[pa.Table, Place]]:
    """Yield a table in pieces of about `rows` rows, each with what names one of its rows; all columns if `columns` is None.

    Raises TableError.
    """
    batches: list[pa.RecordBatch] = []
    before = 0
    for batch in source.batches(columns):
        batches.append(batch)
        if (count := sum(map(len, batches))) >= rows:
            yield pa.Table.from_batches(batches), partial(_place_behind, source, before)
            batches, before = [], before + count
    if batches:
        yield pa.Table.from_batches(batches), partial(_place_behind, source, before)


def _place_behind(source: Table, before: int, row: int) -> str:
    return place_of(source, before + row)


def filesystem_of(path: Path | str) -> tuple[pa.fs.FileSystem, str]:
    """The file system of a path or an fsspec address, and the place there. Raises TableError for an address that cannot be opened.

    A `Path` has lost one of the slashes of an address: `s3:/bucket/log` is `s3://bucket/log`.
    """
    text = str(path)
    if not (scheme := ADDRESS.match(text)):
        return pa.fs.LocalFileSystem(), text
    import fsspec

    address = scheme[0].rstrip("/") + "//" + text[scheme.end() :]
    if scheme[0].startswith("file:"):
        address = scheme[0].rstrip("/") + "///" + text[scheme.end() :].lstrip("/")
    try:
        remote, place = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError, OSError) as error:
        raise TableError(f"{address} cannot be opened: {str(error).splitlines()[0]}") from error
    return pa.fs.PyFileSystem(pa.fs.FSSpecHandler(remote)), place


def has_directory(path: Path | str, name: str) -> bool:
    """Whether the directory at a path or an fsspec address holds a directory of this name; a file holds none. Raises TableError for an
    address that cannot be opened."""
    filesystem, place = filesystem_of(path)
    try:
        return filesystem.get_file_info(f"{place.rstrip('/')}/{name}").type is pa.fs.FileType.Directory
    except NotADirectoryError:  # of a file at file://
        return False


def _files(filesystem: pa.fs.FileSystem, place: str, path: str) -> list[pa.fs.FileInfo]:
    """The files of a table, by name. Raises TableError if there are none."""
    try:
        info = filesystem.get_file_info(place)
        if info.type is pa.fs.FileType.NotFound:
            raise TableError(f"{path} is not there")
        if info.is_file:
            return [info]
        inner = filesystem.get_file_info(pa.fs.FileSelector(place, recursive=True))
    except TableError:
        raise
    except OSError as error:
        raise TableError(f"{path} cannot be opened: {str(error).splitlines()[0]}") from error
    depth = len(place.rstrip("/")) + 1
    files = [info for info in inner if info.is_file and _is_data(info.path[depth:])]
    if not files:
        raise TableError(f"{path} holds no Parquet files, JSON lines or CSV")
    return sorted(files, key=lambda info: info.path)


def _is_data(path: str) -> bool:
    """Whether a file of a directory is to be read: not what Spark and others leave beside their data, such as `_SUCCESS`."""
    *directories, name = path.split("/")
    if any(part.startswith((".", "_")) for part in directories) or name.startswith("."):
        return False
    return not name.startswith("_") or _named_format(name) != ""


def _named_format(path: str) -> str:
    """The format that the name of a file says; empty if it says none."""
    name = Path(path)
    suffix = Path(name.stem).suffix if name.suffix in COMPRESSIONS else name.suffix
    return FORMATS.get(suffix, "")


def _format_of(filesystem: pa.fs.FileSystem, path: str) -> str:
    """The format by the name of a file and its first bytes; empty for a table of no text but blanks. Raises TableError, which says what to
    do, for a file that is no table."""
    with _readable(path, "Parquet"), filesystem.open_input_stream(path, compression=None) as opened:
        head = opened.read(CHECKED_BYTES)
    if problem := pointer_problem(head):
        raise TableError(f"{path} {problem}")
    if not head:
        if _named_format(path) in ("JSON lines", "CSV"):  # whoever writes Parquet closes it with a footer
            return ""
        raise TableError(f"{path} is empty: remove it")
    if head.startswith(PARQUET_MAGIC):
        return "Parquet"
    if Path(path).suffix in OTHER_COMPRESSIONS:
        raise TableError(f"{path} is compressed: unpack it first, or use gzip (.gz) or zstd (.zst)")
    if problem := _compression_problem(Path(path).suffix, head):
        raise TableError(f"{path} {problem}")
    if head.startswith(UTF_16_MARKS):
        raise TableError(f"{path} is no text in UTF-8 but in UTF-16: convert it")
    kind = _named_format(path)
    if kind in ("JSON lines", "CSV") and _is_blank(head, Path(path).suffix):
        return ""
    if kind in ("", "Parquet"):
        raise TableError(
            f"{path} is neither Parquet nor JSON lines (.jsonl) nor CSV (.csv): move it elsewhere, or convert it"
        )
    if kind == "JSON lines" and head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        raise TableError(
            f"{path}, line 1: holds a JSON array; write one object in each line, without brackets and commas"
        )
    return kind


def _compression_problem(suffix: str, head: bytes) -> str:
    """What is wrong with the end of a file's name, for a file that begins with these bytes; empty if nothing."""
    for end, magic in COMPRESSION_MAGIC.items():
        if head.startswith(magic) and suffix != end:
            return f"is compressed with {COMPRESSIONS[end]}, but its name does not end in {end}: rename it"
    if suffix in COMPRESSION_MAGIC and not head.startswith(COMPRESSION_MAGIC[suffix]):
        return f"is not compressed with {COMPRESSIONS[suffix]}, but its name ends in {suffix}: rename it"
    return ""


def _is_blank(head: bytes, suffix: str) -> bool:
    """Whether a file that begins with these CHECKED_BYTES or fewer, and whose name ends so, has no text but blanks."""
    content = head
    if kind := COMPRESSIONS.get(suffix):
        try:
            content = pa.CompressedInputStream(pa.BufferReader(head), kind).read(CHECKED_BYTES)
        except (OSError, pa.ArrowException):  # whoever reads the file says what is wrong with it
            return False
    return max(len(head), len(content)) < CHECKED_BYTES and not content.removeprefix(codecs.BOM_UTF8).strip()


@contextmanager
def _readable(path: str, kind: str) -> Iterator[None]:
    """Turn what a library says about a file into a TableError that names the file."""
    try:
        yield
    except TableError:
        raise
    except UnicodeDecodeError as error:
        raise TableError(f"{path} cannot be read as {kind}: it is no text in UTF-8; convert it") from error
    except (OSError, EOFError, pa.ArrowException) as error:
        reason = str(error).rpartition("': ")[2]  # pyarrow says first, twice, which file it is
        if "magic bytes not found in footer" in reason:
            reason = "its end is not that of a Parquet file; it may be cut off"
        raise TableError(f"{path} cannot be read as {kind}: {reason}") from error


def _check_lines(file: _File, options: pyarrow.json.ParseOptions) -> None:
    """Raises TableError for the first line of JSON that cannot be read, and repeats no value."""
    number = 0
    with file.stream() as opened:
        text = io.BufferedReader(opened)
        while lines := list(islice(text, LINES_AT_ONCE)):
            if json_error(b"".join(lines), options):
                good, bad = 0, len(lines)  # the first `good` lines can be read, the first `bad` cannot
                while bad - good > 1:
                    middle = (good + bad) // 2
                    is_good = not json_error(b"".join(lines[:middle]), options)
                    good, bad = (middle, bad) if is_good else (good, middle)
                problem = json_problem(lines[good], lines[:good], options)
                raise TableError(f"{file.path}, line {number + bad}: {problem}")
            number += len(lines)


def _parquet(file: _File) -> Piece:
    with pq.ParquetFile(file.open()) as opened:
        schema, rows = opened.schema_arrow, opened.metadata.num_rows

    def batches(names: list[str] | None) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(file.open()) as opened:
            yield from opened.iter_batches(BATCH_ROWS, columns=names, use_threads=False)

    ours = {key: value for key, value in (schema.metadata or {}).items() if key.startswith(OURS)}
    fields = [pa.field(one.name, one.type) for one in schema if file.may_lack is None or one.name in file.columns]
    return Piece(file.path, "Parquet", pa.schema(fields, ours or None), batches, rows)


def _json_lines(file: _File) -> Piece:
    first = file.first
    if first is None:  # pyarrow guesses types from the first block, and integers above 2^63 as floats
        try:
            if file.may_lack is None:
                with pyarrow.json.open_json(file.stream(), _json_reading()) as reader:
                    schema = reader.schema
            else:
                schema = _schema_of_lines(file)
            lacking = [pa.field(name, file.columns[name]) for name in file.may_lack or () if name not in schema.names]
            first = pa.schema([*(_declared(one, file.columns) for one in schema), *lacking])
        except (pa.ArrowException, ValueError, TypeError, RecursionError):
            declared = pa.schema(list(file.columns.items()))
            _check_lines(file, pyarrow.json.ParseOptions(declared, unexpected_field_behavior="infer"))
            raise
    others = "error" if file.may_lack is None else "ignore"
    strict = pyarrow.json.ParseOptions(explicit_schema=first, unexpected_field_behavior=others)

    def batches(names: list[str] | None) -> Iterator[pa.RecordBatch]:
        with pyarrow.json.open_json(file.stream(), _json_reading(), strict) as reader:
            yield from reader

    try:
        rows = sum(map(len, batches(None)))
    except (pa.ArrowException, UnicodeDecodeError):
        _check_lines(file, strict)
        raise
    return Piece(file.path, "JSON lines", first, batches, rows)


def _schema_of_lines(file: _File) -> pa.Schema:
    """The types of these columns in the first lines, whatever is in other columns there.

    Raises pa.ArrowException, ValueError, TypeError or RecursionError for a line that is no object.
    """
    with file.stream() as opened:
        lines = io.TextIOWrapper(opened, encoding="utf-8-sig").readlines(BLOCK_BYTES)
    rows = [json.loads(line) for line in lines if line.strip()]
    kept = [json.dumps({name: row[name] for name in file.columns if name in row}) for row in rows]
    return pyarrow.json.read_json(io.BytesIO("\n".join(kept).encode())).schema if kept else pa.schema([])


def _check_first_line(file: _File, schema: pa.Schema) -> None:
    """Raises TableError if the first line lacks a field: an absent field reads as null, and a misspelt one would be two columns."""
    with file.stream() as opened:
        lines = io.TextIOWrapper(opened, encoding="utf-8-sig")  # some editors begin a file with a mark
        line = next((line for line in lines if line.strip()), "{}")
    fields = json.loads(line)
    if lost := set(schema.names) - set(fields):
        raise TableError(
            f"{file.path}, line 1: lacks the fields {', '.join(sorted(lost))}, which other lines have: write every column in every row"
        )


def _json_reading() -> pyarrow.json.ReadOptions:
    return pyarrow.json.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)


def _csv(file: _File) -> Piece:
    reading = pyarrow.csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
    open_csv = partial(pyarrow.csv.open_csv, read_options=reading, parse_options=parsing)
    with _csv_rows_named(file.path, []), open_csv(file.stream()) as reader:
        all_names = reader.schema.names  # pyarrow numbers these in what it says
        fields = [one for one in reader.schema if file.may_lack is None or one.name in file.columns]
        schema = pa.schema([one.with_type(_csv_type(one, file.columns)) for one in fields])
    types = {one.name: one.type for one in schema}
    # true and false are no 1 and 0 to the reader; `_common_schema` finds the type that holds both
    types |= {one.name: one.type for one in file.first or () if types.get(one.name) != pa.bool_()}
    # strings_can_be_null stays False: NA and null are texts like others
    strict = pyarrow.csv.ConvertOptions(column_types=types, include_columns=schema.names)

    def batches(names: list[str] | None) -> Iterator[pa.RecordBatch]:
        with (
            _csv_rows_named(file.path, all_names),
            open_csv(file.stream(), convert_options=strict) as reader,
        ):
            rows = 0
            for batch in reader:
                _check_quotes(file.path, batch, rows)
                rows += len(batch)
                yield batch

    return Piece(file.path, "CSV", schema, batches, None)


@contextmanager
def _csv_rows_named(path: str, names: list[str]) -> Iterator[None]:
    """Turn what pyarrow says about a row of CSV into a TableError that repeats no value and counts rows without the header, from 1."""
    try:
        yield
    except pa.ArrowInvalid as error:
        if misfit := re.search(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to (\w+)", str(error)):
            column, row, kind = misfit.groups()
            name = names[int(column)]
            raise TableError(
                f"{path}, row {int(row) - 1}: column {name} holds a value that does not fit {kind}"
            ) from error
        if uneven := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", str(error)):
            row, columns, cells = map(int, uneven.groups())
            raise TableError(
                f"{path}, row {row - 1}: has {cells} values for {columns} columns; it may be cut off"
            ) from error
        if "straddling object" in str(error):
            raise TableError(f"{path} has a row of more than a megabyte: {OPEN_QUOTE}") from error
        raise


def _check_quotes(path: str, batch: pa.RecordBatch, before: int) -> None:
    """Raises TableError for a text that is so long that it holds other rows. `before`: how many rows came before these."""
    for name, values in zip(batch.schema.names, batch.columns, strict=True):
        if not pa.types.is_string(values.type):
            continue
        lengths = pc.binary_length(values)
        longest = pc.max(lengths).as_py() or 0
        if longest > MOST_TEXT_BYTES:
            row = before + lengths.index(longest).as_py() + 1
            raise TableError(f"{path}, row {row}: column {name} holds {longest:,} bytes: {OPEN_QUOTE}")


def _csv_type(one: pa.Field, columns: Mapping[str, pa.DataType]) -> pa.DataType:
    """The type of a column of CSV: what is declared; a column that is not, such as an action's, says yes or no if it can."""
    kinds = pa.types
    if one.name in columns:
        texts = kinds.is_string(one.type) and not kinds.is_string(columns[one.name])
        return (
            one.type
            if texts or (kinds.is_temporal(one.type) and not kinds.is_string(columns[one.name]))
            else columns[one.name]
        )
    if kinds.is_null(one.type):
        return one.type if one.name == CODES else pa.bool_()
    return one.type


def _declared(one: pa.Field, columns: Mapping[str, pa.DataType]) -> pa.Field:
    """A field of JSON lines with its declared type, unless its values are of another kind, which is refused where they are read.

    A field that is not declared, such as an action's, and has nothing but nulls so far says yes or no. Lists that are all empty so far are
    of integers, as content codes are.
    """
    kinds, undeclared = pa.types, pa.list_(pa.int64()) if one.name == CODES else pa.bool_()
    wish = columns.get(one.name, undeclared if kinds.is_null(one.type) else one.type)
    if kinds.is_list(wish) and kinds.is_null(wish.value_type):
        return one.with_type(pa.list_(pa.int64()))
    if kinds.is_list(wish) and kinds.is_list(one.type):
        inner = one.type.value_type
        is_number = kinds.is_integer(inner) or kinds.is_floating(inner) or kinds.is_null(inner)
        return one.with_type(wish) if is_number else one
    if kinds.is_string(wish):
        fits = kinds.is_temporal(one.type)  # "2026-11-25" is a text
    else:
        fits = kinds.is_integer(one.type) or (kinds.is_floating(one.type) and wish != pa.int64())
    return one.with_type(wish) if fits or kinds.is_null(one.type) else one
