"""The rule of what is refused because its reply would come too late, for the queue and for bodies to be read. Pure arithmetic."""

from __future__ import annotations

TOO_LATE = "callers leave before such a wait is over"
PAST_DEADLINE = "the predicted wait is longer than the deadline"
SURE_TIMES = 1.5


def late_seconds(end_seconds: float, leaves_seconds: float, own_seconds: float) -> float:
    """By how much a request ends after its caller has left; 0 or less where it is in time. All in seconds from now.

    One that ends within `SURE_TIMES` times its own work, `own_seconds`, is in time: callers who leave at once keep nobody out.
    """
    return end_seconds - max(leaves_seconds, SURE_TIMES * own_seconds)
