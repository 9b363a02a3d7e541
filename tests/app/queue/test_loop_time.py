"""What a request costs the loop is learnt from what the loop did lately, and from nothing where too few came."""

from __future__ import annotations

import pytest

from app.queue.forecast import LEAST_REQUESTS, REFUSAL_SHARE, LoopTime, LoopWork


def busy(each_seconds: float, *, answered: int, refused: int = 0, background: float = 0.0) -> LoopTime:
    """Two seconds in which this many requests a tick cost the loop that much each, beside something else."""
    time, work = LoopTime(), LoopWork(0.0, 0, 0)
    for tick in range(100):
        time.observe(100 + tick * 0.02, work)
        cost = (answered + REFUSAL_SHARE * refused) * each_seconds + background
        work = LoopWork(work.cpu_seconds + cost, work.answered + answered, work.refused + refused)
    return time


@pytest.mark.parametrize("refused", [0, 50])
def test_the_wait_is_what_the_requests_in_hand_cost(refused: int) -> None:
    time = busy(0.001, answered=10, refused=refused)
    assert time.wait_seconds(200) == pytest.approx(0.2)
    assert time.wait_seconds(0) == 0.0


def test_what_a_request_costs_is_learnt_anew() -> None:
    time = busy(0.001, answered=10)
    work = LoopWork(100.0, 10_000, 0)
    for tick in range(500):
        time.observe(200 + tick * 0.02, work)
        work = LoopWork(work.cpu_seconds + 0.02, work.answered + 5, 0)
    assert time.wait_seconds(10) == pytest.approx(0.04, rel=0.01)


def test_few_requests_do_not_blame_a_loop_busy_with_other_work() -> None:
    """As the collector does, or a scrape: else a handful of requests would be refused after it."""
    assert LEAST_REQUESTS > 25
    assert busy(0.001, answered=1, background=0.02).wait_seconds(10_000) == 0.0
    assert LoopTime().wait_seconds(10_000) == 0.0
