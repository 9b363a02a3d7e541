"""Corpora whose ids are texts: built, searched and changed with their texts; two texts of one hash are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from model.inputs import Context
from model.retrieval.corpus import packed
from model.retrieval.engine import RetrievalEngine, RetrievalOptions
from model.retrieval.inputs import Change, Filters, NewPosts, PostChange, PostRows, Query
from tests import retrieval_goldens as goldens
from tests.goldens import GOLDEN
from tests.weights.call import run
from weights import text_ids
from weights.checkpoint import Encoder
from weights.corpus.changes import load_changed, mark_after
from weights.corpus.importer import check_texts
from weights.corpus.store import load_corpus
from weights.corpus.table import PostsTable
from weights.errors import CheckpointError
from weights.tables import TableError
from weights.text_ids import collision

POSTS = [f"post:{number:024x}" for number in range(40)]
AUTHORS = ["ada", "é" * 64, "b\0", *(f"author {number}" for number in range(37))]
NONE = np.empty(0, np.uint64)


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("towers") / "towers"
    assert run("import", GOLDEN / "retrieval-mean-pool/retrieval", "--ids", "text", "--out", path)[0] == 0
    return path


@pytest.fixture(scope="module")
def encoder(towers: Path) -> Encoder:
    from weights.checkpoint import load_encoder

    return load_encoder(towers)


def table(**changes: Any) -> pa.Table:
    columns = {"post_ids": POSTS, "author_ids": AUTHORS, "topics": ["art", None] * 20, "created_at": [5, None] * 20}
    return pa.table({name: column for name, column in (columns | changes).items() if column is not None})


def built(tmp_path: Path, towers: Path, name: str = "corpus") -> Path:
    pq.write_table(table(), tmp_path / "posts.parquet")
    code, said = run("corpus", "build", tmp_path / "posts.parquet", "--encoder", towers, "--out", tmp_path / name)
    assert code == 0, said
    return tmp_path / name


def test_posts_in_parquet_and_in_json_lines_make_one_corpus(tmp_path: Path, towers: Path, encoder: Encoder) -> None:
    path = built(tmp_path, towers)
    (tmp_path / "posts.jsonl").write_text("\n".join(map(json.dumps, table().to_pylist())))
    args = ("--encoder", towers, "--out", tmp_path / "again", "--name", "corpus")
    assert run("corpus", "build", tmp_path / "posts.jsonl", *args)[0] == 0
    assert run("corpus", "verify", path, "--encoder", towers)[0] == 0
    stored = load_corpus(path, encoder.manifest)
    assert stored.manifest == load_corpus(tmp_path / "again").manifest
    assert stored.manifest.ids == "text"
    corpus = stored.corpus
    assert corpus.texts_of(np.arange(40)) == list(zip(POSTS, AUTHORS, strict=True))
    assert corpus.post_ids.tolist() == text_ids.text_ids(POSTS).tolist()
    assert corpus.created_at is not None
    assert corpus.created_at.tolist() == [5, 0] * 20
    vectors = encoder.towers.encode_posts(corpus.post_ids, corpus.author_ids).numpy()
    np.testing.assert_allclose(corpus.vectors, vectors, atol=1e-6)


def found(engine: RetrievalEngine) -> dict[str, str]:
    """Every post that a search returns, and its author."""
    nobody = np.zeros((0, engine.config.actions), np.float32)
    context = Context(1, NONE, NONE, nobody, NONE.view(np.int64), np.empty(0, np.float32))
    [retrieved] = engine.retrieve([Query(context, 100, Filters(NONE))]).retrieved
    assert text_ids.text_ids(post for post, _ in retrieved.texts).tolist() == retrieved.post_ids.tolist()
    return dict(retrieved.texts)


def test_texts_go_through_search_change_and_restart(tmp_path: Path, towers: Path, encoder: Encoder) -> None:
    path = built(tmp_path, towers)
    stored, kept, _ = load_changed(path, encoder.manifest)
    engine = RetrievalEngine(encoder.towers, stored.corpus, RetrievalOptions(backend="torch"))
    expected = dict(zip(POSTS, AUTHORS, strict=True))
    assert found(engine) == expected
    for delete, new in ((POSTS[:2], {"new one": "x"}), (["new one"], {POSTS[5]: "another author", "y" * 128: "ada"})):
        ids, authors = text_ids.text_ids(new), text_ids.text_ids(new.values())
        vectors = encoder.towers.encode_posts(ids, authors).numpy()
        posts = NewPosts(ids, authors, np.zeros(len(new), np.int64), ["art"] * len(new), vectors, list(new.items()))
        change = Change(text_ids.text_ids(delete), posts, kept.mark, list(delete))
        change = replace(change, mark=mark_after(kept.mark, change))
        kept.record([change])
        engine.change(change)
        expected = {post: author for post, author in expected.items() if post not in delete} | new
        assert found(engine) == expected
    kept.close()
    stored, again, change = load_changed(path, encoder.manifest)
    assert change.posts.texts == [(POSTS[5], "another author"), ("y" * 128, "ada")]
    assert again.mark == kept.mark
    engine = RetrievalEngine(encoder.towers, stored.corpus, RetrievalOptions(backend="torch"))
    engine.change(change)
    assert found(engine) == expected
    again.close()


def test_merged_changes_keep_the_texts_of_what_is_left() -> None:
    def change(delete: str, *posts: str) -> PostChange:
        ids = text_ids.text_ids(posts)
        rows = PostRows(ids, ids, np.zeros(len(posts), np.int64), [None] * len(posts), [(p, p) for p in posts])
        return PostChange(text_ids.text_ids([delete]), rows, [delete])

    merged = PostChange.merged([change("a", "b", "c"), change("b", "a"), change("x", "d")])
    assert (merged.delete_texts, merged.upsert.texts) == (["b", "x"], [("c", "c"), ("a", "a"), ("d", "d")])
    merged.check()
    with pytest.raises(ValueError, match="text ids for only some of its posts"):
        replace(merged, delete_texts=["b"]).check()


def test_two_texts_of_one_hash_are_refused_with_both(tmp_path: Path, towers: Path) -> None:
    """Of 64 bytes, XXH64 adds those from 32 to 39 to what those from 0 to 7 left: here they make up for the difference."""
    pair = [f"{begin:-<32}{middle:-<32}" for begin, middle in (("lqczktln", "9bga98z7"), ("nxpohksi", "vuh8r4lh"))]
    assert text_ids.text_id(pair[0]) == text_ids.text_id(pair[1])
    for column in ("post_ids", "author_ids"):
        for texts, is_refused in (((*pair, pair[0]), True), ((pair[0], pair[0], "x"), False)):
            columns = {"post_ids": ["p", "q", "r"], "author_ids": ["a", "b", "b"]} | {column: texts}
            pq.write_table(pa.table(columns), tmp_path / "posts.parquet")
            out = tmp_path / f"{column}-{is_refused}"
            code, said = run("corpus", "build", tmp_path / "posts.parquet", "--encoder", towers, "--out", out)
            assert (code == 1, f"{pair[0]!r} and {pair[1]!r} in the column {column} have one hash" in said) == (
                is_refused,
                is_refused,
            ), said
            assert out.exists() != is_refused
    assert collision(lambda: iter(())) is None


def read(posts: PostsTable) -> None:
    for name in posts.columns:
        list(posts.column(name))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"post_ids": list(range(40))}, "column post_ids holds int64, not texts"),
        (
            {"author_ids": ["", *AUTHORS[1:]]},
            "column author_ids holds a text that is no id; an id must be a text of 1 to 128 bytes",
        ),
        ({"author_ids": [None, *AUTHORS[1:]]}, "has 1 nulls"),
        ({"author_ids": None}, "lacks the column author_ids: a post has post_ids and author_ids"),
        ({"topics": [["a"]] * 40}, "column topics does not fit string"),
        ({"topics": ["a", "a\0"] * 20}, "row 2: column topics holds a NUL, which no topic may have"),
    ],
)
def test_what_are_no_texts_is_refused(tmp_path: Path, encoder: Encoder, changes: dict[str, Any], sentence: str) -> None:
    pq.write_table(table(**changes), tmp_path / "posts.parquet")
    with pytest.raises(TableError, match=sentence):
        read(PostsTable(tmp_path / "posts.parquet", "text"))


def test_topics_may_be_numbers_and_0_is_one(tmp_path: Path) -> None:
    pq.write_table(table(topics=pa.array([0, 1, None, 10**18] * 10)), tmp_path / "posts.parquet")
    posts = PostsTable(tmp_path / "posts.parquet", "text")
    rows = torch.cat(list(posts.column("topics"))).tolist()
    names = posts.topic_names()
    assert [names[row] if row >= 0 else None for row in rows] == ["0", "1", None, str(10**18)] * 10


def test_files_without_rows_add_nothing_and_make_no_corpus(tmp_path: Path, towers: Path) -> None:
    empty, full = tmp_path / "empty", tmp_path / "full"
    for folder, names in ((empty, "a"), (full, "abc")):
        folder.mkdir()
        for name in names:
            pq.write_table(table().slice(0, 40 if name == "b" else 0), folder / f"{name}.parquet")
    code, said = run("corpus", "build", empty, "--encoder", towers, "--out", tmp_path / "none")
    assert (code, "holds no post" in said) == (1, True), said
    assert run("corpus", "build", full, "--encoder", towers, "--out", tmp_path / "made")[0] == 0
    assert len(load_corpus(tmp_path / "made").corpus) == 40


def test_texts_for_integers_and_integers_for_texts_are_refused(tmp_path: Path, towers: Path) -> None:
    source = GOLDEN / "retrieval-mean-pool"
    code, said = run("corpus", "import", source / "corpus.npz", "--encoder", towers, "--out", tmp_path / "x")
    assert (code, "has ids that are uint64, those of towers are text" in said) == (1, True), said
    goldens.imported(source / "retrieval", tmp_path / "integers")
    pq.write_table(table(), tmp_path / "posts.parquet")
    args = ("--encoder", tmp_path / "integers", "--out", tmp_path / "x")
    code, said = run("corpus", "build", tmp_path / "posts.parquet", *args)
    assert (code, "column post_ids holds texts, not integers" in said) == (1, True), said
    pq.write_table(
        table(post_ids=range(1, 41), author_ids=np.full(40, 2**64 - 1, np.uint64)), tmp_path / "posts.parquet"
    )
    code, said = run("corpus", "build", tmp_path / "posts.parquet", *args)
    assert code == 0, said
    assert load_corpus(tmp_path / "x").corpus.texts is None


def test_verify_sees_texts_that_are_not_those_of_the_ids(tmp_path: Path, towers: Path) -> None:
    stored = load_corpus(built(tmp_path, towers))
    check_texts(stored)
    texts = [("post", "author")] * 40
    with pytest.raises(CheckpointError, match="texts that are not those of its ids"):
        check_texts(replace(stored, corpus=replace(stored.corpus, texts=packed(texts))))
