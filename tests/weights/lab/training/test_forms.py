"""The forms that a log may have: directories by day, CSV, compressed files, addresses, sorted on disk; each gives the same log."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow")
duckdb = pytest.importorskip("duckdb")
import pyarrow.csv  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from tests.support.full_disk import full_disk  # noqa: E402
from tests.weights.call import call  # noqa: E402
from tests.weights.lab.training.small_run import small_config  # noqa: E402
from weights.checkpoint import load_manifest  # noqa: E402
from weights.lab.training.log import COLUMNS, Log, read_log, write_log  # noqa: E402
from weights.lab.world.simulate import World  # noqa: E402
from weights.tables import TableError  # noqa: E402
from weights.text_ids import IdKind  # noqa: E402

ROWS = 600


@pytest.fixture(scope="module")
def table(world: World, tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """Some rows of a world's log, in no order."""
    rows = np.random.default_rng(3).permutation(ROWS)
    write_log(path := tmp_path_factory.mktemp("log") / "log.parquet", world.log.take(rows))
    return pq.read_table(path)


def lines(table: pa.Table) -> bytes:
    return "\n".join(map(json.dumps, table.to_pylist())).encode() + b"\n"


def compressed(name: str, content: bytes, path: Path) -> None:
    with pa.CompressedOutputStream(str(path), name) as out:
        out.write(content)


def csv(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, sink)
    return sink.getvalue().to_pybytes()


