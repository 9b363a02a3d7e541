"""A day of requests on paper: how many are served from a cache, and how many machines that takes.

Put your own figures in; those that stand here were measured on two cores (README) and guessed for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

DAY_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class Day:
    """What is asked, what a request costs, what a machine has. Costs are seconds of one core, wherever they are spent."""

    requests: float = 1e9
    peak: float = 2.5  # requests a second at the busiest hour ÷ those of the mean
    pages: float = 3.0  # requests in a row with one and the same history
    page_seconds: float = 60.0  # between two of them
    cold_seconds: float = 10.8e-3  # mini, 512 candidates: 5.38 ms on two cores
    cached_seconds: float = 6.1e-3
    around_seconds: float = 0.5e-3
    context_bytes: float = 260e3  # mini: 128 tokens, bf16; measure yours: bytes ÷ entries of the cache
    cache_bytes: float = 32e9  # a process
    cores: int = 16  # a machine, one process each
    use: float = 0.6  # of the cores, so that the wait stays short and one machine may die

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Day:
        """With these figures by name. Raises ValueError for one that is not there or is no number."""
        names = [field.name for field in fields(cls)]
        if unknown := given.keys() - names:
            raise ValueError(f"no figure is named {', '.join(unknown)}; there are {', '.join(names)}")
        return cls(**{name: type(getattr(cls(), name))(value) for name, value in given.items()})

    @property
    def rate(self) -> float:
        """Requests a second at the peak."""
        return self.peak * self.requests / DAY_SECONDS


@dataclass(frozen=True, slots=True)
class Plan:
    """For one way of routing: the share of requests that find their context, how long a context stays, and machines."""

    hits: float
    stays_seconds: float
    machines: int


def plan(day: Day, *, keyed: bool) -> Plan:
    """As many machines as it takes, with requests routed by user or anywhere.

    A context is looked for `pages − 1` times of `pages`; by user it is where it was, anywhere it is there once in N times. It is
    still there if fewer others have come since than a cache holds: `N · cache ÷ context ÷ (rate · misses)` seconds.
    """
    machines = 1
    while True:
        there = 1.0 if keyed else 1 / machines
        hits = there * (1 - 1 / day.pages)
        stays = machines * day.cache_bytes / day.context_bytes / (day.rate * (1 - hits))
        if stays < day.page_seconds:
            hits, stays = 0.0, machines * day.cache_bytes / day.context_bytes / day.rate
        cost = hits * day.cached_seconds + (1 - hits) * day.cold_seconds + day.around_seconds
        if machines * day.cores * day.use >= day.rate * cost:
            return Plan(hits, stays, machines)
        machines += 1


def plans(day: Day) -> str:
    """Both plans, as Markdown."""
    lines = [f"{day.requests:g} requests a day, {day.rate:,.0f} a second at the peak", ""]
    lines += [f"| routing | cache hits | a context stays, s | machines of {day.cores} cores |", "|---|--:|--:|--:|"]
    for name, keyed in (("by user", True), ("anywhere", False)):
        found = plan(day, keyed=keyed)
        lines.append(f"| {name} | {found.hits:.2f} | {found.stays_seconds:,.0f} | {found.machines} |")
    return "\n".join(lines)
