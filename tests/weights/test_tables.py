"""Parquet files and JSON lines of ids: what they hold is read to the last bit, or refused."""

from __future__ import annotations

import gzip
import io
import json
import re
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from weights.lab.training.log import COLUMNS, Log, read_log
from weights.table_files import open_table, tables_of
from weights.tables import TableError, column_of, ids_of

IDS = [1, 2**53 + 1, 5281804507670857603, 2**63 - 1, 2**63, 2**63 + 12345, 2**64 - 1]
MANY = 20_000  # rows of more than the megabyte from which pyarrow guesses the types


def row(**values: Any) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS, 1) | {"action.like": True} | values


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({name: [one[name] for one in rows] for name in rows[0]}), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.parametrize("before", [0, MANY])
def test_every_64_bit_integer_is_read_exactly_from_json_lines(tmp_path: Path, before: int) -> None:
    ids = [7] * before + IDS
    log = read_log(write(tmp_path / "log.jsonl", [row(post_id=one, author_id=one) for one in ids]))
    assert log.post_id.tolist() == log.author_id.tolist() == ids


def test_the_first_json_lines_do_not_decide_the_type_of_a_column(tmp_path: Path) -> None:
    rows = [row(post_id="2026-11-25", dwell_seconds=0)] * MANY + [row(post_id="post:a", dwell_seconds=1.5)]
    rows = [one | {"user_id": "a", "author_id": "b"} for one in rows]
    log = read_log(write(tmp_path / "log.jsonl", rows), "text")
    assert log.dwell_seconds[-1] == 1.5
    assert log.ids("post_id", np.array([0, MANY])) == ["2026-11-25", "post:a"]
    posts = [{"post_ids": 1, "created_at": None}] * 2 * MANY + [{"post_ids": 2, "created_at": 3}]
    posts = open_table(write(tmp_path / "posts.jsonl", posts), {"post_ids": pa.uint64(), "created_at": pa.int64()})
    assert column_of(posts.to_table(), "created_at", pa.int64(), "", 0).tolist() == [0] * 2 * MANY + [3]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_column_that_a_later_file_brings_is_refused(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"a{suffix}", [row()])
    write(tmp_path / f"b{suffix}", [row(**{"action.repotr": True})])
    with pytest.raises(
        TableError, match=r"b\.(parquet has columns .* lacks: action.repotr|jsonl, line 1: .*: write every column)"
    ):
        read_log(tmp_path)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"post_id": 7.5}, "uint64"),
        ({"author_id": 7.0}, "uint64"),
        ({"user_id": 5e17}, "uint64"),
        ({"post_id": 2**64}, "uint64"),
        ({"request_id": -1}, "uint64"),
        ({"post_id": [5417]}, "uint64"),
        ({"action.like": 2}, "bool"),
    ],
)
@pytest.mark.parametrize("before", [0, 1, MANY])
def test_a_line_whose_value_does_not_fit_names_the_column(
    before: int, change: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    rows = [row()] * before + [row(**change)]
    with pytest.raises(TableError) as told:
        read_log(write(tmp_path / "log.jsonl", [*rows, row()]))
    (name,) = change
    line = 2 if before == 0 and name == "action.like" else before + 1  # alone, the first line may have any type
    assert re.search(rf"log\.jsonl, line {line}: column {re.escape(name)} ", str(told.value)), told.value
    is_declared = before == MANY or not name.startswith("action.")
    assert f"does not fit {kind if is_declared else 'the type of the rows before'}" in str(told.value)


def test_a_field_that_a_later_row_brings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="write every column in every row"):
        read_log(write(tmp_path / "log.jsonl", [row()] * MANY + [row(**{"action.repotr": True})]))


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [row()] * MANY)
    path.write_text(path.read_text()[:-30])
    with pytest.raises(TableError, match=rf"log\.jsonl, line {MANY}: is no JSON object; it may be cut off"):
        open_table(path, COLUMNS)


def test_what_is_no_parquet_is_named_once(tmp_path: Path) -> None:
    (path := tmp_path / "log.parquet").write_text("x\n")
    with pytest.raises(TableError, match=r"is neither Parquet nor JSON lines") as told:
        open_table(path, COLUMNS)
    assert str(told.value).count("log.parquet") == 1


