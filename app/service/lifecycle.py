"""Where the process stands between start and stop, and why. Not for signals or sockets: those are the server's."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class State(StrEnum):
    """The states in their order; a process only ever moves forward."""

    STARTING = "starting"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


REASONS = {
    State.STARTING: "The process is starting.",
    State.LOADING: "The checkpoint is being loaded.",
    State.WARMING: "The engine is warming up.",
    State.READY: "",
    State.DRAINING: "The process is shutting down.",
    State.STOPPED: "The process has stopped.",
}
ORDER = list(State)


class Lifecycle:
    """The state of this process; `failure` is a sentence once something broke for good."""

    def __init__(self, on_change: Callable[[State], None] | None = None) -> None:
        self.state = State.STARTING
        self.started = False  # a model was loaded and warmed up, whatever came after
        self.failure: str | None = None
        self._on_change = on_change

    def move(self, state: State) -> None:
        """Enter a later state; an earlier or the present one changes nothing, so a late loader cannot undo a drain."""
        if ORDER.index(state) <= ORDER.index(self.state):
            return
        self.state = state
        self.started = self.started or state is State.READY
        if self._on_change is not None:
            self._on_change(state)

    @property
    def draining(self) -> bool:
        """The process takes no more work than it must."""
        return ORDER.index(self.state) > ORDER.index(State.READY)

    @property
    def reason(self) -> str:
        """Why the process is not ready; empty when it is."""
        return self.failure or REASONS[self.state]
