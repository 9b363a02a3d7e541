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
from model.inputs import Candidates, Context, age_bucket, codes_as_read, codes_fitting, history_counts
from weights.lab.training.log import Log
from weights.tables import TableError
from weights.values import codes_rule

Request = tuple[Context, Candidates]
GROUPED_AT_ONCE = 1_000_000
"""Requests that are Python's numbers at a time while they are put into groups."""


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """actions float32 `[B, C, A]`, 1 if the action happened; dwell float32 `[B, C]`, seconds / 30, at most 1.

    shown bool `[B, C]`, False for padding; dwelt bool `[B, C]`, whether the dwell is known. weight float32 `[B, C]`: how often a
    candidate counts; None: once. is_known bool `[B, C, A]`: whether it is known that the action happened or not; None: of all.
    """

    actions: Tensor
    dwell: Tensor
    shown: Tensor
    dwelt: Tensor
    weight: Tensor | None = None
    is_known: Tensor | None = None

    def to(self, device: torch.device | str) -> Labels:
        """The same labels on another device."""
        columns = self.actions, self.dwell, self.shown, self.dwelt, self.weight, self.is_known
        return Labels(*(column if column is None else column.to(device) for column in columns))  # type: ignore[arg-type]

    @property
    def counts(self) -> Tensor | None:
        """How often each action of each candidate counts, float32 `[B, C, A]`; None: once."""
        if self.is_known is None:
            return None if self.weight is None else self.weight[..., None].expand_as(self.actions)
        return self.is_known.float() if self.weight is None else self.is_known * self.weight[..., None]


@dataclass(frozen=True, slots=True)
class HiddenShares:
    """The shares, 0 … 1, of users, posts and authors that training shows under an id never seen, as new ones are when served.

    Half of the hidden users have no id at all. Without hidden ids a model learns nothing about what to do with new ones. `events`: the
    share of a history that is left out, each event leaving its place empty, so that no single event decides. `codes`: the share of the
    content codes that are shown as none, level by level, so that the codes of a post do not tell which post it is.
    """

    users: float = 0.0
    posts: float = 0.0
    authors: float = 0.0
    events: float = 0.0
    codes: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Groups(Sequence[NDArray[np.int64]]):
    """Requests in groups, as a sequence of arrays of requests: group g is `order[starts[g] : starts[g + 1]]`. int64 `[R]`, `[G]`."""

    order: NDArray[np.int64]
    starts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, group: int) -> NDArray[np.int64]:  # type: ignore[override]
        """The requests of a group. Raises IndexError."""
        start = int(self.starts[group])
        stop = int(self.starts[group + 1]) if group + 1 < len(self) else len(self.order)
        requests: NDArray[np.int64] = self.order[start:stop]
        return requests

    @property
    def newest(self) -> NDArray[np.int64]:
        """The last request of each group, int64 `[G]`."""
        newest: NDArray[np.int64] = self.order[np.append(self.starts[1:], len(self.order)) - 1]
        return newest

    def sums(self, of_request: NDArray[np.int64]) -> NDArray[np.int64]:
        """A number of each request, summed over each group, int64 `[G]`."""
        sums: NDArray[np.int64] = np.add.reduceat(of_request[self.order], self.starts)
        return sums


class Histories:
    """The requests of a log in time order, each with its user's history: what the user engaged with, in any way, strictly before it.

    `starts`, `stops` int64 `[R]`: the rows of request i are `starts[i] … stops[i] - 1`; `times` int64, `users` uint64 `[R]`. The history
    of request i are rows `oldest[i] … last[i] - 1` of `events`, the newest `length` of `first[i] … last[i] - 1`. Nobody, user 0,
    has none. `event_rows` int64 `[E]`: where the log has the events. Where the log has the context that was served, `served[i]` is its
    place there, and that is the history instead; else -1. `history_lengths` int64 `[R]`: how many events a request reads.
    """

    def __init__(self, log: Log, length: int) -> None:
        self.log = log
        self.starts = log.request_starts
        self.stops = np.append(self.starts[1:], len(log))
        self.times, self.users = log.impression_ts[self.starts], log.user_id[self.starts]
        engaged = np.flatnonzero(log.actions.any(1) & (log.user_id != 0))
        order, self.first, self.last = _earlier_events(
            log.user_id[engaged], log.impression_ts[engaged], self.users, self.times
        )
        self.event_rows = engaged[order]
        self.oldest = np.maximum(self.first, self.last - length)
        self.history_lengths = self.last - self.oldest
        self.served = np.full(len(self.starts), -1)
        if log.contexts is not None and log.context_id is not None:
            self.served = log.contexts.places(log.context_id[self.starts])
            lengths = np.minimum(log.contexts.stops - log.contexts.starts, length)
            if len(lengths):
                self.history_lengths = np.where(self.served >= 0, lengths[self.served], self.history_lengths)

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def events(self) -> Log:
        """What users engaged with, by user, then time."""
        return self.log.take(self.event_rows)

    @property
    def request_of_rows(self) -> NDArray[np.int64]:
        """The request of each row of the log, int64 `[n]`."""
        return np.repeat(np.arange(len(self)), self.stops - self.starts)


