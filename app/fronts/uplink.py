"""Keeps a front linked to the engine process, and tracks its unanswered questions whatever they ask."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import structlog

from app.errors import DeadlineExceeded, ServiceError
from app.fronts import wire
from app.fronts.link import Link
from app.telemetry.sums import Deltas

CONNECT_SECONDS = 0.02  # between two attempts
TURN_SECONDS = 0.1
COUNTS_TURNS = 5  # between two reports of what was counted; a killed front loses the counts of this time
GRACE_SECONDS = 0.25  # after a deadline, for the engine process to answer first
CLOSE_SECONDS = 1.0

log = structlog.get_logger("app.fronts.uplink")


def _nobody(result: Any) -> None:
    """Ignore the result of a question that has ended."""


class Asked:
    """`interface.Ticket`: a question until it is answered or released. `deadline`: seconds of CLOCK_MONOTONIC; `answer`: the type of
    message that answers it, besides `Failed`; `done` is called once with the result or the error."""

    __slots__ = ("answer", "deadline", "done", "number", "uplink")

    def __init__(self, uplink: Uplink, answer: type[Any], deadline: float, done: Callable[[Any], None]) -> None:
        self.uplink = uplink
        self.answer = answer
        self.deadline = deadline
        self.done = done
        self.number = next(uplink.numbers)
        uplink.asked[self.number] = self

    def release(self) -> None:
        """Drop the question and tell the engine process. A second call does nothing."""
        if self.uplink.asked.pop(self.number, None) is not None:
            self.done = _nobody
            self.uplink.send(wire.Cancel(self.number))

    def end(self, result: Any) -> None:
        """Call `done` with the result, unless the question was released or has ended."""
        if self.uplink.asked.pop(self.number, None) is None:
            return
        self.uplink.answered += 1
        done, self.done = self.done, _nobody  # the caller holds this object: without a cycle both are freed at once
        try:
            done(result)
        except Exception as error:  # a fault in one request must not end the link of all
            log.error("fault", exc_info=error)


class Uplink:
    """Used by the event loop only. `receive` gets messages that are not answers, `lost` is called when a link has ended, `down` returns
    the error for questions without a link.
    """

    def __init__(
        self,
        path: str,
        front: int,
        deltas: Deltas,
        receive: Callable[[Any], None],
        lost: Callable[[], None],
        down: Callable[[], ServiceError],
    ) -> None:
        self.link: Link | None = None
        self.heard = 0.0  # seconds of the monotonic clock
        self.numbers = itertools.count(1)
        self.asked: dict[int, Asked] = {}
        self.answered = 0
        self.refused = 0  # requests refused unread since the last report to the engine process
        self._path = path
        self._front = front
        self._deltas = deltas
        self._receive_other = receive
        self._on_lost = lost
        self._down = down
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Keep a link from now on. A second call does nothing."""
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._keep()), loop.create_task(self._tend())]

    async def stop(self) -> None:
        """Send the last counts, and end."""
        for task in self._tasks:
            task.cancel()
        if self.link is not None:
            self.tell()
            self.link.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), CLOSE_SECONDS)

    def send(self, message: wire.Message) -> None:
        """Send a message; do nothing without a link."""
        if self.link is not None:
            self.link.send(message)

    def tell(self, flush: int = 0) -> None:
        """Send the counts, as the answer to the `Flush` of this number, or 0."""
        if self.link is not None:
            self.link.send(wire.Counts(flush, self._deltas.take()))

    # questions and answers

    def begin(self, name: str, deadline: float, done: Callable[[Any], None], *arguments: Any) -> Asked:
        """Ask the engine process to call this method of the interface. The arguments are in the order of `Method.arguments`."""
        method = wire.METHODS[name]
        asked = Asked(self, method.answer, deadline, done)
        self.send(method.question(asked.number, *arguments))
        return asked

    async def ask(self, name: str, *arguments: Any, deadline: float = math.inf) -> Any:
        """Return the result of a method of the interface. Raises `down` without a link, DeadlineExceeded, or the error it is answered with.

        Cancelling it tells the engine process.
        """
        if self.link is None:
            raise self._down()
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(result: Any) -> None:
            if not ended.done():  # a cancelled task may not have released it yet
                ended.set_result(result)

        asked = self.begin(name, deadline, done, *arguments)
        try:
            result = await ended
        finally:
            asked.release()
        if isinstance(result, Exception):
            raise result
        return result

    async def _tend(self) -> None:
        """Report refusals and counts, and end questions that the engine process does not answer in time."""
        for turn in itertools.count(1):
            await asyncio.sleep(TURN_SECONDS)
            if self.refused:
                self.send(wire.Refused(self.refused))
                self.refused = 0
            if turn % COUNTS_TURNS == 0:
                self.tell()
            late = time.monotonic() - GRACE_SECONDS
            for asked in [asked for asked in self.asked.values() if asked.deadline < late]:
                self.send(wire.Cancel(asked.number))
                asked.end(DeadlineExceeded())

    # the link

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._ended = asyncio.Event()
            link = Link(wire.from_engine, self._receive, self._made, self._lose)
            try:
                await loop.create_unix_connection(lambda link=link: link, self._path)  # type: ignore[misc]
            except OSError:  # the engine process is starting or restarting
                await asyncio.sleep(CONNECT_SECONDS)
            else:
                await self._ended.wait()

    def _made(self, link: Link) -> None:
        self.link, self.heard = link, time.monotonic()
        self._deltas.tell_all()
        link.send(wire.Hello(wire.VERSION, self._front))

    def _lose(self, link: Link) -> None:
        self.link = None
        self._on_lost()
        for asked in list(self.asked.values()):
            asked.end(self._down())
        self._ended.set()

    def _receive(self, link: Link, message: Any) -> None:
        self.heard = time.monotonic()
        if isinstance(message, wire.Answer):
            self._answer(message)
        elif isinstance(message, wire.Flush):
            self.tell(message.number)
        else:
            self._receive_other(message)

    def _answer(self, message: Any) -> None:
        asked = self.asked.get(message.id)
        if asked is None:
            return
        if type(message) is wire.Failed:
            asked.end(message.error())
        elif type(message) is asked.answer:
            asked.end(message.result)
        else:
            raise ValueError("the answer to another question")
