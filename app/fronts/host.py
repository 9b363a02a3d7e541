"""The engine process: one ranking service for the fronts that are linked to it. Speaks no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from app.engine.worker import Worker
from app.exits import EXIT_ENGINE_LOST, EXIT_FAILED
from app.fronts import wire
from app.fronts.answers import Answers, Front, keep
from app.fronts.link import Link
from app.service.reload import Reloader
from app.service.service import RankingService
from app.settings import Settings
from app.telemetry.exposition import Scrapes
from app.telemetry.sums import Sums

LOOK_SECONDS = 0.005  # between two checks whether a full queue is still full
IDLE_LOOK_SECONDS = 0.05  # the same for everything else that is sent to fronts
CLOSED_SECONDS = 0.05  # between two messages on how long a queue stays full
SIGN_OF_LIFE_SECONDS = 1.0
FLUSH_SECONDS = 0.2  # the time a front has to answer a flush; a stopped front delays others by this much
LAST_WORDS_SECONDS = 1.0  # for replies to reach the fronts before the process ends
WAIT_SECONDS = 0.01

log = structlog.get_logger("app.fronts.host")


class EngineHost:
    """Serves fronts until a signal or the loss of the engine. Used by the event loop only."""

    def __init__(self, service: RankingService, reloads: Reloader, settings: Settings) -> None:
        self.service = service
        self.reloads = reloads
        self.settings = settings
        self.exit_code = 0
        self._fronts: dict[Link, Front] = {}
        self._links: set[Link] = set()  # also those that have not sent a Hello
        self._kept: dict[int, Worker[Any]] = {}  # held: workers that serve, or that a front may still ask for
        self._numbers = itertools.count(1)
        self._state: wire.State | None = None
        self._told = 0.0  # clock seconds when fronts were last sent the state
        self._sums = Sums()
        self._scrapes = Scrapes(self._exposition)
        self._flushes = itertools.count(1)
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        answers = Answers(service, reloads, self._kept, self._scrapes, self._look, self._flush)
        self._take: dict[type, Callable[[Front, Any], object]] = {
            **answers.by_question,
            wire.Cancel: lambda front, cancel: front.release(cancel.id),
            wire.Left: lambda front, left: self._leave(front, left.number),
            wire.Counts: self._count,
            wire.Refused: self._refused,
        }
        self._answers = answers
        service.on_fatal = self._fatal

    async def serve(self, path: str) -> int:
        """Serve until SIGTERM or the loss of the engine; return the exit code. SIGHUP reads the present checkpoint again."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain)
        loop.add_signal_handler(signal.SIGHUP, self.reloads.reload_soon)
        server = await self.start(path)
        await self._ended.wait()
        server.close()
        await self.stop()
        log.info("stopped", exit_code=self.exit_code)
        return self.exit_code

    async def start(self, path: str) -> asyncio.Server:
        """Begin loading, and listen on a socket."""
        self.service.start()
        if self.settings.reload.watch_seconds:
            self.reloads.watch(self.settings.reload.watch_seconds)
        server = await asyncio.get_running_loop().create_unix_server(self._link, path)
        keep(self._tasks, self._look_on())
        return server

    async def stop(self) -> None:
        """Answer the admitted requests, then end every link."""
        self.reloads.stop()
        if not await self.service.stop(self.settings.drain.timeout_seconds):
            self.exit_code = self.exit_code or EXIT_FAILED
        self._look()
        for link in self._links:
            link.close()
        await _until(lambda: not self._links, LAST_WORDS_SECONDS)
        for task in self._tasks | self._answers.tasks:
            task.cancel()

    def drain(self) -> None:
        """Report not ready, serve the linked fronts, and end with the last of them. A second call does nothing."""
        if not self.service.lifecycle.draining:
            self.service.begin_drain()
            keep(self._tasks, self._end_with_fronts())

    async def _end_with_fronts(self) -> None:
        drain = self.settings.drain
        await _until(lambda: not self._fronts, drain.delay_seconds + drain.timeout_seconds)
        self._ended.set()

    def _fatal(self, reason: str) -> None:
        """End the process. All waiting requests were answered, and only a new process can help."""
        self.exit_code = EXIT_ENGINE_LOST if self.service.health().started else EXIT_FAILED
        self._look()
        self._ended.set()
        log.error("fatal", reason=reason)

    # links

    def _link(self) -> Link:
        return Link(wire.from_front, self._receive, self._links.add, self._lose)

    def _receive(self, link: Link, message: Any) -> None:
        front = self._fronts.get(link)
        if front is not None and type(message) is not wire.Hello:
            self._take[type(message)](front, message)
        elif front is None and type(message) is wire.Hello and message.version == wire.VERSION:
            self._welcome(Front(link, message.front))
        else:
            raise ValueError("a front must send Hello first, only once, and with the same version")

    def _welcome(self, front: Front) -> None:
        state = self._look()
        for number in filter(None, (state.model, state.corpus, state.second)):
            self._serve(front, number)
        self._fronts[front.link] = front
        front.link.send(state)
        log.info("front_linked", front=front.number)

    def _lose(self, link: Link) -> None:
        """Drop the front's requests and keep nothing of it but its counts."""
        self._links.discard(link)
        front = self._fronts.pop(link, None)
        if front is None:
            return
        for ticket in front.tickets.values():
            ticket.release()
        for number in list(front.served):
            self._leave(front, number)
        self._sums.forget(front)
        log.info("front_gone", front=front.number, requests=len(front.tickets))

    # messages to fronts

    async def _look_on(self) -> None:
        while True:
            self._look()
            is_closed = self._state is not None and self._state.closed
            await asyncio.sleep(LOOK_SECONDS if is_closed else IDLE_LOOK_SECONDS)

    def _look(self) -> wire.State:
        """Tell every front if anything has changed: what serves, health, whether there is room."""
        service, second, refusal = self.service, self.service.second, self.service.admission.closed()
        state = wire.State(
            service.health(),
            *(("", 0.0) if refusal is None else (refusal.detail, refusal.retry_after_seconds)),
            self._number(service.versions.current),
            self._number(service.retrieval.versions.current),
            0 if second is None else self._number(service.second_checkpoint.versions.current),
            "" if second is None else second.reason,
            second is not None and second.answers,
        )
        now, before = service.clock(), self._state
        if _without_time(state) != _without_time(before) or now - self._told > (
            CLOSED_SECONDS if state.closed else SIGN_OF_LIFE_SECONDS
        ):
            self._state, self._told = state, now
            for front in self._fronts.values():
                front.link.send(state)
            if before is not None:
                for number in before.model, before.corpus, before.second:
                    self._free(number)
        return state

    def _number(self, worker: Worker[Any] | None) -> int:
        """Return the number by which fronts know this worker's model, 0 for none. A new one is announced to them."""
        if worker is None:
            return 0
        for number, kept in self._kept.items():
            if kept is worker:
                return number
        worker.hold()
        self._kept[number := next(self._numbers)] = worker
        for front in self._fronts.values():
            self._serve(front, number)
        return number

    def _serve(self, front: Front, number: int) -> None:
        front.served.add(number)
        front.link.send(wire.Serve.of(number, self._kept[number].model.served))

    def _leave(self, front: Front, number: int) -> None:
        """Note that this front will ask for this model no more."""
        front.served.discard(number)
        self._free(number)

    def _free(self, number: int) -> None:
        state = self._state
        serves = () if state is None else (state.model, state.corpus, state.second)
        is_wanted = number in serves or any(number in front.served for front in self._fronts.values())
        if number in self._kept and not is_wanted:
            self._kept.pop(number).leave()

    # messages from fronts

    def _count(self, front: Front, counts: wire.Counts) -> None:
        self._sums.add(front, counts.families)
        front.flushed = max(front.flushed, counts.flush)

    def _refused(self, front: Front, refused: wire.Refused) -> None:
        self.service.admission.offered.observe(self.service.clock(), requests=refused.requests)

    async def _flush(self) -> None:
        """Wait until every front has read all that was sent to it and has sent its counts, at most `FLUSH_SECONDS`."""
        asked, number = list(self._fronts.values()), next(self._flushes)
        for front in asked:
            front.link.send(wire.Flush(number))
        await _until(
            lambda: all(front.flushed >= number or front.link not in self._fronts for front in asked), FLUSH_SECONDS
        )

    async def _exposition(self) -> bytes:
        await self._flush()
        return self._sums.render(self.service.metrics.registry)


def _without_time(state: wire.State | None) -> wire.State | None:
    return None if state is None else msgspec.structs.replace(state, retry_after_seconds=0.0)


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  # rare, and every end of it short
                await asyncio.sleep(WAIT_SECONDS)
