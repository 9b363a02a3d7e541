"""Times several sides in turns, so that a slowdown of the machine affects all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

WARM_UP = 2  # rounds


@dataclass(frozen=True, slots=True)
class Figure:
    """The median of several readings and their spread: the 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, readings: list[float]) -> Figure:
        """The figure of these readings; there must be at least one."""
        ordered = sorted(readings)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])

    def scaled(self, factor: float) -> Figure:
        """The same in another unit."""
        return Figure(self.median * factor, self.low * factor, self.high * factor)


def alternate(
    sides: Mapping[str, Callable[[], object]], rounds: int, *, repeats: Mapping[str, int] | None = None
) -> dict[str, list[float]]:
    """Seconds of each side in each round. Every round runs every side `repeats` times and keeps the mean.

    Garbage collection is off during the rounds, and two rounds before them are discarded.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    try:
        for index in range(rounds + WARM_UP):
            for name, side in sides.items():
                times = (repeats or {}).get(name, 1)
                start = time.perf_counter()
                for _ in range(times):
                    side()
                if index >= WARM_UP:
                    seconds[name].append((time.perf_counter() - start) / times)
    finally:
        gc.enable()
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> Figure:
    """The ratio of each round, so that a disturbance affects both sides of it."""
    return Figure.of([a / b for a, b in zip(numerator, denominator, strict=True)])
