"""Keeps a front linked to the engine process: connects and connects again, asks, tells what was counted. Not for requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any

from app.errors import ServiceError
from app.fronts import frames
from app.fronts.link import Link
from app.telemetry.sums import Deltas

CONNECT_SECONDS = 0.02  # between two attempts
COUNTS_SECONDS = 0.5  # between two reports of what was counted; a front that is killed takes so much with it
CLOSE_SECONDS = 1.0


class Uplink:
    """Used by the event loop only. `receive` gets what answers no question, `lost` is called when a link has ended.

    `down` is the error for whoever asks while there is none.
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
        self._path = path
        self._front = front
        self._deltas = deltas
        self._receive_other = receive
        self._on_lost = lost
        self._down = down
        self._ended = asyncio.Event()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Keep a link from now on."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._keep()), loop.create_task(self._tell_again())]

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

    def ask(self, kind: Callable[..., Any], *fields: Any) -> Awaitable[Any]:
        """The frame that answers a question. Raises `down` where there is no link, or no longer."""
        if self.link is None:
            raise self._down()
        number, future = next(self._ids), asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self.link.send(kind(number, *fields))
        return future

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

    async def _tell_again(self) -> None:
        while True:
            await asyncio.sleep(COUNTS_SECONDS)
            self.tell()

    def _made(self, link: Link) -> None:
        self.link, self.heard = link, time.monotonic()
        self._deltas.tell_all()
        link.send(frames.Hello(frames.VERSION, self._front))

    def _lose(self, link: Link) -> None:
        self.link = None
        self._on_lost()
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(self._down())
        self._ended.set()

    def _receive(self, link: Link, frame: Any) -> None:
        self.heard = time.monotonic()
        if isinstance(frame, frames.Flush):
            self.tell(frame.id)
        elif isinstance(frame, frames.Exposition | frames.Reloaded):
            future = self._asked.pop(frame.id, None)
            if future is not None and not future.done():
                future.set_result(frame)
        else:
            self._receive_other(frame)