class Examples(Histories):
    """Requests of a log with their histories, as a model of this architecture reads them, and what users did as labels.

    `smoothed` float32 `[n, A]`: what training learns in place of the actions of the first n rows, if set.
    Raises TableError for a log that does not fit the architecture.
    """

    smoothed: NDArray[np.float32] | None = None

    def __init__(self, log: Log, config: ModelConfig) -> None:
        if log.actions.shape[1] != config.actions:
            raise TableError(f"the log has {log.actions.shape[1]} actions, the architecture {config.actions}")
        if (surface := int(log.product_surface.max())) >= config.product_surfaces:
            raise TableError(f"product_surface must be below {config.product_surfaces}, got {surface}")
        _check_codes(log, config)
        super().__init__(log, config.history_length)
        self.config = config

    @property
    def sizes(self) -> NDArray[np.int64]:
        """How many tokens each request has: its candidates and its history, int64 `[R]`."""
        return self.stops - self.starts + self.history_lengths

    def context(self, index: int, is_kept: bool = True) -> Context:
        """The user and the newest `history_length` events before request `index`."""
        log, user = self.log, int(self.users[index])
        if log.contexts is not None and (place := int(self.served[index])) >= 0:
            return log.contexts.context(place, user, self.config, is_kept)
        rows = self.event_rows[int(self.oldest[index]) : int(self.last[index])]
        return Context(
            user,
            log.post_id[rows],
            log.author_id[rows],
            log.actions[rows].astype(np.float32),
            log.product_surface[rows],
            log.dwell_seconds[rows],
            is_kept,
            codes=self.codes(rows),
        )

    def history_posts(self, index: int) -> NDArray[np.uint64]:
        """The posts of the events that a request reads."""
        if self.served[index] >= 0:
            return self.context(index).post_ids
        return self.events.post_id[self.oldest[index] : self.last[index]]

    def rows(self, index: int) -> NDArray[np.int64]:
        """The rows of the log shown in request `index`."""
        return np.arange(self.starts[index], self.stops[index])

    def candidates(self, rows: NDArray[np.int64] | slice) -> Candidates:
        """The posts shown in the given rows of the log."""
        log = self.log
        ages = age_bucket(log.impression_ts[rows], log.created_at[rows], self.config)
        columns = log.post_id[rows], log.author_id[rows], log.product_surface[rows], ages
        return Candidates(*columns, codes=self.codes(rows))

    def codes(self, rows: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        """The content codes of the given rows as the model reads them, int64 `[n, Q]`; levels that the log lacks have code 0."""
        codes = self.log.codes[rows]
        return codes_fitting(codes, len(codes), self.config)

    def labels(self, rows: Sequence[NDArray[np.int64]]) -> Labels:
        """The labels of the given rows, one list per request, padded to the longest."""
        slots = max(map(len, rows))

        def column(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(np.stack([pad(values[r], slots) for r in rows]))

        log, seconds = self.log, column(self.log.dwell_seconds)
        return Labels(
            actions=column(log.actions).float(),
            dwell=(seconds / MAX_DWELL_SECONDS).clamp(0, 1),
            shown=torch.arange(slots) < torch.tensor([len(r) for r in rows])[:, None],
            dwelt=seconds > 0,
            weight=None if log.weight is None else column(log.weight),
            is_known=None if log.unknown is None else ~column(log.unknown),
        )

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> tuple[Batch, Labels]:
        """The requests `indices` as they are, and their labels."""
        rows = [self.rows(int(index)) for index in indices]
        requests = [(self.context(int(i)), self.candidates(r)) for i, r in zip(indices, rows, strict=True)]
        return collate(requests, self.config), self.labels(rows)

    def groups(self, requests: NDArray[np.int64], max_candidates: int, max_events: int) -> Groups:
        """The requests, cut into groups that share one context in training: successive ones of a user, `max_candidates` together,
        with at most `max_events` events between the first and the last. One larger request is a group by itself.
        """
        order = requests[np.lexsort((self.times[requests], self.users[requests]))]
        columns = self.stops - self.starts, self.users, self.last, self.served
        starts, candidates, first = [np.zeros(0, np.int64)], 0, (0, 0, 0)
        for begin in range(0, len(order), GROUPED_AT_ONCE):
            rows = order[begin : begin + GROUPED_AT_ONCE]
            pieces, begun = (column[rows].tolist() for column in columns), list[int]()
            for place, (size, user, end, served) in enumerate(zip(*pieces, strict=True), begin):
                is_apart = (user, served) != first[:2] or end - first[2] > max_events
                if not place or is_apart or candidates + size > max_candidates:
                    begun.append(place)
                    candidates, first = 0, (user, served, end)
                candidates += size
            starts.append(np.array(begun, np.int64))  # Python's numbers would take five times the memory
        return Groups(order, np.concatenate(starts))

    def training_batch(
        self, groups: Sequence[NDArray[np.int64]], rng: np.random.Generator, hidden: HiddenShares, max_candidates: int
    ) -> tuple[Batch, Tensor, Labels]:
        """A row of a batch for each group, some ids hidden: the context of its last request, and the candidates of all.

        Also, int64 `[B, C]`, how many of the context's events, the oldest ones, came before each candidate's own request: it must see no
        others. A request of more than `max_candidates` loses random candidates.
        """
        requests, shown, seen = [], [], []
        for group in groups:
            rows = np.concatenate([self.rows(int(index)) for index in group])
            seen_events = self.last[group] - self.oldest[group[-1]]
            if self.served[group[-1]] >= 0:  # one context as served, which all of them read whole
                seen_events = self.history_lengths[group]
            before = np.repeat(seen_events, (self.stops - self.starts)[group])
            if len(rows) > max_candidates:
                drawn = np.sort(rng.choice(len(rows), max_candidates, replace=False))
                rows, before = rows[drawn], before[drawn]
            context, candidates = self.context(int(group[-1])), self.candidates(rows)
            read_context, read = _with_hidden_ids((context, candidates), rng, hidden)
            if self.config.history_counts:
                # of what was there: hiding an id changes how it is read, not what a user did
                counts = history_counts(context, candidates, self.config, before)
                read = replace(read, codes=np.hstack((codes_as_read(read.codes, self.config), counts)))
            requests.append((read_context, read))
            shown.append(rows)
            seen.append(before)
        labels, slots = self.labels(shown), max(map(len, shown))
        if self.smoothed is not None:
            actions = np.stack([pad(self.smoothed[rows], slots) for rows in shown])
            labels = replace(labels, actions=torch.from_numpy(actions))
        return (
            collate(requests, self.config),
            torch.from_numpy(np.stack([pad(counts, slots) for counts in seen])),
            labels,
        )


def _check_codes(log: Log, config: ModelConfig) -> None:
    """Raises TableError for content codes that the model does not have. A model without codes reads none."""
    levels, values = config.code_levels, config.code_values
    if levels and ((log.codes[:, :levels] > values).any() or log.codes[:, levels:].any()):
        raise TableError(
            f"the content codes of the log do not fit the architecture: codes {codes_rule(levels, values)}"
        )


def _earlier_events(
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


def _with_hidden_ids(request: Request, rng: np.random.Generator, hidden: HiddenShares) -> Request:
    context, candidates = request
    is_user_shown, unseen = rng.random() >= hidden.users, int(rng.integers(1, 2**63)) if rng.random() < 0.5 else 0

    posts = [hide(part.post_ids, rng, hidden.posts) for part in request]
    if hidden.events:
        posts[0] = np.where(rng.random(len(context)) < hidden.events, np.uint64(0), posts[0])
    authors = [hide(part.author_ids, rng, hidden.authors) if hidden.authors else part.author_ids for part in request]
    codes = [_without_some(part.codes, rng, hidden.codes) if hidden.codes else part.codes for part in request]
    return (
        replace(
            context,
            user_id=context.user_id if is_user_shown else unseen,
            post_ids=posts[0],
            author_ids=authors[0],
            codes=codes[0],
        ),
        replace(candidates, post_ids=posts[1], author_ids=authors[1], codes=codes[1]),
    )


def hide(ids: NDArray[np.uint64], rng: np.random.Generator, share: float) -> NDArray[np.uint64]:
    """The ids, with a share of them replaced by ids never seen."""
    return np.where(rng.random(len(ids)) < share, rng.integers(1, 2**63, len(ids), np.uint64), ids)


def _without_some(codes: NDArray[np.int64], rng: np.random.Generator, share: float) -> NDArray[np.int64]:
    """The content codes, with a share of them replaced by 0, which is none."""
    return np.where(rng.random(codes.shape) < share, 0, codes)
