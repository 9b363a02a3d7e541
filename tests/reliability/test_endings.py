"""The short form of the rows that ask what is lost, in a process of their own: swaps, endings, vanishing clients, broken requests.

No limit in milliseconds is asserted here, where others share the machine; `make soak` asserts them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

import pytest

from loadtest.matrix import Row
from loadtest.soak import endings, hostile, lines, protocol, reloads
from tests.reliability.live import all_ok

pytestmark = pytest.mark.timeout(180)
SOON = {"queue__stall_seconds": 1.0}


@pytest.fixture(autouse=True)
def stuck_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stuck is ended sooner than by default."""
    monkeypatch.setattr(endings, "STALL_EXIT_SECONDS", 2.0)


HOLDS: dict[str, Callable[[], Row | Sequence[Row]]] = {
    "F1, C2 swaps under load drop nothing and cross nothing, with and without fronts": lambda: reloads.swaps(
        0.6, payload_count=10, fronts=(0, 2)
    ),
    "C2 scores are not crossed": lambda: reloads.crossing(0.7),
    "F3 sigterm loses nothing and exits 0": lambda: endings.terminations(2),
    "F5 a stuck engine is seen, answered and ended": lambda: endings.stuck(1, **SOON),
    "F5 a stuck search is seen, answered and ended": lambda: endings.stuck_search(1, **SOON),
    "F5 a search that hangs the loop ends the process": lambda: endings.stuck_loop(1),
    "F6 the innocent get their scores, and a lost device ends the process": lambda: endings.raising(100),
    "F7 clients may vanish": lambda: endings.vanishing(150),
    "B5 no broken request brings a second reply": lambda: protocol.protocol(0.2),
    "B8 whatever is sent is one line of JSON": lambda: lines.lines(0.5),
}


@pytest.mark.parametrize("row", HOLDS)
def test_a_row_holds(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "LATE_EXIT_SECONDS", 30.0)  # a busy machine may end a process late
    found = HOLDS[row]()
    all_ok([found] if isinstance(found, Row) else found)


RED: dict[str, Callable[[], Row]] = {
    "C2 where scores are crossed": lambda: reloads.crossing(0.7, "--cross"),
    "F4 where the process stops answering": lambda: endings.kills(1, signal.SIGSTOP),
    "F5 where nobody watches the stuck search": lambda: endings.stuck_search(
        1, **SOON, queue__stall_exit_seconds=3600, drain__timeout_seconds=1
    ),
    "F5 where nobody watches the loop": lambda: endings.stuck_loop(1, "--no-loop-watch"),
    "B5 with the stock protocol": lambda: protocol.protocol(0.2, "--stock-protocol"),
    "B8 where lines are written for people": lambda: lines.lines(0.2, "console"),
}


@pytest.mark.parametrize("control", RED)
def test_a_row_is_red(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(endings, "LATE_EXIT_SECONDS", 1.0)
    row = RED[control]()
    assert row.failed
    assert row.figure > 0 or not control.startswith("B5"), "second replies"


def test_f3_is_red_when_the_end_comes_at_once() -> None:
    assert not endings.terminations(1, signals=2).ok


def test_f4_kill_hangs_nobody() -> None:
    assert not endings.kills(1).failed


@pytest.mark.parametrize("kind", hostile.KINDS)
def test_b11_sigterm_under_hostile_clients_exits_0_in_time(kind: str) -> None:
    row = hostile.terminations([kind], connections__header_seconds=3)  # none is cut off before the signal
    assert not row.failed, row
    assert row.figure < 2 * hostile.END_SECONDS  # the last second is the long form's
