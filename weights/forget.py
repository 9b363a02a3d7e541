"""Removes some users from a log of what was served, and from the logs that nightly turns have joined from it: the files that hold any of
their rows are written again without them.

Needs pyarrow, like `weights.served`. A service may write into the log of what was served meanwhile: parts that are open then are counted
and not touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from weights.served import OPEN_SUFFIX, PARTS, SUFFIX, hold, open_part
from weights.turns import CHECKPOINTS, CONTEXTS, IMPRESSIONS, LOGS, OUTCOME_NAME, TURNS, WORK

OPEN_PARTS = f"date=*/*{OPEN_SUFFIX}"
OWN_SUFFIX = f".forget{OPEN_SUFFIX}"  # of a part that is written again, after some hex digits
OWN_PARTS = f"date=*/*.{'[0-9a-f]' * 8}{OWN_SUFFIX}"
JOINED_SUFFIX = ".forget"  # of a file of a joined log that is written again, after some hex digits


@dataclass
class Forgotten:
    """What was removed: `rankings`, from `rewritten` and wholly `removed` parts. `parts`: all that were read. `open_parts`: being written
    by a service, at the beginning or at the end, so not looked at. `problems`: sentences about files that could not be read or written."""

    parts: int = 0
    rewritten: int = 0
    removed: int = 0
    rankings: int = 0
    open_parts: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class ForgottenJoined:
    """What was removed from joined logs: `impressions` and `contexts`, rows, from so many `nights`; `begun_again`: the names of turns that
    were not finished and begin again by joining. `problems`: sentences about files that could not be read or written."""

    nights: int = 0
    impressions: int = 0
    contexts: int = 0
    begun_again: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def forget_users(
    directory: Path,
    user_ids: Collection[int],
    update: Callable[[int, int], None] = lambda done, total: None,
    waits: Callable[[], None] = lambda: None,
) -> Forgotten:
    """Remove every ranking of these users, whose ids are as the model reads them. `update` gets the parts that are done, and all.

    `waits` is called where a join reads the log or somebody else removes users from it: this begins when they have ended.

    A part is replaced by a whole one or not at all. What can be done is done also where one file has a problem. Raises OSError where the
    directory cannot be read.
    """
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is no directory")
    with hold(directory, waits, alone=True) as is_alone:
        if is_alone:
            for left in directory.glob(OWN_PARTS):  # by one that was killed
                left.unlink(missing_ok=True)
        return _forget(directory, pa.array(sorted(user_ids), pa.uint64()), update)


def _forget(directory: Path, users: pa.Array, update: Callable[[int, int], None]) -> Forgotten:
    open_before = {
        *directory.glob(OPEN_PARTS)
    }  # before the parts: else one that is closed meanwhile is in neither list
    parts, result = sorted(directory.glob(PARTS)), Forgotten()
    open_before -= {path.with_name(path.name.removesuffix(SUFFIX) + OPEN_SUFFIX) for path in parts}
    for done, path in enumerate(parts):
        update(done, len(parts))
        try:
            _forget_in(path, users, result)
        except FileNotFoundError:  # removed meanwhile, because it is old
            continue
        except (OSError, ValueError) as error:
            result.problems.append(str(error))
    result.open_parts = len(open_before | {*directory.glob(OPEN_PARTS)})
    return result


def _forget_in(path: Path, users: pa.Array, result: Forgotten) -> None:
    """Remove the users' rows from one part."""
    with open_part(path) as part:
        result.parts += 1
        ids = part.read(["user_id"])["user_id"]
        rows = pc.sum(pc.is_in(ids, users)).as_py() or 0
        if not rows:
            return
        if rows == len(ids):
            path.unlink()
            result.removed += 1
        else:
            _rewrite(part, path, users)
            result.rewritten += 1
        result.rankings += rows


def _rewrite(part: pq.ParquetFile, path: Path, users: pa.Array) -> None:
    """Write the part again without these users. A context belongs to one user, so none of the rows that stay loses its history."""
    new = path.with_name(f"{path.name.removesuffix(SUFFIX)}.{secrets.token_hex(4)}{OWN_SUFFIX}")
    options = {"use_dictionary": False, "write_statistics": False, "write_page_checksum": True}
    _replace(part, path, new, lambda rows: pc.invert(pc.is_in(rows["user_id"], users)), 0o600, options)


