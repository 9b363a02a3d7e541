"""The split engine against the published implementation's recorded numbers, all requests of a recording in one forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model.engine import Item
from model.ranker import Ranker
from model.split.engine import SplitEngine
from model.split.graphs import PlainRecorder
from model.tolerances import PARITY
from tests import goldens
from weights.checkpoint import load_checkpoint
from weights.published.importer import PublishedModel, import_published, labels_for


@pytest.fixture(scope="module", params=goldens.NAMES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ranker, str]:
    """A recorded checkpoint, imported and loaded as a user would, and its name."""
    name: str = request.param
    out = tmp_path_factory.mktemp("split") / name
    with PublishedModel(goldens.GOLDEN / name / "ranker") as ranker:
        import_published(ranker, out, labels_for(ranker.config, name))
    return load_checkpoint(out).ranker, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("mode", "recorded"), [("sequential", "logits_fp32"), ("shared", "logits_alone_fp32")])
def test_the_published_numbers_come_out(
    golden: tuple[Ranker, str], mode: Any, recorded: str, dtype: torch.dtype
) -> None:
    ranker, name = golden
    expected, tolerance = goldens.expected(name), PARITY[dtype]
    engine = SplitEngine(ranker, "cpu", dtype, mode, capacity=192, recorder=PlainRecorder())
    engine.warm_up()
    items = [Item(*goldens.features(request, ranker.config)) for request in goldens.requests(name)]
    for index, outcome in enumerate(engine.forward(items)):
        assert np.abs(outcome.scores.logits - expected[f"{index}/{recorded}"]).max() <= tolerance.logits
        if ranker.config.continuous_actions and mode == "sequential":
            difference = np.abs(outcome.scores.continuous - expected[f"{index}/continuous_fp32"])
            assert difference.max() <= tolerance.probabilities
