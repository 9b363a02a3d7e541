"""Admission as pure policy, with a clock that moves when told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.queue.admission import KEY_BURST_SECONDS, Admission, Refusal
from app.queue.batching import Work
from app.queue.forecast import Running
from app.settings import Batching, Queue
from tests.support.fakes import FakeClock

FAR = 1e9
IDLE = Running()


def admission(batching: Batching | None = None, **queue: float) -> Admission:
    chosen = Queue(**{"max_wait_seconds": 0.0, **queue})  # type: ignore[arg-type]
    return Admission(chosen, batching or Batching(), FakeClock())


def job(candidates: int, tokens: int = 0, *, key: str | None = None, deadline: float = FAR, chunks: int = 1) -> Work:
    return Work(candidates=candidates, context_tokens=tokens, deadline=deadline, chunks=chunks, key=key)


def refused(queue: Admission, work: Work) -> Refusal:
    """Why this work may not join an idle engine's queue."""
    refusal = queue.refusal(work, IDLE)
    assert refusal is not None
    return refusal


def test_work_is_counted_and_not_requests() -> None:
    queue = admission(max_candidates=1000)  # and eight times as many context tokens
    for _ in range(10):
        queue.add(job(90, 100))
    assert queue.refusal(job(100, 1), IDLE) is None
    assert queue.refusal(job(101, 1), IDLE) is not None
    assert queue.refusal(job(1, 7001), IDLE) is not None
    queue.remove(job(90, 100))
    assert queue.refusal(job(101, 1), IDLE) is None
    assert queue.refusal(job(1, 7001), IDLE) is None


def test_an_idle_engine_takes_whatever_one_request_may_be() -> None:
    queue = admission(max_candidates=10)
    assert queue.refusal(job(2000, 1000), IDLE) is None
    queue.add(job(2000, 1000))
    assert queue.refusal(job(1, 1), IDLE) is not None
    assert queue.full(IDLE) is not None


def linear(queue: Admission, seconds_per_token: float) -> None:
    """Teach it an engine whose time grows with its work."""
    for cost in (100, 200, 400):
        queue.forward_time.observe(cost, cost * seconds_per_token)


def test_retry_after_is_when_it_would_fit_at_the_observed_rate() -> None:
    queue = admission(max_candidates=1000)
    linear(queue, 0.002)
    queue.add(job(1000))
    refusal = refused(queue, job(250))
    assert refusal.reason == "queue_full"
    assert refusal.retry_after_seconds == pytest.approx(250 * 0.002)


def test_the_predicted_wait_bounds_the_queue_in_seconds() -> None:
    queue = admission(Batching(max_candidates=100), max_wait_seconds=0.5)
    queue.add(job(400))
    assert queue.full(IDLE) is None  # nothing was observed yet, so nothing is predicted
    linear(queue, 0.001)
    assert queue.full(IDLE) is None
    queue.add(job(200))
    refusal = queue.full(IDLE)
    assert refusal is not None
    assert refusal.retry_after_seconds == pytest.approx(0.1)


def test_who_joins_the_next_forward_does_not_wait_for_it_to_fill() -> None:
    """An engine whose time does not grow with its batch: all of the next forward wait equally long."""
    queue = admission(Batching(max_candidates=40), max_wait_seconds=0.04)
    for _ in range(3):
        queue.forward_time.observe(10, 0.05)
    for _ in range(3):
        queue.add(job(10))
        assert queue.wait(job(10), IDLE)[:2] == (0.0, 0)
    queue.add(job(10))
    assert queue.wait(job(10), IDLE)[:2] == (0.05, 1)  # that forward is full


def test_a_request_ends_with_all_that_share_its_forward() -> None:
    queue = admission(Batching(max_candidates=400))
    linear(queue, 0.001)
    queue.add(job(300))
    now = queue.clock()
    assert queue.refusal(job(100, deadline=now + 0.41), IDLE) is None  # 0.1 s by itself, 0.4 s beside the others
    assert refused(queue, job(100, deadline=now + 0.39)).reason == "deadline"


