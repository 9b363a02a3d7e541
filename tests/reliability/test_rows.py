"""The short form of the rows that compare speeds or memory, each in a process of its own: overload, leaks, hostile clients.

They have the machine to themselves. Limits in milliseconds are asserted by `make soak` alone.
"""

from __future__ import annotations

import pytest

from loadtest.generate import wrk
from loadtest.matrix import Row
from loadtest.soak import hostile, overload, reloads

pytestmark = pytest.mark.timeout(90)


def test_row_is_red_for_a_failure_a_figure_beyond_its_limit_and_for_nothing_tried() -> None:
    good = Row("L1", "", 10, 0, 1.0, 2.0, "s")
    assert good.ok
    assert not Row("L1", "", 0, 0, 1.0, 2.0, "s").ok
    assert not Row("L1", "", 10, 1, 1.0, 2.0, "s").ok
    assert not Row("L1", "", 10, 0, 2.1, 2.0, "s").ok
    assert not Row("L1", "", 10, 0, 1.0, 2.0, "s", at_least=True).ok


def test_l1_overload_is_refused_and_the_admitted_stay_fast() -> None:
    answers, stretch, goodput = overload.overload(2.4)
    assert not answers.failed
    assert stretch.figure < 4.0
    assert goodput.figure > 0.8


def test_l1_is_red_without_a_bound_on_the_queue() -> None:
    unbounded = {**overload.SETTINGS, "queue__max_wait_seconds": 0, "queue__max_candidates": 10**6}
    answers, stretch, _ = overload.overload(0.4, unbounded)
    assert answers.failed or stretch.figure > 4.0


def test_l2_after_a_storm_of_retries_all_succeed_again() -> None:
    assert overload.recovery(1.5).ok


def test_l3_an_expired_request_is_not_computed() -> None:
    row = overload.deadlines(200)
    assert not row.failed
    assert row.figure < 0.5


@pytest.mark.skipif(not wrk.IS_INSTALLED, reason="wrk is not installed: apt-get install wrk")
def test_l5_impatient_callers_do_not_starve_the_others() -> None:
    goodput, stretch = overload.impatience(1.6, rounds=1)
    assert not goodput.failed
    assert goodput.figure > 0.6  # the milliseconds and the tenths are the long form's
    assert stretch.figure < 20


@pytest.mark.skipif(not wrk.IS_INSTALLED, reason="wrk is not installed: apt-get install wrk")
def test_l5_is_red_where_no_refusal_waits() -> None:
    goodput, _ = overload.impatience(0.8, "--none-held", rounds=1)
    assert not goodput.ok


def test_l6_a_shadow_takes_nothing_from_answers_under_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "ASKED", 5)
    bits, p99, goodput = overload.shadow(2.0, rounds=1)
    assert bits.ok, bits
    assert not p99.failed
    assert p99.figure < 1.5  # the hundredths are the long form's
    assert goodput.figure > 0.85


def test_l6_is_red_where_the_shadow_does_not_ask_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overload, "ASKED", 1)  # no bits are compared
    _, p99, goodput = overload.shadow(1.2, "--eager-shadow", rounds=1)
    assert not (p99.ok and goodput.ok)


def test_l4_a_planted_leak_is_seen_and_without_it_memory_is_flat() -> None:
    leaking = reloads.leak(1.4, "--leak-bytes=8192")
    assert not leaking.ok
    sound = reloads.leak(1.4)
    assert not sound.failed
    assert sound.figure < leaking.figure / 2


def test_b10_one_connection_with_dear_bodies_does_not_slow_others_down() -> None:
    row = hostile.dear(1.6)
    assert not row.failed
    assert hostile.dear(1.2, "--no-rest", percent=90).figure > 3  # the control: held refusals alone spare the median


SMALL = {
    "budgets__connections": 700, "cache__bytes": 0, "queue__max_requests": 256,
}  # fmt: skip


def test_b11_hostile_clients_by_the_hundred_take_no_more_memory_than_is_stated() -> None:
    row = hostile.memory(3.0, "--small-budgets", **SMALL)
    assert row.ok, row


def test_b11_is_red_without_budgets() -> None:
    assert not hostile.memory(3.0, "--small-budgets", "--no-budgets", **SMALL).ok


def test_b11_calls_that_stop_in_the_middle_take_no_more_memory_than_is_stated() -> None:
    row = hostile.calls(3.0, batching__max_requests=8)
    assert row.ok, row
    held = (hostile.calls(seconds, batching__max_requests=400).figure for seconds in (3.0, 9.0))  # for a slow machine
    assert any(figure > row.limit for figure in held), "the control: calls that no limit turns away are held"
