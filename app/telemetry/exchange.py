"""What is noted about one HTTP request on its way: the source of its log line, its metrics and its span."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec


class Exchange(msgspec.Struct):
    """It is logged, so it holds nothing of a user's history, and names of requests only after a check.

    `started`, when its first bytes came, `came`, when the last did, and `turn_at`, when its turn came: they were read, and the corpus
    had the change that it asked for, in seconds of `time.perf_counter`; `stages` in seconds, and `spans` has when each of them first
    began and last ended, on that clock. `status` 499 means that the client disconnected; `code` is a problem's. A request that was not
    named by its caller's header takes the name in its body, if there is one. `scored`: of its replies, the action names and the
    probabilities, float32 `[C, A]`. `body_bytes` counts towards what all bodies may take together; `is_reading`: the body is on its
    way, `is_read`: it is whole. `has_long_body`: it is, or may be, so long that a refusal ends the connection rather than read it.
    `says_deadline`: the caller's own header says how long it waits.
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

    def measured(self, stage: str) -> Stopwatch:
        """A block whose time is added to a stage."""
        return Stopwatch(self, stage)

    def passed(self, stages: Iterable[tuple[str, float]]) -> None:
        """Note the spans of consecutive stages, each with its seconds; the last one ends now. The span of a stage that is noted again, as
        in a batch, reaches from its first beginning to its last end. Nothing is added to `stages`."""
        end = time.perf_counter()
        for stage, seconds in reversed([*stages]):
            began = end - seconds
            first, last = self.spans.get(stage, (began, end))
            self.spans[stage] = min(first, began), max(last, end)
            end = began


class Stopwatch:
    """Adds the seconds of a block to a stage of an exchange, also where it raises."""

    __slots__ = ("exchange", "stage", "started")

    def __init__(self, exchange: Exchange, stage: str) -> None:
        self.exchange = exchange
        self.stage = stage

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        ended, stage, stages, spans = time.perf_counter(), self.stage, self.exchange.stages, self.exchange.spans
        stages[stage] = stages.get(stage, 0.0) + ended - self.started
        spans[stage] = spans[stage][0] if stage in spans else self.started, ended
