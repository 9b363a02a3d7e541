"""The service as a front sees it: `app/interface.py` over a link to the engine process, which decides who is admitted."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import structlog
from numpy.typing import NDArray

from app.errors import CorpusNotLoaded, DeadlineExceeded, Draining, EngineDown, NotReady, Overloaded, ServiceError
from app.fronts import wire
from app.fronts.uplink import Asked, Uplink
from app.interface import Changed, Done, FoundDone, Health, Second, ServedModel, ServedRetrieval, Ticket
from app.loop_lag import LoopClock, Work
from app.settings import Settings
from app.telemetry.metrics import Metrics
from app.telemetry.sums import Deltas
from model.inputs import Candidates, Context
from model.retrieval.inputs import PostChange, Query

RETRY_AFTER_SECONDS = 2.0  # while the engine process starts
OVERRUN_RETRY_SECONDS = 1.0
SILENT_SECONDS = 4.0  # the longest time without a sign of life, which comes once a second
SCRAPE_SECONDS = 5.0
STARTING = wire.State(Health(False, False, False, False, "The engine process is starting."))
ENDED = wire.State(Health(False, False, True, False, "The engine process has ended."))

log = structlog.get_logger("app.fronts.remote")


@dataclass(slots=True, eq=False)
class Place:
    """`interface.Ticket`: a request that is prepared, then sent, and finally answered or released."""

    model: ServedModel
    deadline: float
    key: str | None
    again: bool
    waits: bool
    used: bool = False
    asked: Asked | None = None

    def release(self) -> None:
        """Free the place and drop work not yet computed. A second call does nothing."""
        self.used = True
        if self.asked is not None:
            self.asked.release()


class RemoteService:
    """`interface.Service` of one front. Used by the event loop only. `serves`: the models for new requests, by the engine process's
    numbers; `numbers`: the numbers of all models that the front still has.

    The engine process keeps a model until no front has it. A front tells it when the front's last reference is gone.
    """

    def __init__(self, settings: Settings, path: str, front: int, metrics: Metrics) -> None:
        """`path` is that of the engine process's socket."""
        self.settings = settings
        self.metrics = metrics
        self.clock = time.monotonic
        self.on_fatal: Callable[[str], None] = lambda reason: None  # nothing here is fatal: the supervisor decides
        self.linked = asyncio.Event()  # set while the engine process's state is known
        self.uplink = Uplink(path, front, Deltas(metrics.registry), self._receive, self._lose, self._down)
        self.retrieval = RemoteRetrieval(self)
        self.state = STARTING
        self.serves: dict[int, wire.Served] = {}
        self.numbers: weakref.WeakKeyDictionary[wire.Served, int] = weakref.WeakKeyDictionary()
        self._loop_clock = LoopClock(self.clock, self._work)
        self._refused = 0
        self._draining = self._refusing = self._started = False

    # life

    def start(self) -> None:
        """Keep a link to the engine process from now on. A second call does nothing."""
        self.uplink.start()

    def begin_drain(self) -> None:
        """Report not ready, but keep serving requests."""
        self._draining = True

    async def stop(self, timeout_seconds: float) -> bool:
        """Wait for requests under way, then end the link. Return False if time ran out."""
        self._draining = self._refusing = True
        until = self.clock() + timeout_seconds
        while self.uplink.asked and self.clock() < until:  # noqa: ASYNC110  # once in a life
            await asyncio.sleep(0.01)
        finished = not self.uplink.asked
        await self.uplink.stop()
        return finished

    def has_running_threads(self) -> bool:
        """Always False: a front has no engine threads."""
        return False

    # messages from the engine process

    def _receive(self, message: Any) -> None:
        if isinstance(message, wire.Serve):
            served = self.serves[message.number] = message.served()
            self.numbers[served] = message.number
            if self.uplink.link is not None:
                leave = weakref.finalize(served, self.uplink.link.send, wire.Left(message.number))
                leave.atexit = False
        else:
            self.state = message
            self._started = self._started or message.health.started
            for number in self.serves.keys() - {message.model, message.corpus, message.second}:
                del self.serves[number]
            self.linked.set()

    def _lose(self) -> None:
        """Forget the state of an engine process that has ended."""
        self.linked.clear()
        self.serves.clear()
        self.numbers.clear()
        self.state = ENDED
        if not self._refusing:
            log.error("engine_process_lost", requests=len(self.uplink.asked))

    def _down(self) -> ServiceError:
        health = self.state.health
        return (EngineDown if health.failed else NotReady)(health.reason, retry_after_seconds=RETRY_AFTER_SECONDS)

    # admission

    @property
    def model(self) -> ServedModel:
        """The version that serves new requests. Raises NotReady while nothing is loaded."""
        served = self.serves.get(self.state.model)
        if served is None:
            raise NotReady(self.health().reason, retry_after_seconds=RETRY_AFTER_SECONDS)
        return cast(ServedModel, served)

    @property
    def second(self) -> Second | None:
        """The second checkpoint as last reported by the engine process; None if none is configured."""
        if self.settings.shadow.checkpoint is None:
            return None
        held = cast(ServedModel | None, self.serves.get(self.state.second))
        return Second(held, self.state.second_reason, self.state.answers and held is not None)

    def check_open(self, key: str | None = None) -> None:
        """Raise NotReady, Draining, EngineDown or Overloaded if, as far as this front knows, every request would get it now."""
        self._check_able()
        self._loop_clock.last_request = self.clock()
        if not self._loop_clock.is_ticking:
            self._loop_clock.begin()
        under_way = len(self.uplink.asked)
        if self._loop_clock.lag.refuses(under_way):
            self._refuse("loop_overrun", "requests arrive faster than they can be answered", OVERRUN_RETRY_SECONDS)
        if self.state.closed:
            self._refuse("queue_full", self.state.closed, self.state.retry_after_seconds)
        if under_way >= self.settings.queue.max_requests or (
            self.uplink.link is not None and self.uplink.link.congested
        ):
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
        """Prepare a request on `model`; the engine process decides on it when it is sent. Raises NotReady, Draining or EngineDown."""
        self._check_able()
        self._check_served(model)
        deadline = self.clock() + self.settings.deadline.default_seconds if deadline is None else deadline
        return Place(model, deadline, key, again, waits)

    def _check_able(self) -> None:
        if self._refusing:
            self.metrics.rejected.labels("draining").inc()
            raise Draining(retry_after_seconds=RETRY_AFTER_SECONDS)
        if self.uplink.link is None or self.state.health.failed:
            raise self._down()
        if self.state.model not in self.serves:
            self.metrics.rejected.labels("not_ready").inc()
            raise NotReady(self.state.health.reason, retry_after_seconds=RETRY_AFTER_SECONDS)

    def _check_served(self, model: ServedModel) -> int:
        number = self.numbers.get(model)
        if number is None:
            raise NotReady("The model of this request was replaced.", retry_after_seconds=0.0)
        return number

    def _work(self) -> Work:
        return Work(time.thread_time(), self.uplink.answered, self._refused, len(self.uplink.asked))

    def _refuse(self, reason: str, detail: str, retry_after_seconds: float) -> None:
        self._refused += 1
        self.uplink.refused += 1
        self.metrics.rejected.labels(reason).inc()
        raise Overloaded(f"Refused on arrival: {detail}.", retry_after_seconds=retry_after_seconds)

    # ranking

    def shrink(self, ticket: Ticket, candidates: int) -> None:
        """Do nothing: the number of candidates is sent with the request."""

    def rank(self, ticket: Ticket, context: Context | str, candidates: Candidates, done: Done) -> None:
        """Send the request. `done` is called once, later, unless the ticket is released first. It also gets ContextUnknown."""
        assert isinstance(ticket, Place)
        if ticket.used:
            raise ValueError("this ticket was used before")
        ticket.used = True
        number = self.numbers.get(ticket.model)
        if number is None:  # the engine process has ended since this was admitted
            ticket.asked = Asked(self.uplink, wire.Answer, ticket.deadline, done)
            error = EngineDown(ENDED.health.reason, retry_after_seconds=RETRY_AFTER_SECONDS)
            asyncio.get_running_loop().call_soon(ticket.asked.end, error)
            return
        ticket.asked = self.uplink.begin(
            "rank", ticket.deadline, done,
            number, ticket.deadline, ticket.key, ticket.again, ticket.waits, context, candidates,
        )  # fmt: skip

    async def context(self, model: ServedModel, handle: str, key: str | None) -> Context:
        """As `interface.Service.context`."""
        return cast(Context, await self.uplink.ask("context", self._check_served(model), handle, key))

    async def attention(
        self, model: ServedModel, context: Context, candidates: Candidates, deadline: float
    ) -> NDArray[np.float32]:
        """As `interface.Service.attention`."""
        number = self._check_served(model)
        rows: NDArray[np.float32]
        rows = await self.uplink.ask("attention", number, context, candidates, deadline, deadline=deadline)
        return rows

    # health

    def health(self) -> Health:
        """Whether requests may be sent here, and why not."""
        told = self.state.health
        failed, reason = told.failed, told.reason
        silent = self.clock() - self.uplink.heard
        if self.uplink.link is not None and silent > SILENT_SECONDS:
            failed, reason = True, f"The engine process has been silent for {silent:.1f} s."
        if self._draining and not failed:
            reason = "The process is shutting down."
        draining = self._draining or told.draining
        return Health(not reason, self._started, failed, draining, reason, told.feed)

    async def corpus(self) -> Changed | None:
        """As `interface.Service.corpus`. Raises NotReady or EngineDown without a link, and DeadlineExceeded."""
        return cast(Changed | None, await self.uplink.ask("corpus", deadline=self.clock() + SCRAPE_SECONDS))

    async def exposition(self) -> bytes:
        """The metrics of all processes. Raises EngineDown while the engine process, which adds them up, is gone."""
        try:
            return cast(bytes, await self.uplink.ask("exposition", deadline=self.clock() + SCRAPE_SECONDS))
        except DeadlineExceeded:
            reason = self.health().reason or "The engine process has not told the metrics in time."
            raise EngineDown(reason, retry_after_seconds=RETRY_AFTER_SECONDS) from None


