"""The day on paper: its share of hits is that of simulated caches, and better figures never ask for more machines."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import replace

import pytest

from loadtest.capacity import DAY_SECONDS, Day, plan, plans

SMALL = Day(
    requests=2000 * DAY_SECONDS, peak=1.0, cache_bytes=20_000, context_bytes=1, page_seconds=5.0, cores=4, use=0.5
)


def simulated_hits(day: Day, machines: int, *, keyed: bool, seconds: int = 60) -> float:
    """Caches that drop what was used longest ago; users come at random and ask `pages` times."""
    draw, caches = random.Random(5), [OrderedDict[int, None]() for _ in range(machines)]
    due, hits, asked = [], 0, 0
    for user in range(int(day.rate * seconds / day.pages)):
        first = draw.uniform(0, seconds)
        due += [(first + page * day.page_seconds, user) for page in range(int(day.pages))]
    for at, user in sorted(due):
        cache = caches[(user if keyed else draw.randrange(10**6)) % machines]
        if seconds / 3 < at < seconds:
            asked, hits = asked + 1, hits + (user in cache)
        cache[user] = None
        cache.move_to_end(user)
        if len(cache) > day.cache_bytes / day.context_bytes:
            cache.popitem(last=False)
    return hits / asked


@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("cache_bytes", [20_000, 200])
def test_hits_are_those_of_simulated_caches(keyed: bool, cache_bytes: int) -> None:
    """Anywhere, a third page may meet the first's or the second's process: a little more than one in N."""
    day = replace(SMALL, cache_bytes=cache_bytes)
    found = plan(day, keyed=keyed)
    assert found.machines > 3
    assert found.hits == pytest.approx(simulated_hits(day, found.machines, keyed=keyed), abs=0.05)


def test_keys_save_machines() -> None:
    by_user, anywhere = (plan(Day(), keyed=keyed) for keyed in (True, False))
    assert by_user.hits > 0.6 > 0.05 > anywhere.hits
    assert by_user.machines < anywhere.machines


@pytest.mark.parametrize(("name", "factor"), [("requests", 2), ("cold_seconds", 2), ("cores", 0.5), ("use", 0.5)])
def test_more_work_or_smaller_machines_take_more_of_them(name: str, factor: float) -> None:
    changed = replace(Day(), **{name: type(getattr(Day(), name))(getattr(Day(), name) * factor)})
    assert plan(changed, keyed=True).machines > plan(Day(), keyed=True).machines


def test_both_plans_are_told_for_ones_own_figures() -> None:
    said = plans(Day.of({"requests": "1e8", "cores": "32"}))
    assert "| by user | 0." in said
    assert "machines of 32 cores" in said
    with pytest.raises(ValueError, match="no figure is named shoes; there are requests, peak"):
        Day.of({"shoes": "2"})