def _replace(
    part: pq.ParquetFile,
    path: Path,
    new: Path,
    stay: Callable[[pa.Table], pa.ChunkedArray],
    mode: int,
    options: dict[str, Any],
) -> None:
    """Put a file with the rows that stay, one group of rows after the other, in the place of this one. `new`: its name until it is whole;
    `options`: of the writer."""
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, mode)
        compression = part.metadata.row_group(0).column(0).compression.lower()
        with pq.ParquetWriter(str(new), part.schema_arrow, compression=compression, **options) as writer:
            for group in range(part.num_row_groups):
                table = part.read_row_group(group)
                remaining = table.filter(stay(table))
                if len(remaining):
                    writer.write_table(remaining, row_group_size=len(remaining))
        os.fsync(descriptor)
        new.rename(path)
    except BaseException:
        with suppress(OSError):
            new.unlink()
        raise
    finally:
        os.close(descriptor)


def check_root(root: Path) -> None:
    """Raises NotADirectoryError for a directory in which no nightly turn was taken."""
    if not (root / TURNS).is_dir():
        raise NotADirectoryError(f"{root} holds no nightly turns: give the --out of refresh")


def forget_joined(
    root: Path,
    user_ids: Collection[int],
    update: Callable[[int, int], None] = lambda done, total: None,
    waits: Callable[[], None] = lambda: None,
) -> ForgottenJoined:
    """Remove the impressions of these users, whose ids are as the model reads them, and the contexts that only they name, from the nights
    that the turns of `root` have joined. `update` gets the nights that are done, and all.

    A turn that is not finished has its working files removed, as they hold users too, and begins again by joining. So remove the users
    from the log of what was served first. Checkpoints of finished turns stay. `waits` is called while a turn runs: this begins when it has
    ended.

    A file is replaced by a whole one or not at all. What can be done is done also where one file has a problem. Raises OSError where the
    directory cannot be read or is not the root of turns.
    """
    check_root(root)
    result = ForgottenJoined()
    with hold(root, waits, alone=True):
        _begin_again(root, result)
        nights = sorted((root / LOGS).glob("[!.]*"))
        for done, night in enumerate(nights):
            update(done, len(nights))
            _forget_in_night(night, pa.array(sorted(user_ids), pa.uint64()), result)
    return result


def _begin_again(root: Path, result: ForgottenJoined) -> None:
    """Remove what turns work with, and what an unfinished one has made; its directory last, by which it is known."""
    for turn in sorted((root / TURNS).glob("[!.]*")):
        shutil.rmtree(turn / WORK, ignore_errors=True)
        if not (turn / OUTCOME_NAME).exists():
            for made in (root / LOGS / turn.name, root / CHECKPOINTS / turn.name, turn):
                shutil.rmtree(made, ignore_errors=True)
            result.begun_again.append(turn.name)
    for unfinished in (root / LOGS).glob(".*"):  # of a join that was killed
        shutil.rmtree(unfinished, ignore_errors=True)


def _forget_in_night(night: Path, users: pa.Array, result: ForgottenJoined) -> None:
    """Remove the users' rows from one joined log. Contexts do not have their user: those stay that an impression names."""
    for left in night.glob(f"*/*{JOINED_SUFFIX}"):  # by one that was killed
        left.unlink(missing_ok=True)
    before = result.impressions + result.contexts
    named = pa.array([], pa.uint64())
    try:
        for path in sorted((night / IMPRESSIONS).glob(f"*{SUFFIX}")):
            removed = _filter(path, "user_id", lambda ids: pc.invert(pc.is_in(ids, users)))
            result.impressions += removed
            if path.exists():
                contexts = pq.read_table(path, columns=["context_id"], partitioning=None)["context_id"]
                named = pa.concat_arrays([named, pc.unique(contexts)])
        for path in sorted((night / CONTEXTS).glob(f"*{SUFFIX}")):
            result.contexts += _filter(path, "context_id", lambda ids: pc.is_in(ids, named))
    except (OSError, ValueError) as error:
        result.problems.append(f"{night}: {error}")
    result.nights += before < result.impressions + result.contexts


def _filter(path: Path, column: str, stay: Callable[[pa.ChunkedArray], pa.ChunkedArray]) -> int:
    """Leave only the rows of a file that stay by a column; the file is removed where none does. Returns how many rows were removed."""
    with pq.ParquetFile(path) as part:
        ids = part.read([column])[column]
        removed = len(ids) - (pc.sum(stay(ids)).as_py() or 0)
        if removed and removed == len(ids):
            path.unlink()
        elif removed:
            new = path.with_name(f".{path.name}.{secrets.token_hex(4)}{JOINED_SUFFIX}")
            _replace(part, path, new, lambda rows: stay(rows[column]), path.stat().st_mode & 0o777, {})
    return removed
