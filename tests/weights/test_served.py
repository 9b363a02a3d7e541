"""Parts of the log of what was served: what is written is read back, bit for bit."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from model.inputs import Candidates, Context
from weights.served import COLUMNS, ContextName, RowBatch, ServedRanking, read_part, schema

ACTIONS, OUTPUTS = ("favorite", "reply", "report"), ("dwell_time",)


def ranking(number: int, candidates: int = 5, history: int = 4, user: int | None = None) -> ServedRanking:
    """A row of random values, which depend on the number alone."""
    random = np.random.default_rng(number)
    context = Context(
        user_id=2**64 - 1 - number if user is None else user,
        post_ids=random.integers(0, 2**64, history, np.uint64),
        author_ids=random.integers(0, 2**64, history, np.uint64),
        actions=random.random((history, len(ACTIONS)), np.float32),
        surfaces=random.integers(0, 3, history),
        dwell_seconds=random.random(history, np.float32),
        dropped=number,
    )
    posts = Candidates(
        post_ids=random.integers(0, 2**64, candidates, np.uint64),
        author_ids=random.integers(0, 2**64, candidates, np.uint64),
        surfaces=random.integers(0, 3, candidates),
        age_buckets=random.integers(0, 9, candidates),
    )
    scores = random.normal(size=candidates)
    return ServedRanking(
        request_id=f"feed-{number}",
        served_us=1_780_000_000_000_000 + number,
        endpoint="/rank",
        key="web" if number % 2 else None,
        model_name="demo",
        model_version="1",
        model_digest="ab" * 32,
        action_names=ACTIONS,
        continuous_names=OUTPUTS,
        impression_ts=1_780_000_000,
        context=context,
        candidates=posts,
        created_at=random.integers(0, 2**40, candidates),
        scores=scores,
        ranks=np.argsort(np.argsort(-scores)) + 1,
        returned=candidates - 1,
        weights=random.normal(size=len(ACTIONS)),
        score_form="sum",
        temperature=0.5 if number % 2 else None,
        propensities=random.random(candidates) if number % 2 else None,
        probabilities=random.random((candidates, len(ACTIONS)), np.float32) if number % 3 else None,
        continuous=random.random((candidates, len(OUTPUTS)), np.float32) if number % 3 else None,
    )


def batch_of(rows: list[ServedRanking]) -> RowBatch:
    """A batch of these rows."""
    batch = RowBatch(rows[0])
    for row in rows:
        batch.add(row)
    return batch


def write(path: Path, rows: list[ServedRanking], at_once: int = 3) -> None:
    """Write the rows as one part, in several pieces."""
    kind, stored = RowBatch(rows[0]).schema(), set[ContextName]()
    pieces = [batch_of(rows[start : start + at_once]).encode(kind, stored) for start in range(0, len(rows), at_once)]
    pq.write_table(pa.Table.from_batches(pieces), path)


def bits(value: object) -> object:
    """A value of a row, an array as its dtype, shape and bytes."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, Context | Candidates):
        return [bits(getattr(value, field.name)) for field in fields(value)]
    return value


def test_a_part_reads_back_bit_for_bit(tmp_path: Path) -> None:
    rows = [ranking(number, candidates=1 + number % 7, history=number % 5) for number in range(1, 20)]
    write(tmp_path / "part.parquet", rows)
    back = list(read_part(tmp_path / "part.parquet"))
    assert len(back) == len(rows)
    for row, found in zip(rows, back, strict=True):
        for name in row.__struct_fields__:
            assert bits(getattr(found, name)) == bits(getattr(row, name)), name


def test_a_context_is_stored_once_in_a_part(tmp_path: Path) -> None:
    rows = [ranking(1), ranking(2), ranking(3), ranking(4)]
    rows[2].context = rows[0].context
    rows[3].context = rows[0].context.last(3)
    write(tmp_path / "part.parquet", rows, at_once=2)
    table = pq.read_table(tmp_path / "part.parquet")
    assert table["history"].is_valid().to_pylist() == [True, True, False, True]
    names = table["context_id"].to_pylist()
    assert names[0] == names[2]
    assert len({*names}) == 3
    back = list(read_part(tmp_path / "part.parquet"))
    assert bits(back[2].context.actions) == bits(rows[0].context.actions)


def test_arrays_with_gaps_and_in_another_order_are_read_back(tmp_path: Path) -> None:
    row = ranking(1, candidates=6, history=4)
    row.context.actions = np.asfortranarray(row.context.actions)
    row.context.post_ids = np.repeat(row.context.post_ids, 2)[::2]
    row.probabilities = np.random.default_rng(0).random((6, 2 * len(ACTIONS)), np.float32)[:, : len(ACTIONS)]
    write(tmp_path / "part.parquet", [row])
    (back,) = read_part(tmp_path / "part.parquet")
    for name in ("actions", "post_ids"):
        assert bits(getattr(back.context, name)) == bits(getattr(row.context, name))
    assert bits(back.probabilities) == bits(row.probabilities)