def by_day(table: pa.Table, path: Path) -> Path:
    path = path / "days"
    for day in range(3):
        (path / f"date=2026-06-0{day + 1}").mkdir(parents=True)
        piece = table.slice(day * ROWS // 3, ROWS // 3)
        pq.write_table(piece, path / f"date=2026-06-0{day + 1}/part-0.parquet")
    (path / "_SUCCESS").write_text("")
    (path / "date=2026-06-01/.part-0.parquet.crc").write_bytes(b"crc")
    return path


def one_file(name: str, write: Callable[[pa.Table, Path], object]) -> Callable[[pa.Table, Path], Path]:
    def make(table: pa.Table, path: Path) -> Path:
        write(table, path / name)
        return path / name

    return make


def by_duckdb(table: pa.Table, path: Path) -> Path:
    """DuckDB writes a column of another file without nulls as one that can have none."""
    pq.write_table(table, path / "first.parquet")
    duckdb.read_parquet(str(path / "first.parquet")).write_parquet(str(path / "copied.parquet"))
    assert not any(field.nullable for field in pq.read_schema(path / "copied.parquet"))
    return path / "copied.parquet"


def without_nulls(table: pa.Table, path: Path) -> Path:
    """Two files of which only one says that its columns have no nulls."""
    (path / "two").mkdir()
    schema = pa.schema([field.with_nullable(False) for field in table.schema])
    pq.write_table(table.slice(0, ROWS // 2).cast(schema), path / "two/a.parquet")
    pq.write_table(table.slice(ROWS // 2), path / "two/b.parquet")
    return path / "two"


FORMS: dict[str, Callable[[pa.Table, Path], Path]] = {
    "directories by day": by_day,
    "by DuckDB": by_duckdb,
    "columns that can have no nulls": without_nulls,
    "csv": one_file("log.csv", lambda table, path: path.write_bytes(csv(table))),
    "csv.gz": one_file("log.csv.gz", lambda table, path: path.write_bytes(gzip.compress(csv(table)))),
    "csv.zst": one_file("log.csv.zst", lambda table, path: compressed("zstd", csv(table), path)),
    "jsonl.gz": one_file("log.jsonl.gz", lambda table, path: path.write_bytes(gzip.compress(lines(table)))),
    "jsonl.zst": one_file("log.jsonl.zst", lambda table, path: compressed("zstd", lines(table), path)),
}


def assert_equal(log: Log, other: Log) -> None:
    for name in (*COLUMNS, "actions"):
        assert np.array_equal(getattr(log, name), getattr(other, name)), name
        assert getattr(log, name).dtype == getattr(other, name).dtype
    assert log.action_names == other.action_names


@pytest.fixture
def plain(table: pa.Table, tmp_path: Path) -> Log:
    pq.write_table(table, tmp_path / "plain.parquet")
    return read_log(tmp_path / "plain.parquet")


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_log(form: str, table: pa.Table, plain: Log, tmp_path: Path) -> None:
    path = FORMS[form](table, tmp_path)
    assert_equal(read_log(path), plain)
    assert_equal(read_log(path, cache=tmp_path / "cache"), plain)
    assert_equal(read_log(f"file://{path}"), plain)


def test_a_log_is_read_from_an_address(table: pa.Table, plain: Log, tmp_path: Path) -> None:
    import fsspec

    path = by_day(table, tmp_path)
    assert_equal(read_log(f"file://{path}"), plain)
    fsspec.filesystem("memory").put(str(path), "/bucket/log", recursive=True)
    assert_equal(read_log("memory://bucket/log"), plain)
    with pytest.raises(TableError, match=r"memory://bucket/nothing is not there"):
        read_log("memory://bucket/nothing")
    with pytest.raises(TableError, match=r"nowhere://x cannot be opened"):
        read_log("nowhere://x")
    shown = call("log", f"file://{path}")
    assert shown.exit_code == 0, shown.output


def test_a_sorted_copy_is_made_once_and_again_after_a_change(table: pa.Table, plain: Log, tmp_path: Path) -> None:
    told: list[str] = []
    pq.write_table(table, tmp_path / "log.parquet")

    def read() -> Log:
        told.clear()
        return read_log(tmp_path / "log.parquet", cache=tmp_path / "cache", progress=lambda what, *_: told.append(what))

    assert_equal(read(), plain)
    assert told == ["Reading the log", "Sorting the log"]
    assert_equal(read(), plain)
    assert told == [], "it was sorted before"
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "cache").iterdir()} == {0o700}
    pq.write_table(table.slice(10), tmp_path / "log.parquet")
    assert len(read()) == ROWS - 10


def test_a_cut_copy_is_refused_by_name(table: pa.Table, tmp_path: Path) -> None:
    pq.write_table(table, tmp_path / "log.parquet")
    read_log(tmp_path / "log.parquet", cache=tmp_path / "cache")
    (column,) = tmp_path.glob("cache/*/impressions/post_id.bin")
    os.truncate(column, 100)
    with pytest.raises(TableError, match=r"cache/\w+ is damaged .*: remove it, and it is made again"):
        read_log(tmp_path / "log.parquet", cache=tmp_path / "cache")


@pytest.mark.slow
def test_training_gives_one_digest_from_memory_and_disk(world: World, tmp_path: Path) -> None:
    write_log(tmp_path / "log.parquet", world.log)
    (tmp_path / "config.json").write_text(json.dumps(small_config().to_dict()))
    settings = ("--set", "epochs=0.05", "--set", "validation_requests=4", "--set", "evaluate_every=2")
    digests = set()
    for name, further in (("memory", ()), ("disk", ("--cache", tmp_path / "cache"))):
        options = ("--config", tmp_path / "config.json", "--out", tmp_path / name, *settings, *further)
        trained = call("train", "--log", tmp_path / "log.parquet", *options)
        assert trained.exit_code == 0, trained.output
        digests.add(load_manifest(tmp_path / name).digest)
    assert [*(tmp_path / "cache").iterdir()], "the second read the copy"
    assert len(digests) == 1


@pytest.mark.parametrize("is_cached", [False, True])
def test_every_mistake_names_the_file_and_the_row(is_cached: bool, table: pa.Table, tmp_path: Path) -> None:
    path = by_day(table, tmp_path)
    wrong = path / "date=2026-06-03/part-0.parquet"
    posts = pq.ParquetFile(wrong).read()["post_id"].to_pylist()
    for mistake, reason in (
        ([*posts[:4], 0, *posts[5:]], "post_id must not be 0"),
        ([*posts[:4], None, *posts[5:]], "column post_id has 1 nulls; every row needs an id"),
    ):
        table = pq.ParquetFile(wrong).read()
        column = pa.array(mistake, pa.uint64())
        pq.write_table(table.set_column(table.column_names.index("post_id"), "post_id", column), wrong)
        with pytest.raises(TableError, match=rf"date=2026-06-03/part-0\.parquet, row 5: {reason}"):
            read_log(path, cache=tmp_path / "cache" if is_cached else None)


@pytest.mark.parametrize("is_cached", [False, True])
def test_requests_that_differ_are_named_by_their_row(is_cached: bool, table: pa.Table, tmp_path: Path) -> None:
    users = table["user_id"].to_pylist()
    requests = table["request_id"].to_pylist()
    row = next(
        place for place in range(1, ROWS) if requests.count(requests[place]) > 1 and requests[place] in requests[:place]
    )
    users[row] += 1
    table = table.set_column(table.column_names.index("user_id"), "user_id", pa.array(users, pa.uint64()))
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(
        TableError, match=r"log\.parquet, row \d+: impressions of one request_id differ in user_id"
    ) as told:
        read_log(tmp_path / "log.parquet", cache=tmp_path / "cache" if is_cached else None)
    named = int(str(told.value).partition("row ")[2].partition(":")[0]) - 1
    assert requests[named] == requests[row]


def test_one_request_at_two_times_is_named_by_its_row(table: pa.Table, tmp_path: Path) -> None:
    times = table["impression_ts"].to_pylist()
    requests = table["request_id"].to_pylist()
    row = next(place for place in range(1, ROWS) if requests.count(requests[place]) > 1)
    times[row] += 10**6
    table = table.set_column(table.column_names.index("impression_ts"), "impression_ts", pa.array(times))
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(TableError, match=rf"row {row + 1}: impressions of one request_id differ in impression_ts"):
        read_log(tmp_path / "log.parquet")


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_request_of_two_times_in_a_row_is_named(is_cached: bool, table: pa.Table, tmp_path: Path) -> None:
    """No other request lies between its rows once they are sorted by time."""
    times, requests = table["impression_ts"].to_pylist(), table["request_id"].to_pylist()
    newest = max(zip(times, requests, strict=True))[1]
    rows = [row for row in range(ROWS) if requests[row] == newest]
    assert len(rows) > 1
    times[rows[1]] += 1
    table = table.set_column(table.column_names.index("impression_ts"), "impression_ts", pa.array(times))
    pq.write_table(table, tmp_path / "log.parquet")
    with pytest.raises(TableError, match=rf"row {rows[1] + 1}: impressions of one request_id differ in impression_ts"):
        read_log(tmp_path / "log.parquet", cache=tmp_path / "cache" if is_cached else None)


def test_two_formats_in_a_directory_are_refused(table: pa.Table, tmp_path: Path) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "b.csv").write_bytes(csv(table))
    with pytest.raises(TableError, match=r"several formats, CSV \(.*b\.csv\) and Parquet \(.*a\.parquet\)"):
        read_log(tmp_path)


BAD_CSV: dict[str, tuple[int, str, str]] = {
    "a float": (300, "post_id", "5417.5"),
    "a large number": (300, "post_id", "5417" * 6),
    "an action that is 2": (300, "action.click", "5417"),
}


@pytest.mark.parametrize("mistake", BAD_CSV)
def test_a_value_that_does_not_fit_in_csv_names_file_and_row(mistake: str, table: pa.Table, tmp_path: Path) -> None:
    row, name, value = BAD_CSV[mistake]
    flags = {name: table[name].cast(pa.int8()) for name in table.column_names if name.startswith("action.")}
    text = (
        csv(pa.table({column: flags.get(column, table[column]) for column in table.column_names})).decode().splitlines()
    )
    cells = text[row].split(",")
    cells[table.column_names.index(name)] = value
    text[row] = ",".join(cells)
    (tmp_path / "log.csv").write_text("\n".join(text))
    with pytest.raises(TableError, match=rf"log\.csv, row {row}: column {name}") as told:
        read_log(tmp_path / "log.csv")
    assert "5417" not in str(told.value)


@pytest.mark.parametrize("rows", [ROWS, 40 * ROWS])
def test_a_cut_row_of_csv_is_named_without_its_values(rows: int, table: pa.Table, tmp_path: Path) -> None:
    many = pa.concat_tables([table] * (rows // ROWS))
    text = csv(many).decode().splitlines()
    cut = text[rows - 1].split(",")[:5]
    (tmp_path / "log.csv").write_text("\n".join([*text[: rows - 1], ",".join(cut), text[rows]]))
    with pytest.raises(
        TableError, match=rf"log\.csv, row {rows - 1}: has 5 values for \d+ columns; it may be cut off"
    ) as told:
        read_log(tmp_path / "log.csv")
    assert cut[3] not in str(told.value)


def test_a_column_of_csv_that_a_log_has_not_is_named(table: pa.Table, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(csv(table.append_column("extra", table["post_id"])))
    with pytest.raises(TableError, match=r"log\.csv has unknown columns: extra"):
        read_log(tmp_path / "log.csv")


def one_cell(row: int, name: str, value: str) -> Callable[[bytes], bytes]:
    """Replaces a value of a row of CSV, counted from 1 without the header."""

    def changed(text: bytes) -> bytes:
        lines = text.decode().splitlines()
        cells = lines[row].split(",")
        cells[lines[0].replace('"', "").split(",").index(name)] = value
        return "\n".join([*lines[:row], ",".join(cells), *lines[row + 1 :]]).encode()

    return changed


CSV_MISTAKES: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "a text in a column of numbers": (
        "log.csv",
        one_cell(300, "impression_ts", "yesterday"),
        r", row 300: column impression_ts holds texts, not integers$",
    ),
    "a text as an id": ("log.csv", one_cell(7, "user_id", "bob"), r", row 7: column user_id holds texts, not integers"),
    "no names of columns": (
        "log.csv",
        lambda text: text.partition(b"\n")[2],
        r" has several columns with the name 'false'; the first line of CSV must hold the names$",
    ),
    "semicolons": (
        "log.csv",
        lambda text: text.replace(b",", b";"),
        r": its values are separated by semicolons; separate them by commas$",
    ),
    "tabs": (
        "log.csv",
        lambda text: text.replace(b",", b"\t"),
        r": its values are separated by tabs; separate them by commas$",
    ),
    "UTF-16": (
        "log.csv",
        lambda text: text.decode().encode("utf-16"),
        r" is no text in UTF-8 but in UTF-16: convert it$",
    ),
    "Latin-1": (
        "log.csv",
        lambda text: text.replace(b"created_at", "créé".encode("latin-1")),
        r" cannot be read as CSV: it is no text in UTF-8; convert it$",
    ),
    "gzip under a name without .gz": (
        "log.csv",
        gzip.compress,
        r" is compressed with gzip, but its name does not end in \.gz: rename it$",
    ),
    "a name with .gz without gzip": (
        "log.csv.gz",
        lambda text: text,
        r" is not compressed with gzip, but its name ends in \.gz: rename it$",
    ),
    "a name with .zst and gzip": (
        "log.csv.zst",
        gzip.compress,
        r" is compressed with gzip, but its name does not end in \.gz: rename it$",
    ),
}


@pytest.mark.parametrize("mistake", CSV_MISTAKES)
def test_a_mistake_in_csv_says_what_to_do(mistake: str, table: pa.Table, tmp_path: Path) -> None:
    name, change, reason = CSV_MISTAKES[mistake]
    (tmp_path / name).write_bytes(change(csv(table)))
    with pytest.raises(TableError, match=f"{name}{reason}".replace("log.csv", r"log\.csv")):
        read_log(tmp_path / name)


def test_two_columns_of_one_name_are_refused(table: pa.Table, tmp_path: Path) -> None:
    pq.write_table(table.append_column("post_id", table["post_id"]), tmp_path / "log.parquet")
    with pytest.raises(TableError, match=r"log\.parquet has several columns with the name 'post_id'"):
        read_log(tmp_path / "log.parquet")


def test_a_cut_parquet_file_says_that_it_may_be_cut(table: pa.Table, tmp_path: Path) -> None:
    pq.write_table(table, path := tmp_path / "log.parquet")
    os.truncate(path, path.stat().st_size - 9)
    with pytest.raises(TableError, match=r"log\.parquet cannot be read as Parquet: .*it may be cut off$"):
        read_log(path)


def test_a_cut_gzip_file_is_named(table: pa.Table, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl.gz").write_bytes(gzip.compress(lines(table))[:-200])
    with pytest.raises(TableError, match=r"log\.jsonl\.gz cannot be read as JSON lines"):
        read_log(tmp_path / "log.jsonl.gz")


def liked(first: int, second: int) -> bytes:
    """JSON lines of two impressions, of which these were liked: as many bytes, whatever was liked."""
    row = dict.fromkeys(COLUMNS, 1) | {"dwell_seconds": 0.0}
    return lines(
        pa.Table.from_pylist([row | {"post_id": 1 + i, "action.like": yes} for i, yes in enumerate((first, second))])
    )


@pytest.mark.parametrize("address", ["memory", "silent"])
def test_a_copy_of_another_file_at_an_address_is_not_used(address: str, tmp_path: Path) -> None:
    """Memory tells when a file was changed, by no name that Arrow knows. `silent` tells nothing."""
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    class Silent(MemoryFileSystem):
        protocol = "silent"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(super()._strip_protocol(path.removeprefix("silent:/")))

        def info(self, path: str, **options: Any) -> dict[str, Any]:
            told: dict[str, Any] = super().info(path, **options)
            return {name: value for name, value in told.items() if name != "created"}

        def modified(self, path: str) -> Any:
            raise NotImplementedError

    fsspec.register_implementation("silent", Silent, clobber=True)
    remote = fsspec.filesystem(address)
    for first, second in ((1, 0), (0, 1)):
        remote.pipe("/changing/log.jsonl", liked(first, second))
        log = read_log(f"{address}://changing/log.jsonl", cache=tmp_path / "cache")
        assert log.actions[:, 0].tolist() == [bool(first), bool(second)]
    assert len([*(tmp_path / "cache").iterdir()]) == (2 if address == "memory" else 1)


def test_a_cache_may_have_a_quote_in_its_path(table: pa.Table, plain: Log, tmp_path: Path) -> None:
    pq.write_table(table, tmp_path / "log.parquet")
    assert_equal(read_log(tmp_path / "log.parquet", cache=tmp_path / "it's"), plain)


@pytest.mark.parametrize("size", [64, 4_000])
def test_a_cache_on_a_full_disk_is_named(size: int, table: pa.Table, tmp_path: Path) -> None:
    pq.write_table(table, tmp_path / "log.parquet")
    with full_disk(size):
        told = call("log", tmp_path / "log.parquet", "--cache", tmp_path / "cache")
    assert (told.exit_code, told.output.count("\n")) == (1, 1), told.output
    assert told.output.startswith(f"{tmp_path}/cache cannot take the sorted copy of {tmp_path}/log.parquet (")
    assert told.output.endswith("): make room there, or name another place with --cache\n")
    assert not [*(tmp_path / "cache").iterdir()]


@pytest.mark.parametrize("codes", [[None], list(range(99))])
@pytest.mark.parametrize("is_cached", [False, True])
def test_refused_codes_are_named_by_their_row(
    codes: list[int | None], is_cached: bool, table: pa.Table, tmp_path: Path
) -> None:
    half = ROWS // 2
    for name, bad in (("a", [1]), ("b", codes)):
        lists = pa.array([[1, 2]] * 40 + [None, [], bad] + [[1]] * (half - 43), pa.list_(pa.int64()))
        path = tmp_path / f"log/{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(table.slice(0 if name == "a" else half, half).append_column("codes", lists), path)
    with pytest.raises(TableError, match=r"log/b\.parquet, row 43: column codes h"):
        read_log(tmp_path / "log", cache=tmp_path / "cache" if is_cached else None)


@pytest.mark.parametrize("ids", ["uint64", "text"])
def test_a_column_of_users_that_are_all_null_is_nobody(ids: IdKind, table: pa.Table, tmp_path: Path) -> None:
    for name in ("post_id", "author_id") if ids == "text" else ():
        table = table.set_column(table.column_names.index(name), name, table[name].cast(pa.string()))
    table = table.set_column(table.column_names.index("user_id"), "user_id", pa.nulls(len(table)))
    pq.write_table(table, tmp_path / "log.parquet")
    for cache in (None, tmp_path / "cache"):
        assert not read_log(tmp_path / "log.parquet", ids, cache=cache).user_id.any()
