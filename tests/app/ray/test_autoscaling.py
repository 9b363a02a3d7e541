"""How many replicas are wanted: more while requests wait, fewer only where those that stay could do the work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.ray.autoscaling import BUSY, WAIT, QueueWait, replicas_wanted

TARGET = 0.02


@pytest.mark.parametrize(
    ("running", "target", "waits", "busy", "wanted"),
    [
        (1, 1, [0.0], [0.0], 1),  # the last one stays
        (1, 1, [0.021], [0.9], 2),
        (2, 2, [0.03, 0.03], [0.9, 0.9], 3),
        (2, 2, [0.5, 0.5], [1.0, 1.0], 4),  # no more than twice as many in one step
        (2, 2, [0.06, 0.0], [1.0, 0.1], 3),  # the mean counts: no single replica's wait
        (2, 2, [0.019, 0.019], [0.5, 0.5], 2),  # one alone would be busy all the time
        (2, 2, [0.0, 0.0], [0.2, 0.2], 1),
        (4, 4, [0.0] * 4, [0.0] * 4, 3),  # one at a time: each sends its users to caches that do not know them
        (2, 4, [0.5, 0.5], [1.0, 1.0], 4),  # two are still starting
        (2, 4, [0.0, 0.0], [0.9, 0.9], 4),
        (2, 2, [0.0], [0.0], 2),  # the other one says nothing
        (2, 2, [], [], 2),
    ],
)
def test_replicas_wanted(running: int, target: int, waits: list[float], busy: list[float], wanted: int) -> None:
    assert replicas_wanted(running, target, waits, busy, TARGET) == wanted


def test_more_load_never_means_fewer_replicas() -> None:
    for running in range(1, 9):
        wanted = [
            replicas_wanted(running, running, [wait] * running, [0.9] * running, TARGET)
            for wait in (0, 0.02, 0.021, 0.1, 9)
        ]
        assert wanted == sorted(wanted)


def test_the_policy_reads_what_replicas_record() -> None:
    context = SimpleNamespace(
        current_num_replicas=1, target_num_replicas=1, aggregated_metrics={WAIT: {"a": 0.03}, BUSY: {"a": 1.0}}
    )
    assert QueueWait(0.02)(context) == (2, {})
    assert QueueWait(0.05)(context) == (1, {})
    context.aggregated_metrics = None
    assert QueueWait(0.02)(context) == (1, {})
