"""How far an engine's numbers may lie from their definition, by dtype of the trunk: the only place for such figures."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest absolute differences: of logits, of values in 0 … 1, and (also relative) of one operation on numbers near 1."""

    logits: float
    probabilities: float
    operation: float


PARITY = {
    torch.float32: Tolerance(logits=2e-4, probabilities=1e-4, operation=2e-5),
    # the published bf16 is itself 0.06 to 0.09 off in logits
    torch.bfloat16: Tolerance(logits=0.12, probabilities=0.03, operation=2e-2),
}


@dataclass(frozen=True, slots=True)
class RetrievalTolerance:
    """Largest absolute differences: of a user vector's elements, of scores, and of a post vector's elements with tables of this dtype."""

    elements: float
    scores: float
    posts: float


RETRIEVAL = {
    torch.float32: RetrievalTolerance(elements=1e-6, scores=1e-6, posts=1e-6),
    torch.bfloat16: RetrievalTolerance(elements=1e-2, scores=1e-2, posts=6e-3),
}
