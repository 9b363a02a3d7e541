"""Checks a log of any size, sorts it on disk with DuckDB, and maps its columns. The sorted copy is kept for the next time."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from weights.errors import FULL
from weights.format.writer import written_beside
from weights.lab.training.columns import Columns, InFiles, mapped_columns
from weights.lab.training.contexts import ServedContexts, append_contexts, served_contexts
from weights.lab.training.log import NO_IMPRESSIONS, Log, action_names, check_requests, checked_columns
from weights.lab.training.texts import Texts
from weights.progress import Update
from weights.table_files import Table, check_unchanged, files_of, place_of, tables_of
from weights.tables import CODES, TableError, rows_of_lists
from weights.text_ids import IdKind

FORMAT = 2
"""Of the sorted copy: raise it when the files mean something else."""
PIECE_ROWS = 500_000
SORT_MEMORY = "1GB"
SORT_THREADS = 2
FLAGS = ("actions", "unknown")
LOG, SERVED, TEXTS = "impressions", "contexts", "texts.arrow"


def default_cache() -> Path:
    """Where sorted copies of large logs are kept: `phoenix-ranking-server/logs` in `$XDG_CACHE_HOME` or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "phoenix-ranking-server/logs"


def mapped_log(
    source: Table,
    contexts: Table | None,
    where: str,
    ids: IdKind,
    surfaces: int,
    cache: Path | None,
    progress: Update,
) -> tuple[Log, ServedContexts | None]:
    """A log whose columns are mapped from its sorted copy in `cache` (None: `default_cache()`), which is made if it is not there.

    The copy is of these files, as they are now: their paths, sizes and times. Where a file system says nothing that changes with a file,
    it is made again each time. Raises TableError, which names the file and the row, or the cache where that cannot be written.
    """
    actions = action_names(source.schema, where)
    cache = cache or default_cache()
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    of_log, of_contexts = files_of(source), files_of(contexts) if contexts else None
    described = [FORMAT, of_log, of_contexts, ids, surfaces, source.schema.names]
    copy = cache / xxhash.xxh3_128_hexdigest(json.dumps(described).encode())
    if any(mark is None for *_, mark in (*of_log, *(of_contexts or ()))):
        shutil.rmtree(copy, ignore_errors=True)
    if not copy.exists():
        with _cache_named(cache, where), written_beside(copy) as partial_copy:
            partial_copy.chmod(0o700)
            _write(partial_copy, source, contexts, where, ids, surfaces, progress)
    try:
        columns: dict[str, Any] = dict(mapped_columns(copy / LOG))
        rows = columns.pop("row")
        log = Log(**columns, action_names=actions, texts=_read_texts(copy / TEXTS, where))
        served = served_contexts(mapped_columns(copy / SERVED)) if contexts else None
    except (OSError, ValueError) as error:
        raise TableError(f"{copy} is damaged ({error}): remove it, and it is made again") from error
    check_requests(log, lambda row: place_of(source, int(rows[row])))
    return log, served


@contextmanager
def _cache_named(cache: Path, where: str) -> Iterator[None]:
    """Turn what DuckDB says, and that the disk is full, into a TableError."""
    try:
        yield
    except (duckdb.Error, OSError) as error:
        if isinstance(error, OSError) and error.errno not in FULL:
            raise
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error).splitlines()[0]
        raise TableError(
            f"{cache} cannot take the sorted copy of {where} ({reason}): make room there, or name another place with --cache"
        ) from error


