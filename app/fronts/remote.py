"""The service as a front sees it: `interface.Service` over a link to the engine process, which decides who is admitted."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from app.errors import (
    CorpusNotLoaded,
    DeadlineExceeded,
    Draining,
    EngineDown,
    InternalError,
    NotReady,
    Overloaded,
    ServiceError,
    error_class,
)
from app.fronts import frames
from app.fronts.link import Link
from app.fronts.uplink import Uplink
from app.interface import Changed, Done, Found, Health, PostChange, Ranked, ServedModel, ServedRetrieval, Ticket
from app.scheduling.loop_lag import Work
from app.service.loop_clock import LoopClock
from app.settings import Settings
from app.telemetry.metrics import Metrics
from app.telemetry.sums import Deltas
from model.inputs import Candidates, Context
from model.retrieval.inputs import Query
from weights.format.manifest import Manifest

RETRY_AFTER_SECONDS = 2.0  # while the engine process starts
OVERRUN_RETRY_SECONDS = 1.0
SWEEP_SECONDS = 0.1
GRACE_SECONDS = 0.25  # after a deadline, for the engine process to say so itself
SILENT_SECONDS = 4.0  # without a sign of life, of which there is one a second
SCRAPE_SECONDS = 5.0
ENDED = "The engine process has ended."
SINGLE = "Retrieval needs a single process, and this service has several (RANKER_FRONTS)."

log = structlog.get_logger("app.fronts.remote")


class Version:
    """A model of the engine process, with the requests that are prepared for it and not sent."""

    __slots__ = ("actions", "number", "served", "unsent")

    def __init__(self, number: int, served: ServedModel) -> None:
        self.number = number
        self.served = served
        self.actions = served.manifest.config.actions
        self.unsent = 0


class Place(Ticket):
    """A request of this front: first prepared, then sent, at last answered or released."""

    __slots__ = ("again", "candidates", "deadline", "done", "id", "key", "link", "service", "version", "waits")

    def __init__(self, service: RemoteService, link: Link, version: Version, deadline: float, key: str | None) -> None:
        self.service = service
        self.link = link
        self.version = version
        self.deadline = deadline
        self.key = key
        self.candidates = 0
        self.id = 0
        self.done: Done | None = None
        self.again = self.waits = False
        version.unsent += 1

    def release(self) -> None:
        """Free the place and drop what is not computed; a second time does nothing."""
        self.service.drop(self)


class NoRetrieval:
    """`interface.Retrieval` of a front: no link carries a search, so all of it raises CorpusNotLoaded."""

    @property
    def served(self) -> ServedRetrieval:
        """Nothing."""
        raise CorpusNotLoaded(SINGLE)

    async def retrieve(self, served: ServedRetrieval, query: Query, deadline: float, key: str | None = None) -> Found:
        """Nothing."""
        raise CorpusNotLoaded(SINGLE)

    async def change(self, change: PostChange) -> Changed:
        """Nothing."""
        raise CorpusNotLoaded(SINGLE)

    async def compact(self) -> Changed:
        """Nothing."""
        raise CorpusNotLoaded(SINGLE)


class RemoteService:
    """`interface.Service` of one front. All methods belong to the event loop."""

    def __init__(self, settings: Settings, path: str, front: int, metrics: Metrics) -> None:
        """`path`: of the engine process's socket."""
        self.settings = settings
        self.metrics = metrics
        self.clock = time.monotonic
        self.retrieval = NoRetrieval()
        self.on_fatal: Callable[[str], None] = lambda reason: None  # nothing here is fatal: the supervisor decides
        self.linked = asyncio.Event()  # the engine process has said how it is
        self._uplink = Uplink(path, front, Deltas(metrics.registry), self._receive, self._lose, self._down)
        self._loop_clock = LoopClock(self.clock, self._work)
        self._state = frames.State(False, False, False, "The engine process is starting.", "", 0.0)
        self._versions: list[Version] = []  # that may still be asked for; the last one serves
        self._pending: dict[int, Place] = {}
        self._ids = itertools.count(1)
        self._answered = self._refused = 0
        self._untold = 0  # of the refused, since the engine process was told of them
        self._draining = self._refusing = self._started = False
        self._sweeper: asyncio.Task[None] | None = None
        self._take: dict[type, Callable[[Any], None]] = {
            frames.Answer: self._answer,
            frames.Failed: self._fail,
            frames.State: self._hear,
            frames.Model: self._serve,
        }

    # life

    def start(self) -> None:
        """Keep a link to the engine process from now on; a second time does nothing."""
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
            self._uplink.start()

    def begin_drain(self) -> None:
        """Readiness is lost; requests are still served."""
        self._draining = True

    async def stop(self, timeout_seconds: float) -> bool:
        """Wait for what is under way, then end the link. False when the time was not enough."""
        self._draining = self._refusing = True
        until = self.clock() + timeout_seconds
        while self._pending and self.clock() < until:  # noqa: ASYNC110  # once in a life
            await asyncio.sleep(0.01)
        finished = not self._pending
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._uplink.stop()
        return finished

    def has_running_threads(self) -> bool:
        """None here."""
        return False

    def _lose(self) -> None:
        """The engine process has ended: whoever waits is told at once."""
        self.linked.clear()
        self._versions.clear()
        self._state = frames.State(False, True, False, ENDED, "", 0.0)
        if not self._refusing:
            log.error("engine_process_lost", requests=len(self._pending))
        pending, self._pending = self._pending, {}
        for place in pending.values():
            self._settle(place, self._down())

    def _down(self) -> ServiceError:
        if self._state.failed:
            return EngineDown(self._state.reason, retry_after_seconds=RETRY_AFTER_SECONDS)
        return NotReady(self._state.reason, retry_after_seconds=RETRY_AFTER_SECONDS)

    # admission

    @property
    def default_deadline_seconds(self) -> float:
        """For a request that names no deadline."""
        return self.settings.deadline.default_seconds

    @property
    def model(self) -> ServedModel:
        """The version that serves new requests. Raises NotReady while nothing is loaded."""
        if not self._versions:
            raise NotReady(self.health().reason, retry_after_seconds=RETRY_AFTER_SECONDS)
        return self._versions[-1].served

    def check_open(self, key: str | None = None) -> None:
        """Raise what any request would get now, as far as this front knows: NotReady, Draining, EngineDown or Overloaded."""
        link = self._check_able()
        self._loop_clock.request_arrives()
        if self._loop_clock.lag.refuses(len(self._pending)):
            self._refuse("loop_overrun", "requests arrive faster than they can be answered", OVERRUN_RETRY_SECONDS)
        if self._state.closed:
            self._refuse("queue_full", self._state.closed, self._state.retry_after_seconds)
        if link.congested or len(self._pending) >= self.settings.queue.max_requests:
            self._refuse("queue_full", "the queue is full", OVERRUN_RETRY_SECONDS)

    def admit(
        self,
        model: ServedModel,
        *,
        candidates: int,
        history: int,
        deadline: float | None,
        key: str | None = None,
        again: bool = False,
        waits: bool = False,
    ) -> Place:
        """Prepare a request on `model`; the engine process decides when it is sent. Raises NotReady, Draining or EngineDown."""
        link = self._check_able()
        version = next((version for version in self._versions if version.served is model), None)
        if version is None:
            raise NotReady("The model of this request was replaced.", retry_after_seconds=0.0)
        deadline = self.clock() + self.default_deadline_seconds if deadline is None else deadline
        place = Place(self, link, version, deadline, key)
        place.again, place.waits = again, waits
        return place

    def _check_able(self) -> Link:
        if self._refusing:
            self.metrics.rejected.labels("draining").inc()
            raise Draining(retry_after_seconds=RETRY_AFTER_SECONDS)
        link = self._uplink.link
        if link is None or self._state.failed:
            raise self._down()
        if not self._versions:
            self.metrics.rejected.labels("not_ready").inc()
            raise NotReady(self._state.reason, retry_after_seconds=RETRY_AFTER_SECONDS)
        return link

    def _work(self) -> Work:
        return Work(time.thread_time(), self._answered, self._refused, len(self._pending))

    def _refuse(self, reason: str, detail: str, retry_after_seconds: float) -> None:
        self._refused += 1
        self._untold += 1
        self.metrics.rejected.labels(reason).inc()
        raise Overloaded(f"Refused on arrival: {detail}.", retry_after_seconds=retry_after_seconds)

    # ranking

    def shrink(self, ticket: Ticket, candidates: int) -> None:
        """Nothing: the engine process hears how many candidates there are when they are sent."""

    def rank(self, ticket: Ticket, context: Context, candidates: Candidates, done: Done) -> None:
        """Send it; `done` is called once, later, unless the ticket is released before."""
        assert isinstance(ticket, Place)
        if ticket.done is not None:
            raise ValueError("this ticket was used before")
        place, number = ticket, next(self._ids)
        place.id, place.done, place.candidates = number, done, len(candidates)
        self._pending[number] = place
        if place.link is not self._uplink.link:  # lost since it was admitted
            lost = EngineDown(ENDED, retry_after_seconds=RETRY_AFTER_SECONDS)
            asyncio.get_running_loop().call_soon(self._finish, number, lost)
            return
        words, floats = frames.columns_of(context, candidates)
        place.link.send(
            frames.Rank(
                number, place.version.number, place.deadline, place.key, context.user_id, len(context),
                len(candidates), words, floats, place.again, place.waits,
            )
        )  # fmt: skip
        self._is_sent(place.version)

    async def attention(
        self, model: ServedModel, context: Context, candidates: Candidates, deadline: float
    ) -> NDArray[np.float32] | None:
        """None: no link carries it."""
        return None

    def drop(self, place: Place) -> None:
        """For `Place.release`."""
        if not place.id:
            place.id = -1
            self._is_sent(place.version)
        elif self._pending.pop(place.id, None) is not None and place.link is self._uplink.link:
            place.link.send(frames.Cancel(place.id))

    def _is_sent(self, version: Version) -> None:
        version.unsent -= 1
        self._leave(version)

    def _leave(self, version: Version) -> None:
        """Tell when the last request on a replaced model was sent: it may be freed once that is answered."""
        if not version.unsent and version in self._versions[:-1]:
            self._versions.remove(version)
            self._uplink.send(frames.Left(version.number))

    def _finish(self, number: int, result: Ranked | ServiceError) -> None:
        place = self._pending.pop(number, None)
        if place is not None:
            self._settle(place, result)

    def _settle(self, place: Place, result: Ranked | ServiceError) -> None:
        assert place.done is not None
        self._answered += 1
        try:
            place.done(result)
        except Exception as error:  # a fault in one request must not end the link of all
            log.error("fault", exc_info=error)

    async def _sweep(self) -> None:
        """Answer whom the engine process does not answer in time, and tell it what was refused."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            if self._untold:
                self._uplink.send(frames.Refused(self._untold))
                self._untold = 0
            late = self.clock() - GRACE_SECONDS
            for place in [place for place in self._pending.values() if place.deadline < late]:
                place.release()
                self._settle(place, DeadlineExceeded())

    # health

    def health(self) -> Health:
        """Whether requests may be sent here, and why not."""
        state, failed, reason = self._state, self._state.failed, self._state.reason
        silent = self.clock() - self._uplink.heard
        if self._uplink.link is not None and silent > SILENT_SECONDS:
            failed, reason = True, f"The engine process has been silent for {silent:.1f} s."
        if self._draining and not failed:
            reason = "The process is shutting down."
        draining = self._draining or state.draining
        return Health(ready=not reason, started=self._started, failed=failed, draining=draining, reason=reason)

    async def exposition(self) -> bytes:
        """The metrics of all processes. Raises EngineDown while the engine process, which adds them up, is gone."""
        self._uplink.tell()
        try:
            told: frames.Exposition = await asyncio.wait_for(self._uplink.ask(frames.Scrape), SCRAPE_SECONDS)
        except TimeoutError:
            raise EngineDown(self.health().reason, retry_after_seconds=RETRY_AFTER_SECONDS) from None
        return told.text

    # what the engine process says

    def _receive(self, frame: Any) -> None:
        self._take[type(frame)](frame)

    def _answer(self, frame: frames.Answer) -> None:
        place = self._pending.get(frame.id)
        if place is not None:
            scores = frames.scores_of(frame, place.candidates, place.version.actions)
            self._finish(frame.id, Ranked(scores, frame.cache, frame.queue_seconds, frame.forward_seconds))

    def _fail(self, frame: frames.Failed) -> None:
        kind = error_class(frame.code)
        self._finish(frame.id, kind(frame.detail, retry_after_seconds=frame.retry_after_seconds))

    def _hear(self, state: frames.State) -> None:
        self._state = state
        self._started = self._started or state.started
        self.linked.set()

    def _serve(self, frame: frames.Model) -> None:
        served = ServedModel(Manifest.from_json(frame.manifest), frame.info())
        self._versions.append(Version(frame.model, served))
        for version in self._versions[:-1]:
            self._leave(version)

    async def reload(self, checkpoint: str | None) -> ServedModel:
        """Have another checkpoint served. Raises what `Reloads.reload` raises, and CheckpointNotFound."""
        told: frames.Reloaded = await self._uplink.ask(frames.Reload, checkpoint)
        if told.failure:
            raise frames.RELOAD_FAILURES.get(told.failure, InternalError)(told.detail)
        return self.model


class RemoteReloads:
    """`interface.Reloads` of a front: names are resolved and directories watched by the engine process."""

    def __init__(self, service: RemoteService) -> None:
        self.service = service

    def resolve(self, name: str) -> Path:
        """The name as it is."""
        return Path(name)

    async def reload(self, path: Path | None = None) -> ServedModel:
        """As in the engine process. Raises CheckpointNotFound besides."""
        return await self.service.reload(None if path is None else str(path))

    async def reload_retrieval(self, checkpoint: Path | None = None, corpus: Path | None = None) -> ServedRetrieval:
        """Raises CorpusNotLoaded."""
        return self.service.retrieval.served

    def reload_soon(self) -> None: ...

    def watch(self, seconds: float) -> None: ...

    def stop(self) -> None: ...
