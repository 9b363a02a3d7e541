"""The random parts of the traffic model: popularity, sizes, ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from model.exploration import STEP, finalised

Ids = NDArray[np.uint64]

ID_BITS = 62  # ids look like those of a real feed: large, yet within a signed 64-bit integer


@dataclass(frozen=True, slots=True)
class SizeBand:
    """A `share` of the draws lies in `low … high`, both included, each size equally likely."""

    low: int
    high: int
    share: float


class Sizes:
    """A distribution of sizes, given as bands. Raises ValueError unless the bands are valid and their shares sum to 1."""

    def __init__(self, bands: Sequence[SizeBand]) -> None:
        shares = np.array([band.share for band in bands])
        if abs(shares.sum() - 1.0) > 1e-9 or any(band.low > band.high or band.low < 0 for band in bands):
            raise ValueError("size bands must be ordered, not negative, and their shares must sum to 1")
        self.bands = tuple(bands)
        self._edges = np.cumsum(shares)[:-1]

    def draw(self, random: np.random.Generator) -> int:
        """Draw one size."""
        band = self.bands[int(np.searchsorted(self._edges, random.random(), side="right"))]
        return int(random.integers(band.low, band.high + 1))

    def clipped(self, limit: int) -> Sizes:
        """The same distribution with larger sizes cut to `limit`, for a server with that limit."""
        return Sizes([SizeBand(min(band.low, limit), min(band.high, limit), band.share) for band in self.bands])


class Zipf:
    """Ranks 0 … n − 1, rank r drawn in proportion to 1 / (r + 1)^exponent."""

    def __init__(self, count: int, exponent: float) -> None:
        if count < 1 or exponent < 0:
            raise ValueError("a Zipf law needs at least one rank and an exponent that is not negative")
        weights = np.arange(1, count + 1, dtype=np.float64) ** -exponent
        self._cumulative = np.cumsum(weights / weights.sum())
        self._cumulative[-1] = 1.0
        self.count = count

    def draw(self, random: np.random.Generator, size: int) -> NDArray[np.int64]:
        """int64 `[size]`, drawn with replacement."""
        return np.searchsorted(self._cumulative, random.random(size), side="right").astype(np.int64)

    def draw_distinct(self, random: np.random.Generator, size: int, taken: set[int]) -> list[int]:
        """`size` different ranks, none of them in `taken`. After four draws, fills up from the unpopular end."""
        chosen: dict[int, None] = {}
        for _ in range(4):
            for rank in self.draw(random, 2 * size).tolist():
                if rank not in taken and len(chosen) < size:
                    chosen[rank] = None
            if len(chosen) == size:
                return list(chosen)
        for rank in range(self.count - 1, -1, -1):
            if len(chosen) == size:
                return list(chosen)
            if rank not in taken:
                chosen[rank] = None
        raise ValueError(f"{size} more distinct posts were asked of {self.count}, {len(taken)} of them taken")


def mix(values: NDArray[np.uint64] | NDArray[np.int64], salt: int) -> Ids:
    """SplitMix64 of each value and the salt: uint64, the same on every machine."""
    with np.errstate(over="ignore"):
        return finalised(values.astype(np.uint64) + np.uint64(salt) * STEP)


def ids_of(ranks: NDArray[np.int64], salt: int) -> Ids:
    """One id per rank. Ids look random and are never 0, which means padding."""
    return (mix(ranks, salt) >> np.uint64(64 - ID_BITS)) | np.uint64(1)