def test_a_file_that_is_damaged_within_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", [row()] * 100)
    damaged = bytearray(path.read_bytes())
    damaged[4:40] = b"\xff" * 36
    path.write_bytes(damaged)
    with pytest.raises(TableError, match=r"log\.parquet cannot be read"):
        list(tables_of(open_table(path, COLUMNS), 10))


def test_the_text_option_is_named_only_for_ids_that_may_be_texts() -> None:
    for name, option in (("user_id", True), ("request_id", False)):
        with pytest.raises(TableError, match=f"column {name} holds texts, not integers") as told:
            column_of(pa.table({name: ["r-1"]}), name, pa.uint64(), "The table")
        assert ("--ids text" in str(told.value)) is option


def test_ids_as_floats_and_times_with_a_unit_are_refused() -> None:
    with pytest.raises(TableError, match="holds double, not integers"):
        ids_of(pa.table({"user_id": [1.0, 2.0]}), "user_id", "uint64", "The table")
    for unit in ("s", "ms", "us", "ns"):
        with pytest.raises(TableError, match="write Unix seconds"):
            column_of(pa.table({"at": pa.array([10**9], pa.timestamp(unit))}), "at", pa.int64(), "The table")
    assert column_of(pa.table({"at": [1e9]}), "at", pa.int64(), "The table").tolist() == [10**9]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_number_other_than_1_or_0_is_no_action(tmp_path: Path, suffix: str) -> None:
    """The service takes how much of an action there was; a log has only whether."""
    log = write(tmp_path / f"log{suffix}", [row(**{"action.like": each}) for each in (1, 0)])
    assert read_log(log).actions.ravel().tolist() == [True, False]
    log = write(tmp_path / f"log{suffix}", [row(**{"action.like": each}) for each in (1, 0.5)])
    with pytest.raises(TableError, match=r"column action\.like must be true or false, or 1 or 0"):
        read_log(log)


def test_a_file_that_git_lfs_has_not_fetched_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [row()])
    (tmp_path / "b.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 147583746\n")
    with pytest.raises(TableError, match=r"b\.parquet is a Git LFS pointer"):
        open_table(tmp_path, COLUMNS)


def days(folder: Path, name: str, first: pa.Array, second: pa.Array) -> Path:
    """A log of two files whose column `name` holds these values."""
    folder.mkdir()
    for number, values in enumerate((first, second)):
        table = pa.Table.from_pylist([row() for _ in values])
        place = table.schema.get_field_index(name)
        table = table.append_column(name, values) if place < 0 else table.set_column(place, name, values)
        pq.write_table(table, folder / f"day-{number}.parquet")
    return folder


NULLS = pa.nulls(2)
YES_NO = pa.array([True, False])


@pytest.mark.parametrize("turned", [False, True])
def test_days_whose_types_differ_are_read_without_loss(turned: bool, tmp_path: Path) -> None:
    def columns(case: str, name: str, one: pa.Array, other: pa.Array) -> Log:
        pair = (other, one) if turned else (one, other)
        return read_log(days(tmp_path / case, name, *pair))

    log = columns("unknown", "action.like", NULLS, YES_NO)
    assert log.unknown is not None
    assert (log.unknown.sum(), log.actions.sum()) == (2, 1)
    assert columns("numbers", "action.like", YES_NO, pa.array([1, 0])).actions.sum() == 2
    widths = columns("widths", "user_id", pa.array([1, 1], pa.int32()), pa.array([1, 1], pa.uint64()))
    assert widths.user_id.tolist() == [1] * 4
    codes = columns("codes", "codes", pa.array([[], []]), pa.array([[1, 2], [3, 4]], pa.large_list(pa.int32())))
    assert sorted(codes.codes.tolist()) == [[0, 0], [0, 0], [1, 2], [3, 4]]


