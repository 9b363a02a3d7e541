"""Reads what a service has logged of what it served, and compares it bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from model.inputs import Candidates, Context
from weights.served import PARTS, RowBatch, ServedRanking, read_part


def rankings_of(directory: Path) -> list[ServedRanking]:
    """The rows of all parts."""
    return [row for path in sorted(directory.glob(PARTS)) for row in read_part(path)]


def by_name(directory: Path) -> dict[str, ServedRanking]:
    """The rows of all parts by the names of the rankings, which must differ."""
    rows = rankings_of(directory)
    named = {row.request_id: row for row in rows}
    assert len(named) == len(rows)
    return named


def bits(value: Any) -> Any:
    """A value, an array as its dtype, shape and bytes. Of an input of the model, everything that the model reads."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, Context | Candidates):
        return [(field.name, bits(getattr(value, field.name))) for field in fields(value) if field.name != "is_kept"]
    return value


def write_rows(path: Path, rows: Sequence[ServedRanking]) -> None:
    """Write rows of one model as one part of a log."""
    batch = RowBatch(rows[0])
    for row in rows:
        batch.add(row)
    kind = batch.schema()
    pq.write_table(pa.Table.from_batches([batch.encode(kind, set())]), path, write_page_checksum=True)
