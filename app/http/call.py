"""Every endpoint as a call: headers and body in, status, headers and body out. A server or an ASGI application carries the bytes."""

from __future__ import annotations

import asyncio
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from app.errors import Overloaded
from app.http.headers import Headers, too_long
from app.http.observe import Recorder
from app.http.problems import problem_reply
from app.interface import Ticket
from app.telemetry.exchange import Exchange

Fields = Sequence[tuple[bytes, bytes]]
Reply = Callable[[int, Fields, bytes, bool], None]  # the last: whether an impatient caller's reply may be written later
Answer = tuple[int, Fields, bytes]
T = TypeVar("T")
BODILESS = (204, 304)  # replies without a content-length


def timings_ms(stages: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a request's stages → milliseconds with three decimals, as replies have them."""
    return {stage: round(seconds * 1e6) / 1e3 for stage, seconds in stages.items()}


class Steps:
    """Runs a coroutine and measures how long its longest step held the event loop, in processor time of the thread."""

    def __init__(self) -> None:
        self._longest = self._began = 0.0

    def held_seconds(self) -> float:
        """The longest step so far; when the coroutine calls this, its present step counts too."""
        return max(self._longest, time.thread_time() - self._began)

    @types.coroutine
    def run(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """What the coroutine returns."""
        step: Callable[[], Any] = partial(work.send, None)
        while True:
            self._began = time.thread_time()
            try:
                waits_for = step()
            except StopIteration as end:
                result: T = end.value
                return result
            self._longest = max(self._longest, time.thread_time() - self._began)
            try:
                step = partial(work.send, (yield waits_for))
            except BaseException as error:
                step = partial(work.throw, error)


class Endpoint(ABC):
    """Takes the requests of one route. `path` is the route as metrics and logs name it; bodies are at most `max_body_bytes` long."""

    def __init__(self, recorder: Recorder, path: str, max_body_bytes: int, method: str = "POST") -> None:
        self.recorder = recorder
        self.path = path
        self.method = method
        self.max_body_bytes = max_body_bytes

    @abstractmethod
    def begin(self, headers: Fields, reply: Reply) -> Call:
        """The headers have arrived. `reply` is called once, possibly right away, unless the call is abandoned first."""


class Call(ABC):
    """One request, from its headers to its reply: `finish` with its body, `fail` or `abandon`. Belongs to the event loop."""

    ranks = True
    steps: Steps | None = None  # of the task that answers it, where it takes one
    __slots__ = ("_endpoint", "_reply", "_tickets", "exchange", "headers", "max_body_bytes", "recorder")

    def __init__(self, endpoint: Endpoint, headers: Headers, reply: Reply) -> None:
        self._endpoint = endpoint
        self.recorder = endpoint.recorder
        self.headers = headers
        self.max_body_bytes = endpoint.max_body_bytes
        self.exchange: Exchange = self.recorder.begin(endpoint.method, endpoint.path, headers)
        self._reply: Reply | None = reply
        self._tickets: tuple[Ticket, ...] = ()  # what is begun for it

    @abstractmethod
    def finish(self, body: bytes | bytearray) -> None:
        """The body has arrived."""

    def too_long(self) -> None:
        """More of the body has arrived than `max_body_bytes`."""
        self.fail(too_long(self.max_body_bytes))

    def no_room(self) -> None:
        """The bodies being read for all callers take too much room."""
        self.fail(Overloaded("Too many bytes of requests are being read.", retry_after_seconds=1.0))

    def abandon(self, answered: tuple[int, str] | None = None) -> None:
        """The client has disconnected, or the connection has already answered with this status and code."""
        if self._reply is None:
            return
        if answered is not None:
            self.exchange.status, self.exchange.code = answered
        elif not self.is_begun:
            self.recorder.metrics.cancelled.labels("body").inc()
        self._leave()
        self.recorder.end(self.exchange, self.headers)

    def fail(self, error: Exception) -> None:
        """Answer with a problem."""
        if self._reply is not None:
            problem = self.recorder.problem(error, self.exchange)
            self.answer(*problem_reply(problem, self.exchange), may_wait=problem.may_wait)

    def answer(
        self, status: int, headers: Fields, body: bytes, *, may_wait: bool = False, at_once: bool = False
    ) -> None:
        """Send the reply. `at_once`: before it is counted and logged."""
        reply, exchange = self._reply, self.exchange
        assert reply is not None
        exchange.status = status
        self._leave()
        fields = [*headers, (b"x-request-id", exchange.request_id.encode())]
        if status not in BODILESS and b"content-length" not in [name for name, _ in headers]:
            fields.append((b"content-length", b"%d" % len(body)))
        if not at_once:
            self.recorder.end(exchange, self.headers)
        try:
            reply(status, fields, b"" if self._endpoint.method == "HEAD" else body, may_wait)
        finally:
            if at_once:
                self.recorder.end(exchange, self.headers)

    @property
    def is_begun(self) -> bool:
        """Whether something is computed for it."""
        return bool(self._tickets)

    def _leave(self) -> None:
        """Send and compute nothing more."""
        self._reply = None
        for ticket in self._tickets:
            ticket.release()


class TaskCall(Call):
    """A request that takes a task to answer."""

    __slots__ = ("_task", "steps")

    def __init__(self, endpoint: Endpoint, headers: Headers, reply: Reply) -> None:
        super().__init__(endpoint, headers, reply)
        self.steps = None
        self._task: asyncio.Task[None] | None = None
        try:
            self.open()
        except Exception as error:
            self.fail(error)

    def open(self) -> None:
        """The headers have arrived. Raise here for refusals that need no body."""

    @abstractmethod
    async def reply_to(self, body: bytes | bytearray) -> Answer:
        """Status, headers and body. Raises ServiceError; is cancelled when the client disconnects."""

    def finish(self, body: bytes | bytearray) -> None:
        """As `Call.finish`."""
        if self._reply is not None:
            self.steps = Steps()
            self._task = asyncio.get_running_loop().create_task(self._measured(self._run(body)))

    async def _measured(self, work: Coroutine[Any, Any, None]) -> None:
        assert self.steps is not None
        await self.steps.run(work)

    @property
    def is_begun(self) -> bool:
        """As `Call.is_begun`."""
        return self._task is not None

    async def _run(self, body: bytes | bytearray) -> None:
        try:
            self.answer(*await self.reply_to(body))
        except Exception as error:
            self.fail(error)

    def _leave(self) -> None:
        super()._leave()
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
