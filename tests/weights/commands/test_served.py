"""`served forget` on the command line: no trace of a user stays in the parts, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.parts import bits, rankings_of
from tests.weights.call import run
from tests.weights.test_served import ranking, write
from weights.forget import forget_users
from weights.text_ids import text_id

DAY = "date=2026-11-28"


def forget(directory: Path, *options: str) -> tuple[int, str]:
    return run("served", "forget", directory, *options)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two parts with users 1 and 2, one with user 1 alone, one with user 2 alone."""
    (tmp_path / DAY).mkdir()
    for part, users in enumerate([(1, 2, 1, 2), (2, 1), (1, 1), (2,)]):
        rows = [ranking(10 * part + place, user=user) for place, user in enumerate(users)]
        if part == 0:  # one context, of which the part holds the first only
            rows[2].context, rows[3].context = rows[0].context, rows[1].context
        write(tmp_path / DAY / f"{part}.parquet", rows, at_once=2)
    return tmp_path


def test_a_user_is_removed_and_others_keep_every_bit(log: Path) -> None:
    before = {row.request_id: row for row in rankings_of(log) if row.context.user_id == 2}
    code, said = forget(log, "--user", "1")
    assert code == 0
    assert "5 rankings removed; of 4 parts 2 were written again and 1 removed" in said
    after = {row.request_id: row for row in rankings_of(log)}
    assert after.keys() == before.keys()
    for name, row in after.items():
        assert bits(row.context) == bits(before[name].context)
        assert bits(row.scores) == bits(before[name].scores)
    assert sorted(path.name for path in (log / DAY).iterdir()) == ["0.parquet", "1.parquet", "3.parquet"]
    assert (log / DAY / "0.parquet").stat().st_mode & 0o777 == 0o600


def test_a_part_that_is_closed_meanwhile_is_told(log: Path) -> None:
    """It is in no list of parts, and holds a ranking of the user."""
    is_open = log / DAY / "4.parquet.open"
    write(is_open, [ranking(50, user=1)])

    def close(done: int, parts: int) -> None:
        if is_open.exists():
            is_open.rename(log / DAY / "4.parquet")

    result = forget_users(log, [1], close)
    assert (result.parts, result.open_parts) == (4, 1)
    assert forget_users(log, [1]).open_parts == 0


def test_several_users_and_users_who_are_not_there(log: Path) -> None:
    assert "0 rankings removed" in forget(log, "--user", "3")[1]
    assert "9 rankings removed" in forget(log, "--user", "1", "--user", "2")[1]
    assert rankings_of(log) == []


def test_a_user_whose_id_is_a_text(tmp_path: Path) -> None:
    (tmp_path / DAY).mkdir()
    write(tmp_path / DAY / "a.parquet", [ranking(1, user=text_id("Lee")), ranking(2, user=5)])
    code, said = forget(tmp_path, "--user", "Lee")
    assert (code, "add --ids text" in said) == (2, True)
    assert "1 rankings removed" in forget(tmp_path, "--user", "Lee", "--ids", "text")[1]
    assert [row.context.user_id for row in rankings_of(tmp_path)] == [5]


def test_parts_that_are_being_written_are_counted(log: Path) -> None:
    (log / DAY / "x.parquet.open").write_bytes(b"PAR1")
    assert "1 parts are being written and were not looked at" in forget(log, "--user", "1")[1]


def test_a_file_that_is_no_part_is_named_and_the_others_are_done(log: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), log / DAY / "foreign.parquet")
    (log / DAY / "cut.parquet").write_bytes((log / DAY / "0.parquet").read_bytes()[:-10])
    code, said = forget(log, "--user", "1")
    assert code == 1
    for words in ("5 rankings removed", "foreign.parquet is no part of a log", "cut.parquet cannot be read as Parquet"):
        assert words in said


@pytest.mark.slow
def test_two_at_once_remove_one_after_the_other(log: Path) -> None:
    command = [sys.executable, "-m", "weights", "served", "forget", str(log), "--user", "2"]
    others, said = list[subprocess.Popen[str]](), list[str]()

    def begin_another(done: int, parts: int) -> None:
        if not others:
            others.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
            assert others[0].stdout is not None
            said.append(others[0].stdout.readline())

    assert forget_users(log, [1], begin_another).rankings == 5
    said += others[0].communicate()[0].splitlines()
    assert "is in use by a join or another `served forget`: this begins when that ends" in said[0]
    assert "4 rankings removed" in said[1]
    assert rankings_of(log) == []


def test_what_a_killed_one_left_is_removed(log: Path) -> None:
    left = log / DAY / "0.0123abcd.forget.parquet.open"
    left.write_bytes(b"PAR1")
    code, said = forget(log, "--user", "3")
    assert (code, left.exists(), "are being written" in said) == (0, False, False)


def test_a_damaged_part_is_named(log: Path) -> None:
    data = bytearray((log / DAY / "0.parquet").read_bytes())
    data[len(data) - 8 - int.from_bytes(data[-8:-4], "little")] ^= 0xFF  # the footer's first byte
    (log / DAY / "0.parquet").write_bytes(data)
    code, said = forget(log, "--user", "1")
    assert (code, "0.parquet cannot be read as Parquet: " in said) == (1, True)


def test_a_directory_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    code, said = forget(tmp_path / "nothing", "--user", "1")
    assert (code, said.count("\n"), "nothing is no directory" in said) == (1, 1, True)
