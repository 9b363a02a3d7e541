"""Unit vectors that searches are tested on."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float32]


def unit(rows: NDArray[Any]) -> Rows:
    """The rows at unit length."""
    scaled: Rows = np.ascontiguousarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True), np.float32)
    return scaled


def isotropic(rng: np.random.Generator, count: int, width: int) -> Rows:
    """Unit vectors with uniformly random directions."""
    return unit(rng.standard_normal((count, width), np.float32))
