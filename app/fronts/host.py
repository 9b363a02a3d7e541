"""The engine process: one ranking service for the fronts that are linked to it. Speaks no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from app.engine.worker import EngineWorker
from app.errors import InternalError, Overloaded, ServiceError
from app.exits import EXIT_ENGINE_LOST, EXIT_FAILED
from app.fronts import frames
from app.fronts.link import Link
from app.fronts.retrieval import change_of, posts_frame, query_of
from app.interface import Found, PostChange, Ranked, ServedModel, ServedRetrieval, Ticket
from app.service.reload import Reloader
from app.service.service import RankingService
from app.settings import Settings
from app.telemetry.sums import Sums

LOOK_SECONDS = 0.005  # how often it is looked whether a queue that is full still is
IDLE_LOOK_SECONDS = 0.05  # the same for everything else that fronts are told
CLOSED_SECONDS = 0.05  # between two notes of how long a full queue takes
SIGN_OF_LIFE_SECONDS = 1.0
FLUSH_SECONDS = 0.2  # what a front has to answer a question in; a stopped one delays others so long
LAST_WORDS_SECONDS = 1.0  # for replies to reach the fronts before the process ends
WAIT_SECONDS = 0.01

log = structlog.get_logger("app.fronts.host")


class Model:
    """A loaded model, or a retrieval model with its corpus, and the number under which fronts know it. `free`: no front will ask."""

    def __init__(
        self, number: int, served: ServedModel | ServedRetrieval, free: Callable[[], None], is_second: bool
    ) -> None:
        self.number = number
        self.served = served
        self.free = free
        self.is_second = is_second
        self.actions = served.manifest.config.actions


class Answering:
    """`interface.Ticket` of a question that a task answers."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def release(self) -> None:
        """Nobody waits for it any more."""
        self._task.cancel()


class Front:
    """One linked front and its requests."""

    def __init__(self, link: Link, number: int) -> None:
        self.link = link
        self.number = number
        self.tickets: dict[int, Ticket] = {}
        self.models: set[int] = set()  # it may still ask for these
        self.flushed = 0  # the last question that it has answered


