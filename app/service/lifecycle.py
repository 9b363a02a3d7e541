"""Where the process stands between start and stop, and why. Signals and sockets are the server's."""

from __future__ import annotations

from enum import StrEnum

from app.interface import Health


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

    def __init__(self) -> None:
        self.state = State.STARTING
        self.started = False  # a model has been ready at least once
        self.failure: str | None = None

    def move(self, state: State) -> None:
        """Enter a later state; an earlier one changes nothing, so a late loader cannot undo a drain."""
        if ORDER.index(state) > ORDER.index(self.state):
            self.state = state
            self.started = self.started or state is State.READY

    @property
    def draining(self) -> bool:
        """Whether the process is shutting down or has stopped."""
        return ORDER.index(self.state) > ORDER.index(State.READY)

    @property
    def reason(self) -> str:
        """Why the process is not ready; empty when it is."""
        return self.failure or REASONS[self.state]

    def health(self, stall: str, problem: str = "", feed: str = "") -> Health:
        """Return what the probes report. `stall`: why the engine is stalled, or ""; `problem`: why others should be asked, or "";
        `feed`: as in `Health`."""
        reason = self.reason or stall or problem
        failed = self.failure is not None or (self.state is State.READY and bool(stall))
        return Health(not reason, self.started, failed, self.draining, reason, feed)
