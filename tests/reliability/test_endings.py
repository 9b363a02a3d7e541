"""The short form of the rows that ask what is lost, in a process of their own: swaps, endings, vanishing clients, broken requests.

No limit in milliseconds is asserted here, where others share the machine; `make soak` asserts them.
"""

from __future__ import annotations

import signal

import pytest

from loadtest.soak import endings, hostile, lines, protocol, swaps
from tests.reliability.live import all_ok

pytestmark = pytest.mark.timeout(180)


def test_f1_c2_swaps_under_load_drop_nothing_and_cross_nothing_with_and_without_fronts() -> None:
    all_ok(swaps.swaps(2.0, payload_count=20, fronts=(0, 2)))


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


def test_f5_a_search_that_hangs_the_loop_ends_the_process(
    stuck_soon: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "LATE_EXIT_SECONDS", 30.0)
    row = endings.stuck_loop(1)
    assert row.ok, row


def test_f5_is_red_when_nobody_watches_the_loop(stuck_soon: dict[str, float]) -> None:
    assert endings.stuck_loop(1, "--no-loop-watch").failed


def test_f6_the_innocent_get_their_scores_and_a_lost_device_ends_the_process() -> None:
    all_ok(endings.raising(100))


def test_f7_clients_may_vanish() -> None:
    assert endings.vanishing(150).ok


@pytest.mark.parametrize("kind", hostile.KINDS)
def test_b11_sigterm_under_hostile_clients_exits_0_in_time(kind: str) -> None:
    row = hostile.terminations([kind])
    assert not row.failed, row
    assert row.figure < 2 * hostile.END_SECONDS  # the last second is the long form's


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
