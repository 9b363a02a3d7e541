"""When requests are due, in seconds from the start. The schedule is fixed before the run: no server can slow it down."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Arrivals = Literal["constant", "poisson"]


def schedule(kind: Arrivals, rate_rps: float, seconds: float, seed: int = 1) -> NDArray[np.float64]:
    """Due times, ascending, all below `seconds`. Poisson arrivals have exponential gaps: independent users; constant has equal ones.

    Raises ValueError for a rate or length that is not positive.
    """
    if rate_rps <= 0 or seconds <= 0:
        raise ValueError("rate and seconds must be positive")
    if kind == "constant":
        return np.arange(int(np.ceil(rate_rps * seconds)), dtype=np.float64) / rate_rps
    random = np.random.default_rng(seed)
    spare = int(rate_rps * seconds + 10 * np.sqrt(rate_rps * seconds) + 10)
    times = np.cumsum(random.exponential(1 / rate_rps, spare))
    return times[times < seconds]