@pytest.mark.parametrize("turned", [False, True])
def test_days_whose_types_lose_something_are_refused(turned: bool, tmp_path: Path) -> None:
    def refusal(case: str, name: str, one: pa.Array, other: pa.Array) -> str:
        with pytest.raises(TableError) as told:
            read_log(days(tmp_path / case, name, *((other, one) if turned else (one, other))))
        return str(told.value)

    said = refusal("floats", "user_id", pa.array([1, 2], pa.uint64()), pa.array([2.0**60, 2.0**60 + 256]))
    assert re.search(r"day-1\.parquet: column user_id holds (double|uint64), and that of .*day-0\.parquet", said)
    said = refusal(
        "times", "impression_ts", pa.array([1_700_000_000, 1_700_000_001]), pa.array([1.7e9, 1.7e9], pa.float32())
    )
    assert "day-1.parquet: column impression_ts holds" in said
    said = refusal("counts", "action.like", YES_NO, pa.array([3, -1]))
    assert f"day-{int(not turned)}.parquet, row 1: column action.like must be true or false, or 1 or 0" in said


@pytest.mark.parametrize("turned", [False, True])
def test_days_of_csv_say_yes_and_no_in_two_ways(turned: bool, tmp_path: Path) -> None:
    answers = [("true", "false"), ("1", "0")]
    for number, (yes, no) in enumerate(reversed(answers) if turned else answers):
        rows = [row(**{"action.like": answer}) for answer in (yes, no)]
        lines = [",".join(map(str, values)) for values in (rows[0], *(one.values() for one in rows))]
        (tmp_path / f"day-{number}.csv").write_text("\n".join(lines) + "\n")
    assert sorted(read_log(tmp_path).actions[:, 0].tolist()) == [False, False, True, True]


def test_times_as_short_floats_are_refused() -> None:
    with pytest.raises(TableError, match="holds float, not integers: a float cannot hold every one of them"):
        column_of(pa.table({"at": pa.array([1.7e9], pa.float32())}), "at", pa.int64(), "The table")


@pytest.mark.parametrize("head", ["\ufeff", "\n", "\ufeff\n\n"])
def test_json_lines_may_begin_with_a_mark_or_a_blank_line(head: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(head + json.dumps(row()) + "\n", encoding="utf-8")
    assert len(read_log(tmp_path / "log.jsonl")) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("{}.jsonl", b""),
        ("{}.jsonl", b"\n"),
        ("{}.jsonl", b"\xef\xbb\xbf\r\n"),
        ("{}.jsonl.gz", gzip.compress(b"")),
        ("{}.csv", b""),
    ],
    ids=["JSON lines", "a line", "a mark", "gzip", "CSV"],
)
def test_an_empty_file_is_passed_over_beside_others(name: str, content: bytes, tmp_path: Path) -> None:
    """A writer that rotates leaves some. Alone, it is refused."""
    empty = tmp_path / name.format("a")
    empty.write_bytes(content)
    for place in (empty, tmp_path):
        with pytest.raises(TableError, match="is empty: remove it"):
            open_table(place, COLUMNS)
    whole = write(tmp_path / "whole.jsonl", [row(), row(post_id=2)])
    if name.endswith(".gz"):
        whole.with_name("b.jsonl.gz").write_bytes(gzip.compress(whole.read_bytes()))
        whole.unlink()
    (tmp_path / name.format("z")).write_bytes(content)
    assert sorted(read_log(tmp_path).post_id.tolist()) == [1, 2]


def test_a_text_of_csv_may_hold_line_breaks_in_a_large_file(tmp_path: Path) -> None:
    rows = [row(post_id=number) for number in range(4000)]
    note = '"' + "a line\nand another, " * 50 + '"'
    lines = [",".join(["note", *rows[0]]), *(",".join([note, *map(str, one.values())]) for one in rows)]
    (tmp_path / "events.csv").write_text("\n".join(lines) + "\n")
    assert (tmp_path / "events.csv").stat().st_size > 3 * 2**20
    table = open_table(tmp_path / "events.csv", COLUMNS, may_lack=[])
    assert column_of(table.to_table(), "post_id", pa.uint64(), "").tolist() == [*range(4000)]


def test_parquet_without_a_byte_is_refused(tmp_path: Path) -> None:
    """Whoever writes Parquet closes it with a footer, so rows are missing."""
    write(tmp_path / "a.parquet", [row()])
    (tmp_path / "b.parquet").touch()
    with pytest.raises(TableError, match=r"b\.parquet is empty: remove it"):
        open_table(tmp_path, COLUMNS)


