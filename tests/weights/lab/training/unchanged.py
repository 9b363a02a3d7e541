"""Figures of training that were written down: what moves them makes another demo. Not a test itself.

`UPDATE_GOLDEN=1 pytest tests/weights/lab/training` writes them anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import isclose, nan
from pathlib import Path

import torch
from torch import Tensor

GOLDEN = Path(__file__).parents[3] / "golden/training.json"
WITHIN = 2e-3  # other processors round otherwise; one decision that is made another way moves more


def assert_unchanged(name: str, figures: Mapping[str, float]) -> None:
    """The figures of that name are those of the file."""
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        rounded = {key: float(f"{value:.6g}") for key, value in figures.items()}
        GOLDEN.write_text(json.dumps(golden | {name: rounded}, indent=1) + "\n")
    else:
        told = golden[name]
        others = {
            key: told.get(key)
            for key, value in figures.items()
            if not isclose(value, told.get(key, nan), rel_tol=WITHIN)
        }
        assert not others, f"{name}: these were written down: {others}, these are found: {dict(figures)}"


def moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each tensor went from where it began, and how large it is now: root mean squares."""
    return {
        f"{what} of {name}": float(values.double().square().mean().sqrt())
        for name, tensor in after.items()
        for what, values in (("size", tensor), ("way", tensor - before[name]))
        if values.any() and tensor.dtype == torch.float32
    }