@pytest.mark.parametrize(("per_second", "joins_next"), [(40, True), (80, True), (400, False)])
def test_a_limit_below_a_forward_admits_what_the_next_would_miss(per_second: int, joins_next: bool) -> None:
    """An engine that can do 80 a second in forwards of four, one of which has just begun."""
    clock, running = FakeClock(), Running(4, 40, 0, 0.0)
    queue = Admission(Queue(max_wait_seconds=0.04), Batching(max_candidates=40), clock)
    queue.forward_time.observe(40, 0.05)
    for _ in range(4):
        queue.add(job(10))
    for _ in range(10 * per_second):
        clock.advance(1 / per_second)
        queue.refusal(job(10), running)
    assert (queue.refusal(job(10), running) is None) == joins_next
    for _ in range(4):
        queue.add(job(10))
    assert queue.refusal(job(10), Running(4, 40, 0, 0.02)) is not None  # there is a full forward before it


def test_requests_that_are_refused_unread_are_offered_too() -> None:
    clock, running = FakeClock(), Running(4, 40, 0, 0.0)
    queue = Admission(Queue(max_wait_seconds=0.04), Batching(max_candidates=40), clock)
    queue.forward_time.observe(40, 0.05)
    jobs = [job(10) for _ in range(8)]
    for each in jobs:
        queue.refusal(each, running)
        queue.add(each)
    for _ in range(400):
        clock.advance(1 / 400)
        assert queue.full(running) is not None
    for each in jobs[4:]:
        queue.remove(each)
    assert queue.refusal(job(10), running) is not None  # others will come who wait less


def test_what_the_present_forward_has_done_shortens_the_wait() -> None:
    queue = admission()
    linear(queue, 0.001)
    queue.add(job(500))
    for seconds, left in ((0.0, 0.5), (0.2, 0.3), (5.2, 0.0)):  # longer than predicted: it may be over any moment
        assert queue.wait(job(1), Running(1, 500, 0, seconds)).seconds == pytest.approx(left)


def test_a_job_that_turns_out_smaller_makes_room_and_none_grows() -> None:
    queue = admission(Batching(chunk_candidates=100), max_candidates=1000)
    work = job(900, 1, chunks=9)
    queue.add(work)
    queue.resize(work, 150, 30)
    assert (queue.candidates, queue.context_tokens, work.chunks) == (150, 30, 2)
    assert queue.refusal(job(850), IDLE) is None
    with pytest.raises(ValueError, match="more candidates"):
        queue.resize(work, 151, 30)
    queue.remove(work)
    assert queue.requests == queue.cost == 0


def test_a_deadline_is_held_against_the_wait_and_all_chunks() -> None:
    queue = admission(Batching(max_candidates=100))
    clock = queue.clock
    linear(queue, 0.001)
    queue.add(job(500))
    assert queue.refusal(job(100, deadline=clock() + 0.61), IDLE) is None
    late = refused(queue, job(100, deadline=clock() + 0.59))
    assert late.reason == "deadline"
    assert queue.refusal(job(100, chunks=2, deadline=clock() + 1.11), IDLE) is None  # two turns, each behind the others
    assert queue.refusal(job(100, chunks=2, deadline=clock() + 1.09), IDLE) is not None
    past = refused(queue, job(1, deadline=clock()))
    assert past.reason == "deadline"


def test_no_key_keeps_a_newcomer_out() -> None:
    queue = admission(max_candidates=500, max_share_per_key=0.5)
    taken = {"greedy": 0, "second": 0, "third": 0}
    for key in taken:
        while queue.refusal(job(10, key=key), IDLE) is None:
            queue.add(job(10, key=key))
            taken[key] += 10
        assert taken[key] > 0
    assert taken["greedy"] == 250  # before its last ten, ten less were held and ten more were free
    assert taken["greedy"] > taken["second"] > taken["third"]


