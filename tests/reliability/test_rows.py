"""The short form of the rows that need a process of their own: overload, swaps, endings, vanishing clients, leaks.

Limits in milliseconds are not asserted here, where others share the machine; `make soak` asserts them.
"""

from __future__ import annotations

import signal

import pytest

from loadtest.generate import wrk
from loadtest.matrix import Row
from loadtest.soak import endings, hostile, leak, lines, overload, protocol, shadow, swaps

pytestmark = pytest.mark.timeout(90)


def test_row_is_red_for_a_failure_a_figure_beyond_its_limit_and_for_nothing_tried() -> None:
    good = Row("L1", "", 10, 0, 1.0, 2.0, "s")
    assert good.ok
    assert not Row("L1", "", 0, 0, 1.0, 2.0, "s").ok
    assert not Row("L1", "", 10, 1, 1.0, 2.0, "s").ok
    assert not Row("L1", "", 10, 0, 2.1, 2.0, "s").ok
    assert not Row("L1", "", 10, 0, 1.0, 2.0, "s", at_least=True).ok


def test_l1_overload_is_refused_and_the_admitted_stay_fast() -> None:
    answers, stretch, goodput = overload.overload(5.0)
    assert not answers.failed
    assert stretch.figure < 4.0
    assert goodput.figure > 0.8


def test_l1_is_red_without_a_bound_on_the_queue() -> None:
    unbounded = {**overload.SETTINGS, "queue__max_wait_seconds": 0, "queue__max_candidates": 10**6}
    answers, stretch, _ = overload.overload(2.0, unbounded)
    assert answers.failed or stretch.figure > 4.0


def test_l2_after_a_storm_of_retries_all_succeed_again() -> None:
    assert overload.recovery(3.0).ok


def test_l3_an_expired_request_is_not_computed() -> None:
    row = overload.deadlines(200)
    assert not row.failed
    assert row.figure < 0.5


@pytest.mark.skipif(not wrk.IS_INSTALLED, reason="wrk is not installed: apt-get install wrk")
def test_l5_impatient_callers_do_not_starve_the_others() -> None:
    goodput, stretch = overload.impatience(8.0, rounds=1)
    assert not goodput.failed
    assert goodput.figure > 0.6  # the milliseconds and the tenths are the long form's
    assert stretch.figure < 20


@pytest.mark.skipif(not wrk.IS_INSTALLED, reason="wrk is not installed: apt-get install wrk")
def test_l5_is_red_where_no_refusal_waits() -> None:
    goodput, _ = overload.impatience(8.0, rounds=1, connections__held_refusals=0)
    assert not goodput.ok


def test_l6_a_shadow_takes_nothing_from_answers_under_overload() -> None:
    bits, p99, goodput = shadow.shadow(5.0, rounds=1)
    assert bits.ok, bits
    assert not p99.failed
    assert p99.figure < 1.5  # the hundredths are the long form's
    assert goodput.figure > 0.85


def test_l6_is_red_where_the_shadow_does_not_ask_who_waits() -> None:
    _, p99, goodput = shadow.shadow(3.0, "--eager-shadow", rounds=1)
    assert not (p99.ok and goodput.ok)


def test_l4_a_planted_leak_is_seen_and_without_it_memory_is_flat() -> None:
    leaking = leak.leak(3.0, "--leak-bytes=8192")
    assert not leaking.ok
    sound = leak.leak(3.0)
    assert not sound.failed
    assert sound.figure < leaking.figure / 2


def test_f1_c2_swaps_under_load_drop_nothing_and_cross_nothing() -> None:
    for row in swaps.swaps(3.0, payload_count=20):
        assert row.ok, row


def test_c2_is_red_when_scores_are_crossed() -> None:
    assert swaps.crossing(1.5).ok
    assert swaps.crossing(1.5, "--cross").failed


def test_f3_sigterm_loses_nothing_and_exits_0() -> None:
    assert endings.terminations(2).ok


def test_f3_is_red_when_the_end_comes_at_once() -> None:
    assert not endings.terminations(1, signals=2).ok


def test_f4_kill_hangs_nobody() -> None:
    assert not endings.kills(1).failed


def test_f4_is_red_when_the_process_stops_answering() -> None:
    assert endings.kills(1, signal.SIGSTOP).failed


def test_f5_a_stuck_engine_is_seen_answered_and_ended() -> None:
    row = endings.stuck(1, queue__stall_seconds=1.0, queue__stall_exit_seconds=2.0)
    assert row.ok, row


@pytest.fixture
def stuck_soon(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Settings, and how soon the process must end with them."""
    monkeypatch.setattr(endings, "STALL_EXIT_SECONDS", 2.0)
    return {"queue__stall_seconds": 1.0}


def test_f5_a_stuck_search_is_seen_answered_and_ended(stuck_soon: dict[str, float]) -> None:
    row = endings.stuck_search(1, **stuck_soon)
    assert row.ok, row


def test_f5_is_red_when_nobody_watches_the_search(stuck_soon: dict[str, float]) -> None:
    assert endings.stuck_search(1, **stuck_soon, queue__stall_exit_seconds=3600, drain__timeout_seconds=1).failed


def test_f5_a_search_that_hangs_the_loop_ends_the_process(stuck_soon: dict[str, float]) -> None:
    row = endings.stuck_loop(1)
    assert row.ok, row


def test_f5_is_red_when_nobody_watches_the_loop(stuck_soon: dict[str, float]) -> None:
    assert endings.stuck_loop(1, "--no-loop-watch").failed


def test_f6_the_innocent_get_their_scores_and_a_lost_device_ends_the_process() -> None:
    for row in endings.raising(100):
        assert row.ok, row


def test_f7_clients_may_vanish() -> None:
    assert endings.vanishing(150).ok


def test_b10_one_connection_with_dear_bodies_does_not_slow_others_down() -> None:
    row = hostile.dear(6.0)
    assert not row.failed
    assert hostile.dear(6.0, "--no-rest", percent=90).figure > 3  # the control: held refusals alone spare the median


SMALL = {
    "budgets__body_bytes": 4 * 2**20, "budgets__reply_bytes": 4 * 2**20, "budgets__connections": 700, "cache__bytes": 0,
    "budgets__batch_candidates": 16_384, "queue__max_requests": 256, "queue__max_context_tokens": 16_384,
}  # fmt: skip


def test_b11_hostile_clients_by_the_hundred_take_no_more_memory_than_is_stated() -> None:
    row = hostile.memory(7.0, **SMALL)
    assert row.ok, row


def test_b11_is_red_without_budgets() -> None:
    assert not hostile.memory(7.0, "--no-budgets", **SMALL).ok


@pytest.mark.parametrize("kind", hostile.KINDS)
def test_b11_sigterm_under_hostile_clients_exits_0_in_time(kind: str) -> None:
    row = hostile.terminations([kind])
    assert row.ok, row


def test_b5_no_broken_request_brings_a_second_reply() -> None:
    assert protocol.protocol(1.0).ok


def test_b5_is_red_with_the_stock_protocol() -> None:
    row = protocol.protocol(1.0, "--stock-protocol")
    assert row.failed
    assert row.figure > 0


def test_b8_whatever_is_sent_is_one_line_of_json() -> None:
    assert lines.lines(1.0).ok


def test_b8_is_red_when_lines_are_written_for_people() -> None:
    assert lines.lines(0.5, "console").failed
