"""The facts of one night: how much joined, how users behaved, whether histories and clocks look right. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from weights.lab.evaluate.evaluation import known_worth
from weights.lab.evaluate.predict import rows_of
from weights.lab.joining.counts import JoinCounts
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log
from weights.turns import IMPRESSIONS


@dataclass(frozen=True, slots=True)
class Night:
    """Counts of one night.

    `positives`: impressions that were worth more than nothing to the score. `activity`: actions per impression; `expected_activity`: what
    the serving model expects of the same actions, on the held-out impressions. `returning_requests`: of users who did something before,
    as the log of the last nights says; `empty_histories`: those of them whose history was empty. `timed_events`: events that name
    a candidate; `early_events`: those before their ranking. `delay_seconds`: 5th percentile and median.
    """

    rankings: int
    impressions: int
    positives: int
    activity: float
    expected_activity: float
    returning_requests: int
    empty_histories: int
    timed_events: int
    early_events: int
    delay_seconds: tuple[float, float]


def without_log(counts: JoinCounts) -> Night:
    """The facts of a night of which nothing joined."""
    return Night(counts.rankings_never_shown, 0, 0, 0.0, 0.0, 0, 0, *_times(counts))


def facts_of(
    counts: JoinCounts,
    examples: Examples,
    requests: NDArray[np.int64],
    weights: NDArray[np.float32],
    expected: NDArray[np.float32],
) -> Night:
    """The facts of the night that has these requests of `examples`, which may also hold earlier nights. `weights` of the score, float32
    `[A]`; `expected`: how often the serving model expects each action per impression, float32 `[A]`."""
    rows = rows_of(examples, requests)
    shown = examples.log.take(rows)
    returning = (examples.last > examples.first)[requests] & (examples.users[requests] != 0)
    empty = examples.history_lengths[requests] == 0
    return Night(
        len(requests),
        len(rows),
        int(is_positive(shown, weights).sum()),
        float(shown.shares.sum()),
        float(expected[shown.known_actions].sum()),
        int(returning.sum()),
        int((returning & empty).sum()),
        *_times(counts),
    )


def _times(counts: JoinCounts) -> tuple[int, int, tuple[float, float]]:
    early = counts.events_before_ranking
    first, median = counts.delay_seconds
    return counts.joined_events + early + counts.events_after_window, early, (first, median)


def is_positive(shown: Log, weights: NDArray[np.float32]) -> NDArray[np.bool_]:
    """The impressions of which the score knows everything and whose actions are worth more than nothing, `[n]`."""
    return np.asarray(known_worth(shown, weights) & (shown.actions @ weights > 0))


def requests_of(examples: Examples, night: Path) -> NDArray[np.int64]:
    """The places in `examples` of the requests of the joined log in the directory `night`, by time."""
    return np.flatnonzero(np.isin(examples.log.request_id[examples.starts], _ids_of(night)))


def has_some_of(log: Log, night: Path) -> bool:
    """Whether the log holds any request of the joined log in the directory `night`."""
    return bool(np.isin(_ids_of(night), log.request_id).any())


def _ids_of(night: Path) -> NDArray[np.uint64]:
    column = pq.read_table(night / IMPRESSIONS, columns=["request_id"]).column("request_id")
    return np.unique(column.to_numpy())


def with_known_surfaces(log: Log, surfaces: int) -> tuple[Log, int]:
    """The log without the requests of which a post, or an event of the context as served, is on a product surface that a model with this
    many does not have; and how many these are."""
    is_unknown, contexts = log.product_surface >= surfaces, log.contexts
    if contexts is not None and log.context_id is not None:
        events = np.flatnonzero(contexts.product_surfaces >= surfaces)
        of_context = np.searchsorted(events, contexts.stops) > np.searchsorted(events, contexts.starts)
        named = np.flatnonzero(log.context_id)
        is_unknown[named] |= of_context[contexts.places(log.context_id[named])]
    left_out = np.unique(log.request_id[is_unknown])
    return (log.take(~np.isin(log.request_id, left_out)) if len(left_out) else log), len(left_out)
