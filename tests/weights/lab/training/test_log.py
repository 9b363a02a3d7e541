"""The columnar log: what is written reads back, and what cannot be used is refused with the column's name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

from weights.lab.training.log import COLUMNS, Log, read_log, write_log  # noqa: E402
from weights.tables import TableError  # noqa: E402


def small_log() -> Log:
    return Log(
        request_id=np.array([1, 1, 2], np.uint64),
        impression_ts=np.array([100, 100, 200]),
        user_id=np.array([2**63 + 5, 2**63 + 5, 7], np.uint64),
        post_id=np.array([11, 12, 2**64 - 1], np.uint64),
        author_id=np.array([21, 22, 23], np.uint64),
        product_surface=np.array([0, 1, 2]),
        created_at=np.array([90, 0, 150]),
        dwell_seconds=np.array([1.5, 0.0, 31.0], np.float32),
        actions=np.array([[True, False], [False, False], [True, True]]),
        action_names=("favorite", "reply"),
    )


def test_a_log_reads_back_in_time_order_from_any_row_order(tmp_path: Path) -> None:
    log = small_log()
    write_log(tmp_path / "log.parquet", log.take(np.array([2, 0, 1])))
    again = read_log(tmp_path / "log.parquet")
    assert again.action_names == log.action_names
    for name in (*COLUMNS, "actions"):
        assert np.array_equal(getattr(again, name), getattr(log, name)), name


def test_integers_of_another_width_are_taken(tmp_path: Path) -> None:
    table = written(tmp_path)
    table = replaced(table, "post_id", pa.array([11, 12, 13], pa.int32()))
    pq.write_table(table, tmp_path / "log.parquet")
    assert read_log(tmp_path / "log.parquet").post_id.dtype == np.uint64


REFUSED: dict[str, Callable[[pa.Table], pa.Table]] = {
    "lacks the column dwell_seconds": lambda t: t.drop_columns(["dwell_seconds"]),
    "no column action.": lambda t: t.drop_columns(["action.favorite", "action.reply"]),
    "unknown columns: colour": lambda t: t.append_column("colour", pa.array([1, 2, 3])),
    "row 2: column author_id has 1 nulls; every row needs an id": lambda t: replaced(t, "author_id", pa.array([1, None, 3], pa.uint64())),
    "row 2: column post_id does not fit uint64": lambda t: replaced(t, "post_id", pa.array([1, -2, 3], pa.int64())),
    "row 2: post_id must not be 0": lambda t: replaced(t, "post_id", pa.array([1, 0, 3], pa.uint64())),
    "row 2: column created_at has 1 nulls": lambda t: replaced(t, "created_at", pa.array([1, None, 3])),
    "row 3: position must be an integer between 0": lambda t: t.append_column("position", pa.array([1, 2, -1])),
    "row 3: propensity must be a probability": lambda t: t.append_column("propensity", pa.array([0.5, 0, 1.5])),
    "row 1: weight must be a number between 0": lambda t: t.append_column("weight", pa.array([-1.0, 1.0, 1.0])),
    "row 2: impression_ts must be Unix seconds.*milliseconds": lambda t: replaced(
        t, "impression_ts", pa.array([100, 1_700_000_000_000, 200])
    ),
    "row 3: created_at must be Unix seconds": lambda t: replaced(t, "created_at", pa.array([90, 0, -5])),
    "row 2: dwell_seconds must be seconds, a finite": lambda t: replaced(
        t, "dwell_seconds", pa.array([1.0, float("nan"), 3.0], pa.float32())
    ),
    "row 2: product_surface must be an integer between 0 and 65535": lambda t: replaced(t, "product_surface", pa.array([0, -1, 2])),
    "row 2: impressions of one request_id differ in user_id": lambda t: replaced(t, "user_id", pa.array([5, 6, 7], pa.uint64())),
    "holds no impressions": lambda t: t.slice(0, 0),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_used_is_refused_with_the_reason(reason: str, tmp_path: Path) -> None:
    path = tmp_path / "log.parquet"
    pq.write_table(REFUSED[reason](written(tmp_path)), path)
    with pytest.raises(TableError, match=reason) as refusal:
        read_log(path)
    assert str(path) in str(refusal.value)


def written(directory: Path) -> pa.Table:
    write_log(directory / "log.parquet", small_log())
    return pq.read_table(directory / "log.parquet")


def replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)