class RemoteRetrieval:
    """`interface.Retrieval` of one front. Used by the event loop only."""

    def __init__(self, service: RemoteService) -> None:
        self._service = service
        self._uplink = service.uplink

    @property
    def served(self) -> ServedRetrieval:
        """The towers and corpus that serve new requests. Raises CorpusNotLoaded."""
        served = self._service.serves.get(self._service.state.corpus)
        if served is None:
            is_wanted = self._service.settings.retrieval.checkpoint is not None
            detail, seconds = ("The corpus is being loaded.", 2.0) if is_wanted else (None, None)
            raise CorpusNotLoaded(detail, retry_after_seconds=seconds)
        return cast(ServedRetrieval, served)

    def retrieve(
        self, served: ServedRetrieval, query: Query, deadline: float, key: str | None, done: FoundDone
    ) -> Ticket:
        """As `interface.Retrieval.retrieve`; the engine process decides whether there is room."""
        number = self._service.numbers.get(served)
        if number is None:
            raise CorpusNotLoaded("The corpus of this request was replaced.", retry_after_seconds=0.0)
        return self._uplink.begin("retrieve", deadline, done, number, query, deadline, key)

    async def change(self, change: PostChange) -> Changed:
        """As `interface.Retrieval.change`."""
        return cast(Changed, await self._uplink.ask("change", change))

    async def compact(self) -> Changed:
        """As `interface.Retrieval.compact`."""
        return cast(Changed, await self._uplink.ask("compact"))


class RemoteReloads:
    """`interface.Reloads` of one front: names are resolved and directories watched by the engine process."""

    def __init__(self, service: RemoteService) -> None:
        self.service = service

    def resolve(self, name: str) -> Path:
        """Return the name unchanged."""
        return Path(name)

    async def reload(self, path: Path | None = None, *, second: bool = False) -> ServedModel:
        """As `interface.Reloads.reload`, for a name below the root."""
        await self.service.uplink.ask("reload", path, second)
        held = self.service.second
        if not second:
            return self.service.model
        if held is None or held.model is None:
            raise NotReady("The second checkpoint was given up.", retry_after_seconds=0.0)
        return held.model

    async def reload_retrieval(self, checkpoint: Path | None = None, corpus: Path | None = None) -> ServedRetrieval:
        """As `interface.Reloads.reload_retrieval`, by names below the root."""
        await self.service.uplink.ask("reload_retrieval", checkpoint, corpus)
        return self.service.retrieval.served

    def reload_soon(self) -> None:
        """Do nothing: the engine process handles SIGHUP."""

    def watch(self, seconds: float) -> None:
        """Do nothing: the engine process watches."""

    def stop(self) -> None:
        """Do nothing: a front has no reload of its own."""
