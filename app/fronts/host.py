"""The engine process: one ranking service for the fronts that are linked to it. Speaks no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import structlog

from app.errors import ServiceError
from app.exits import EXIT_ENGINE_LOST, EXIT_FAILED
from app.fronts import frames
from app.fronts.link import Link
from app.fronts.models import Front, Models
from app.fronts.requests import Requests, fail
from app.fronts.retrieval import change_of
from app.service.reload import Reloader
from app.service.service import RankingService
from app.settings import Settings
from app.telemetry.metrics import Scrapes
from app.telemetry.sums import Sums
from model.retrieval.inputs import PostChange

LOOK_SECONDS = 0.005  # how often it is looked whether a queue that is full still is
IDLE_LOOK_SECONDS = 0.05  # the same for everything else that fronts are told
CLOSED_SECONDS = 0.05  # between two notes of how long a full queue takes
SIGN_OF_LIFE_SECONDS = 1.0
FLUSH_SECONDS = 0.2  # what a front has to answer a question in; a stopped one delays others so long
LAST_WORDS_SECONDS = 1.0  # for replies to reach the fronts before the process ends
WAIT_SECONDS = 0.01

log = structlog.get_logger("app.fronts.host")


class EngineHost:
    """Serves fronts until a signal or the loss of the engine. All methods belong to the event loop."""

    def __init__(self, service: RankingService, reloads: Reloader, settings: Settings) -> None:
        self.service = service
        self.reloads = reloads
        self.settings = settings
        self.exit_code = 0
        self._fronts: dict[Link, Front] = {}
        self._links: set[Link] = set()  # those without a Hello too
        self._models = Models(service, self._fronts.values())
        requests = Requests(service, self._models, self._keep, self._look)
        self._state: frames.State | None = None
        self._told = 0.0  # when fronts were last told how it is
        self._sums = Sums()
        self._scrapes = Scrapes(self._exposition)
        self._flushes = 0
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._take: dict[type, Any] = {
            frames.Rank: requests.rank,
            frames.Attend: requests.attend,
            frames.Cancel: requests.cancel,
            frames.Search: requests.search,
            frames.Left: lambda front, frame: self._models.leave(front, frame.model),
            frames.Counts: self._count,
            frames.Refused: self._refused,
            frames.Scrape: lambda front, frame: self._keep(self._scrape(front, frame)),
            frames.Reload: lambda front, frame: self._keep(self._tell(front, frame, self._reload(frame))),
            frames.Change: lambda front, frame: self._keep(
                self._tell(front, frame, self._change(frame, change_of(frame)))
            ),
            frames.Compact: lambda front, frame: self._keep(self._tell(front, frame, self._compact(frame))),
        }
        service.on_fatal = self._fatal

    async def serve(self, path: str) -> int:
        """Serve until SIGTERM or the loss of the engine; the exit code. SIGHUP reads the present checkpoint again."""
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
        """Begin to load, and listen on a socket."""
        self.service.start()
        if self.settings.reload.watch_seconds:
            self.reloads.watch(self.settings.reload.watch_seconds)
        server = await asyncio.get_running_loop().create_unix_server(self._link, path)
        self._keep(self._look_on())
        return server

    async def stop(self) -> None:
        """Answer what was admitted, then end every link."""
        self.reloads.stop()
        if not await self.service.stop(self.settings.drain.timeout_seconds):
            self.exit_code = self.exit_code or EXIT_FAILED
        self._look()
        for link in self._links:
            link.close()
        await _until(lambda: not self._links, LAST_WORDS_SECONDS)
        for task in self._tasks:
            task.cancel()

    def drain(self) -> None:
        """Lose readiness, serve the fronts that are linked, and end with the last of them. A second time does nothing."""
        if not self.service.lifecycle.draining:
            self.service.begin_drain()
            self._keep(self._end_with_fronts())

    async def _end_with_fronts(self) -> None:
        drain = self.settings.drain
        await _until(lambda: not self._fronts, drain.delay_seconds + drain.timeout_seconds)
        self._ended.set()

    def _fatal(self, reason: str) -> None:
        """Everyone who waits was answered, and only a new process can help."""
        self.exit_code = EXIT_ENGINE_LOST if self.service.health().started else EXIT_FAILED
        self._look()
        self._ended.set()
        log.error("fatal", reason=reason)

    # links

    def _link(self) -> Link:
        return Link(frames.from_front, self._receive, self._links.add, self._lose)

    def _receive(self, link: Link, frame: Any) -> None:
        front = self._fronts.get(link)
        if front is not None and type(frame) is not frames.Hello:
            self._take[type(frame)](front, frame)
        elif front is None and type(frame) is frames.Hello and frame.version == frames.VERSION:
            self._welcome(Front(link, frame.front))
        else:
            raise ValueError("a front says Hello first, once, and in this version")

    def _welcome(self, front: Front) -> None:
        self._fronts[front.link] = front
        self._models.welcome(front)
        front.link.send(self._look())
        log.info("front_linked", front=front.number)

    def _lose(self, link: Link) -> None:
        """Its requests are dropped, and nothing of it stays but what it has counted."""
        self._links.discard(link)
        front = self._fronts.pop(link, None)
        if front is None:
            return
        for ticket in front.tickets.values():
            ticket.release()
        for model in list(front.models):
            self._models.leave(front, model)
        self._sums.forget(front)
        log.info("front_gone", front=front.number, requests=len(front.tickets))

    # what fronts are told

    async def _look_on(self) -> None:
        while True:
            self._look()
            is_closed = self._state is not None and self._state.closed
            await asyncio.sleep(LOOK_SECONDS if is_closed else IDLE_LOOK_SECONDS)

    def _look(self) -> frames.State:
        """Tell every front what has changed: the model that serves, health, whether there is room."""
        self._models.look()
        health, refusal = self.service.health(), self.service.admission.closed()
        closed, retry_after = ("", 0.0) if refusal is None else (refusal.detail, refusal.retry_after_seconds)
        state = frames.State(health.started, health.failed, health.draining, health.reason, closed, retry_after)
        now = self.service.clock()
        if _without_time(state) != _without_time(self._state) or now - self._told > (
            CLOSED_SECONDS if closed else SIGN_OF_LIFE_SECONDS
        ):
            self._state, self._told = state, now
            for front in self._fronts.values():
                front.link.send(state)
        return state

    # what fronts tell and ask

    def _count(self, front: Front, frame: frames.Counts) -> None:
        self._sums.add(front, frame.families)
        front.flushed = max(front.flushed, frame.id)

    def _refused(self, front: Front, frame: frames.Refused) -> None:
        self.service.admission.offered.observe(self.service.clock(), requests=frame.requests)

    async def _flush(self) -> None:
        """Return when every front has taken all that was sent to it, and told what it has counted; a stopped one is not waited for."""
        self._flushes += 1
        asked, number = list(self._fronts.values()), self._flushes
        for front in asked:
            front.link.send(frames.Flush(number))
        await _until(
            lambda: all(front.flushed >= number or front.link not in self._fronts for front in asked), FLUSH_SECONDS
        )

    async def _scrape(self, front: Front, frame: frames.Scrape) -> None:
        front.link.send(frames.Exposition(frame.id, await self._scrapes.get()))

    async def _exposition(self) -> bytes:
        await self._flush()
        return self._sums.render(self.service.metrics.registry)

    async def _tell(self, front: Front, asked: Any, work: Coroutine[Any, Any, Any]) -> None:
        """The answer to a question about models or posts, once every front has heard what has changed."""
        try:
            answer = await work
            self._look()
            await self._flush()
            front.link.send(answer)
        except ServiceError as error:
            fail(front, asked.id, error)
        except Exception as error:  # it has been logged
            failure = next((name for name, kind in frames.RELOAD_FAILURES.items() if isinstance(error, kind)), "other")
            front.link.send(frames.Reloaded(asked.id, failure, str(error)))

    async def _reload(self, frame: frames.Reload) -> frames.Reloaded:
        def found(name: str | None) -> Path | None:
            return None if name is None else self.reloads.resolve(name)

        if frame.retrieval is None:
            await self.reloads.reload(found(frame.checkpoint), second=frame.second)
        else:
            await self.reloads.reload_retrieval(*map(found, frame.retrieval))
        return frames.Reloaded(frame.id, "", "")

    async def _change(self, frame: frames.Change, change: PostChange) -> frames.Changed:
        changed = await self.service.retrieval.change(change)
        return frames.Changed(frame.id, changed.posts, changed.changes, changed.deleted)

    async def _compact(self, frame: frames.Compact) -> frames.Changed:
        changed = await self.service.retrieval.compact()
        return frames.Changed(frame.id, changed.posts, changed.changes, changed.deleted)

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _without_time(state: frames.State | None) -> frames.State | None:
    return None if state is None else msgspec.structs.replace(state, retry_after_seconds=0.0)


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  # rare, and every end of it short
                await asyncio.sleep(WAIT_SECONDS)
