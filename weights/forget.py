"""Removes the rankings of some users from a log of what was served: the parts that hold any are written again without them.

Needs pyarrow, like `weights.served`. A service may write into the log meanwhile: parts that are open then are counted and not touched.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from weights.served import OPEN_SUFFIX, PARTS, SUFFIX, hold, open_part

OPEN_PARTS = f"date=*/*{OPEN_SUFFIX}"
OWN_SUFFIX = f".forget{OPEN_SUFFIX}"  # of a part that is written again, after some hex digits
OWN_PARTS = f"date=*/*.{'[0-9a-f]' * 8}{OWN_SUFFIX}"


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
    """Write the part again without these users, one group of rows after the other. A context belongs to one user, so none of the rows that
    stay loses its history."""
    new = path.with_name(f"{path.name.removesuffix(SUFFIX)}.{secrets.token_hex(4)}{OWN_SUFFIX}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        compression = part.metadata.row_group(0).column(0).compression.lower()
        with pq.ParquetWriter(
            str(new),
            part.schema_arrow,
            compression=compression,
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        ) as writer:
            for group in range(part.num_row_groups):
                table = part.read_row_group(group)
                remaining = table.filter(pc.invert(pc.is_in(table["user_id"], users)))
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
