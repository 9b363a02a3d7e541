"""What is noted about one HTTP request on its way: the source of its log line, its metrics and its span."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec


class Exchange(msgspec.Struct):
    """It is logged, so it holds nothing of a user's history, and names of requests only after a check.

    Times are on the clock of `time.perf_counter`, durations in seconds. `started`: when its first bytes came; of a request behind another
    on its connection, when that one was done. `came`: when its last bytes came. `turn_at`: when its turn came, since it was read and the
    corpus had the change that it asked for. `stages`: how long each took, in
    the order in which they first ended; `spans`: when each first began and last ended. `status` 499 means that the client disconnected;
    `code` is a problem's. A request that was not named by its caller's header takes the name in its body, if there is one. `scored`: of
    its replies, the action names and the probabilities, float32 `[C, A]`. `body_bytes` counts towards what all bodies may take together;
    `is_reading`: the body is on its way, `is_read`: it is whole. `has_long_body`: it is, or may be, so long that a refusal ends the
    connection rather than read it. `says_deadline`: the caller's own header says how long it waits.
    """

    request_id: str
    started: float
    method: str
    route: str = ""
    status: int = 0
    code: str = ""
    key: str | None = None
    version: str = ""
    candidates: int = 0
    history: int = 0
    requests: int = 0
    cache: str = ""
    stages: dict[str, float] = msgspec.field(default_factory=dict)
    spans: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    scored: list[tuple[tuple[str, ...], Any]] = msgspec.field(default_factory=list)
    is_named_by_caller: bool = False
    body_bytes: int = 0
    is_reading: bool = False
    is_read: bool = False
    has_long_body: bool = False
    says_deadline: bool = False
    came: float = 0.0
    turn_at: float = 0.0

    def note_turn(self) -> None:
        """Its turn has come: that ends the stage `read`, which began with its first bytes."""
        self.turn_at = now = time.perf_counter()
        self.stages["read"], self.spans["read"] = now - self.started, (self.started, now)

    def measured(self, stage: str, since: float | None = None) -> Stopwatch:
        """A block whose time is added to a stage, counted from `since` where that is given."""
        return Stopwatch(self, stage, since)

    def passed(self, asked_at: float, computed: Mapping[str, float]) -> float:
        """Note the spans of `queue`, which began at `asked_at`, and of the stages that were `computed` after it, with the seconds of each;
        the last one ends now. The span of a stage that is noted again, as in a batch, reaches from its first beginning to its last end.
        Return the seconds of `queue`: what is left. Nothing is added to `stages`."""
        end = time.perf_counter()
        waited = max(0.0, end - asked_at - sum(computed.values()))
        began = asked_at
        for stage, seconds in {"queue": waited, **computed}.items():
            ended = min(end, began + seconds)
            first, last = self.spans.get(stage, (began, ended))
            self.spans[stage] = min(first, began), max(last, ended)
            began = ended
        return waited


class Stopwatch:
    """Adds the seconds of a block to a stage of an exchange, also where it raises."""

    __slots__ = ("exchange", "since", "stage", "started")

    def __init__(self, exchange: Exchange, stage: str, since: float | None) -> None:
        self.exchange = exchange
        self.stage = stage
        self.since = since

    def __enter__(self) -> None:
        self.started = time.perf_counter() if self.since is None else self.since

    def __exit__(self, *_: object) -> None:
        ended, stage, stages, spans = time.perf_counter(), self.stage, self.exchange.stages, self.exchange.spans
        stages[stage] = stages.get(stage, 0.0) + ended - self.started
        spans[stage] = spans[stage][0] if stage in spans else self.started, ended
