"""Keeps a front linked to the engine process, and knows what that was asked and has not answered. Not for what is asked."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import structlog

from app.errors import DeadlineExceeded, ServiceError, error_class
from app.fronts import frames
from app.fronts.link import Link
from app.telemetry.sums import Deltas

CONNECT_SECONDS = 0.02  # between two attempts
TURN_SECONDS = 0.1
COUNTS_TURNS = 5  # between two reports of what was counted; a front that is killed takes so much with it
GRACE_SECONDS = 0.25  # after a deadline, for the engine process to say so itself
CLOSE_SECONDS = 1.0

log = structlog.get_logger("app.fronts.uplink")


class Asked(ABC):
    """What the engine process was asked, until it answers. `deadline`: seconds of CLOCK_MONOTONIC."""

    __slots__ = ("deadline",)

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def read(self, frame: Any) -> Any:
        """What an answer says. Raises ValueError for one that makes no sense, which ends the link."""
        return frame

    @abstractmethod
    def end(self, result: Any) -> None:
        """Called once, with what was read or with the ServiceError that it ended with."""


class Question(Asked):
    """One that a task waits for."""

    __slots__ = ("future",)

    def __init__(self, deadline: float) -> None:
        super().__init__(deadline)
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def end(self, result: Any) -> None:
        """Wake the task, unless it was cancelled."""
        if self.future.done():
            return
        if isinstance(result, ServiceError):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


class Uplink:
    """Used by the event loop only. `receive` gets what answers nothing, `lost` is called when a link has ended, `down` is the error
    of whoever asks without one.
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
        self.asked: dict[int, Asked] = {}
        self.answered = 0
        self.refused = 0  # requests, unread, since the engine process was told of them
        self._path = path
        self._front = front
        self._deltas = deltas
        self._receive_other = receive
        self._on_lost = lost
        self._down = down
        self._ended = asyncio.Event()
        self._ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Keep a link from now on; a second time does nothing."""
        if not self._tasks:
            loop = asyncio.get_running_loop()
            self._tasks = [loop.create_task(self._keep()), loop.create_task(self._tend())]

    async def stop(self) -> None:
        """Tell the last counts, and end."""
        for task in self._tasks:
            task.cancel()
        if self.link is not None:
            self.tell()
            self.link.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), CLOSE_SECONDS)

    def send(self, frame: frames.ToEngine) -> None:
        """Nothing without a link."""
        if self.link is not None:
            self.link.send(frame)

    def tell(self, number: int = 0) -> None:
        """What was counted, as the answer to a `Flush` of that number."""
        if self.link is not None:
            self.link.send(frames.Counts(number, self._deltas.take()))

    # questions and answers

    async def ask(self, kind: Callable[..., Any], *fields: Any, deadline: float = math.inf) -> Any:
        """The frame that answers a question. Raises `down` without a link, DeadlineExceeded, or the error that is the answer.

        Cancelling it tells the engine process.
        """
        if self.link is None:
            raise self._down()
        question = Question(deadline)
        number = self.expect(question)
        self.link.send(kind(number, *fields))
        try:
            return await question.future
        finally:
            self.forget(number)

    def expect(self, asked: Asked) -> int:
        """The number for the frame that asks."""
        number = next(self._ids)
        self.asked[number] = asked
        return number

    def forget(self, number: int) -> None:
        """Its caller is gone: no answer is needed."""
        if self.asked.pop(number, None) is not None:
            self.send(frames.Cancel(number))

    def end(self, number: int, result: Any) -> None:
        """Give the answer to whoever asked, unless it was forgotten."""
        asked = self.asked.pop(number, None)
        if asked is None:
            return
        self.answered += 1
        try:
            asked.end(result)
        except Exception as error:  # a fault in one request must not end the link of all
            log.error("fault", exc_info=error)

    async def _tend(self) -> None:
        """Tell what was refused and counted, and answer whom the engine process does not answer in time."""
        for turn in itertools.count(1):
            await asyncio.sleep(TURN_SECONDS)
            if self.refused:
                self.send(frames.Refused(self.refused))
                self.refused = 0
            if turn % COUNTS_TURNS == 0:
                self.tell()
            late = time.monotonic() - GRACE_SECONDS
            for number in [number for number, asked in self.asked.items() if asked.deadline < late]:
                self.send(frames.Cancel(number))
                self.end(number, DeadlineExceeded())

    # the link

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._ended = asyncio.Event()
            link = Link(frames.from_engine, self._receive, self._made, self._lose)
            try:
                await loop.create_unix_connection(lambda link=link: link, self._path)  # type: ignore[misc]
            except OSError:  # it starts, or starts again
                await asyncio.sleep(CONNECT_SECONDS)
            else:
                await self._ended.wait()

    def _made(self, link: Link) -> None:
        self.link, self.heard = link, time.monotonic()
        self._deltas.tell_all()
        link.send(frames.Hello(frames.VERSION, self._front))

    def _lose(self, link: Link) -> None:
        self.link = None
        self._on_lost()
        for number in list(self.asked):
            self.end(number, self._down())
        self._ended.set()

    def _receive(self, link: Link, frame: Any) -> None:
        self.heard = time.monotonic()
        if isinstance(frame, frames.Told):
            asked = self.asked.get(frame.id)
            if asked is not None:
                self.end(frame.id, _error(frame) if isinstance(frame, frames.Failed) else asked.read(frame))
        elif isinstance(frame, frames.Flush):
            self.tell(frame.id)
        else:
            self._receive_other(frame)


def _error(frame: frames.Failed) -> ServiceError:
    return error_class(frame.code)(frame.detail, retry_after_seconds=frame.retry_after_seconds)
