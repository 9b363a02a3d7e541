"""What one checkpoint lets a request say: its action names, its product surfaces, its default weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from weights.format.manifest import Manifest

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`index` maps action names and decimal strings to columns; `weights` float64 `[A]`. `codec` reads most requests, if there is one."""

    action_names: tuple[str, ...]
    index: Mapping[str, int]
    product_surfaces: int
    weights: NDArray[np.float64]
    codec: Any = None  # a `codec.Codec`, which is made of a vocabulary
    _rules: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, manifest: Manifest) -> Vocabulary:
        """From a checkpoint's manifest, without a codec."""
        names = manifest.action_names
        index = {str(column): column for column in range(len(names))} | {
            name: column for column, name in enumerate(names)
        }
        weights = np.array([manifest.score_weights.get(name, 0.0) for name in names])
        return cls(names, index, manifest.config.product_surfaces, weights)

    def rule(self, name: str, make: Callable[[], T]) -> T:
        """The rule of this name, made once."""
        found = self._rules.get(name)
        if found is None:
            found = self._rules[name] = make()
        rule: T = found
        return rule
