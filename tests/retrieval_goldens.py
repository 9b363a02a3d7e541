"""The recorded requests and outputs of the published retrieval model, imported and loaded as a user would. Not a test itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from model.config import ModelConfig
from model.inputs import Context
from tests.goldens import GOLDEN, context
from weights.checkpoint import Encoder, load_encoder
from weights.format.writer import write_checkpoint
from weights.published.importer import PublishedModel, labels_for

NAMES = ("retrieval-mean-pool", "retrieval-mlp-gqa")
REQUESTS = 10
PIPELINES = Path(__file__).resolve().parents[2] / "shared"  # 4 MB each: read where they lie beside the checkout


def contexts(name: str, config: ModelConfig) -> list[Context]:
    """Every recorded user of one golden."""
    return [context(request, config) for request in json.loads((GOLDEN / name / "requests.json").read_text())]


def arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """An npz file, read whole."""
    with np.load(path, allow_pickle=False) as loaded:
        return dict(loaded)


def imported(source: Path, out: Path, **options: Any) -> Encoder:
    """A published retrieval directory as a loaded checkpoint of ours."""
    with PublishedModel(source) as model:
        write_checkpoint(out, model.config, model.pieces, labels_for(model.config, "towers"), **options)
    return load_encoder(out)