@pytest.mark.parametrize("first", [0, 3])
def test_content_codes_may_be_there_or_not(tmp_path: Path, first: int) -> None:
    """A request whose posts have no codes is read with a width of 0, beside others of the same model."""
    rows = []
    for number, levels in enumerate((first, 0, 3, 3, 0), 1):
        row = ranking(number, candidates=4, history=3)
        row.context.codes = np.arange(3 * levels).reshape(3, levels)
        row.candidates.codes = np.arange(4 * levels).reshape(4, levels) + 7
        rows.append(row)
    write(tmp_path / "part.parquet", rows)
    for row, back in zip(rows, read_part(tmp_path / "part.parquet"), strict=True):
        assert bits(back.context.codes) == bits(row.context.codes)
        assert bits(back.candidates.codes) == bits(row.candidates.codes)


def test_rows_that_cannot_be_encoded_leave_the_part_as_it_was(tmp_path: Path) -> None:
    bad, good = ranking(1), ranking(2)
    bad.context = good.context
    bad.returned = 2**70
    kind, stored = RowBatch(good).schema(), set[ContextName]()
    with pytest.raises((OverflowError, pa.ArrowException)):
        batch_of([bad]).encode(kind, stored)
    assert not stored
    pq.write_table(pa.Table.from_batches([batch_of([good]).encode(kind, stored)]), tmp_path / "part.parquet")
    assert bits(next(read_part(tmp_path / "part.parquet")).context) == bits(good.context)


def test_a_batch_that_begins_again_holds_only_new_rows(tmp_path: Path) -> None:
    long, short = ranking(1, candidates=40, history=30), ranking(2, candidates=3, history=2)
    batch, kind = batch_of([long]), RowBatch(long).schema()
    pq.write_table(pa.Table.from_batches([batch.encode(kind, set())]), tmp_path / "long.parquet")
    batch.begin(short)
    assert batch.rows == 0
    batch.add(short)
    pq.write_table(pa.Table.from_batches([batch.encode(kind, set())]), tmp_path / "short.parquet")
    for name, row in (("long", long), ("short", short)):
        (back,) = read_part(tmp_path / f"{name}.parquet")
        for field in row.__struct_fields__:
            assert bits(getattr(back, field)) == bits(getattr(row, field)), field


def test_equal_histories_of_two_users_are_two_contexts(tmp_path: Path) -> None:
    rows = [ranking(1, user=1), ranking(1, user=2)]
    write(tmp_path / "part.parquet", rows)
    table = pq.read_table(tmp_path / "part.parquet")
    assert table["history"].null_count == 0
    assert len({*table["context_id"].to_pylist()}) == 2


def test_lists_are_as_long_as_their_axes(tmp_path: Path) -> None:
    write(tmp_path / "part.parquet", [ranking(1, candidates=6, history=3)])
    row = pq.read_table(tmp_path / "part.parquet").to_pylist()[0]
    assert len(row["history"]["actions"]) == 3 * len(ACTIONS)
    assert len(row["probabilities"]) == 6 * len(ACTIONS)
    assert len(row["candidates"]["age_buckets"]) == 6


def test_every_array_of_the_inputs_has_a_column() -> None:
    def names(column: str) -> list[str]:
        return [child.name for child in schema().field(column).type]

    row = ranking(1)
    for column, inputs in (("history", row.context), ("candidates", row.candidates)):
        arrays = [field.name for field in fields(inputs) if isinstance(getattr(inputs, field.name), np.ndarray)]
        assert names(column) == arrays
    assert schema().names == [*COLUMNS]


def test_a_part_from_before_a_column_has_none_in_its_place(tmp_path: Path) -> None:
    later = [name for name, column in COLUMNS.items() if column.is_nullable and name != "history"]
    rows = [ranking(1), ranking(2)]
    write(tmp_path / "part.parquet", rows)
    pq.write_table(pq.read_table(tmp_path / "part.parquet").drop_columns(later), tmp_path / "part.parquet")
    for row, back in zip(rows, read_part(tmp_path / "part.parquet"), strict=True):
        for name in row.__struct_fields__:
            assert bits(getattr(back, name)) == (None if name in later else bits(getattr(row, name))), name


@pytest.mark.parametrize("name", ["scores", "history"])
def test_a_file_without_a_column_that_parts_have_is_no_part(tmp_path: Path, name: str) -> None:
    write(tmp_path / "part.parquet", [ranking(1)])
    pq.write_table(pq.read_table(tmp_path / "part.parquet").drop_columns(name), tmp_path / "part.parquet")
    with pytest.raises(ValueError, match=r"part\.parquet is no part of a log of what was served"):
        list(read_part(tmp_path / "part.parquet"))


def test_a_foreign_file_is_refused_with_its_name(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"request_id": ["a"]}), foreign)
    with pytest.raises(ValueError, match=r"foreign\.parquet is no part of a log of what was served"):
        list(read_part(foreign))


def test_a_part_cut_short_is_refused_with_its_name(tmp_path: Path) -> None:
    write(tmp_path / "part.parquet", [ranking(1)])
    whole = (tmp_path / "part.parquet").read_bytes()
    (tmp_path / "part.parquet").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"part\.parquet cannot be read as Parquet"):
        list(read_part(tmp_path / "part.parquet"))
