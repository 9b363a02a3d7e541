"""The published implementation's numbers, through import, save, load and the plain ranker, on every recorded request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model.batch import collate
from model.config import CandidatePositions, HashSpec
from model.hashing import hash_rows
from model.tolerances import PARITY
from tests import goldens
from weights.checkpoint import Checkpoint, load_checkpoint
from weights.published.importer import PublishedModel, import_published, labels_for

CASES = [(name, index) for name in goldens.NAMES for index in range(len(goldens.requests(name)))]
PADDING_ROWS = 65  # the published pipeline lays the three tables into one, after these rows


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """Every golden, imported and loaded as a user would."""
    loaded = {}
    for name in goldens.NAMES:
        out = tmp_path_factory.mktemp("parity") / name
        with PublishedModel(goldens.GOLDEN / name / "ranker") as ranker:
            import_published(ranker, out, labels_for(ranker.config, name))
        loaded[name] = load_checkpoint(out)
    return loaded


@pytest.fixture(scope="module")
def outputs() -> dict[str, dict[str, Any]]:
    return {name: goldens.expected(name) for name in goldens.NAMES}


@torch.inference_mode()
def score(checkpoint: Checkpoint, index: int, positions: CandidatePositions, dtype: torch.dtype) -> tuple[Any, Any]:
    config = checkpoint.manifest.config
    features = goldens.features(goldens.requests(checkpoint.manifest.name)[index], config)
    logits, continuous = checkpoint.ranker(collate([features], config, positions), dtype)
    return logits[0].numpy(), continuous[0].numpy()


def distance(left: Any, right: Any) -> float:
    assert left.shape == right.shape
    return float(np.abs(left - right).max())


@pytest.mark.parametrize(("name", "index"), CASES)
def test_sequential_positions_equal_the_published_pipeline(
    name: str, index: int, checkpoints: dict[str, Checkpoint], outputs: dict[str, dict[str, Any]]
) -> None:
    tolerance = PARITY[torch.float32]
    logits, continuous = score(checkpoints[name], index, "sequential", torch.float32)
    assert distance(logits, outputs[name][f"{index}/logits_fp32"]) <= tolerance.logits
    if checkpoints[name].manifest.config.continuous_actions:
        assert distance(continuous, outputs[name][f"{index}/continuous_fp32"]) <= tolerance.probabilities
    else:
        assert f"{index}/continuous_fp32" not in outputs[name]


@pytest.mark.parametrize(("name", "index"), CASES)
def test_shared_positions_equal_each_candidate_sent_alone(
    name: str, index: int, checkpoints: dict[str, Checkpoint], outputs: dict[str, dict[str, Any]]
) -> None:
    logits, _ = score(checkpoints[name], index, "shared", torch.float32)
    assert distance(logits, outputs[name][f"{index}/logits_alone_fp32"]) <= PARITY[torch.float32].logits


@pytest.mark.parametrize(("name", "index"), CASES)
def test_bfloat16_stays_near_float32(
    name: str, index: int, checkpoints: dict[str, Checkpoint], outputs: dict[str, dict[str, Any]]
) -> None:
    tolerance = PARITY[torch.bfloat16]
    logits, continuous = score(checkpoints[name], index, "sequential", torch.bfloat16)
    assert distance(logits, outputs[name][f"{index}/logits_fp32"]) <= tolerance.logits
    assert distance(logits, outputs[name][f"{index}/logits_fp32"]) > PARITY[torch.float32].logits  # it is bfloat16
    if continuous.size:
        assert distance(continuous, outputs[name][f"{index}/continuous_fp32"]) <= tolerance.probabilities


@pytest.mark.parametrize("name", ["phoenix-jan-gqa", "phoenix-mini"])
def test_the_tolerance_tells_the_position_modes_apart(
    name: str, checkpoints: dict[str, Checkpoint], outputs: dict[str, dict[str, Any]]
) -> None:
    """Negative control: the wrong mode is far outside."""
    logits, _ = score(checkpoints[name], 2, "shared", torch.float32)
    assert distance(logits, outputs[name]["2/logits_fp32"]) > 1000 * PARITY[torch.float32].logits


@pytest.mark.parametrize(("name", "index"), CASES)
def test_hashes_are_equal(
    name: str, index: int, checkpoints: dict[str, Checkpoint], outputs: dict[str, dict[str, Any]]
) -> None:
    config = checkpoints[name].manifest.config
    context, candidates = goldens.features(goldens.requests(name)[index], config)
    posts_start = PADDING_ROWS + config.user_hashes.vocab_size
    authors_start = posts_start + config.post_hashes.vocab_size

    def unified(ids: Any, spec: HashSpec, start: int) -> Any:
        rows = hash_rows(np.asarray(ids, np.uint64), spec)
        return np.where(rows > 0, rows + start, 0)

    for key, ids, spec, start in (
        ("user_hashes", [context.user_id], config.user_hashes, PADDING_ROWS),
        ("history_post_hashes", context.post_ids, config.post_hashes, posts_start),
        ("history_author_hashes", context.author_ids, config.author_hashes, authors_start),
        ("candidate_post_hashes", candidates.post_ids, config.post_hashes, posts_start),
        ("candidate_author_hashes", candidates.author_ids, config.author_hashes, authors_start),
    ):
        recorded = outputs[name][f"{index}/{key}"]
        rows = unified(ids, spec, start)
        assert np.array_equal(recorded[: len(rows)], rows), key
        assert not recorded[len(rows) :].any(), key
