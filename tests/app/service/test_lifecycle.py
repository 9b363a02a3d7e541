"""States only move forward, and each says why the process is not ready."""

from __future__ import annotations

import pytest

from app.interface import Health
from app.service.lifecycle import Lifecycle, State
from app.service.watchdog import Watchdog
from app.settings import Queue


def test_states_only_move_forward() -> None:
    lifecycle, seen = Lifecycle(), []
    for state in (State.LOADING, State.WARMING, State.LOADING, State.DRAINING, State.READY, State.STOPPED):
        lifecycle.move(state)
        seen.append(lifecycle.state)
    drained = [State.DRAINING] * 2  # a late loader undoes no drain
    assert seen == [State.LOADING, State.WARMING, State.WARMING, *drained, State.STOPPED]


def test_every_state_but_ready_has_a_reason() -> None:
    for state in State:
        lifecycle = Lifecycle()
        lifecycle.move(state)
        assert bool(lifecycle.reason) == (state is not State.READY)
        assert lifecycle.draining == (state in (State.DRAINING, State.STOPPED))
    lifecycle.failure = "it broke"
    assert lifecycle.reason == "it broke"


def test_started_is_remembered_and_a_drain_while_loading_is_no_start() -> None:
    drained, served = Lifecycle(), Lifecycle()
    for state in (State.LOADING, State.DRAINING, State.STOPPED):
        drained.move(state)
        assert not drained.started  # or /startupz says 200, and a failed load exits as if an engine had been lost
    served.move(State.READY)
    served.move(State.DRAINING)
    assert served.started


def test_who_has_failed_or_stalls_is_not_ready() -> None:
    lifecycle = Lifecycle()
    lifecycle.move(State.READY)
    assert lifecycle.health("") == Health(ready=True, started=True, failed=False, draining=False, reason="")
    assert lifecycle.health("slow") == Health(ready=False, started=True, failed=True, draining=False, reason="slow")
    lifecycle.failure = "it broke"
    assert lifecycle.health("") == Health(ready=False, started=True, failed=True, draining=False, reason="it broke")


class Silent:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def silent_seconds(self) -> float:
        return self.seconds


@pytest.mark.parametrize(
    ("forward", "search", "said"),
    [
        (3.0, 3.0, ""),
        (5.0, 9.0, "The engine has work and has finished no forward for 5.0 s."),
        (0.0, 5.0, "A search has not finished for 5.0 s."),
    ],
)
def test_a_silence_names_what_is_silent(forward: float, search: float, said: str) -> None:
    watchdog = Watchdog(Queue(stall_seconds=4.0), Silent(forward), Silent(search), None, None)  # type: ignore[arg-type]
    assert watchdog._silence(4.0) == said
