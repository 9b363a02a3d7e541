"""A valid request → what the model reads: the newest history that fits its window, ages in buckets."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.request.validate import Request, Viewer
from model.config import MAX_DWELL_SECONDS, ModelConfig
from model.inputs import Candidates, Context, age_bucket


def context_of(request: Request | Viewer, config: ModelConfig) -> Context:
    """The user and the newest `history_length` history items. Values that the checkpoint has no input for do no harm."""
    kept = min(len(request.history), config.history_length)
    first = len(request.history) - kept

    def newest(column: NDArray[Any]) -> NDArray[Any]:
        return column[first:].copy() if first else column  # a view would keep the whole history while the request waits

    # The model clips there anyway; clipping here makes equal tokens equal keys of the cache, and 1e300 fit a float32.
    dwell = np.minimum(newest(request.dwell_seconds), MAX_DWELL_SECONDS).astype(np.float32)
    return Context(
        user_id=request.user_id,
        post_ids=newest(request.history.post_ids),
        author_ids=newest(request.history.author_ids),
        actions=newest(request.actions),
        surfaces=newest(request.history.surfaces),
        dwell_seconds=dwell,
        dropped=first,
    )


def candidates_of(request: Request, config: ModelConfig) -> Candidates:
    """All candidates in the request's order, with the age bucket at `impression_ts`."""
    return Candidates(
        post_ids=request.candidates.post_ids,
        author_ids=request.candidates.author_ids,
        surfaces=request.candidates.surfaces,
        age_buckets=age_bucket(request.impression_ts, request.numbers["created_at"], config),
    )
