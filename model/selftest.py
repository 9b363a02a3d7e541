"""Checks a live engine with random requests at warm-up: bits do not depend on the batch, and numbers match the definition's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from model.config import ModelConfig
from model.dense import DenseEngine
from model.engine import Engine, EngineError, Item
from model.inputs import Candidates, Context, Scores
from model.ranker import Ranker
from model.synthetic import random_request
from model.tolerances import PARITY

CANDIDATE_COUNTS = (1, 7, 63, 100)


def check_isolation(engine: Engine, candidate_counts: Sequence[int] = CANDIDATE_COUNTS) -> dict[str, int]:
    """Score random requests together, each request alone, and its candidates one by one; every bit must agree.

    Returns how many comparisons were made. Raises EngineError at the first difference, naming what differed, and for scores
    that are not finite: such a model could answer no request.
    """
    requests = list(_requests(engine.config, candidate_counts))
    together = engine.forward([Item(*request) for request in requests])
    if not all(outcome.scores.is_finite() for outcome in together):
        raise EngineError("the model's scores of random requests are not finite numbers")
    compared = 0
    for (context, candidates), batched in zip(requests, together, strict=True):
        whole = engine.forward([Item(context, candidates)])[0]
        _require_equal(batched.scores, whole.scores, f"{len(candidates)} candidates in a batch and by themselves")
        for place in sorted({0, len(candidates) // 2, len(candidates) - 1}):
            single = engine.forward([Item(context, candidates.chunk(place, place + 1), whole.state)])[0]
            row = whole.scores.rows(slice(place, place + 1))
            _require_equal(row, single.scores, f"candidate {place} of {len(candidates)} in its list and alone")
            compared += 1
        compared += 1
    return {"comparisons": compared, "different_bits": 0}


class Definition:
    """The plain definition's scores for a few random requests, in fp32 on the ranker's device. Computed on first use."""

    def __init__(self, ranker: Ranker) -> None:
        config = ranker.config
        sizes = ((min(config.history_length, 70), 9), (0, 1))  # more keys than fit into one tile
        self._ranker = ranker
        self._items = [Item(*random_request(config, *size, seed)) for seed, size in enumerate(sizes, 11)]
        self._expected: list[Scores] | None = None

    def check(self, engine: Engine) -> float:
        """The largest difference of a logit. Raises EngineError if it exceeds the tolerance of the engine's dtype plus twice the
        definition's own error in that dtype: weights that give large logits lose more.
        """
        if self._expected is None:
            self._expected = self._scores(torch.float32, engine)
        dtype: torch.dtype = getattr(torch, engine.info.dtype)
        found = [outcome.scores for outcome in engine.forward(self._items)]
        worst, allowed = largest_difference(found, self._expected), PARITY[dtype].logits
        if not worst <= allowed and dtype != torch.float32:
            allowed += 2 * largest_difference(self._scores(dtype, engine), self._expected)
        if not worst <= allowed:
            raise EngineError(f"logits differ from the definition's by {worst:.3g}, more than {allowed:.3g}")
        return worst

    def _scores(self, dtype: torch.dtype, engine: Engine) -> list[Scores]:
        definition = DenseEngine(self._ranker, dtype, engine.info.candidate_positions)
        return [outcome.scores for outcome in definition.forward(self._items)]


def largest_difference(found: Sequence[Scores], expected: Sequence[Scores]) -> float:
    """The largest absolute difference of any logit; NaN if one is NaN."""
    pairs = zip(found, expected, strict=True)
    return float(np.max([np.abs(ours.logits - theirs.logits).max() for ours, theirs in pairs]))


def same_bits(first: Scores, second: Scores) -> bool:
    """Whether two scores are the same bits, NaN included."""
    pairs = (
        (first.logits, second.logits),
        (first.probabilities, second.probabilities),
        (first.continuous, second.continuous),
    )
    return all(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


def _requests(config: ModelConfig, candidate_counts: Sequence[int]) -> Iterator[tuple[Context, Candidates]]:
    lengths = np.linspace(0, config.history_length, len(candidate_counts)).astype(int)
    for seed, count in enumerate(candidate_counts):
        yield random_request(config, int(lengths[seed]), count, seed)


def _require_equal(first: Scores, second: Scores, what: str) -> None:
    if not same_bits(first, second):
        raise EngineError(f"isolation is broken on this device: {what} differ")
