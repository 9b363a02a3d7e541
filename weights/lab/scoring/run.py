"""Scores a log that need not fit into memory: split by user, one partition at a time. A run that was killed goes on where it stopped.

`OUT/part-00000.parquet …` are scores, each renamed into place when complete. `OUT/run.json` says which run they are of.
`OUT/.split` holds the split log until all of it is scored.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from model.exploration import finalised
from weights.format.manifest import Manifest
from weights.format.writer import alone_in, name_whole, named, write_whole
from weights.lab.scoring.scorer import NAMING, Scorer
from weights.lab.training.contexts import open_contexts
from weights.lab.training.log import action_names, checked_columns, kind_of, open_log
from weights.progress import Update
from weights.table_files import Table, Unchanged, check_unchanged, files_of, tables_of
from weights.tables import Place, TableError

PARTITION_ROWS = 500_000
ROUND_ROWS = 1_000_000
"""Rows read before they are written to their partitions: the number that splitting holds in memory."""
MAX_PARTITIONS = 500  # files open at once while the log is split


class RunError(ValueError):
    """The output directory belongs to another run or holds something else; the message says what differs."""


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that determines the output's bytes. `log`: path, size in bytes and modification time of each file."""

    log: Unchanged
    rows: int
    partitions: int
    since_ts: int
    columns: list[str]
    checkpoint: str


def score_log(
    log: Path,
    out: Path,
    scorer: Scorer,
    since_ts: int = 0,
    partitions: int = 0,
    progress: Update = lambda what, done, total: None,
) -> int:
    """Score the requests of a log (a file or a directory) from `since_ts` on. Return the number of rows written. Histories are those of
    the log's rows.

    `partitions` 0: enough to keep each near PARTITION_ROWS. Parts that a killed run finished are kept.
    Raises TableError, EngineError, RunError if `out` holds something else, or BlockingIOError if another process writes there.
    """
    if open_contexts(log):
        raise TableError(
            f"{log} has contexts as served, which are not read here: give {log}/impressions, and histories are made from its rows"
        )
    source = open_log(log, scorer.manifest.ids)
    action_names(source.schema, str(log))
    schema = scorer.schema(kind_of(source.schema, str(log), scorer.manifest.ids))
    rows = source.count_rows()
    if not rows:
        raise TableError(f"{log} holds no impressions")
    run = Run(
        files_of(source),
        rows,
        partitions or min(MAX_PARTITIONS, -(-rows // PARTITION_ROWS)),
        since_ts,
        schema.names,
        scorer.manifest.digest,
    )
    parts, split = [out / f"part-{number:05}.parquet" for number in range(run.partitions)], out / ".split"
    with alone_in(out), _given_back(out, parts):
        _claim(out, run)
        todo = {part: split / f"{part.stem}.arrow" for part in parts if not part.exists()}
        if not all(piece.exists() for piece in todo.values()):
            _split(source, split, run, scorer.manifest, progress)
        tables = {part: _read(piece) for part, piece in todo.items()}  # mapped, not read
        done = rows - sum(map(len, tables.values()))
        for part, table in tables.items():
            if len(table):
                scored = scorer.score(scorer.prepare(table, since_ts, str(log)), _beyond(progress, done, rows))
            else:
                scored = schema.empty_table()
            write_whole(part, partial(_write, scored))
            done += len(table)
        shutil.rmtree(split, ignore_errors=True)
        return sum(pq.read_metadata(part).num_rows for part in parts)


def partition_of(user_ids: NDArray[np.uint64], partitions: int) -> NDArray[np.int64]:
    """The partition of each user's rows: the same in every run, and even for any ids."""
    return (finalised(user_ids) % np.uint64(partitions)).astype(np.int64)


def _beyond(progress: Update, before: int, rows: int) -> Callable[[int], None]:
    def with_rows_before(scored: int) -> None:
        progress("Scoring", before + scored, rows)

    return with_rows_before


@contextmanager
def _given_back(out: Path, parts: list[Path]) -> Iterator[None]:
    """Remove what the run wrote to `out` if the log is refused before a part is finished: then the mended log can be scored there."""
    try:
        yield
    except TableError:
        if not any(part.exists() for part in parts):
            for left in (out / ".split", out / ".split.new"):
                shutil.rmtree(left, ignore_errors=True)
            (out / "run.json").unlink(missing_ok=True)
            with suppress(OSError):
                out.rmdir()
        raise


def _claim(out: Path, run: Run) -> None:
    """Write the description of the run to `out`, or check that it is already there. Raises RunError."""
    description, file = json.loads(json.dumps(asdict(run))), out / "run.json"
    if not file.exists():
        if not all(path.name.startswith(f".{file.name}.") for path in out.iterdir()):  # those are of a killed run
            raise RunError(f"{out} holds something else: choose another place")
        write_whole(file, lambda new: new.write_text(json.dumps(description, indent=1)))
    try:
        written: Any = json.loads(file.read_bytes())
    except ValueError:
        written = None
    if not isinstance(written, dict):
        raise RunError(f"{out} holds something else: choose another place")
    if differing := [name for name in description if written.get(name) != description[name]]:
        raise RunError(f"{out} belongs to another run ({', '.join(differing)} differ): choose another place")


def _split(source: Table, split: Path, run: Run, manifest: Manifest, progress: Update) -> None:
    """Check the values of the log, and write the rows of each user to one file. After a kill, the next run starts this again."""
    unfinished = split.with_name(".split.new")
    for left in (unfinished, split):
        shutil.rmtree(left, ignore_errors=True)
    unfinished.mkdir()
    files = [unfinished / f"part-{number:05}.arrow" for number in range(run.partitions)]
    with named(split, left=""):
        writers = [pa.ipc.new_file(file, source.schema) for file in files]
    done = 0
    for table, place in tables_of(source, ROUND_ROWS):
        where = partition_of(_checked(table, source, place, manifest), run.partitions)
        order = np.argsort(where, kind="stable")
        sorted_table, edges = table.take(order), np.searchsorted(where[order], np.arange(run.partitions + 1))
        for writer, first, last in zip(writers, edges[:-1], edges[1:], strict=True):
            if last > first:
                with named(split, left=""):
                    writer.write_table(sorted_table.slice(first, last - first))
        done += len(table)
        progress("Splitting by user", done, run.rows)
    with named(split, left=""):
        for writer in writers:
            writer.close()
    check_unchanged(source, run.log)
    name_whole(unfinished, split)


def _checked(table: pa.Table, source: Table, place: Place, manifest: Manifest) -> NDArray[np.uint64]:
    """Whose rows are to stay together, in a piece of the log: each user's, and each request's of nobody. Raises TableError for a value that
    a request may not have."""
    columns, _ = checked_columns(table, source.files[0], manifest.ids, manifest.config.product_surfaces, place)
    users: NDArray[np.uint64] = np.where(columns["user_id"] == 0, columns["request_id"], columns["user_id"])
    return users


def _read(piece: Path) -> pa.Table:
    with pa.memory_map(str(piece)) as mapped:
        return pa.ipc.open_file(mapped).read_all()


def _write(scored: pa.Table, path: Path) -> None:
    # Floats hardly repeat: compressed, these columns would be a sixth smaller and take twice as long.
    compression = {name: "zstd" if name in NAMING else "none" for name in scored.column_names}
    pq.write_table(scored, path, compression=compression, use_dictionary=False, write_statistics=list(NAMING))
