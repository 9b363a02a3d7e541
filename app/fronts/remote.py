"""The service as a front sees it: `interface.Service` over a link to the engine process, which decides who is admitted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from app.errors import DeadlineExceeded, Draining, EngineDown, NotReady, Overloaded, ServiceError
from app.fronts import frames
from app.fronts.places import ENDED, Place, Version
from app.fronts.retrieval import RemoteRetrieval
from app.fronts.uplink import Uplink
from app.interface import Done, Health, Second, ServedModel, Ticket
from app.loop_lag import LoopClock, Work
from app.settings import Settings
from app.telemetry.metrics import Metrics
from app.telemetry.sums import Deltas
from model.inputs import Candidates, Context
from weights.format.manifest import Manifest

RETRY_AFTER_SECONDS = 2.0  # while the engine process starts
OVERRUN_RETRY_SECONDS = 1.0
SILENT_SECONDS = 4.0  # without a sign of life, of which there is one a second
SCRAPE_SECONDS = 5.0

log = structlog.get_logger("app.fronts.remote")


class RemoteService:
    """`interface.Service` of one front. All methods belong to the event loop."""

    def __init__(self, settings: Settings, path: str, front: int, metrics: Metrics) -> None:
        """`path`: of the engine process's socket."""
        self.settings = settings
        self.metrics = metrics
        self.clock = time.monotonic
        self.retrieval = RemoteRetrieval(self)
        self.on_fatal: Callable[[str], None] = lambda reason: None  # nothing here is fatal: the supervisor decides
        self.linked = asyncio.Event()  # the engine process has said how it is
        self.uplink = Uplink(path, front, Deltas(metrics.registry), self._receive, self._lose, self._down)
        self._versions: list[Version] = []  # that may still be asked for
        self._first: Version | None = None
        self._second: Version | None = None
        self._second_state = frames.SecondState(0, "The engine process is starting.", False)
        self._loop_clock = LoopClock(self.clock, self._work)
        self._state = frames.State(False, False, False, "The engine process is starting.", "", 0.0)
        self._refused = 0
        self._draining = self._refusing = self._started = False

    # life

    def start(self) -> None:
        """Keep a link to the engine process from now on; a second time does nothing."""
        self.uplink.start()

    def begin_drain(self) -> None:
        """Readiness is lost; requests are still served."""
        self._draining = True

    async def stop(self, timeout_seconds: float) -> bool:
        """Wait for what is under way, then end the link. False when the time was not enough."""
        self._draining = self._refusing = True
        until = self.clock() + timeout_seconds
        while self.uplink.asked and self.clock() < until:  # noqa: ASYNC110  # once in a life
            await asyncio.sleep(0.01)
        finished = not self.uplink.asked
        await self.uplink.stop()
        return finished

    def has_running_threads(self) -> bool:
        """None here."""
        return False

    # what the engine process says

    def _receive(self, frame: Any) -> None:
        if isinstance(frame, frames.Model):
            served = ServedModel(Manifest.from_json(frame.manifest), frame.info())
            version = Version(frame.model, served, self.uplink.link)
            self._versions.append(version)
            if frame.second:
                self._second = version
            else:
                self._first = version
            self._leave_all()
        elif isinstance(frame, frames.SecondState):
            self._second_state = frame
            if not frame.model:
                self._second = None
                self._leave_all()
        elif isinstance(frame, frames.Corpus):
            self.retrieval.serve(frame)
        else:
            self._state = frame
            self._started = self._started or frame.started
            self.linked.set()

    def _lose(self) -> None:
        """The engine process has ended: whoever waits is told at once."""
        self.linked.clear()
        self._versions.clear()
        self._first = self._second = None
        self.retrieval.lose()
        self._state = frames.State(False, True, False, ENDED, "", 0.0)
        if not self._refusing:
            log.error("engine_process_lost", requests=len(self.uplink.asked))

    def _down(self) -> ServiceError:
        kind = EngineDown if self._state.failed else NotReady
        return kind(self._state.reason, retry_after_seconds=RETRY_AFTER_SECONDS)

    # admission

    @property
    def model(self) -> ServedModel:
        """The version that serves new requests. Raises NotReady while nothing is loaded."""
        if self._first is None:
            raise NotReady(self.health().reason, retry_after_seconds=RETRY_AFTER_SECONDS)
        return self._first.served

    @property
    def second(self) -> Second | None:
        """The second checkpoint, as the engine process told last; None where none is configured."""
        if self.settings.shadow.checkpoint is None:
            return None
        state, held = self._second_state, self._second
        return Second(None if held is None else held.served, state.reason, state.answers and held is not None)

    def check_open(self, key: str | None = None) -> None:
        """Raise what any request would get now, as far as this front knows: NotReady, Draining, EngineDown or Overloaded."""
        self._check_able()
        self._loop_clock.last_request = self.clock()
        if not self._loop_clock.is_ticking:
            self._loop_clock.begin()
        under_way = len(self.uplink.asked)
        if self._loop_clock.lag.refuses(under_way):
            self._refuse("loop_overrun", "requests arrive faster than they can be answered", OVERRUN_RETRY_SECONDS)
        if self._state.closed:
            self._refuse("queue_full", self._state.closed, self._state.retry_after_seconds)
        if under_way >= self.settings.queue.max_requests or (
            self.uplink.link is not None and self.uplink.link.congested
        ):
            self._refuse("queue_full", "the queue is full", OVERRUN_RETRY_SECONDS)

    def _version(self, model: ServedModel) -> Version:
        """The number of this very model. Raises NotReady where it is gone."""
        version = next((version for version in self._versions if version.served is model), None)
        if version is None:
            raise NotReady("The model of this request was replaced.", retry_after_seconds=0.0)
        return version

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
        self._check_able()
        version = self._version(model)
        deadline = self.clock() + self.settings.deadline.default_seconds if deadline is None else deadline
        return Place(self, version, deadline, key, again, waits)

    def _check_able(self) -> None:
        if self._refusing:
            self.metrics.rejected.labels("draining").inc()
            raise Draining(retry_after_seconds=RETRY_AFTER_SECONDS)
        if self.uplink.link is None or self._state.failed:
            raise self._down()
        if self._first is None:
            self.metrics.rejected.labels("not_ready").inc()
            raise NotReady(self._state.reason, retry_after_seconds=RETRY_AFTER_SECONDS)

    def _work(self) -> Work:
        return Work(time.thread_time(), self.uplink.answered, self._refused, len(self.uplink.asked))

    def _refuse(self, reason: str, detail: str, retry_after_seconds: float) -> None:
        self._refused += 1
        self.uplink.refused += 1
        self.metrics.rejected.labels(reason).inc()
        raise Overloaded(f"Refused on arrival: {detail}.", retry_after_seconds=retry_after_seconds)

    # ranking

    def shrink(self, ticket: Ticket, candidates: int) -> None:
        """Nothing: the engine process hears how many candidates there are when they are sent."""

    def rank(self, ticket: Ticket, context: Context, candidates: Candidates, done: Done) -> None:
        """Send it; `done` is called once, later, unless the ticket is released before."""
        assert isinstance(ticket, Place)
        ticket.send(context, candidates, done)

    def is_sent(self, version: Version) -> None:
        """For a place: there is one request less to come on this model."""
        version.unsent -= 1
        self._leave(version)

    def _leave(self, version: Version) -> None:
        """Tell when the last request on a replaced model was sent: it may be freed once that is answered."""
        if not version.unsent and version in self._versions and version not in (self._first, self._second):
            self._versions.remove(version)
            self.uplink.send(frames.Left(version.number))

    def _leave_all(self) -> None:
        for version in list(self._versions):
            self._leave(version)

    async def attention(
        self, model: ServedModel, context: Context, candidates: Candidates, deadline: float
    ) -> NDArray[np.float32]:
        """What the engine process says to this question."""
        version = self._version(model)
        words, floats = frames.columns_of(context, candidates)
        told: frames.Attended = await self.uplink.ask(
            frames.Attend, version.number, deadline, None, context.user_id, len(context), len(candidates), words, floats,
            False, False, context.is_kept, candidates.first_slot, deadline=deadline,
        )  # fmt: skip
        return np.frombuffer(told.columns, np.float32).reshape(told.shape)

    # health

    def health(self) -> Health:
        """Whether requests may be sent here, and why not."""
        state, failed, reason = self._state, self._state.failed, self._state.reason
        silent = self.clock() - self.uplink.heard
        if self.uplink.link is not None and silent > SILENT_SECONDS:
            failed, reason = True, f"The engine process has been silent for {silent:.1f} s."
        if self._draining and not failed:
            reason = "The process is shutting down."
        draining = self._draining or state.draining
        return Health(ready=not reason, started=self._started, failed=failed, draining=draining, reason=reason)

    async def exposition(self) -> bytes:
        """The metrics of all processes. Raises EngineDown while the engine process, which adds them up, is gone."""
        self.uplink.tell()
        try:
            told: frames.Exposition = await self.uplink.ask(frames.Scrape, deadline=self.clock() + SCRAPE_SECONDS)
        except DeadlineExceeded:
            reason = self.health().reason or "The engine process has not told the metrics in time."
            raise EngineDown(reason, retry_after_seconds=RETRY_AFTER_SECONDS) from None
        return told.text
