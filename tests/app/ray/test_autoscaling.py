"""How many replicas are wanted: as many as bring their load to 1, fewer only where those that stay could do the work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.ray.autoscaling import LOAD, ByLoad, replicas_wanted


@pytest.mark.parametrize(
    ("running", "target", "loads", "wanted"),
    [
        (1, 1, [0.0], 1),  # the last one stays
        (1, 1, [1.2], 2),
        (2, 2, [1.5, 1.5], 3),
        (2, 2, [2.0, 2.0], 4),
        (2, 2, [2.0, 0.5], 3),  # the mean counts: no single replica's load
        (2, 2, [0.9, 0.9], 2),  # one alone would have too much
        (2, 2, [0.3, 0.3], 1),
        (4, 4, [0.0] * 4, 3),  # one at a time: each sends its users to caches that do not know them
        (2, 4, [2.0, 2.0], 4),  # two are still starting
        (2, 4, [0.9, 0.9], 4),
        (2, 2, [0.0], 2),  # the other one says nothing
        (2, 2, [], 2),
    ],
)
def test_replicas_wanted(running: int, target: int, loads: list[float], wanted: int) -> None:
    assert replicas_wanted(running, target, loads) == wanted


def test_more_load_never_means_fewer_replicas() -> None:
    for running in range(1, 9):
        wanted = [replicas_wanted(running, running, [load] * running) for load in (0, 0.5, 0.9, 1, 1.2, 1.5, 2)]
        assert wanted == sorted(wanted)


def test_the_policy_reads_what_replicas_record() -> None:
    context = SimpleNamespace(current_num_replicas=1, target_num_replicas=1, aggregated_metrics={LOAD: {"a": 1.2}})
    assert ByLoad()(context) == (2, {})
    context.aggregated_metrics = None
    assert ByLoad()(context) == (1, {})