def test_no_key_fills_the_places_of_all_requests() -> None:
    queue = admission(max_requests=100)
    taken = 0
    while queue.refusal(job(1, key="greedy"), IDLE) is None:
        queue.add(job(1, key="greedy"))
        taken += 1
    assert taken == 50
    for _ in range(20):
        assert queue.refusal(job(1, key="modest"), IDLE) is None
        queue.add(job(1, key="modest"))
    assert queue.refusal(job(1, key="newcomer"), IDLE) is None


def test_a_light_key_does_not_wait_for_a_heavy_one() -> None:
    queue = admission(Batching(max_candidates=100), max_wait_seconds=0.6, max_share_per_key=1.0)
    linear(queue, 0.001)
    queue.add(job(1000, key="heavy"))
    for key, is_refused in (("heavy", True), ("light", False)):
        assert (queue.refusal(job(10, key=key), IDLE) is not None) == is_refused
        assert (queue.full(IDLE, key) is not None) == is_refused
    assert queue.wait(job(200, key="light"), IDLE).forwards == 2  # the heavy key is served as much meanwhile


def test_a_key_waits_for_its_own_work_and_as_much_of_each_other() -> None:
    queue = admission(Batching(max_candidates=100))
    queue.add(job(100, key="own"))
    queue.add(job(300, key="other"))
    assert queue.wait(job(100, key="own"), IDLE).forwards == 3, "100 of its own, and 200 of the other's"
    assert queue.wait(job(100, key="new"), IDLE).forwards == 2


def test_a_key_over_its_rate_is_told_when_it_may_come_again() -> None:
    queue = admission(key_candidates_per_second=100.0)
    clock = queue.clock
    assert isinstance(clock, FakeClock)
    work = job(160, key="k")
    for wait in (3.2 - KEY_BURST_SECONDS, 1.6):  # from then on it may have what its rate gives
        assert queue.refusal(work, IDLE) is None
        queue.add(work)
        queue.remove(work)
        refusal = refused(queue, work)
        assert refusal.reason == "key_rate"
        assert refusal.retry_after_seconds == pytest.approx(wait)
        assert queue.refusal(job(160, key="other"), IDLE) is None
        assert queue.refusal(job(160), IDLE) is None  # where no keys are configured, there is no rate
        clock.advance(wait)
    huge = job(10_000, key="once")
    assert queue.refusal(huge, IDLE) is None  # longer than a burst: it may join when nothing is used
    queue.add(huge)
    assert queue.refusal(job(1, key="once"), IDLE) is not None


def test_no_work_of_a_key_is_outside_its_rate() -> None:
    """A context alone has no candidates, and takes a forward all the same."""
    queue = admission(key_candidates_per_second=100.0)
    most = round(100 * KEY_BURST_SECONDS)
    for context in [job(0, 60, key="k")] * most:
        assert queue.refusal(context, IDLE) is None
        queue.add(context)
        queue.remove(context)
    for work in (job(0, 60, key="k"), job(1, key="k")):
        assert refused(queue, work).reason == "key_rate"


@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.integers(0, 2000), st.sampled_from([None, "a", "b"]), st.booleans()),
        max_size=60,
    )
)
def test_what_comes_goes_and_the_limits_hold(steps: list[tuple[int, int, str | None, bool]]) -> None:
    queue = admission(max_candidates=1000, max_requests=20)
    inside: list[Work] = []
    for candidates, tokens, key, leave in steps:
        work = job(candidates, tokens, key=key)
        if queue.refusal(work, IDLE) is None:
            queue.add(work)
            inside.append(work)
        if leave and inside:
            queue.remove(inside.pop(0))
        assert queue.requests == len(inside) <= 20
        if len(inside) > 1:
            assert queue.candidates <= 1000
            assert queue.context_tokens <= 8000
    for work in inside:
        queue.remove(work)
    assert queue.requests == queue.candidates == queue.context_tokens == queue.cost == 0
