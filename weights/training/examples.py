"""Turns a log into examples: each request with its user's history before it, and the actions that followed as labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.batch import Batch, collate, pad
from model.config import MAX_DWELL_SECONDS, ModelConfig
from model.inputs import Candidates, Context, age_bucket
from weights.tables import LogError
from weights.training.log import Index, Log, fingerprint

Request = tuple[Context, Candidates]


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """actions float32 `[B, C, A]`, 1 if the action happened; dwell float32 `[B, C]`, seconds / 30, at most 1.

    shown bool `[B, C]`, False for padding; dwelt bool `[B, C]`, whether the dwell is known. If processes share
    a batch, the weights scale the mean over this part: its shown (or dwelt) candidates ÷ those of an average part.
    """

    actions: Tensor
    dwell: Tensor
    shown: Tensor
    dwelt: Tensor
    shown_weight: float = 1.0
    dwelt_weight: float = 1.0

    def to(self, device: torch.device | str) -> Labels:
        """The same labels on another device."""
        tensors = {name: getattr(self, name).to(device) for name in ("actions", "dwell", "shown", "dwelt")}
        return replace(self, **tensors)


class Examples:
    """Requests of a log in time order. A history is what the user engaged with, in any way, strictly before the request.

    Raises LogError for a log that does not fit the architecture.
    """

    def __init__(self, log: Log, config: ModelConfig) -> None:
        if log.actions.shape[1] != config.actions:
            raise LogError(f"the log has {log.actions.shape[1]} actions, the architecture {config.actions}")
        index = log.index or index_of(log)
        if index.surfaces > config.product_surfaces:
            raise LogError(f"product_surface must be below {config.product_surfaces}, got {index.surfaces - 1}")
        self.log = log
        self.config = config
        self.starts, self.times, self.users = index.starts, index.times, index.users
        self.stops = np.append(self.starts[1:], len(log))
        self.first, self.last, self.events = index.first, index.last, index.events
        self.oldest = np.maximum(self.first, self.last - config.history_length)
        # for a log on disk, values derived from rows are computed on demand
        self._ages = None if log.index else age_bucket(log.impression_ts, log.created_at, config)
        self._actions = self.events.actions if log.index else self.events.actions.astype(np.float32)

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def fingerprint(self) -> dict[str, int]:
        """As `log.fingerprint` of the whole log."""
        return self.log.index.fingerprint if self.log.index else fingerprint(self.log)

    def context(self, index: int, is_kept: bool = True) -> Context:
        """The user and the newest `history_length` events before request `index`."""
        kept, events = slice(int(self.oldest[index]), int(self.last[index])), self.events
        return Context(
            int(self.users[index]),
            events.post_id[kept],
            events.author_id[kept],
            np.asarray(self._actions[kept], np.float32),
            events.product_surface[kept],
            events.dwell_seconds[kept],
            is_kept,
        )

    def rows(self, index: int) -> NDArray[np.int64]:
        """The rows of the log shown in request `index`."""
        return np.arange(self.starts[index], self.stops[index])

    def candidates(self, index: int, rows: NDArray[np.int64] | slice) -> Candidates:
        """The posts shown in the given rows of the log."""
        log, ages = self.log, self._ages
        found = age_bucket(log.impression_ts[rows], log.created_at[rows], self.config) if ages is None else ages[rows]
        return Candidates(log.post_id[rows], log.author_id[rows], log.product_surface[rows], found)

    def labels(self, rows: Sequence[NDArray[np.int64]]) -> Labels:
        """The labels of the given rows, one list per request, padded to the longest."""
        slots = max(map(len, rows))

        def column(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(np.stack([pad(values[r], slots) for r in rows]))

        seconds = self.log.dwell_seconds
        return Labels(
            actions=column(self.log.actions).float(),
            dwell=(column(seconds) / MAX_DWELL_SECONDS).clamp(0, 1),
            shown=torch.arange(slots) < torch.tensor([len(r) for r in rows])[:, None],
            dwelt=column(seconds) > 0,
        )


def index_of(log: Log) -> Index:
    """The requests and histories of a log in memory."""
    starts = np.flatnonzero(np.concatenate(([True], log.request_id[1:] != log.request_id[:-1])))
    times, users = log.impression_ts[starts], log.user_id[starts]
    engaged = np.flatnonzero(log.actions.any(1))
    order, first, last = histories(log.user_id[engaged], log.impression_ts[engaged], users, times)
    surfaces = int(log.product_surface.max()) + 1
    return Index(starts, times, users, first, last, log.take(engaged[order]), surfaces, {})


def histories(
    user_id: NDArray[np.uint64], impression_ts: NDArray[np.int64], of_user: NDArray[np.uint64], at: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The order of events by user, then time, and for each request (of a user, at a time) its earlier events in that order: first, last.

    Every event is part of one of the requests.
    """
    users, of_request = np.unique(of_user, return_inverse=True)
    of_event = np.searchsorted(users, user_id)
    order = np.lexsort((impression_ts, of_event))
    origin, span = (int(at.min()), int(np.ptp(at)) + 1) if len(at) else (0, 1)
    keys = of_event[order] * span + (impression_ts[order] - origin)
    return order, np.searchsorted(keys, of_request * span), np.searchsorted(keys, of_request * span + (at - origin))


def training_batch(
    examples: Examples,
    indices: NDArray[np.int64],
    rng: np.random.Generator,
    *,
    fresh_user_share: float,
    fresh_post_share: float,
    max_candidates: int,
    part: slice = slice(None),
) -> tuple[Batch, Labels]:
    """A batch of the requests `indices` and its labels, some ids replaced by unseen ones, as most are when served.

    Shares lie in 0 … 1; a request of more than `max_candidates` loses random rows. The whole batch is drawn in any case, but only
    `part` is collated: the parts of several processes together are the batch of one.
    """
    requests, shown = [], []
    for index in indices:
        rows = examples.rows(index)
        if len(rows) > max_candidates:
            rows = np.sort(rng.choice(rows, max_candidates, replace=False))
        request = (examples.context(index), examples.candidates(index, rows))
        requests.append(_with_fresh_ids(request, rng, fresh_user_share, fresh_post_share))
        shown.append(rows)
    labels = examples.labels(shown[part])
    if len(shown[part]) < len(shown):
        parts = len(shown) / len(shown[part])
        dwelt = sum(int((examples.log.dwell_seconds[rows] > 0).sum()) for rows in shown)
        labels = replace(
            labels,
            shown_weight=parts * int(labels.shown.sum()) / sum(map(len, shown)),
            dwelt_weight=parts * int(labels.dwelt.sum()) / max(dwelt, 1),
        )
    return collate(requests[part], examples.config), labels


def _with_fresh_ids(request: Request, rng: np.random.Generator, user_share: float, post_share: float) -> Request:
    context, candidates = request
    known, unseen = rng.random() >= user_share, int(rng.integers(1, 2**63)) if rng.random() < 0.5 else 0
    user = context.user_id if known else unseen
    posts = [_refresh(ids, rng, post_share) for ids in (context.post_ids, candidates.post_ids)]
    return replace(context, user_id=user, post_ids=posts[0]), replace(candidates, post_ids=posts[1])


def _refresh(ids: NDArray[np.uint64], rng: np.random.Generator, share: float) -> NDArray[np.uint64]:
    fresh = rng.integers(1, 2**63, len(ids), np.uint64)
    return np.where(rng.random(len(ids)) < share, fresh, ids)
