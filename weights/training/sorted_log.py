"""Sorts logs larger than memory on disk. Training maps them, reads one request at a time and gets the same bits as in memory.

`impressions.bin` and `events.bin` are rows of one size; `starts.npy`, `times.npy`, `users.npy`, `first.npy` and `last.npy` hold one
number per request (see `log.Index`); `log.json` describes the rows.
"""

from __future__ import annotations

import json
import mmap
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from numpy.typing import NDArray

from weights.format.writer import alone_in, name_whole
from weights.tables import LogError, check_unchanged, column_of, files_of, ids_of, tables_of
from weights.text_ids import IdKind
from weights.training.examples import histories
from weights.training.log import (
    COLUMNS,
    Index,
    Log,
    action_names,
    check_requests,
    open_log,
    unsorted,
)

FACTS_NAME = "log.json"
PARTITION_ROWS = 500_000
"""Rows sorted at once, approximately: 79 bytes each with the world's actions, held a few times over."""
MAX_PARTITIONS = 500
SAMPLE_ROWS = 200_000
PER_REQUEST = ("starts", "times", "users", "first", "last")
Rows = NDArray[Any]  # of a structured dtype


class Ranges:
    """Distributes rows to files by ranges of one column. Each file keeps the order in which its rows came."""

    def __init__(self, directory: Path, kind: np.dtype[Any], column: str, cuts: NDArray[Any]) -> None:
        self.directory, self.kind, self.column, self.cuts = directory, kind, column, cuts
        directory.mkdir()

    def __len__(self) -> int:
        return len(self.cuts) + 1

    def add(self, rows: Rows) -> None:
        """Append rows to their files. Equal values always go to the same file."""
        place = np.searchsorted(self.cuts, rows[self.column], side="right")
        order = np.argsort(place, kind="stable")
        edges = np.searchsorted(place[order], np.arange(len(self) + 1))
        for number in np.flatnonzero(np.diff(edges)):
            with (self.directory / str(number)).open("ab") as file:
                _append(file, rows[order[edges[number] : edges[number + 1]]])

    def take(self, number: int) -> Rows:
        """Read the rows of one range and delete its file."""
        path = self.directory / str(number)
        if not path.exists():
            return np.empty(0, self.kind)
        rows = np.fromfile(path, self.kind)
        path.unlink()
        return rows


def sort_log(
    source: Path,
    out: Path,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    ids: IdKind = "uint64",
) -> int:
    """Sort a log (a file or a directory) into the new directory `out`. Return the number of rows.

    Needs memory for a partition and some numbers per request. Raises LogError as `read_log` does, and if `out` exists; BlockingIOError
    if another process writes it.
    """
    dataset, where = open_log(source, ids), str(source)
    names, rows = action_names(dataset.schema, where), int(dataset.count_rows())
    if out.exists():
        raise LogError(f"{out} exists already: choose another place")
    if not rows:
        raise LogError(f"{where} holds no impressions")
    work = out.with_name(f"{out.name}.unfinished")
    kind, before = _row_type(names), files_of(dataset)
    with alone_in(work):
        for path in work.iterdir():  # of a killed run
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        time_cuts, user_cuts = _cuts(dataset, rows, ids, where)
        by_time = Ranges(work / "by-time", kind, "impression_ts", time_cuts)
        done = 0
        for table in tables_of(dataset, PARTITION_ROWS):
            by_time.add(_rows_of(unsorted(table, where, ids), kind))
            done += len(table)
            progress("split by time", done, rows)
        check_unchanged(dataset, before)
        events = Ranges(work / "events", kind, "user_id", user_cuts)
        facts = _write_impressions(work, by_time, events, names, where)
        _write_events(work, events, user_cuts)
        for directory in (by_time.directory, events.directory):
            directory.rmdir()
        named = {} if ids == "uint64" else {"ids": ids}
        (work / FACTS_NAME).write_text(json.dumps({"rows": rows, "actions": names, **named, **facts}))
        name_whole(work, out)
    return rows


def open_sorted(directory: Path, ids: IdKind = "uint64") -> Log:
    """Map the log in a directory that `sort_log` wrote. Raises LogError if there is none, or if its ids are of another kind."""
    try:
        facts = json.loads((directory / FACTS_NAME).read_bytes())
        if (found := facts.get("ids", "uint64")) != ids:
            raise LogError(f"its ids are {found}, not {ids} (--ids)")
        names = tuple(facts["actions"])
        kind = _row_type(names)
        events = _log_of(_mapped(directory / "events.bin", kind), names)
        per_request = {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in PER_REQUEST}
        impressions = _mapped(directory / "impressions.bin", kind)
        if len(impressions) < facts["rows"] or len(events) < per_request["last"].max(initial=0):
            raise LogError("impressions.bin or events.bin is cut off")
        index = Index(**per_request, events=events, surfaces=facts["surfaces"], fingerprint=facts["fingerprint"])
        return _log_of(impressions, names, index)
    except (OSError, ValueError, KeyError) as error:
        raise LogError(f"{directory} is not a log that sort-log wrote: {error}") from error


