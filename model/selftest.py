"""Checks on a live engine that a candidate's bits do not depend on the batch. Run at warm-up, on random requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from model.config import ModelConfig
from model.engine import Engine, EngineError, Item
from model.inputs import Candidates, Context, Scores
from model.synthetic import random_request

CANDIDATE_COUNTS = (1, 7, 63, 100)


def check_isolation(engine: Engine, candidate_counts: Sequence[int] = CANDIDATE_COUNTS) -> dict[str, int]:
    """Score random requests together, each request alone, and its candidates one by one; every bit must agree.

    Returns how many comparisons were made. Raises EngineError at the first difference, naming what differed, and for scores
    that are no finite numbers: such a model could answer nobody.
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
    for seed, (history, count) in enumerate(zip(lengths, candidate_counts, strict=True)):
        yield random_request(config, int(history), count, seed)


def _require_equal(first: Scores, second: Scores, what: str) -> None:
    if not same_bits(first, second):
        raise EngineError(f"isolation is broken on this device: {what} differ")
