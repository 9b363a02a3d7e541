"""How many replicas a deployment should have: as many as bring the load of each to 1, and fewer one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.load import replicas_for

LOAD = "load"  # `app.load.Load.value` of each replica
SPARE = 0.95  # the share of the load that the remaining replicas may have, or a removed one would come back at once


class ByLoad:
    """An autoscaling policy for Ray Serve, which averages the figures over its look-back period, and applies bounds and delays."""

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context`: Ray Serve's AutoscalingContext. Replicas wanted, and no state."""
        figures: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        loads = list(figures.get(LOAD, {}).values())
        return replicas_wanted(context.current_num_replicas, context.target_num_replicas, loads), {}


def replicas_wanted(running: int, target: int, loads: list[float]) -> int:
    """`running` replicas, `target` of them wanted so far; `loads`: one for each replica that reports."""
    if not loads or len(loads) < running:
        return target  # a silent replica may be the busiest
    if (wanted := replicas_for(running, loads)) > running:
        return max(target, wanted)
    if running > 1 and sum(loads) < (running - 1) * SPARE:
        return min(target, running - 1)  # its users move to replicas that have not cached them
    return target
