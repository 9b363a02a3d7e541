"""Logs whose ids are texts: training, scoring and comparing read and write the texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from tests.weights.call import run
from weights.actions import SCORE_WEIGHT_SETS
from weights.checkpoint import load_manifest
from weights.lab.training.log import COLUMNS, HASHES, ID_COLUMNS, IDS_KEY, Log, read_log, write_log
from weights.lab.world.simulate import World
from weights.tables import TableError
from weights.text_ids import text_id

ROWS = 400
COLLIDING = (
    "posts-aa------------------------posts-bb------------------------",
    "v3ad13qg------------------------q:XMZU2y------------------------",
)
"""Two texts of one hash: the second stripe of XXH64 undoes what the first one changed."""


@pytest.fixture(scope="module")
def logs(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The beginning of a log with integers, with texts, with texts as JSON lines, and with the hashes of texts, as `join` marks them."""
    path = tmp_path_factory.mktemp("logs")
    write_log(path / "integers.parquet", world.log.take(np.arange(ROWS)))
    table = pq.read_table(path / "integers.parquet")
    for name in ID_COLUMNS:
        texts = [f"{name}:{number:x}" for number in table[name].to_pylist()]
        table = table.set_column(table.column_names.index(name), name, pa.array(texts))
    pq.write_table(table, path / "texts.parquet")
    (path / "texts.jsonl").write_text("\n".join(map(json.dumps, table.to_pylist())))
    hashes = pq.read_table(path / "integers.parquet").replace_schema_metadata({IDS_KEY: HASHES})
    pq.write_table(hashes, path / "hashes.parquet")
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "small"
    assert run("random", "--ids", "text", "--out", path)[0] == 0
    return path


def are_equal(first: Log, second: Log) -> bool:
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in (*COLUMNS, "actions"))


def test_both_files_give_one_log_with_its_texts(logs: Path, tmp_path: Path) -> None:
    log, lines = read_log(logs / "texts.parquet", "text"), read_log(logs / "texts.jsonl", "text")
    assert are_equal(log, lines)
    texts = log.ids("user_id", np.arange(ROWS))
    assert texts == lines.ids("user_id", np.arange(ROWS))
    assert texts[0].startswith("user_id:")
    assert log.user_id.tolist() == list(map(text_id, texts))
    rows = np.array([7, 3])
    assert log.take(rows).ids("post_id", np.arange(2)) == log.ids("post_id", rows)
    write_log(tmp_path / "again.parquet", log)
    assert are_equal(read_log(tmp_path / "again.parquet", "text"), log)