def _row_type(names: tuple[str, ...]) -> np.dtype[Any]:
    """A row on disk: the columns of a log and its actions."""
    return np.dtype(
        [(name, column.to_pandas_dtype()) for name, column in COLUMNS.items()] + [("actions", "?", len(names))]
    )


def _cuts(dataset: ds.FileSystemDataset, rows: int, ids: IdKind, where: str) -> list[NDArray[Any]]:
    """Cuts of times and users into ranges of about PARTITION_ROWS, from a sample. No bit of the sorted log depends on them."""
    every, partitions = -(-rows // SAMPLE_ROWS), min(MAX_PARTITIONS, -(-rows // PARTITION_ROWS))
    sample: dict[str, list[NDArray[Any]]] = {"impression_ts": [], "user_id": []}
    for table in tables_of(dataset, PARTITION_ROWS, columns=list(sample)):
        sample["impression_ts"].append(column_of(table, "impression_ts", pa.int64(), where)[::every])
        sample["user_id"].append(ids_of(table, "user_id", ids, where)[::every])
    ordered = [np.sort(np.concatenate(values)) for values in sample.values()]
    return [np.unique(values[np.arange(1, partitions) * len(values) // partitions]) for values in ordered]


def _write_impressions(
    work: Path, by_time: Ranges, events: Ranges, names: tuple[str, ...], where: str
) -> dict[str, Any]:
    """Write the rows by time, then request, and the per-request arrays; add the engaged rows to `events`."""
    checksums, surfaces, done = dict.fromkeys((*COLUMNS, "actions"), 0), 0, 0
    starts, times, users, ids = [], [], [], []
    with (work / "impressions.bin").open("wb") as file:
        for number in range(len(by_time)):
            rows = by_time.take(number)
            if not len(rows):
                continue
            rows = rows[np.lexsort((rows["request_id"], rows["impression_ts"]))]
            check_requests(_log_of(rows, names), where)
            _append(file, rows)
            for name in checksums:
                checksums[name] = zlib.crc32(np.ascontiguousarray(rows[name]).data, checksums[name])
            first = np.flatnonzero(np.diff(rows["request_id"], prepend=~rows["request_id"][:1]))
            starts.append(done + first)
            times.append(rows["impression_ts"][first])
            users.append(rows["user_id"][first])
            ids.append(rows["request_id"][first])
            events.add(rows[rows["actions"].any(1)])
            surfaces = max(surfaces, int(rows["product_surface"].max(initial=-1)) + 1)
            done += len(rows)
    if len(np.unique(np.concatenate(ids))) < sum(map(len, ids)):
        raise LogError(f"{where}: impressions of one request_id differ in user_id or impression_ts")
    for name, values in (("starts", starts), ("times", times), ("users", users)):
        _save(work / f"{name}.npy", np.concatenate(values))
    return {"surfaces": surfaces, "fingerprint": checksums}


def _write_events(work: Path, events: Ranges, user_cuts: NDArray[Any]) -> None:
    """Write the engaged rows by user, then time, and for each request the range of them before it."""
    users, times = np.load(work / "users.npy"), np.load(work / "times.npy")
    place = np.searchsorted(user_cuts, users, side="right")
    first, last = np.empty(len(users), np.int64), np.empty(len(users), np.int64)
    done = 0
    with (work / "events.bin").open("wb") as file:
        for number in range(len(events)):
            rows, requests = events.take(number), np.flatnonzero(place == number)
            order, begin, end = histories(rows["user_id"], rows["impression_ts"], users[requests], times[requests])
            _append(file, rows[order])
            first[requests], last[requests] = done + begin, done + end
            done += len(rows)
    _save(work / "first.npy", first)
    _save(work / "last.npy", last)


def _append(file: BinaryIO, values: NDArray[Any]) -> None:
    """Write values as `tofile` does, which loses the last of them in silence where the disk is full."""
    file.write(np.ascontiguousarray(values).view(np.uint8).data)


def _save(path: Path, values: NDArray[Any]) -> None:
    """Write a file for `np.load`; `np.save` calls `tofile`."""
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(values))
        _append(file, values)


def _rows_of(log: Log, kind: np.dtype[Any]) -> Rows:
    rows = np.empty(len(log), kind)
    for name in kind.names or ():
        rows[name] = getattr(log, name)
    return rows


def _log_of(rows: Rows, names: tuple[str, ...], index: Index | None = None) -> Log:
    columns: dict[str, Any] = {name: rows[name] for name in COLUMNS}
    return Log(**columns, actions=rows["actions"], action_names=names, index=index)


def _mapped(path: Path, kind: np.dtype[Any]) -> Rows:
    """Map a file's rows without read-ahead: the rows around one request are of no use to the next."""
    if not path.stat().st_size:
        return np.empty(0, kind)
    rows = np.memmap(path, kind, "r")
    rows._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return np.asarray(rows)
