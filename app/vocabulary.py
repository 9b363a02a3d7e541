"""What callers may name of one checkpoint: its actions, its sets of weights, its kind of ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import structlog
from numpy.typing import NDArray

from weights.actions import SCORE_WEIGHT_SETS, continuous_weights, default_score_weights, weight_vector
from weights.format.manifest import Manifest
from weights.text_ids import IdKind

log = structlog.get_logger("app.vocabulary")

NO_WEIGHTS = "All weights in force are 0, so all scores are equal and the ranks mean nothing."
NO_WEIGHTS_KEPT = f"{NO_WEIGHTS} The checkpoint has none: send weights, or give it some with `phoenix-ranker relabel --score-weights`."


@dataclass(slots=True, eq=False)
class Vocabulary:
    """What one checkpoint knows. Made once for each served model. Nothing in it changes but whether the log was told of zero weights.

    `index`: action names, and decimal strings, to columns. `ids`: what callers name users, posts and authors by. `weights`: of the
    checkpoint, float64 `[A]`. `sets`: published weights by name, float64 `[A]`, or `[A + Z]` where they weigh continuous outputs too.
    `code_levels`, `code_values`: of the content codes, 0 for none.
    `model`: name and version as replies tell them, and its `digest`. `scales`: of the continuous outputs to their units, float32 `[Z]`.
    """

    action_names: tuple[str, ...]
    index: Mapping[str, int]
    product_surfaces: int
    code_levels: int
    code_values: int
    ids: IdKind
    weights: NDArray[np.float64]
    sets: Mapping[str, NDArray[np.float64]]
    model: Mapping[str, str]
    digest: str
    continuous_names: tuple[str, ...]
    scales: NDArray[np.float32]
    _has_warned: bool = field(default=False, init=False)

    @classmethod
    def of(cls, manifest: Manifest) -> Vocabulary:
        """Return the vocabulary of the checkpoint with this manifest."""
        names, outputs = manifest.action_names, tuple(output.name for output in manifest.continuous)
        columns = {name: column for column, name in enumerate(names)}
        weights = weight_vector(manifest.score_weights, names)
        sets = {name: _published(name, manifest) for name in SCORE_WEIGHT_SETS}
        return cls(
            action_names=names,
            index={str(column): column for column in columns.values()} | columns,
            product_surfaces=manifest.config.product_surfaces,
            code_levels=manifest.config.code_levels,
            code_values=manifest.config.code_values,
            ids=manifest.ids,
            weights=weights,
            sets=sets,
            model={"name": manifest.name, "version": manifest.version},
            digest=manifest.digest,
            continuous_names=outputs,
            scales=np.array([output.scale for output in manifest.continuous], np.float32),
        )

    def warning_of_zeros(self, weights: NDArray[np.float64]) -> str:
        """Return what a reply says of weights that are all 0, `[A]` or `[A + Z]`. Where they are the checkpoint's own, the log says so too,
        once."""
        if weights is not self.weights:
            return NO_WEIGHTS
        if not self._has_warned:
            self._has_warned = True
            log.warning("scores_mean_nothing", detail=NO_WEIGHTS_KEPT, **self.model)
        return NO_WEIGHTS_KEPT


def _published(name: str, manifest: Manifest) -> NDArray[np.float64]:
    """The weights of this set for a checkpoint's actions and continuous outputs; its weights for others are left out."""
    weights = default_score_weights(manifest.action_names, name)
    actions = [weights.get(action, 0.0) for action in manifest.action_names]
    outputs = continuous_weights(name, manifest.continuous)
    return np.array([*actions, *outputs] if any(outputs) else actions)
