"""Corpora from npz files: the published vectors or the tower's, topics and times, what is left out, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import retrieval_goldens as goldens
from tests.goldens import GOLDEN
from weights.checkpoint import Encoder
from weights.corpus.importer import PostsFile, check_corpus, encode, make_corpus
from weights.corpus.store import CorpusLabels, StoredCorpus, load_corpus
from weights.errors import CheckpointError
from weights.format.manifest import TableDtype

NAME = "retrieval-mlp-gqa"
PUBLISHED = GOLDEN / NAME / "corpus.npz"
NONE = np.ones(0, np.int64)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return goldens.imported(GOLDEN / NAME / "retrieval", tmp_path_factory.mktemp("encoder") / "towers")


def made(
    source: Path, encoder: Encoder, out: Path, *, by_towers: bool = False, topics: Path | None = None
) -> tuple[StoredCorpus, list[str]]:
    """Make a corpus, load it, and what was said meanwhile."""
    with PostsFile(source, topics) as posts:
        make_corpus(posts, encoder, out, CorpusLabels("posts"), by_towers=by_towers)
        return load_corpus(out, encoder.manifest), posts.notes


def edited(tmp_path: Path, **changes: Any) -> Path:
    """The published corpus with some arrays replaced; `...` removes one."""
    values = goldens.arrays(PUBLISHED) | changes
    np.savez(tmp_path / "posts.npz", **{name: value for name, value in values.items() if value is not ...})
    return tmp_path / "posts.npz"


def ids_of(tmp_path: Path, **columns: Any) -> Path:
    """The published posts without their vectors, and without padding, which may only be imported."""
    arrays = goldens.arrays(PUBLISHED)
    rows = arrays["post_ids"] != 0
    ids = {name: arrays[name][rows] for name in ("post_ids", "author_ids")}
    np.savez(tmp_path / "ids.npz", **ids | columns)
    return tmp_path / "ids.npz"


def test_the_published_corpus_is_imported_as_it_is(encoder: Encoder, tmp_path: Path) -> None:
    stored, notes = made(PUBLISHED, encoder, tmp_path / "corpus")
    published, corpus = goldens.arrays(PUBLISHED), stored.corpus
    assert notes == []
    assert np.array_equal(corpus.post_ids, published["post_ids"])
    assert np.array_equal(corpus.author_ids, published["author_ids"])
    assert corpus.vectors.tobytes() == published["candidate_representations"].tobytes()
    assert corpus.topics is not None
    assert [corpus.topic_names[topic] for topic in corpus.topics] == published["topics"].tolist()
    assert stored.manifest.encoder == encoder.manifest.model_digest
    check_corpus(stored, encoder)


def test_built_vectors_are_the_published_ones(encoder: Encoder, tmp_path: Path) -> None:
    stored, _ = made(ids_of(tmp_path, created_at=np.arange(254)), encoder, tmp_path / "corpus", by_towers=True)
    arrays = goldens.arrays(PUBLISHED)
    published = arrays["candidate_representations"][arrays["post_ids"] != 0]
    np.testing.assert_allclose(stored.corpus.vectors, published, atol=1e-6, rtol=0)
    assert stored.corpus.created_at is not None
    assert stored.corpus.created_at.tolist() == list(range(254))
    alone = encode(encoder, stored.corpus.post_ids[7:8], stored.corpus.author_ids[7:8])
    np.testing.assert_allclose(alone.numpy(), published[7:8], atol=1e-6, rtol=0)


@pytest.mark.parametrize("tables", ["bfloat16", "float32"])
def test_the_vectors_of_half_tables_are_stored_in_half(tables: TableDtype, tmp_path: Path) -> None:
    encoder = goldens.imported(GOLDEN / NAME / "retrieval", tmp_path / "towers", table_dtype=tables)
    stored, _ = made(ids_of(tmp_path), encoder, tmp_path / "corpus", by_towers=True)
    assert stored.manifest.tensors["vectors"].dtype == tables
    assert stored.corpus.vectors.dtype == np.float32
    check_corpus(stored, encoder)


def test_topics_as_python_objects_are_left_out_alone(encoder: Encoder, tmp_path: Path) -> None:
    topics = goldens.arrays(PUBLISHED)["topics"]
    source = edited(tmp_path, topics=topics.astype(object))
    stored, (note,) = made(source, encoder, tmp_path / "corpus")
    assert "Array topics holds Python objects, which are not read: nothing is unpickled" in note
    assert stored.corpus.topics is None
    assert stored.manifest.topics == ()
    (tmp_path / "topics.txt").write_text(
        "\n".join([*topics[:-1], ""]) + "\n", "utf-8-sig"
    )  # as some editors write text
    stored, _ = made(source, encoder, tmp_path / "again", topics=tmp_path / "topics.txt")
    assert stored.corpus.topics is not None
    assert stored.corpus.topics[-1] == -1
    assert [stored.corpus.topic_names[topic] for topic in stored.corpus.topics[:-1]] == topics[:-1].tolist()


def test_the_encoder_must_be_the_one_that_made_the_vectors(encoder: Encoder, tmp_path: Path) -> None:
    """Nothing in the published file says who made it."""
    other = goldens.imported(GOLDEN / NAME / "retrieval", tmp_path / "other")
    assert isinstance(other.towers.candidate.output, torch.nn.Parameter)
    other.towers.candidate.output.data *= torch.linspace(0.9, 1, 64)
    with pytest.raises(CheckpointError, match=r"vectors are not those of towers .* 255 of 256 rows by more than 1e-06"):
        made(PUBLISHED, other, tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()
    stored, _ = made(PUBLISHED, encoder, tmp_path / "corpus")
    with pytest.raises(CheckpointError, match="its vectors are not those of"):
        check_corpus(stored, other)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"post_ids": np.ones(256)}, "array post_ids has shape .* of <f8"),
        ({"author_ids": ...}, "lacks array author_ids"),
        ({"post_ids": np.array([object()] * 256)}, r"of \|O"),
        ({"candidate_representations": np.ones((256, 64))}, "only float32 is read"),
        ({"candidate_representations": np.full((256, 64), np.nan, np.float32)}, "differs by inf"),
        ({"post_ids": NONE, "author_ids": NONE, "candidate_representations": np.ones((0, 64), np.float32)}, "no post"),
    ],
)
def test_what_is_no_corpus_is_refused(encoder: Encoder, tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        made(edited(tmp_path, **changes), encoder, tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize(
    ("column", "value", "sentence"),
    [
        ("created_at", 1_780_000_000_000, r"row 6: created_at must be Unix seconds, .*; this looks like milliseconds"),
        ("post_ids", 0, r"row 6: post_ids must not be 0, which is padding\."),
    ],
)
def test_an_invalid_time_or_post_is_refused_with_file_and_row(
    encoder: Encoder, tmp_path: Path, column: str, value: int, sentence: str
) -> None:
    values = np.arange(1, 255) if column == "post_ids" else np.full(254, 1_780_000_000)
    values[5] = value
    with pytest.raises(CheckpointError, match=rf"ids\.npz, {sentence}"):
        made(ids_of(tmp_path, **{column: values}), encoder, tmp_path / "corpus", by_towers=True)
    assert not (tmp_path / "corpus").exists()


def test_a_published_corpus_with_times_that_are_none_is_refused(encoder: Encoder, tmp_path: Path) -> None:
    source = edited(tmp_path, created_at=np.full(256, 1_780_000_000_000))
    with pytest.raises(CheckpointError, match=r"posts\.npz, row 1: created_at must be Unix seconds"):
        made(source, encoder, tmp_path / "corpus")


@pytest.mark.parametrize("lines", [255, 257])
def test_a_topics_file_of_another_length_or_with_a_nul_is_refused(encoder: Encoder, tmp_path: Path, lines: int) -> None:
    (tmp_path / "topics.txt").write_text("a\n" * lines)
    with pytest.raises(CheckpointError, match=rf"topics\.txt has {lines} lines for 256 posts"):
        made(PUBLISHED, encoder, tmp_path / "corpus", topics=tmp_path / "topics.txt")
    (tmp_path / "topics.txt").write_text("a\na\0\n" * 128)
    with pytest.raises(CheckpointError, match=r"topics\.txt holds a NUL, which no topic may have"):
        made(PUBLISHED, encoder, tmp_path / "corpus", topics=tmp_path / "topics.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["topics.txt"]
