"""The recorded requests and outputs of the published implementation, as the model's inputs. Not a test itself."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from model.config import ModelConfig
from model.inputs import Candidates, Context, age_bucket

GOLDEN = Path(__file__).parent / "golden"
NAMES = ("phoenix-jan-gqa", "phoenix-mini", "phoenix-right-anchored")


def requests(name: str) -> list[dict[str, Any]]:
    """The requests of one golden, as recorded; actions are index → value."""
    loaded: list[dict[str, Any]] = json.loads((GOLDEN / name / "requests.json").read_text())
    return loaded


@cache
def expected(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """`{request}/{output}` → array."""
    with np.load(GOLDEN / name / "expected.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def imported(name: str, out: Path, **changes: Any) -> Path:
    """One golden, imported into a checkpoint directory as a user would. `changes` are of its architecture, such as a shorter window."""
    from weights.format.writer import write_checkpoint
    from weights.published.importer import PublishedModel, labels_for

    with PublishedModel(GOLDEN / name / "ranker") as ranker:
        config = replace(ranker.config, **changes)
        write_checkpoint(out, config, ranker.pieces, labels_for(config, name))
    return out


def context(request: dict[str, Any], config: ModelConfig) -> Context:
    """One recorded user as the model takes it; what a recording lacks is 0."""
    history = request["history"]
    actions = np.zeros((len(history), config.actions), np.float32)
    for row, event in zip(actions, history, strict=True):
        for index, value in event["actions"].items():
            row[int(index)] = value
    return Context(
        request["user_id"],
        _column(history, "post_id", np.uint64),
        _column(history, "author_id", np.uint64),
        actions,
        _column(history, "product_surface", np.int64),
        _column(history, "dwell_time", np.float32),
    )


def features(request: dict[str, Any], config: ModelConfig) -> tuple[Context, Candidates]:
    """One recorded request as the model takes it."""
    candidates = request["candidates"]
    ages = age_bucket(request["impression_ts"], _column(candidates, "created_at", np.int64), config)
    return context(request, config), Candidates(
        _column(candidates, "post_id", np.uint64),
        _column(candidates, "author_id", np.uint64),
        _column(candidates, "product_surface", np.int64),
        ages,
    )


def _column(rows: list[dict[str, Any]], key: str, dtype: Any) -> Any:
    return np.array([row.get(key, 0) for row in rows], dtype)
