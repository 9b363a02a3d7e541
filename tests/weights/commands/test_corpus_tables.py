"""`corpus build` from Parquet and JSON lines: every refusal names the file, where there is one the line, and repeats no value."""

from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from tests.goldens import GOLDEN
from tests.weights.call import run
from weights.corpus.store import load_corpus

SECRET = "5417secret"
ROWS: list[dict[str, Any]] = [
    {"post_ids": post, "author_ids": post % 7 + 1, "created_at": 5, "topics": "art"} for post in range(1, 21)
]


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A retrieval checkpoint for each kind of ids."""
    place = tmp_path_factory.mktemp("towers")
    for kind in ("uint64", "text"):
        source = GOLDEN / "retrieval-mean-pool/retrieval"
        assert run("import", source, "--ids", kind, "--out", place / kind)[0] == 0
    return {kind: place / kind for kind in ("uint64", "text")}


def lines_of(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def build(towers: Path, source: Path) -> tuple[int, str]:
    return run("corpus", "build", source, "--encoder", towers, "--out", source.with_name(f"{source.name}-corpus"))


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_every_kind_of_text_column_is_a_text(tmp_path: Path, towers: dict[str, Path], kind: pa.DataType) -> None:
    """Polars writes string views, pandas large strings and dictionaries."""
    texts = {
        name: pa.array([f"{name} {row['post_ids']}" for row in ROWS]).cast(kind) for name in ("post_ids", "author_ids")
    }
    pq.write_table(
        pa.table({**texts, "topics": pa.array(["art"] * 20).cast(kind)}), source := tmp_path / "posts.parquet"
    )
    assert build(towers["text"], source)[0] == 0
    corpus = load_corpus(tmp_path / "posts.parquet-corpus").corpus
    assert (len(corpus), corpus.topic_names) == (20, ("art",))
    code, said = build(towers["uint64"], source)
    assert (code, "posts.parquet, row 1: column post_ids holds texts, not integers" in said) == (1, True), said


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"created_at": SECRET}, "column created_at holds texts, not integers"),
        ({"created_at": "5417"}, "column created_at holds texts, not integers"),
        ({"created_at": True}, "column created_at holds true and false, not integers"),
        ({"created_at": 5417.5}, "row 1: column created_at does not fit int64; it holds double"),
        ({"author_ids": SECRET}, "column author_ids holds texts, not integers"),
        ({"author_ids": True}, "column author_ids holds true and false, not integers"),
    ],
)
def test_a_column_of_another_kind_is_refused(
    tmp_path: Path, towers: dict[str, Path], suffix: str, change: dict[str, Any], problem: str
) -> None:
    rows = [row | change for row in ROWS]
    source = tmp_path / f"posts{suffix}"
    if suffix == ".jsonl":
        source.write_text(lines_of(rows))
        problem = problem.replace("row 1", "line 1")
    else:
        pq.write_table(pa.Table.from_pylist(rows), source)
    code, said = build(towers["uint64"], source)
    assert code == 1
    assert problem in said
    assert f"posts{suffix}, " in said
    assert "5417" not in said


def test_the_second_file_and_its_row_are_named(tmp_path: Path, towers: dict[str, Path]) -> None:
    (folder := tmp_path / "posts").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "a.parquet")
    for change, problem in (
        ({"post_ids": None}, "column post_ids has 1 nulls"),
        ({"created_at": -1}, "created_at must be Unix seconds"),
        ({"post_ids": 0}, "post_ids must not be 0"),
    ):
        late = [row | {"post_ids": row["post_ids"] + 100} for row in ROWS]
        late[4] |= change
        pq.write_table(pa.Table.from_pylist(late), folder / "b.parquet")
        code, said = build(towers["uint64"], folder)
        assert (code, f"{folder}/b.parquet, row 5: {problem}" in said) == (1, True), said


Write = Callable[[Path], object]
STRAY: dict[str, tuple[str, Write, str]] = {
    "a README": ("README.md", lambda path: path.write_text("# Posts\n"), "is neither Parquet nor JSON lines"),
    "a table of another form": ("b.tsv", lambda path: path.write_text("post_ids\n1\n"), "is neither Parquet nor JSON"),
    "an empty Parquet file": ("z.parquet", lambda path: path.touch(), "is empty"),
    "a JSON array": ("b.jsonl", lambda path: path.write_text(json.dumps(ROWS)), ", line 1: holds a JSON array"),
    "a cut last line": ("b.jsonl", lambda path: path.write_text(lines_of(ROWS)[:-9]), ", line 20: is no JSON object"),
    "a list in a line": (
        "b.jsonl",
        lambda path: path.write_text(lines_of(ROWS) + "5417\n"),
        ", line 21: holds no JSON",
    ),
    "a changed type": (
        "b.jsonl",
        lambda path: path.write_text(lines_of([*ROWS, {**ROWS[0], "created_at": SECRET}])),
        ", line 21: column created_at holds a value that does not fit int64",
    ),
    "a new column": (
        "b.jsonl",
        lambda path: path.write_text(lines_of([*ROWS, {**ROWS[0], "extra": 5417}])),
        ", line 21: has a column that the first rows lack",
    ),
    "a compressed file": (
        "b.jsonl.bz2",
        lambda path: path.write_bytes(bz2.compress(lines_of(ROWS).encode())),
        "is compressed: unpack it first, or use gzip (.gz) or zstd (.zst)",
    ),
    "Parquet beside JSON": (
        "b.parquet",
        lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
        "of several formats",
    ),
}


@pytest.mark.parametrize("case", STRAY)
def test_a_stray_or_broken_file_is_named(tmp_path: Path, towers: dict[str, Path], case: str) -> None:
    name, write, problem = STRAY[case]
    (folder := tmp_path / "posts").mkdir()
    (folder / "a.jsonl").write_text(lines_of(ROWS))
    write(folder / name)
    code, said = build(towers["uint64"], folder)
    assert (code, f"{folder / name}" in said, problem in said, "5417" in said) == (1, True, True, False), said
    code, said = build(towers["uint64"], folder / name)
    if name != "b.parquet" and case != "a new column":
        assert (code, f"{folder / name}" in said, problem in said) == (1, True, True), said


def test_a_cut_parquet_file_is_named(tmp_path: Path, towers: dict[str, Path]) -> None:
    (folder := tmp_path / "posts").mkdir()
    for name in ("a.parquet", "b.parquet"):
        pq.write_table(pa.Table.from_pylist(ROWS), folder / name)
    (folder / "b.parquet").write_bytes((folder / "b.parquet").read_bytes()[:-9])
    code, said = build(towers["uint64"], folder)
    assert (code, f"{folder}/b.parquet cannot be read as Parquet" in said) == (1, True), said


def test_a_blank_in_a_columns_name_is_named(tmp_path: Path, towers: dict[str, Path]) -> None:
    for suffix in (".parquet", ".jsonl"):
        rows = [{"post_ids ": row["post_ids"], "author_ids": 1} for row in ROWS]
        source = tmp_path / f"posts{suffix}"
        source.write_text(lines_of(rows))
        if suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), source)
        code, said = build(towers["uint64"], source)
        assert (code, f"{source}: the name of the column 'post_ids ' begins or ends with a blank" in said) == (1, True)


def test_files_that_begin_with_an_underscore_are_read(tmp_path: Path, towers: dict[str, Path]) -> None:
    """If they end as a table does. Others are what Spark and pyarrow leave."""
    (folder := tmp_path / "posts").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS[:10]), folder / "a.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS[10:]), folder / "_b.parquet")
    for name in ("_SUCCESS", "_committed_17", ".a.parquet.crc"):
        (folder / name).touch()
    (folder / "_temporary").mkdir()
    (folder / "_temporary/c.parquet").write_bytes((folder / "a.parquet").read_bytes())
    assert build(towers["uint64"], folder)[0] == 0
    assert len(load_corpus(tmp_path / "posts-corpus").corpus) == 20
    (folder / "notes").write_text("x")
    code, said = build(towers["uint64"], folder)
    assert (code, f"{folder}/notes is neither Parquet nor JSON lines" in said) == (1, True), said


WITHOUT_NULLS = pa.schema([field.with_nullable(False) for field in pa.Table.from_pylist(ROWS).schema])
FORMS: dict[str, Callable[[Path], object]] = {
    "posts.csv": lambda path: pyarrow.csv.write_csv(pa.Table.from_pylist(ROWS), path),
    "posts.csv.gz": lambda path: pyarrow.csv.write_csv(
        pa.Table.from_pylist(ROWS), pa.CompressedOutputStream(str(path), "gzip")
    ),
    "posts.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines_of(ROWS).encode())),
    "date=2026-11-28/posts.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
    "posts without nulls.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS).cast(WITHOUT_NULLS), path),
}


@pytest.mark.parametrize("name", FORMS)
def test_posts_come_in_every_form_that_a_log_may_have(tmp_path: Path, towers: dict[str, Path], name: str) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), plain := tmp_path / "plain.parquet")
    (folder := tmp_path / "posts" / name).parent.mkdir(parents=True)
    FORMS[name](folder)
    for source in (plain, tmp_path / "posts", Path(f"file://{tmp_path}/posts")):
        code, said = run(
            "corpus", "build", source, "--encoder", towers["uint64"], "--out", tmp_path / "out", "--replace"
        )
        assert code == 0, said
        corpus = load_corpus(tmp_path / "out").corpus
        assert corpus.post_ids.tolist() == [row["post_ids"] for row in ROWS], source
        assert corpus.topic_names == ("art",)
