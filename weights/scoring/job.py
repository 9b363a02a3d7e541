"""Scores a log that does not fit into memory: split by user, one partition at a time. An interrupted job resumes where it stopped.

`OUT/part-00000.parquet …` are scores, each renamed into place when complete. `OUT/job.json` describes the job, `OUT/SHA256SUMS` has the
parts' digests: a part damaged since is computed again. `OUT/.split` holds the split log until all of it is scored.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from numpy.typing import NDArray

from weights.format.writer import alone_in, name_whole, write_whole
from weights.scoring.scorer import NAMING, Prepared, Scorer
from weights.tables import check_unchanged, files_of, ids_of, tables_of
from weights.text_ids import IdKind
from weights.training.log import action_names, open_log

PARTITION_ROWS = 500_000
ROUND_ROWS = 1_000_000
"""Rows read before they are written to their partitions: the number that splitting holds in memory."""
MAX_PARTITIONS = 500  # files open at once while the log is split

SUMS = "SHA256SUMS"

Progress = Callable[[str, int, int], None]
"""Called with the current activity, rows done and total rows."""


class JobError(ValueError):
    """The output directory belongs to another job or holds something else; the message says what differs."""


@dataclass(frozen=True, slots=True)
class Job:
    """Everything that determines the output's bytes. `log`: path, size in bytes and modification time of each file."""

    log: list[tuple[str, int, int]]
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
    progress: Progress | None = None,
    warn: Callable[[str], object] = lambda sentence: None,
) -> int:
    """Score the requests of a log (a file or a directory) from `since_ts` on. Return the number of rows written.

    `partitions` 0: enough to keep each near PARTITION_ROWS. Parts that a killed run left are kept, unless damaged since: `warn` is
    then called.
    Raises LogError, EngineError, JobError if `out` holds something else, or BlockingIOError if another process writes there.
    """
    say = progress or (lambda what, done, total: None)
    source = open_log(log, scorer.manifest.ids)
    action_names(source.schema, str(log))
    rows = source.count_rows()
    job = Job(
        files_of(source),
        rows,
        partitions or min(MAX_PARTITIONS, -(-rows // PARTITION_ROWS) or 1),
        since_ts,
        scorer.schema.names,
        scorer.manifest.digest,
    )
    with alone_in(out):
        _claim(out, job)
        _score_parts(source, str(log), out, job, scorer, say, warn)
        return sum(pq.read_metadata(part).num_rows for part in _parts(out, job))


def _score_parts(
    source: ds.FileSystemDataset,
    where: str,
    out: Path,
    job: Job,
    scorer: Scorer,
    say: Progress,
    warn: Callable[[str], object],
) -> None:
    """Write the parts that are not there or damaged."""
    parts, sums = _parts(out, job), _sums(out)
    todo, split = [part for part in parts if not part.exists() or _sha256(part) != sums.get(part.name)], out / ".split"
    for part in todo:
        if part.exists():
            warn(f"{part} is computed again: its bytes are not those that were written.")
    pieces = [split / f"{part.stem}.arrow" for part in todo]
    if not all(piece.exists() for piece in pieces):
        _split(source, split, job, scorer.manifest.ids, say)
    sizes = [int(ds.dataset(piece, format="ipc").count_rows()) for piece in pieces]
    done = job.rows - sum(sizes)
    with ThreadPoolExecutor(1, thread_name_prefix="files") as files:  # reads and writes while the engine computes
        writing: Future[None] | None = None
        reads = (files.submit(_prepared, scorer, piece, job.since_ts, where) for piece in pieces)
        reading = next(reads, None)
        for part, size in zip(todo, sizes, strict=True):
            assert reading is not None
            prepared, reading = reading.result(), next(reads, None)  # the next is read while this one is scored
            told = partial(lambda before, scored: say("scored", before + scored, job.rows), done)
            scored = scorer.score(prepared, told) if prepared else scorer.schema.empty_table()
            done += size
            if writing:
                writing.result()
            writing = files.submit(write_whole, part, partial(_write, scored, sums))
        if writing:
            writing.result()
    shutil.rmtree(split, ignore_errors=True)


def _parts(out: Path, job: Job) -> list[Path]:
    return [out / f"part-{number:05}.parquet" for number in range(job.partitions)]


def partition_of(user_ids: NDArray[np.uint64], partitions: int) -> NDArray[np.int64]:
    """The partition of each user's rows: the same in every run, and even for any ids (the mixing of splitmix64)."""
    mixed = user_ids.copy()
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(partitions)).astype(np.int64)


def _claim(out: Path, job: Job) -> None:
    """Write the job description to `out`, or check that it is already there. Raises JobError."""
    wanted = json.loads(json.dumps(asdict(job)))
    stated = out / "job.json"
    if not stated.exists():
        if {path.name for path in out.iterdir()} - {"job.new"}:  # that of a killed run
            raise JobError(f"{out} holds something else: choose another place")
        write_whole(stated, lambda new: new.write_text(json.dumps(wanted, indent=1)))
    try:
        found = json.loads(stated.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise JobError(f"{out} holds something else: choose another place")
    if differing := [name for name in wanted if found.get(name) != wanted[name]]:
        raise JobError(f"{out} belongs to another job ({', '.join(differing)} differ): choose another place")


def _split(source: ds.FileSystemDataset, split: Path, job: Job, ids: IdKind, say: Progress) -> None:
    """Write the rows of each user to one file. After a kill, the next run starts this again."""
    unfinished = split.with_name(".split.new")
    for left in (unfinished, split):
        shutil.rmtree(left, ignore_errors=True)
    unfinished.mkdir()
    files = [unfinished / f"part-{number:05}.arrow" for number in range(job.partitions)]
    lz4 = pa.ipc.IpcWriteOptions(compression="lz4")
    writers = [pa.ipc.new_file(file, source.schema, options=lz4) for file in files]
    done = 0
    for table in tables_of(source, ROUND_ROWS):
        where = partition_of(ids_of(table, "user_id", ids, job.log[0][0]), job.partitions)
        order = np.argsort(where, kind="stable")
        sorted_table, edges = table.take(order), np.searchsorted(where[order], np.arange(job.partitions + 1))
        for writer, first, last in zip(writers, edges[:-1], edges[1:], strict=True):
            if last > first:
                writer.write_table(sorted_table.slice(first, last - first))
        done += len(table)
        say("split by user", done, job.rows)
    for writer in writers:
        writer.close()
    check_unchanged(source, job.log)
    name_whole(unfinished, split)


def _prepared(scorer: Scorer, piece: Path, since_ts: int, where: str) -> Prepared | None:
    """Read and prepare a piece; None if it has no rows."""
    with pa.ipc.open_file(pa.OSFile(str(piece))) as reader:
        table = reader.read_all()
    return scorer.prepare(table, since_ts, where) if len(table) else None


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sums(out: Path) -> dict[str, str]:
    """Digests by file name, from a list for `sha256sum -c`; a file that is no such list gives none."""
    try:
        lines = (out / SUMS).read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return {}
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _write(scored: pa.Table, sums: dict[str, str], path: Path) -> None:
    # Floats hardly repeat: compressed, these columns would be a sixth smaller and take twice as long.
    compression = {name: "zstd" if name in NAMING else "none" for name in scored.column_names}
    pq.write_table(scored, path, compression=compression, use_dictionary=False, write_statistics=list(NAMING))
    sums[path.with_suffix(".parquet").name] = _sha256(
        path
    )  # listed before the file gets its name, so every named file is listed
    write_whole(path.with_name(SUMS), lambda new: new.write_text("".join(f"{sums[n]}  {n}\n" for n in sorted(sums))))
