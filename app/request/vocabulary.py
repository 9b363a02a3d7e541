"""What one checkpoint lets a request say: its action names, its product surfaces, its default weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from weights.actions import CONTINUOUS_WEIGHTS, SCORE_WEIGHT_SETS
from weights.format.manifest import Manifest
from weights.text_ids import IdKind, is_text_id, text_id

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`index` maps action names and decimal strings to columns; `weights` float64 `[A]`. `codec` reads most requests, if there is one.
    `ids`: what callers name users, posts and authors by. `sets`: published weights by name, float64 `[A]`, or `[A + Z]` where they weigh
    continuous outputs."""

    action_names: tuple[str, ...]
    index: Mapping[str, int]
    product_surfaces: int
    weights: NDArray[np.float64]
    codec: Any = None  # a `codec.Codec`, which is made of a vocabulary
    ids: IdKind = "uint64"
    sets: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    _rules: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, manifest: Manifest) -> Vocabulary:
        """From a checkpoint's manifest, without a codec."""
        names = manifest.action_names
        index = {str(column): column for column in range(len(names))} | {
            name: column for column, name in enumerate(names)
        }
        weights = np.array([manifest.score_weights.get(name, 0.0) for name in names])
        outputs = [output.name for output in manifest.continuous]
        sets = {name: _published(name, names, outputs) for name in SCORE_WEIGHT_SETS}
        return cls(names, index, manifest.config.product_surfaces, weights, ids=manifest.ids, sets=sets)

    def user_of(self, sent: int | str) -> int | str:
        """The user id of a body, checked or not, in the same form for both readers: the hash of a valid text id, else the id as sent."""
        return text_id(sent) if self.ids == "text" and isinstance(sent, str) and is_text_id(sent) else sent

    def rule(self, name: str, make: Callable[[], T]) -> T:
        """The rule of this name, made once."""
        found = self._rules.get(name)
        if found is None:
            found = self._rules[name] = make()
        rule: T = found
        return rule


def _published(name: str, actions: Sequence[str], outputs: Sequence[str]) -> NDArray[np.float64]:
    """The weights of this set for these actions and continuous outputs; its weights for others are left out."""
    found = [SCORE_WEIGHT_SETS[name].get(action, 0.0) for action in actions]
    further = CONTINUOUS_WEIGHTS.get(name, {})
    if further.keys() & set(outputs):
        found += [further.get(output, 0.0) for output in outputs]
    return np.array(found)