def test_the_sorted_copy_of_texts_has_them_too(logs: Path, tmp_path: Path) -> None:
    log = read_log(logs / "texts.parquet", "text")
    for _ in range(2):  # made, and found again
        copy = read_log(logs / "texts.parquet", "text", cache=tmp_path / "cache")
        assert are_equal(copy, log)
        for name in ID_COLUMNS:
            assert copy.ids(name, np.arange(ROWS)) == log.ids(name, np.arange(ROWS))


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("kind", [pa.string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_a_user_without_a_text_is_nobody(logs: Path, tmp_path: Path, kind: pa.DataType, is_cached: bool) -> None:
    table = pq.read_table(logs / "texts.parquet")
    users = table["user_id"].to_pylist()
    requests = table["request_id"].to_pylist()
    nobody = {requests[0]: "", requests[-1]: None}
    users = [nobody.get(request, user) for request, user in zip(requests, users, strict=True)]
    pq.write_table(
        table.set_column(table.column_names.index("user_id"), "user_id", pa.array(users).cast(kind)),
        tmp_path / "log.parquet",
    )
    log = read_log(tmp_path / "log.parquet", "text", cache=tmp_path / "cache" if is_cached else None)
    assert set(log.request_id[log.user_id == 0].tolist()) == set(nobody)


@pytest.mark.parametrize("is_cached", [False, True])
def test_two_texts_of_one_hash_are_refused(logs: Path, tmp_path: Path, is_cached: bool) -> None:
    first, second = COLLIDING
    assert text_id(first) == text_id(second)
    table = pq.read_table(logs / "texts.parquet")
    posts = [first, second, *table["post_id"].to_pylist()[2:]]
    pq.write_table(
        table.set_column(table.column_names.index("post_id"), "post_id", pa.array(posts)), tmp_path / "log.parquet"
    )
    with pytest.raises(TableError, match=r"log\.parquet: '.*' and '.*' have one hash"):
        read_log(tmp_path / "log.parquet", "text", cache=tmp_path / "cache" if is_cached else None)


@pytest.mark.slow
def test_training_on_texts_keeps_the_requested_score_weights(logs: Path, tmp_path: Path) -> None:
    settings = [w for one in ("epochs=0.3", "batch_contexts=8", "validation_requests=4") for w in ("--set", one)]
    args = ("--log", logs / "texts.jsonl", "--out", tmp_path / "out", "--score-weights", "x-2026-09", *settings)
    code, said = run("train", *args)
    assert (code, "column user_id holds texts, not integers" in said) == (1, True), said
    code, said = run("train", "--ids", "text", *args)
    assert code == 0, said
    manifest = load_manifest(tmp_path / "out")
    known = SCORE_WEIGHT_SETS["x-2026-09"]
    assert manifest.ids == "text"
    assert manifest.score_weights == {name: known[name] for name in manifest.action_names if name in known}
    code, said = run("train", "--start", tmp_path / "out", "--log", logs / "integers.parquet", "--out", tmp_path / "x")
    assert (code, "give --ids text" in said) == (1, True)
    assert run("relabel", tmp_path / "out", "--score-weights", "default")[0] == 0
    assert load_manifest(tmp_path / "out").score_weights["report"] == -20


def test_scores_name_what_the_log_names(logs: Path, checkpoint: Path, tmp_path: Path) -> None:
    code, said = run("score", "--checkpoint", checkpoint, "--log", logs / "texts.parquet", "--out", tmp_path / "out")
    assert code == 0, said
    scored = pq.read_table(tmp_path / "out/part-00000.parquet").to_pylist()
    wanted = pq.read_table(logs / "texts.parquet").to_pylist()
    names = ("request_id", "user_id", "post_id")
    assert sorted(tuple(row[n] for n in names) for row in scored) == sorted(
        tuple(row[n] for n in names) for row in wanted
    )
    code, said = run("score", "--checkpoint", checkpoint, "--log", logs / "integers.parquet", "--out", tmp_path / "no")
    assert (code, "column user_id holds uint64, not texts" in said) == (1, True)


def test_scores_of_hashes_name_the_hashes(logs: Path, checkpoint: Path, tmp_path: Path) -> None:
    """They were written as texts of digits, which are the ids of nobody."""
    words = ("--checkpoint", checkpoint, "--log", logs / "hashes.parquet", "--partitions", 60)
    code, said = run("score", *words, "--out", tmp_path / "out")
    assert code == 0, said
    assert "Its user_id and post_id are the hashes of texts, as in the log" in said
    parts = [pq.read_table(path) for path in sorted((tmp_path / "out").glob("part-*.parquet"))]
    assert not all(len(part) for part in parts), "some users' part is empty, and has the same columns"
    assert all(part.schema.metadata[IDS_KEY] == HASHES for part in parts)
    names = ["request_id", "user_id", "post_id"]
    scored, log = pa.concat_tables(parts).select(names), pq.read_table(logs / "hashes.parquet").select(names)
    assert scored.schema.types == log.schema.types
    keys = [(name, "ascending") for name in names]
    assert scored.sort_by(keys).to_pylist() == log.sort_by(keys).to_pylist()


def test_a_comparison_shows_and_links_texts(logs: Path, checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert run("random", "--ids", "text", "--seed", 1, "--out", other)[0] == 0
    code, said = run("compare", checkpoint, other, "--log", logs / "texts.parquet", "--out", tmp_path / "out")
    assert code == 0, said
    figures = json.loads((tmp_path / "out/figures.json").read_text())
    changed = next(one for one in figures["changed"] if one["body"]["history"])
    assert changed["best"][0].startswith("post_id:")
    posts = changed["body"]["candidates"] + changed["body"]["history"]
    assert all(post["author_id"].startswith("author_id:") for post in posts)
    assert run("random", "--out", tmp_path / "integers")[0] == 0
    args = ("--log", logs / "texts.parquet", "--out", tmp_path / "out")
    assert "no log has both" in run("compare", checkpoint, tmp_path / "integers", *args)[1]


def test_a_comparison_links_no_texts_of_nobody(logs: Path, checkpoint: Path, tmp_path: Path) -> None:
    """No text names nobody, so the page could not open such a request."""
    table = pq.read_table(logs / "texts.parquet")
    some = set(table["request_id"].unique().to_pylist()[::2])
    rows = [row | ({"user_id": None} if row["request_id"] in some else {}) for row in table.to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, table.schema), tmp_path / "log.parquet")
    other = tmp_path / "other"
    assert run("random", "--ids", "text", "--seed", 1, "--out", other)[0] == 0
    code, said = run("compare", checkpoint, other, "--log", tmp_path / "log.parquet", "--out", tmp_path / "out")
    assert code == 0, said
    changed = json.loads((tmp_path / "out/figures.json").read_text())["changed"]
    assert {one["request_id"] in some: bool(one["body"]) for one in changed} == {True: False, False: True}
    assert all(one["body"]["user_id"].startswith("user_id:") for one in changed if one["body"])


INTEGERS = {
    "log": ("log", "LOG"),
    "train": ("train", "--log", "LOG", "--out", "OUT"),
    "train-towers": ("train-towers", "--log", "LOG", "--out", "OUT"),
    "eval": ("eval", "--checkpoint", "CHECKPOINT", "--log", "LOG", "--out", "OUT"),
    "score": ("score", "--checkpoint", "CHECKPOINT", "--log", "LOG", "--out", "OUT"),
    "compare": ("compare", "CHECKPOINT", "CHECKPOINT", "--log", "LOG", "--out", "OUT"),
    "calibrate": ("calibrate", "CHECKPOINT", "--log", "LOG"),
    "off-policy": ("off-policy", "--checkpoint", "CHECKPOINT", "--log", "LOG", "--temperature", "1"),
}
"""Commands that read a log, here one of hashes, as one whose ids are integers."""


@pytest.mark.parametrize("name", INTEGERS)
def test_hashes_of_texts_are_not_read_as_integers(name: str, logs: Path, tmp_path: Path) -> None:
    """They were, and a model was trained that the service fed with other ids."""
    assert run("random", "--out", tmp_path / "integers")[0] == 0
    given = {"LOG": logs / "hashes.parquet", "OUT": tmp_path / "out", "CHECKPOINT": tmp_path / "integers"}
    code, said = run(*(given.get(word, word) for word in INTEGERS[name]))
    assert code == 1, said
    assert "hashes.parquet holds the hashes of texts" in said
    assert "give --ids text" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", [("integers", "hashes"), ("hashes", "integers")])
def test_a_directory_of_integers_and_hashes_is_refused(names: tuple[str, str], logs: Path, tmp_path: Path) -> None:
    for number, name in enumerate(names):
        (tmp_path / f"{number}.parquet").symlink_to(logs / f"{name}.parquet")
    for ids in ("uint64", "text"):
        with pytest.raises(TableError, match=r"1\.parquet and .*0\.parquet, one alone holds the hashes of texts"):
            read_log(tmp_path, ids)


def test_hashes_are_not_read_as_integers_with_a_cache(logs: Path, tmp_path: Path) -> None:
    read_log(logs / "hashes.parquet", "text", cache=tmp_path / "cache")
    with pytest.raises(TableError, match="give --ids text"):
        read_log(logs / "hashes.parquet", cache=tmp_path / "cache")


@pytest.mark.parametrize("ids", [(), ("--ids", "text")], ids=str)
def test_hashes_of_texts_give_no_table_of_posts(ids: tuple[str, ...], logs: Path, tmp_path: Path) -> None:
    code, said = run("posts", logs / "hashes.parquet", *ids, "--out", tmp_path / "posts.parquet")
    assert (code, "a corpus needs the texts" in said) == (1, True), said
    assert not (tmp_path / "posts.parquet").exists()


def test_hashes_of_texts_train_as_texts(logs: Path, tmp_path: Path) -> None:
    settings = [w for one in ("epochs=0.3", "batch_contexts=8", "validation_requests=4") for w in ("--set", one)]
    args = ("--ids", "text", "--log", logs / "hashes.parquet", "--out", tmp_path / "out", *settings)
    code, said = run("train", *args, "--score-weights", "x-2026-09")
    assert code == 0, said
    assert load_manifest(tmp_path / "out").ids == "text"
