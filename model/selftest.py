"""Checks a live engine with random requests at warm-up: bits do not depend on the batch, and numbers match the definition's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from model.batch import collate
from model.config import CandidatePositions, ModelConfig
from model.dense import forward_on
from model.engine import Engine, EngineError, Item
from model.inputs import Candidates, Context, Float32s, Scores
from model.ranker import Ranker
from model.synthetic import random_request
from model.tolerances import PARITY

CANDIDATE_COUNTS = (1, 7, 63, 100)
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


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
    """The plain definition's logits for two random requests: as long as the model takes, with 100 candidates, and without a history.

    Computed on `device` with products one step wider than the engine's dtype, so that a wrong kernel is compared with other kernels.
    """

    def __init__(self, ranker: Ranker, device: torch.device | None = None) -> None:
        sizes = ((ranker.config.history_length, 100), (0, 1))
        self._ranker = ranker
        self._device = device or ranker.tokens.user_projection.device
        self._items = [Item(*random_request(ranker.config, *size, seed)) for seed, size in enumerate(sizes, 11)]
        for item in self._items:
            item.context.is_kept = False  # no caller will ask for it

    def check(self, engine: Engine) -> float:
        """The largest difference of a logit. Raises EngineError if it exceeds the tolerance of the engine's dtype plus twice the
        definition's own error in that dtype on this device: weights that give large logits lose more.
        """
        dtype: torch.dtype = getattr(torch, engine.info.dtype)
        positions = engine.info.candidate_positions
        expected = self._logits(WIDER[dtype], positions)
        actual = [outcome.scores.logits for outcome in engine.forward(self._items)]
        worst, allowed = _largest(actual, expected), PARITY[dtype].logits
        if not worst <= allowed:
            allowed += 2 * _largest(self._logits(dtype, positions), expected)
        if not worst <= allowed:
            raise EngineError(f"logits differ from the definition's by {worst:.3g}, more than {allowed:.3g}")
        return worst

    def _logits(self, dtype: torch.dtype, positions: CandidatePositions) -> list[Float32s]:
        batches = [collate([(item.context, item.candidates)], self._ranker.config, positions) for item in self._items]
        return [forward_on(self._ranker, batch, dtype, self._device)[0][0].cpu().numpy() for batch in batches]


def largest_difference(actual: Sequence[Scores], expected: Sequence[Scores]) -> float:
    """The largest absolute difference of any logit; NaN if one is NaN."""
    return _largest([scores.logits for scores in actual], [scores.logits for scores in expected])


def _largest(actual: Sequence[Float32s], expected: Sequence[Float32s]) -> float:
    return float(np.max([np.abs(ours - theirs).max() for ours, theirs in zip(actual, expected, strict=True)]))


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
