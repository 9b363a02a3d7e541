"""How many replicas a deployment should have: more when requests wait for the engine, fewer when the others could do the work."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any

WAIT = "queue_wait_seconds"  # what a request that comes now would wait for its first forward
BUSY = "busy"  # 1 while a forward runs, else 0: its mean is the share of the time that the engine works

MOST_AT_ONCE = 2.0  # times the replicas that there are, in one step
BUSY_AFTER = 0.6  # of their time may the replicas that stay be busy


class QueueWait:
    """An autoscaling policy for Ray Serve, which averages both figures over its look-back period, and applies bounds and delays."""

    def __init__(self, target_seconds: float = 0.02) -> None:
        """Replicas come while requests wait longer than this."""
        self.target_seconds = target_seconds

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context`: Ray Serve's AutoscalingContext. Replicas wanted, and no state."""
        figures: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        waits, busy = (list(figures.get(name, {}).values()) for name in (WAIT, BUSY))
        wanted = replicas_wanted(
            context.current_num_replicas, context.target_num_replicas, waits, busy, self.target_seconds
        )
        return wanted, {}


def replicas_wanted(running: int, target: int, waits: list[float], busy: list[float], target_seconds: float) -> int:
    """`running` replicas, `target` of them wanted so far; `waits` in seconds and `busy` shares, one of each for a replica that reports."""
    if not waits or len(waits) < running:
        return target  # a replica that is silent may be the busiest
    if (wait := fmean(waits)) > target_seconds:
        return max(target, math.ceil(running * min(wait / target_seconds, MOST_AT_ONCE)))
    if running > 1 and sum(busy) < (running - 1) * BUSY_AFTER:
        return min(target, running - 1)
    return target
