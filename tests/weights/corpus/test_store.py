"""A corpus on disk is read back as it was written, and anything else is refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from model.retrieval.inputs import Change, Mark
from model.retrieval.towers import Towers
from tests import retrieval_goldens as goldens
from tests.goldens import GOLDEN
from weights.checkpoint import Encoder, load_checkpoint, save_checkpoint
from weights.corpus.changes import load_changed, mark_after, no_posts, read_changes
from weights.corpus.manifest import CorpusManifest
from weights.corpus.store import CorpusLabels, load_corpus, load_corpus_manifest, write_corpus
from weights.errors import CheckpointError
from weights.format.manifest import content_digest, signed

NAME = "retrieval-mean-pool"
POSTS, WIDTH = 100, 48


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return goldens.imported(GOLDEN / NAME / "retrieval", tmp_path_factory.mktemp("encoder") / "towers")


def arrays() -> dict[str, Tensor]:
    rng = np.random.default_rng(1)
    vectors = rng.standard_normal((POSTS, WIDTH)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ids = rng.permutation(POSTS) + 1
    values = {"post_ids": ids, "author_ids": ids % 7, "created_at": ids * 60, "vectors": vectors}
    return {name: torch.from_numpy(value) for name, value in values.items()} | {
        "topics": torch.from_numpy((ids % 4 - 1).astype(np.int32))
    }


def write(
    path: Path, encoder: Encoder, values: dict[str, Tensor], position: str = "", **options: Any
) -> CorpusManifest:
    def pieces(name: str) -> Iterable[Tensor]:
        return torch.split(values[name], 33)

    columns = [name for name in ("post_ids", "author_ids", "created_at", "topics", "codes") if name in values]
    if "codes" in values:
        options |= {"code_levels": values["codes"].shape[1]}
    labels = CorpusLabels("posts", position=position)
    return write_corpus(path, labels, encoder, POSTS, columns, pieces, lambda: ("a", "b", "c"), **options)


def test_topics_that_make_the_manifest_too_long_are_refused(encoder: Encoder, tmp_path: Path) -> None:
    topics, values = [f"{number:0100}" for number in range(180_000)], arrays()
    columns = ["post_ids", "author_ids", "topics"]
    with pytest.raises(CheckpointError, match=r"its 180000 topics make manifest\.json longer than 16777216 bytes"):
        write_corpus(
            tmp_path / "c", CorpusLabels("c"), encoder, POSTS, columns, lambda name: [values[name]], lambda: topics
        )
    assert [*tmp_path.iterdir()] == []


def test_it_is_read_back(encoder: Encoder, tmp_path: Path) -> None:
    values = arrays()
    manifest = write(tmp_path / "corpus", encoder, values)
    stored = load_corpus(tmp_path / "corpus", encoder.manifest)
    assert stored.manifest == manifest == load_corpus_manifest(tmp_path / "corpus")
    for name, value in values.items():
        assert np.array_equal(getattr(stored.corpus, name), value.numpy())
    assert not stored.corpus.hidden.any()
    assert (stored.corpus.name, stored.corpus.version) == ("posts", manifest.version)
    assert manifest == write(tmp_path / "again", encoder, values), "equal content, equal digest"


def test_zero_rows_and_duplicates_are_hidden_and_counted(encoder: Encoder, tmp_path: Path) -> None:
    values = arrays()
    values["vectors"][5] = 0
    values["post_ids"][[20, 90]] = int(values["post_ids"][10])
    write(tmp_path / "corpus", encoder, values)
    corpus = load_corpus(tmp_path / "corpus").corpus
    assert np.flatnonzero(corpus.hidden).tolist() == [5, 20, 90]
    assert corpus.duplicates == 2
    wanted = np.array([values["post_ids"][90], 999, values["post_ids"][0]], np.uint64)
    assert corpus.rows_of(wanted).tolist() == [10, 0]


def test_a_checkpoint_is_neither_loaded_nor_replaced(encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a corpus"):
        load_corpus(encoder.path)
    towers = encoder.towers
    assert isinstance(towers, Towers)
    save_checkpoint(tmp_path / "x", towers, name="x", action_names=[f"a{i}" for i in range(7)])
    with pytest.raises(CheckpointError, match="not a corpus"):
        write(tmp_path / "x", encoder, arrays(), replace=True)
    write(tmp_path / "corpus", encoder, arrays())
    with pytest.raises(CheckpointError, match="describes a corpus, not a model"):
        load_checkpoint(tmp_path / "corpus")


def longer(values: dict[str, Tensor]) -> None:
    values["vectors"][40] *= 1.002


def unnamed(values: dict[str, Tensor]) -> None:
    values["topics"][3] = 3


def in_milliseconds(values: dict[str, Tensor]) -> None:
    """As an earlier version took them."""
    values["created_at"][3] = 1_780_000_000_000


def with_a_negative_code(values: dict[str, Tensor]) -> None:
    values["codes"] = torch.ones(POSTS, 2, dtype=torch.int32)
    values["codes"][5, 1] = -1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (with_a_negative_code, "row 6: codes must be a list of at most 64 content codes"),
        (longer, "a vector of length 1.002 in row 40, not 1"),
        (unnamed, "a topic that the manifest does not name"),
        (in_milliseconds, r"row 4: created_at must be Unix seconds.*milliseconds"),
    ],
)
def test_values_that_no_corpus_has_are_refused(
    encoder: Encoder, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], sentence: str
) -> None:
    values = arrays()
    change(values)
    with pytest.raises(CheckpointError, match=f"{tmp_path}/corpus is not written: .*{sentence}"):
        write(tmp_path / "corpus", encoder, values)
    assert [*tmp_path.iterdir()] == []


def test_half_vectors_may_be_less_exact(encoder: Encoder, tmp_path: Path) -> None:
    """Negative control of the tighter bound: the same lengths pass for vectors that were stored in 16 bits."""
    values = arrays()
    longer(values)
    write(tmp_path / "corpus", encoder, values, dtype="bfloat16")
    load_corpus(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (CorpusLabels("a/b"), "name 'a/b' must be"),
        (CorpusLabels("posts", "v 1"), "version 'v 1' must be"),
        (CorpusLabels("posts", position="12"), "not two numbers and a dash, such as 1764000000000-0"),
        (CorpusLabels("posts", position="1-2-3"), "not two numbers and a dash"),
    ],
)
def test_impossible_labels_are_refused_before_any_encoding(
    encoder: Encoder, tmp_path: Path, labels: CorpusLabels, sentence: str
) -> None:
    asked: list[str] = []
    with pytest.raises(CheckpointError, match=sentence):
        write_corpus(tmp_path / "corpus", labels, encoder, POSTS, ["post_ids", "author_ids"], asked.append)  # type: ignore[arg-type]
    assert asked == []
    assert list(tmp_path.iterdir()) == []


def test_a_changed_corpus_is_replaced_only_with_a_feed_position(encoder: Encoder, tmp_path: Path) -> None:
    path, values = tmp_path / "corpus", arrays()
    write(path, encoder, values)
    _, changes, _ = load_changed(path, encoder.manifest)
    one = Change(np.array([1], np.uint64), no_posts(WIDTH), changes.mark)
    changes.record([Change(one.delete, one.posts, mark_after(changes.mark, one))])
    changes.close()
    with pytest.raises(CheckpointError, match=r"the changes would be lost; choose another place or, .*--feed-position"):
        write(path, encoder, values, replace=True)
    assert len(read_changes(path, load_corpus_manifest(path)).delete) == 1
    manifest = write(path, encoder, values, replace=True, position="1764000000000-0")
    assert load_corpus_manifest(path) == manifest
    assert read_changes(path, manifest).mark == manifest.first_mark
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "posts.safetensors", "vectors.safetensors"]


def test_one_changed_byte_is_refused(encoder: Encoder, tmp_path: Path) -> None:
    write(tmp_path / "corpus", encoder, arrays())
    name = "vectors.safetensors"
    file = tmp_path / "corpus" / name
    raw = bytearray(file.read_bytes())
    raw[-9] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"{name} has SHA-256"):
        load_corpus(tmp_path / "corpus")
    file.write_bytes(raw[:-1])
    with pytest.raises(CheckpointError, match=f"{name} is {len(raw) - 1} bytes long"):
        load_corpus(tmp_path / "corpus")


@pytest.mark.parametrize("mark", [Mark(-1), Mark(1, "g" * 32), Mark(1, position="x")])
def test_a_mark_that_no_change_leaves_is_refused(encoder: Encoder, tmp_path: Path, mark: Mark) -> None:
    manifest = write(tmp_path / "corpus", encoder, arrays())
    right = Mark(1, "0" * 32, "1-0")
    assert msgspec.structs.replace(manifest, mark=right).first_mark == right
    with pytest.raises(CheckpointError, match=r"invalid mark|feed position"):
        msgspec.structs.replace(manifest, mark=mark)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"posts": 99}, "in a file, dtype or shape that a corpus does not have"),
        ({"posts": 0}, "holds 0 posts"),
        ({"width": 47}, "in a file, dtype or shape that a corpus does not have"),
        ({"topics": ["a", "a"]}, "each topic once"),
        ({"topics": ["a", ""]}, "not a text of 1 to 100"),
        ({"topics": ["a", "b" * 101]}, "not a text of 1 to 100"),
        ({"topics": ["a", "b", "c" * 100]}, None),
        ({"tensors": {}}, "does not list all tensors"),
    ],
)
def test_an_edited_manifest_is_refused(
    encoder: Encoder, tmp_path: Path, changes: dict[str, Any], sentence: str | None
) -> None:
    write(tmp_path / "corpus", encoder, arrays())
    manifest = tmp_path / "corpus" / "manifest.json"
    values = json.loads(manifest.read_bytes())
    digest = values.pop("digest")
    manifest.write_bytes(signed(values | changes))
    if sentence is None:  # negative control: signed anew, a sound content is read
        assert load_corpus(tmp_path / "corpus").manifest.digest == content_digest(values | changes) != digest
        values |= changes
        manifest.write_text(json.dumps(values | {"digest": digest}))
        sentence = "it was changed after"
    with pytest.raises(CheckpointError, match=sentence):
        load_corpus(tmp_path / "corpus")
