"""The published layout in both variants and other shapes of the same formats; nothing is ignored silently."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from model.batch import collate
from model.config import ModelConfig, RetrievalConfig
from tests import goldens, retrieval_goldens
from tests.support.random_models import random_model
from tests.weights.published.layout import write_published
from weights.checkpoint import Checkpoint, load_checkpoint
from weights.errors import CheckpointError
from weights.format.manifest import TableDtype
from weights.format.writer import write_checkpoint
from weights.published.importer import PublishedModel, labels_for
from weights.synthetic.random_weights import mini_config


def brought_in(source: Path, out: Path, tables: TableDtype = "float32", **options: Any) -> Checkpoint:
    """Import and load."""
    with PublishedModel(source, **options) as ranker:
        write_checkpoint(out, ranker.config, ranker.pieces, labels_for(ranker.config, "x"), table_dtype=tables)
    return load_checkpoint(out)


@pytest.fixture
def january(tmp_path: Path) -> Path:
    """A private copy of the smallest golden."""
    return Path(shutil.copytree(goldens.GOLDEN / "phoenix-jan-gqa" / "ranker", tmp_path / "ranker"))


def edit_config(source: Path, **changes: Any) -> None:
    values = json.loads((source / "config.json").read_text()) | changes
    (source / "config.json").write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def edit_params(source: Path, file: str = "model_params.npz", **changes: Any) -> None:
    """Replace arrays; `...` removes one."""
    with np.load(source / file) as arrays:
        values = dict(arrays) | changes
    np.savez(source / file, **{name: value for name, value in values.items() if value is not ...})


@pytest.mark.slow
def test_the_variants_are_told_by_their_shapes(tmp_path: Path) -> None:
    january = brought_in(goldens.GOLDEN / "phoenix-jan-gqa" / "ranker", tmp_path / "january").manifest
    may = brought_in(goldens.GOLDEN / "phoenix-mini" / "ranker", tmp_path / "may").manifest
    anchored = brought_in(goldens.GOLDEN / "phoenix-right-anchored" / "ranker", tmp_path / "anchored").manifest
    variant = (january.config.has_dwell, january.config.has_post_age, january.config.continuous_actions)
    assert variant == (False, False, 0)
    assert (may.config.has_dwell, may.config.has_post_age, may.config.continuous_actions) == (True, True, 8)
    assert (january.config.widening, january.config.kv_heads) == (4.0, 2)
    assert (may.config.widening, may.config.kv_heads, may.config.attention_multiplier) == (2.0, 4, 0.125)
    assert anchored.config.right_anchored
    assert not may.config.right_anchored


def test_released_names(tmp_path: Path) -> None:
    manifest = brought_in(goldens.GOLDEN / "phoenix-mini" / "ranker", tmp_path / "may").manifest
    named = {0: "invalid", 1: "favorite", 4: "reply", 5: "quote", 6: "repost", 10: "server_report", 11: "dwell",
             12: "not_dwelled", 13: "vqv", 16: "report", 17: "not_interested", 18: "undo_not_interested"}  # fmt: skip
    assert {index: manifest.action_names[index] for index in named} == named
    assert len(set(manifest.action_names)) == 19
    assert [output.name for output in manifest.continuous][:3] == ["continuous_0", "dwell_time", "continuous_2"]
    assert (manifest.continuous[1].scale, manifest.continuous[1].unit) == (30.0, "s")
    complaints = {name: weight for name, weight in manifest.score_weights.items() if weight < 0}
    assert complaints == {"report": -20.0, "not_interested": -5.0}


OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "wider": {"width": 192, "query_heads": 6, "kv_heads": 3, "widening": 3.5, "attention_multiplier": 0.2},
    "odd_age": {"post_age_granularity_minutes": 7, "product_surfaces": 5, "continuous_actions": 0},
    "dwell_only": {"has_post_age": False, "actions": 2, "continuous_actions": 3},
    "age_only": {"has_dwell": False, "right_anchored": True, "history_length": 3, "candidate_length": 5, "layers": 1},
}


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_other_shapes_of_the_same_formats(name: str, tmp_path: Path) -> None:
    config = replace(mini_config(1, (30, 40, 50)), layers=2, width=64, head_width=16)
    check(replace(config, **OTHER_SHAPES[name]), tmp_path)


def test_other_numbers_of_hashes(tmp_path: Path) -> None:
    for hashes in (1, 4):
        config = replace(mini_config(1, (30, 40, 50), hashes=hashes), layers=1, width=32, head_width=8)
        check(config, tmp_path / str(hashes))


def check(config: ModelConfig, tmp_path: Path) -> None:
    """Published layout → checkpoint → ranker: the same architecture, the same scores as the ranker in memory."""
    write_published(tmp_path / "published", config, 4)
    loaded = brought_in(tmp_path / "published", tmp_path / "ours")
    assert loaded.manifest.config == config
    request = goldens.requests("phoenix-mini")[4]
    request["history"] = request["history"][: config.history_length]
    for event in request["history"]:
        event["actions"] = {"0": 1.0}
    for post in [*request["history"], *request["candidates"]]:
        post["product_surface"] %= config.product_surfaces
    batch = collate([goldens.features(request, config)], config)
    for before, after in zip(random_model(config, 4)(batch), loaded.ranker(batch), strict=True):
        assert torch.equal(before, after)
    assert random_model(config, 4)(batch)[0].abs().max() > 0.1


def test_bfloat16_tables_are_the_rounded_ones(january: Path, tmp_path: Path) -> None:
    full, half = (brought_in(january, tmp_path / dtype, dtype).ranker for dtype in ("float32", "bfloat16"))  # type: ignore[arg-type]
    assert half.tables.post.dtype == torch.bfloat16
    assert torch.equal(half.tables.post, full.tables.post.bfloat16())
    assert not torch.equal(half.tables.post.float(), full.tables.post)
    assert torch.equal(half.heads.actions.weight, full.heads.actions.weight)


def test_context_attention_may_be_chosen(january: Path, tmp_path: Path) -> None:
    def chosen(name: str, **options: Any) -> str:
        return brought_in(january, tmp_path / name, **options).ranker.config.context_attention

    assert chosen("a") == "causal"
    assert chosen("b", context_attention="bidirectional") == "bidirectional"
    edit_config(january, context_attention="bidirectional")
    assert chosen("c") == "bidirectional"


def test_a_key_that_is_present_wins(january: Path, tmp_path: Path) -> None:
    edit_config(january, attn_output_multiplier=0.25)
    assert brought_in(january, tmp_path / "x").ranker.config.attention_multiplier == 0.25


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"final_softcap": 30.0}, "does not know: final_softcap"),
        ({"num_layers": ...}, "lacks num_layers"),
        ({"num_layers": True}, "num_layers must be of type int"),
        ({"num_layers": 10**9}, "layers must be positive and at most 1024"),
        ({"num_layers": 1000}, "num_layers is 1000, but model_params.npz has"),
        ({"num_layers": 2}, r"no place: transformer/decoder_layer_2"),
        ({"num_layers": 4}, r"lacks array transformer/decoder_layer_3"),
        ({"num_kv_heads": 3}, "must be a multiple of kv_heads"),
        ({"widening_factor": 2.0}, "asks"),
        ({"widening_factor": "4"}, "widening_factor must be of type float"),
        ({"emb_size": 10**12}, r"config\.json: width must be positive and at most 65536"),
        ({"key_size": 15}, "head_width must be even"),
        ({"user_vocab_size": 501}, r"user_embeddings has shape \[500, 64\], config.json asks \[501, 64\]"),
        ({"num_user_hashes": 3}, "num_user_hashes is 3, but hash_params holds 2"),
        ({"hash_params": {}}, "hash_params must hold exactly"),
        ({"context_attention": "sideways"}, "context_attention must be 'causal' or 'bidirectional'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(january: Path, tmp_path: Path, changes: Any, sentence: str) -> None:
    edit_config(january, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        brought_in(january, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("raw", [b"[]", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"\xff", b" " * (2**20 + 1)])
def test_a_config_that_is_no_json_object_is_refused(january: Path, tmp_path: Path, raw: bytes) -> None:
    (january / "config.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        brought_in(january, tmp_path / "out")


def test_an_unknown_array_is_named_and_may_be_ignored(january: Path, tmp_path: Path) -> None:
    edit_params(january, **{"phoenix_model/surprise": np.ones(3, np.float32)})
    edit_params(january, "embedding_tables.npz", topic_embeddings=np.ones((3, 3), np.float32))
    with pytest.raises(CheckpointError, match="no place: phoenix_model/surprise"):
        brought_in(january, tmp_path / "out")
    with pytest.raises(CheckpointError, match="no place: topic_embeddings"):
        brought_in(january, tmp_path / "out", ignore=["phoenix_model/surprise"])
    brought_in(january, tmp_path / "out", ignore=["phoenix_model/surprise", "topic_embeddings"])
    with pytest.raises(CheckpointError, match=r"has no key, and the download no array, called surprize \(--ignore\)"):
        brought_in(january, tmp_path / "out", ignore=["surprize"])


def test_a_missing_array_is_named(january: Path, tmp_path: Path) -> None:
    edit_params(january, **{"phoenix_model/unembeddings": ...})
    with pytest.raises(CheckpointError, match=r"model_params\.npz lacks array phoenix_model/unembeddings"):
        brought_in(january, tmp_path / "out")


@pytest.mark.parametrize("file", ["config.json", "embedding_tables.npz"])
def test_a_file_that_git_lfs_has_not_fetched_is_named(january: Path, tmp_path: Path, file: str) -> None:
    (january / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1475837465\n")
    with pytest.raises(CheckpointError, match=rf"{file}:? is a Git LFS pointer.*git lfs pull"):
        brought_in(january, tmp_path / "out")


def test_values_that_are_not_finite_are_refused(january: Path, tmp_path: Path) -> None:
    table = np.ones((501, 64), np.float32)
    table[400, 3] = np.nan
    edit_params(january, "embedding_tables.npz", item_embeddings=table)
    with pytest.raises(CheckpointError, match="item_embeddings holds a NaN or an infinity"):
        brought_in(january, tmp_path / "out")
    assert not list(tmp_path.glob(".*")), "nothing half-written stays"


def test_a_value_too_large_for_bfloat16_is_refused(january: Path, tmp_path: Path) -> None:
    edit_params(january, "embedding_tables.npz", item_embeddings=np.full((501, 64), 3.4e38, np.float32))
    brought_in(january, tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"tables\.post holds a NaN or an infinity"):
        brought_in(january, tmp_path / "half", "bfloat16")


def test_other_directories_get_a_hint(january: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"import the ranker, {january}"):
        PublishedModel(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        PublishedModel(tmp_path / "nothing")
    (january / "model_params.npz").rename(tmp_path / "aside")
    with pytest.raises(CheckpointError, match=r"is not the published layout: it lacks model_params\.npz"):
        PublishedModel(january)
    (tmp_path / "aside").rename(january / "model_params.npz")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"lacks config\.json, model_params\.npz, embedding_tables\.npz"):
        PublishedModel(tmp_path / "empty")
    brought_in(january, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="needs no import"):
        PublishedModel(tmp_path / "ours")


@pytest.fixture
def towers(tmp_path: Path) -> Path:
    """A private copy of the golden whose candidates are projected."""
    return Path(shutil.copytree(goldens.GOLDEN / "retrieval-mlp-gqa" / "retrieval", tmp_path / "retrieval"))


def test_the_retrieval_model_is_told_by_its_arrays(towers: Path, tmp_path: Path) -> None:
    edit_params(towers, **{"~/log_temperature": np.float32(3.0)})  # of training alone
    encoder = retrieval_goldens.imported(towers, tmp_path / "towers")
    assert isinstance(encoder.manifest.config, RetrievalConfig)
    assert encoder.manifest.config.linear_projection
    assert encoder.manifest.score_weights == {}


@pytest.mark.parametrize(
    ("source", "changes", "sentence"),
    [
        ("retrieval-mlp-gqa", {"enable_linear_proj": False}, "no place: .*candidate_tower_projection_1"),
        ("retrieval-mean-pool", {"enable_linear_proj": ...}, "lacks array .*candidate_tower_projection_1"),
        ("retrieval-mlp-gqa", {"context_attention": "bidirectional"}, "and is causal"),
    ],
)
def test_a_retrieval_config_that_does_not_fit_is_refused(
    tmp_path: Path, source: str, changes: dict[str, Any], sentence: str
) -> None:
    copy = Path(shutil.copytree(goldens.GOLDEN / source / "retrieval", tmp_path / "retrieval"))
    edit_config(copy, **changes)
    with pytest.raises(CheckpointError, match=sentence):
        retrieval_goldens.imported(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()