@pytest.mark.parametrize("rows", [2_000, 40_000])
def test_a_quote_that_is_not_closed_loses_no_rows(rows: int, tmp_path: Path) -> None:
    lines = [f"{number},click" for number in range(rows)]
    lines[3] = '3,"click'
    (tmp_path / "events.csv").write_text("\n".join(["post_id,action", *(line.ljust(80, "k") for line in lines)]) + "\n")
    with pytest.raises(
        TableError, match=r"events\.csv(, row 4: column action holds| has a row of more than).*opened and not closed"
    ):
        open_table(tmp_path / "events.csv", {"post_id": pa.uint64(), "action": pa.string()}, may_lack=[]).to_table()


def test_empty_lists_at_first_are_lists_of_codes(tmp_path: Path) -> None:
    for number, codes in enumerate(([], [1, 2])):
        write(tmp_path / f"day-{number}.jsonl", [row(codes=codes)])
    assert sorted(read_log(tmp_path).codes.tolist()) == [[0, 0], [1, 2]]


@pytest.mark.parametrize("nothing", [None, []])
def test_codes_that_are_null_at_first_are_lists(nothing: Any, tmp_path: Path) -> None:
    for number, codes in enumerate((nothing, [1, 2])):
        write(tmp_path / f"day-{number}.jsonl", [row(codes=codes)])
    assert sorted(read_log(tmp_path).codes.tolist()) == [[0, 0], [1, 2]]


def test_json_lines_may_hold_what_python_writes_for_no_number(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"log\.jsonl, line 1: dwell_seconds must be"):
        read_log(write(tmp_path / "log.jsonl", [row(dwell_seconds=float("nan"))]))


@pytest.mark.parametrize("user", ["NA", "null", "nan", "None"])
def test_a_text_of_csv_is_never_taken_for_nobody(user: str, tmp_path: Path) -> None:
    names = row()
    values = [user if name == "user_id" else "x" if name in ("post_id", "author_id") else "1" for name in names]
    (tmp_path / "log.csv").write_text(",".join(names) + "\n" + ",".join(values) + "\n")
    log = read_log(tmp_path / "log.csv", "text")
    assert log.ids("user_id", np.array([0])) == [user]


def test_users_may_be_null_in_any_column_of_exact_numbers(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row(), row(request_id=2)])
    users = pa.array([Decimal(2**64 - 1), None], pa.decimal128(20))
    pq.write_table(
        table.set_column(table.schema.get_field_index("user_id"), "user_id", users), tmp_path / "log.parquet"
    )
    assert read_log(tmp_path / "log.parquet").user_id.tolist() == [2**64 - 1, 0]


class ReadSlowly(io.BytesIO):
    """A file that notes whether it is closed while somebody reads it."""

    closed_while_read = False
    is_read = False

    def read(self, size: int | None = -1) -> bytes:
        self.is_read = True
        time.sleep(0.02)
        content = super().read(size)
        self.is_read = False
        return content

    def close(self) -> None:
        ReadSlowly.closed_while_read |= self.is_read
        super().close()


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_no_file_is_closed_while_pyarrow_still_reads_it(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread would go on reading from a descriptor that may be another file's: rows were lost or could not be read."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    rows = 150_000
    lines = {
        "jsonl": "".join(f'{{"post_id": {row}, "author_id": 7}}\n' for row in range(rows)),
        "csv": "post_id,author_id\n" + "".join(f"{row:018},{7:018}\n" for row in range(rows)),
    }
    memory.pipe(f"/slow/rows.{suffix}", lines[suffix].encode())
    monkeypatch.setattr(memory, "_open", lambda path, *_, **__: ReadSlowly(memory.store[path].getvalue()))
    ReadSlowly.closed_while_read = False
    table = open_table(f"memory://slow/rows.{suffix}", {"post_id": pa.uint64(), "author_id": pa.uint64()})
    assert next(iter(table.batches())).num_rows < rows, "it is read in pieces"
    assert len(table.to_table()) == rows
    assert not ReadSlowly.closed_while_read