def _write(
    copy: Path, source: Table, contexts: Table | None, where: str, ids: IdKind, surfaces: int, progress: Update
) -> None:
    """Write the sorted copy of a log. Raises TableError."""
    before, rows = files_of(source), source.count_rows()
    if not rows:
        raise TableError(NO_IMPRESSIONS.format(where))
    sorting = copy / "sorting"
    sorting.mkdir()
    settings: dict[str, Any] = {
        "memory_limit": SORT_MEMORY,
        "threads": SORT_THREADS,
        "temp_directory": str(sorting / "spilled"),
    }
    with duckdb.connect(sorting / "rows.duckdb", config=settings) as database:
        database.execute("SET enable_progress_bar = false")
        texts, has_unknown = list[pa.Array](), False
        for number, (columns, more) in enumerate(_pieces(source, where, ids, surfaces, rows, progress)):
            has_unknown = has_unknown or bool(columns["unknown"].any())
            texts = [pa.concat_arrays([*texts, more.texts]).unique()] if more else []
            database.register("piece", pa.table(_packed(columns)))
            database.execute(
                "INSERT INTO rows SELECT * FROM piece" if number else "CREATE TABLE rows AS SELECT * FROM piece"
            )
            database.unregister("piece")
        check_unchanged(source, before)
        actions = len(action_names(source.schema, where))
        sorted_rows = database.sql("SELECT * FROM rows ORDER BY impression_ts, request_id, row")
        (copy / LOG).mkdir()
        with InFiles(copy / LOG) as files:
            done = 0
            for batch in sorted_rows.to_arrow_reader(65_536):
                unpacked = _unpacked(batch, actions)
                if not has_unknown:
                    del unpacked["unknown"]
                files.append(unpacked)
                done += len(batch)
                progress("Sorting the log", done, rows)
    shutil.rmtree(sorting)
    if texts:
        Texts.of_texts(texts[0], where)  # refuses two of one hash now, and not each time that the copy is read
        table = pa.table({"text": texts[0]})
        with pa.OSFile(str(copy / TEXTS), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
            out.write_table(table)
    if contexts:
        (copy / SERVED).mkdir()
        with InFiles(copy / SERVED) as files:
            append_contexts(contexts, action_names(source.schema, where), files)


def _pieces(
    source: Table, where: str, ids: IdKind, surfaces: int, rows: int, progress: Update
) -> Iterator[tuple[Columns, Texts | None]]:
    """The checked columns of the log, piece by piece, each with the number of its row in the log."""
    done, levels = 0, _code_levels(source)
    for table, place in tables_of(source, PIECE_ROWS):
        columns, texts = checked_columns(table, where, ids, surfaces, place, levels)
        columns["row"] = np.arange(done, done + len(table))
        done += len(table)
        progress("Reading the log", done, rows)
        yield columns, texts


def _code_levels(source: Table) -> int:
    """How many levels of content codes some row of the log has. Raises TableError."""
    if CODES not in source.schema.names:
        return 0
    pieces = tables_of(source, PIECE_ROWS, [CODES])
    return max((rows_of_lists(table, place).shape[1] for table, place in pieces), default=0)


def _packed(columns: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """The columns with 64 actions in an integer: DuckDB sorts three of them faster than nineteen flags."""
    packed = {name: values for name, values in columns.items() if name not in (*FLAGS, CODES)}
    packed |= {f"{CODES}.{level}": columns[CODES][:, level] for level in range(columns[CODES].shape[1])}
    for name in FLAGS:
        bits = np.packbits(columns[name], 1)
        words = np.zeros((len(bits), -(-bits.shape[1] // 8) * 8), np.uint8)
        words[:, : bits.shape[1]] = bits
        packed |= {f"{name}.{place}": word for place, word in enumerate(words.view(np.uint64).T)}
    return packed


def _unpacked(batch: pa.RecordBatch, actions: int) -> Columns:
    """The columns of `_packed` as they were before."""
    columns: Columns = {}
    for name in batch.schema.names:
        if not name.startswith(tuple(f"{several}." for several in (*FLAGS, CODES))):
            columns[name] = batch.column(name).to_numpy(zero_copy_only=False)
    if levels := [name for name in batch.schema.names if name.startswith(f"{CODES}.")]:
        columns[CODES] = np.stack([batch.column(name).to_numpy(zero_copy_only=False) for name in levels], 1)
    for flags in FLAGS:
        names = [name for name in batch.schema.names if name.startswith(f"{flags}.")]
        words = np.stack([batch.column(name).to_numpy(zero_copy_only=False) for name in names], 1)
        columns[flags] = np.unpackbits(words.view(np.uint8), 1, count=actions).astype(bool)
    return columns


def _read_texts(path: Path, where: str) -> Texts | None:
    if not path.exists():
        return None
    with pa.memory_map(str(path)) as mapped:
        return Texts.of_texts(pa.ipc.open_file(mapped).read_all().column("text").combine_chunks(), where)
