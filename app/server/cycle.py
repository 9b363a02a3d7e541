"""A request that an ASGI application answers: uvicorn's own way, but for how its connection ends."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, cast

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

COPY_SECONDS = 5e-10  # about what the kernel takes to copy a byte of a reply, behind the step that writes it


def fit(cycle: Any, close: Callable[[], None], is_closing: Callable[[], bool]) -> None:
    """Have a RequestResponseCycle ask both in the transport's place, so that the client reads the reply first, and tell it who answered."""
    cycle.transport = _ReplyTransport(cycle.transport.write, close, is_closing)
    cycle.receive = _Receive(cycle)


def disconnect(cycle: RequestResponseCycle, answered: tuple[int, str] | None = None) -> None:
    """The application is told that the client disconnected, or was answered by the connection, with status and code."""
    cast(_Receive, cycle.receive).answered = answered
    cycle.disconnected = True
    cycle.message_event.set()


class Steps:
    """How long the longest step of an application's coroutine has held the event loop, in processor time of its thread, and whether it has
    ranked."""

    def __init__(self, app: ASGI3Application) -> None:
        self.has_ranked = False
        self._app = app
        self._longest = self._began = 0.0
        self._bytes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The application."""

        async def told(message: Any) -> None:
            if message["type"] == "http.response.start":
                self.has_ranked = scope["method"] == "POST" and message["status"] < 400
            self._bytes += len(message.get("body", b""))
            await send(message)

        await self._taken(cast(Coroutine[Any, Any, None], self._app(scope, receive, told)))

    def held(self) -> float:
        """Called by the application, it counts the present step as well."""
        return max(self._longest, time.thread_time() - self._began) + self._bytes * COPY_SECONDS

    @types.coroutine
    def _taken(self, work: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        step: Callable[[], Any] = partial(work.send, None)
        while True:
            self._began = time.thread_time()
            try:
                waits_for = step()
            except StopIteration:
                return
            self._longest = max(self._longest, time.thread_time() - self._began)
            try:
                step = partial(work.send, (yield waits_for))
            except BaseException as error:
                step = partial(work.throw, error)


class _ReplyTransport:
    """The transport as one request sees it."""

    def __init__(
        self, write: Callable[[bytes], None], close: Callable[[], None], is_closing: Callable[[], bool]
    ) -> None:
        self.write = write
        self.close = close
        self.is_closing = is_closing


class _Receive:
    """A request's messages; the last says what the connection has answered in the application's place."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self.answered: tuple[int, str] | None = None
        self._receive = cycle.receive

    async def __call__(self) -> dict[str, Any]:
        message: Any = await self._receive()
        return {**message, "answered": self.answered} if message["type"] == "http.disconnect" else message
