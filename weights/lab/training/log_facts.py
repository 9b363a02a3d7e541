"""What a log holds, in counts, and what looks wrong with its histories. Printed before `choices` decides how to train on it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from weights.lab.counts import pair_key
from weights.lab.training.examples import Histories
from weights.lab.training.log import Log

Int64s = NDArray[np.int64]
MOSTLY_EMPTY = 0.5
"""Above this share of empty histories, a warning says so."""
LENGTH_RATIO, AGE_RATIO = 1.25, 2.0
"""Served and reconstructed histories differ if their mean lengths, or the median ages of their newest events, do so by more than this."""
AGE_SECONDS = 60.0
"""Ages below this count as this: a difference of seconds is none."""
EARLIEST_TS = 631_152_000
"""The beginning of 1990, Unix seconds. A log that ends before it has times of another unit: seconds that were divided by 1,000 once more
lie in the first weeks of 1970."""
PIECE_ROWS = 1_000_000
"""About so many rows are sorted at once to find those that come again."""
MOST_COMPARED = 20_000
"""How many requests served and reconstructed histories are compared on."""


def facts(log: Log, history_length: int) -> list[str]:
    """Lines for people: counts of each action, of impressions of nobody, of unknown authors and that come again, and of histories; then
    warnings, which begin with `WARNING`.

    `history_length`: how many events the model reads at most.
    """
    lines = [f"  {line}" for line in _actions(log)]
    if nobody := int((log.user_id == 0).sum()):
        lines.append(f"  {nobody:,} impressions of nobody (user 0): they have no history and are in none")
    if unknown := int((log.author_id == 0).sum()):
        lines.append(f"  {unknown:,} impressions of an unknown author (author 0)")
    if repeated := _repeated(log):
        lines.append(
            f"  {repeated:,} impressions have the request_id and the post_id of an earlier row: "
            "the post was shown twice, or a file is twice in the log"
        )
    optional = [name for name in ("position", "propensity", "weight") if getattr(log, name) is not None]
    if optional:
        lines.append(f"  has {', '.join(optional)}")
    histories = Histories(log, history_length)
    read, is_served = histories.history_lengths, histories.served >= 0
    empty = int((read == 0).sum())
    lines.append(
        f"  histories: {empty:,} of {len(read):,} are empty ({empty / len(read):.0%}); "
        f"half of them have {np.median(read):.0f} events or more"
    )
    if log.contexts is not None:
        lines.append(
            f"  contexts: as served for {is_served.sum():,} requests, reconstructed from the log's rows for {(~is_served).sum():,}"
        )
    return [*lines, *_early(log), *_warnings(histories)]


def _actions(log: Log) -> list[str]:
    """How often each action was taken, was not, and is unknown."""
    taken = log.actions.sum(0)
    unknown = np.zeros(len(taken), np.int64) if log.unknown is None else log.unknown.sum(0)
    lines = []
    for name, yes, never_told in zip(log.action_names, taken.tolist(), unknown.tolist(), strict=True):
        gap = f", unknown of {never_told:,}" if never_told else ""
        lines.append(f"{name}: taken {yes:,}, not taken {len(log) - yes - never_told:,}{gap}")
    return lines


def _early(log: Log) -> list[str]:
    """A warning of times that cannot be those of impressions, if that is what they are."""
    if log.impression_ts[-1] >= EARLIEST_TS:
        return []
    return [
        f"WARNING: every impression_ts lies before 1990 ({log.span}). It must be Unix seconds: was it divided by too much? "
        "pandas may hold microseconds or nanoseconds"
    ]


def _repeated(log: Log) -> int:
    """How many rows have the request and the post of an earlier row. The rows of a request are adjacent, so they are in one piece."""
    starts, repeated = log.request_starts, 0
    pieces = starts[np.searchsorted(starts, np.arange(0, len(log), PIECE_ROWS), "right") - 1]
    for begin, end in pairwise([*np.unique(pieces).tolist(), len(log)]):
        pairs = np.sort(pair_key(log.request_id[begin:end], log.post_id[begin:end]))
        repeated += int(np.count_nonzero(pairs[1:] == pairs[:-1]))
    return repeated


def _warnings(histories: Histories) -> list[str]:
    read, reconstructed = histories.history_lengths, histories.last - histories.oldest
    is_served = histories.served >= 0
    warnings, both = [], np.flatnonzero(is_served & (histories.users != 0))
    empty = float((read == 0).mean())
    if empty > MOSTLY_EMPTY:
        warnings.append(
            f"WARNING: {empty:.0%} of the histories are empty: a model cannot learn from them. Is the export of the users' actions whole?"
        )
    if not len(both):
        return warnings
    means = float(read[both].mean()), float(reconstructed[both].mean())
    if max(means) > LENGTH_RATIO * min(means):
        warnings.append(
            f"WARNING: served histories have {means[0]:.1f} events on average; "
            f"those that the log's rows give for the same requests have {means[1]:.1f}"
        )
    ages = _ages(histories, both[-MOST_COMPARED:])
    if ages and max(ages) > AGE_RATIO * max(min(ages), AGE_SECONDS):
        warnings.append(
            f"WARNING: the newest event of a served history is {_duration(ages[0])} old (median), "
            f"that of the log's rows {_duration(ages[1])}"
        )
    if not is_served.all():
        others = float(read[~is_served].mean())
        if max(others, means[0]) > LENGTH_RATIO * min(others, means[0]):
            warnings.append(
                f"WARNING: histories differ by where they come from: {means[0]:.1f} events on average as served, {others:.1f} reconstructed"
            )
    return warnings


def _ages(histories: Histories, requests: Int64s) -> tuple[float, float] | None:
    """The median ages in seconds, at these requests, of the newest event in the served history and in the reconstructed one.

    The time of a served event is that of the newest earlier row in which the user engaged with its post. None if no request has both.
    """
    log, event_rows = histories.log, histories.event_rows
    assert log.contexts is not None
    times: dict[tuple[int, int], list[int]] = {}
    # of these users alone: Python's numbers take memory
    of_users = event_rows[np.isin(log.user_id[event_rows], histories.users[requests])]
    for user, post, time in zip(
        log.user_id[of_users].tolist(),
        log.post_id[of_users].tolist(),
        log.impression_ts[of_users].tolist(),
        strict=True,
    ):
        times.setdefault((user, post), []).append(time)
    of_served, of_rows = list[int](), list[int]()
    for request in requests.tolist():
        user, now = int(histories.users[request]), int(histories.times[request])
        begin, end = (int(ends[histories.served[request]]) for ends in (log.contexts.starts, log.contexts.stops))
        newest = event_rows[histories.last[request] - 1] if histories.last[request] else -1
        if begin == end or newest < 0 or int(log.user_id[newest]) != user:
            continue
        earlier = [time for time in times.get((user, int(log.contexts.post_ids[end - 1])), ()) if time < now]
        if earlier:
            of_served.append(now - max(earlier))
            of_rows.append(now - int(log.impression_ts[newest]))
    return (float(np.median(of_served)), float(np.median(of_rows))) if of_served else None


def _duration(seconds: float) -> str:
    """A length of time in the unit that suits it."""
    for size, name in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds"