class EngineHost:
    """Serves fronts until a signal or the loss of the engine. All methods belong to the event loop."""

    def __init__(self, service: RankingService, reloads: Reloader, settings: Settings) -> None:
        self.service = service
        self.reloads = reloads
        self.settings = settings
        self.exit_code = 0
        self._fronts: dict[Link, Front] = {}
        self._links: set[Link] = set()  # those without a Hello too
        self._models: dict[int, Model] = {}  # those that are kept for fronts
        self._model: Model | None = None  # the one that serves
        self._second: Model | None = None
        self._second_state: frames.SecondState | None = None
        self._corpus: Model | None = None  # the same of what retrieves
        self._numbers = itertools.count(1)
        self._state: frames.State | None = None
        self._told = 0.0  # when fronts were last told how it is
        self._sums = Sums()
        self._flushes = 0
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._take: dict[type, Any] = {
            frames.Rank: self._rank,
            frames.Attend: self._attend,
            frames.Cancel: self._cancel,
            frames.Left: lambda front, frame: self._leave(front, frame.model),
            frames.Counts: self._count,
            frames.Refused: self._refused,
            frames.Scrape: lambda front, frame: self._keep(self._scrape(front, frame)),
            frames.Search: self._search,
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
        for model in (self._model, self._second, self._corpus):
            if model is not None:
                self._tell_model(front, model)
        if self._second_state is not None:
            front.link.send(self._second_state)
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
            self._leave(front, model)
        self._sums.forget(front)
        log.info("front_gone", front=front.number, requests=len(front.tickets))

    # requests

    def _rank(self, front: Front, frame: frames.Rank) -> None:
        model, service, number = self._models.get(frame.model), self.service, frame.id
        if model is None or not isinstance(model.served, ServedModel) or number in front.tickets:
            raise ValueError("a request on no model, or of a number that another has")
        try:
            if not frame.waits:
                service.check_open(frame.key)
            front.tickets[number] = ticket = service.admit(
                model.served,
                candidates=frame.candidates,
                history=frame.history,
                deadline=frame.deadline,
                key=frame.key,
                again=frame.again,
                waits=frame.waits,
            )
        except ServiceError as error:
            _fail(front, number, error)
            if isinstance(error, Overloaded):
                self._look()
        else:
            context, candidates = frames.inputs_of(frame, model.actions)
            service.rank(ticket, context, candidates, functools.partial(_answer, front, number))

    def _search(self, front: Front, frame: frames.Search) -> None:
        corpus, service, number = self._models.get(frame.corpus), self.service, frame.id
        if corpus is None or not isinstance(corpus.served, ServedRetrieval) or number in front.tickets:
            raise ValueError("a search of no corpus, or of a number that another has")
        query, answer = query_of(frame, corpus.actions), functools.partial(_answer, front, number)
        try:
            service.check_open(frame.key)
            ticket = service.retrieval.retrieve(corpus.served, query, frame.deadline, frame.key, answer)
            front.tickets[number] = ticket
        except ServiceError as error:
            _fail(front, number, error)

    def _attend(self, front: Front, frame: frames.Attend) -> None:
        model, number = self._models.get(frame.model), frame.id
        if model is None or not isinstance(model.served, ServedModel) or number in front.tickets:
            raise ValueError("a question on no model, or of a number that another has")
        asked = frames.inputs_of(frame, model.actions)
        answer = self._attention(front, number, self.service.attention(model.served, *asked, frame.deadline))
        front.tickets[number] = Answering(self._keep(answer))

    async def _attention(self, front: Front, number: int, rows: Coroutine[Any, Any, NDArray[np.float32]]) -> None:
        try:
            found = await rows
            front.link.send(frames.Attended(number, found.shape, found.tobytes()))
        except ServiceError as error:
            _fail(front, number, error)
        finally:
            front.tickets.pop(number, None)

    def _cancel(self, front: Front, frame: frames.Cancel) -> None:
        ticket = front.tickets.pop(frame.id, None)
        if ticket is not None:
            ticket.release()

    # what fronts are told

    async def _look_on(self) -> None:
        while True:
            self._look()
            is_closed = self._state is not None and self._state.closed
            await asyncio.sleep(LOOK_SECONDS if is_closed else IDLE_LOOK_SECONDS)

    def _look(self) -> frames.State:
        """Tell every front what has changed: the model that serves, health, whether there is room."""
        current, corpus = self.service.versions.current, self.service.retrieval.current
        if current is not None and (self._model is None or current.model.served is not self._model.served):
            self._model = self._adopt_worker(self._model, current)
        self._look_at_second()
        if corpus is not None and (self._corpus is None or corpus.loaded.served is not self._corpus.served):
            searches = self.service.retrieval.searches
            searches.keep(corpus)
            self._corpus = self._adopt(self._corpus, corpus.loaded.served, functools.partial(searches.leave, corpus))
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

    def _look_at_second(self) -> None:
        """Tell every front what has changed of the second checkpoint."""
        found = self.service.second
        if found is None:
            return
        current, old = self.service.second_checkpoint.versions.current, self._second
        if current is None:
            self._second = None
            self._free_if_left(old)
        elif old is None or current.model.served is not old.served:
            self._second = self._adopt_worker(old, current, is_second=True)
        number = 0 if self._second is None else self._second.number
        state = frames.SecondState(number, found.reason, found.answers)
        if state != self._second_state:
            self._second_state = state
            for front in self._fronts.values():
                front.link.send(state)

    def _adopt_worker(self, old: Model | None, worker: EngineWorker, *, is_second: bool = False) -> Model:
        worker.unfinished += 1
        return self._adopt(old, worker.model.served, functools.partial(self._free_model, worker), is_second=is_second)

    def _adopt(
        self,
        old: Model | None,
        served: ServedModel | ServedRetrieval,
        free: Callable[[], None],
        *,
        is_second: bool = False,
    ) -> Model:
        """New requests are for this one. It and the one before are kept until no front asks for them any more."""
        number = next(self._numbers)
        new = self._models[number] = Model(number, served, free, is_second)
        for front in self._fronts.values():
            self._tell_model(front, new)
        self._free_if_left(old)
        return new

    def _free_if_left(self, model: Model | None) -> None:
        if model is not None and not any(model.number in front.models for front in self._fronts.values()):
            self._free(model)

    def _tell_model(self, front: Front, model: Model) -> None:
        front.models.add(model.number)
        served = model.served
        if isinstance(served, ServedRetrieval):
            manifests = served.manifest.to_json(), served.corpus.to_json()
            front.link.send(frames.Corpus(model.number, *manifests, served.hidden, served.duplicates, served.notes))
            return
        info = served.engine
        front.link.send(
            frames.Model(
                model.number, served.manifest.to_json(), info.device, info.dtype, info.backend,
                info.candidate_positions, info.notes, model.is_second,
            )
        )  # fmt: skip

    def _leave(self, front: Front, number: int) -> None:
        front.models.discard(number)
        model = self._models.get(number)
        if model not in (self._model, self._second, self._corpus):
            self._free_if_left(model)

    def _free(self, model: Model) -> None:
        del self._models[model.number]
        model.free()

    def _free_model(self, worker: EngineWorker) -> None:
        worker.unfinished -= 1
        self.service.free_if_done(worker)

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
        await self._flush()
        front.link.send(frames.Exposition(frame.id, self._sums.render(self.service.metrics.registry)))

    async def _tell(self, front: Front, asked: Any, work: Coroutine[Any, Any, Any]) -> None:
        """The answer to a question about models or posts, once every front has heard what has changed."""
        try:
            answer = await work
            self._look()
            await self._flush()
            front.link.send(answer)
        except ServiceError as error:
            _fail(front, asked.id, error)
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


def _answer(front: Front, number: int, result: Ranked | Found | ServiceError) -> None:
    if front.tickets.pop(number, None) is None:
        return
    if not isinstance(result, ServiceError):
        try:
            front.link.send(posts_frame(number, result) if isinstance(result, Found) else _scores(number, result))
            return
        except ValueError as error:
            log.error("answer_too_long", reason=str(error))
            result = InternalError()
    _fail(front, number, result)


def _scores(number: int, ranked: Ranked) -> frames.Answer:
    scores, times = ranked.scores, (ranked.queue_seconds, ranked.forward_seconds)
    return frames.Answer(number, ranked.cache, *times, scores.finite, frames.scores_bytes(scores))


def _fail(front: Front, number: int, error: ServiceError) -> None:
    front.link.send(frames.Failed(number, error.code, error.detail, error.retry_after_seconds))


def _without_time(state: frames.State | None) -> frames.State | None:
    return None if state is None else msgspec.structs.replace(state, retry_after_seconds=0.0)


async def _until(condition: Callable[[], bool], seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110  # rare, and every end of it short
                await asyncio.sleep(WAIT_SECONDS)
