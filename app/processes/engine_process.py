"""The engine process: one ranker for all workers. Its own ports, where they are set, have the admin interface, probes and metrics."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from app.errors import InternalError, NotReady, ServiceError
from app.exits import EXIT_ENGINE_LOST, EXIT_FAILED
from app.interface import Job, PlaceRequest, ServedModel
from app.processes.link import Link
from app.processes.messages import (
    METHODS,
    Admit,
    Answer,
    Call,
    Cancel,
    EngineState,
    Failed,
    FromWorker,
    Rank,
    Search,
    ServedNow,
    decoder,
    encode,
)
from app.queue.admission import CROWDED_SECONDS
from app.queue.scheduler import Scheduler
from app.service.local import LocalService
from app.settings import Settings
from app.telemetry.logs import of_exception

LOOK_SECONDS = 0.01  # between two looks for a change that workers should know
SIGN_OF_LIFE_SECONDS = 1.0
REPLACED_SECONDS = 5.0  # at least this long a replaced version is kept for requests that workers have read for it
SCRAPE_SECONDS = 1.0  # for a worker to tell its metrics; one that is stopped is left out
# between two log lines about the sending of the state, which is tried again every `LOOK_SECONDS`
SAME_FAULT_SECONDS = 10.0
LAST_SECONDS = 5.0  # how much longer than their drain the workers may take before this process ends without them

log = structlog.get_logger("app.processes.engine_process")


@dataclass(slots=True)
class Place:
    """The place of a request that was admitted and not ranked yet. Closing `held` frees it."""

    job: Job
    held: ExitStack


@dataclass(slots=True, eq=False)
class Peer:
    """A linked worker, with its questions under way and its reserved places by id."""

    link: Link
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)

    def forget(self, number: int) -> None:
        """Drop the question of this id, and free its place."""
        if (task := self.tasks.pop(number, None)) is not None:
            task.cancel()
        if (place := self.places.pop(number, None)) is not None:
            place.held.close()


class EngineProcess:
    """Serves workers until a signal or the loss of the engine. Used by the event loop only."""

    def __init__(
        self, ranker: LocalService, settings: Settings, on_first_worker: Callable[[], object] = lambda: None
    ) -> None:
        """`on_first_worker` is called once, when a worker is linked."""
        self.ranker = ranker
        self._on_first_worker = on_first_worker
        self.settings = settings
        self.exit_code = 0
        self._peers: dict[Link, Peer] = {}
        self._numbers = itertools.count(1)
        self._named: dict[Any, int] = {}  # numbers of what serves, or was replaced just now
        self._schedulers: dict[int, Scheduler[Any]] = {}  # held, by number
        self._state = EngineState(ranker.health())
        self._sent_at = 0.0
        self._fault_logged_at = float("-inf")
        self._ended = asyncio.Event()
        self._without_workers = asyncio.Event()
        self._without_workers.set()
        self._ending: asyncio.Task[None] | None = None
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "exposition": self.exposition,
            "context": lambda model, handle, key: ranker.context(self._served(model), handle, key, float("inf")),
            "attention": lambda model, *rest: ranker.attention(self._served(model), *rest),
            "corpus_state": ranker.corpus.state,
            "reach": self._reach,
        }
        ranker.on_fatal = self._fatal
        ranker.unreached = lambda: "" if self._peers else "No worker is linked."

    async def serve(self, path: str) -> int:
        """Listen on a Unix socket at `path` until the end; return the exit code.

        SIGTERM ends it once no worker is linked: a supervisor may send it to all processes at once, and the workers still have requests.
        """
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            # asyncio's own would be gone with the loop, before the process ends
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: loop.is_closed() or loop.call_soon_threadsafe(self.end))
            loop.add_signal_handler(signal.SIGHUP, self.ranker.reloads.reload_soon)
        server = await loop.create_unix_server(
            lambda: Link(FromWorker, self._take, self._on_open, self._on_close), path
        )
        self.ranker.start()
        look = loop.create_task(self._keep_sending_state())
        await self._ended.wait()
        if not await self.ranker.stop(self.settings.drain.timeout_seconds):
            self.exit_code = self.exit_code or EXIT_FAILED
        self._send_state()
        look.cancel()
        server.close()
        for peer in list(self._peers.values()):
            peer.link.close()
        await asyncio.sleep(0)
        return self.exit_code

    def end(self) -> None:
        """Report not ready, but serve the workers; end when the last one has gone, at the latest some time after its drain."""
        self.ranker.begin_drain()
        drain = self.settings.drain
        loop = asyncio.get_running_loop()
        self._ending = self._ending or loop.create_task(
            self._end_after_workers(drain.delay_seconds + drain.timeout_seconds + LAST_SECONDS)
        )

    async def _end_after_workers(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._without_workers.wait()
        self._ended.set()

    def _fatal(self, reason: str) -> None:
        self.exit_code = EXIT_ENGINE_LOST if self.ranker.health().started else EXIT_FAILED
        log.error("fatal", reason=reason)
        self._send_state()
        asyncio.get_running_loop().call_later(0.05, self._ended.set)  # waiting requests have their errors by then

    # links

    def _on_open(self, link: Link) -> None:
        self._on_first_worker()
        self._on_first_worker = lambda: None
        self._peers[link] = Peer(link)
        self._without_workers.clear()
        link.send(self._state)
        self._look()  # the state is another one if this is the first worker

    def _on_close(self, link: Link) -> None:
        peer = self._peers.pop(link)
        for number in [*peer.tasks, *peer.places]:
            peer.forget(number)
        if not self._peers:
            self._without_workers.set()

    def _take(self, link: Link, message: Admit | Rank | Search | Call | Cancel) -> None:
        """Begin to answer. Raises ValueError for what breaks the protocol; whatever else is wrong with a question is its own answer."""
        peer = self._peers[link]
        if isinstance(message, Cancel):
            peer.forget(message.id)
            return
        if message.id in peer.tasks or message.id in peer.places:
            raise ValueError("a question with an id in use")
        peer.tasks[message.id] = asyncio.get_running_loop().create_task(self._answer(peer, message))

    async def _answer(self, peer: Peer, question: Admit | Rank | Search | Call) -> None:
        number = question.id
        try:
            peer.link.send(Answer(number, encode(await self._result(peer, question))))
        except Exception as error:
            if not isinstance(error, ServiceError):
                log.error("fault", **of_exception(error))
            peer.link.send(Failed.of(number, error))
        finally:
            peer.tasks.pop(number, None)

    async def _result(self, peer: Peer, question: Admit | Rank | Search | Call) -> Any:
        if isinstance(question, Admit):
            return self._admit(peer, question)
        if isinstance(question, Rank):
            return await self._rank(peer, question)
        if isinstance(question, Search):
            return await self._search(question)
        kinds, _ = METHODS[question.method]
        arguments = [decoder(kind).decode(argument) for kind, argument in zip(kinds, question.arguments, strict=True)]
        return await self._methods[question.method](*arguments)

    def _admit(self, peer: Peer, question: Admit) -> None:
        model = self._served(question.model)
        peer.places[question.id] = self._place(model, question.request)

    def _place(self, model: ServedModel, request: PlaceRequest) -> Place:
        """Admit a request. Raises what `interface.RankingService.admit` describes."""
        self.ranker.check_open(request.key, request.leaves_at)
        with ExitStack() as held:
            return Place(held.enter_context(self.ranker.admit(model, request)), held.pop_all())

    async def _rank(self, peer: Peer, question: Rank) -> Any:
        place = peer.places.pop(question.place_id, None)
        if place is None and question.place_id:
            raise NotReady("The place of this request is gone.", retry_after_seconds=0.0)
        with ExitStack() as held:
            if place is not None:
                held.push(place.held)
            else:
                place = self._place(self._served(question.model), question.request)
                held.push(place.held)
            config = place.job.model.manifest.config
            question.candidates.check(config)
            if not isinstance(question.context, str):
                question.context.check(config)  # native code trusts it
            ranked = await self.ranker.rank(place.job, question.context, question.candidates)
        is_logged = self.settings.served.directory is not None
        return ranked if is_logged or ranked.context is None else msgspec.structs.replace(ranked, context=None)

    async def _search(self, question: Search) -> Any:
        served = self._served(question.corpus)
        request = question.request
        request.query.check(served.manifest.config)
        if not request.has_place:
            self.ranker.check_open(request.key, request.leaves_at)
        return await self.ranker.corpus.search(served, request)

    def _served(self, number: int) -> Any:
        scheduler = self._schedulers.get(number)
        if scheduler is None:
            raise NotReady("The model of this request was replaced.", retry_after_seconds=0.0)
        return scheduler.loaded.served

    # what workers know

    async def _reach(self, at_least: str, key: str | None, deadline: float) -> None:
        """`CorpusService.reach`. The worker is told of a corpus that has the change before it is told that one has."""
        await self.ranker.corpus.reach(at_least, key, deadline)
        self._send_state()

    async def _keep_sending_state(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._look()

    def _look(self) -> None:
        try:
            self._send_state()
        except Exception as error:  # the next look may go well; without one, workers would call this process silent
            now = asyncio.get_running_loop().time()
            if now >= self._fault_logged_at + SAME_FAULT_SECONDS:
                self._fault_logged_at = now
                log.error("state_not_sent", **of_exception(error))

    def _send_state(self) -> None:
        """Send the state to all workers if it has changed, or as a sign of life."""
        ranker = self.ranker
        now, running = ranker.clock(), ranker.versions.running()
        refusal = ranker.admission.closed(running)
        is_crowded = now < ranker.places.refused_at + CROWDED_SECONDS
        model, corpus = self._described(ranker.versions.current), self._described(ranker.corpus.versions.current)
        state = EngineState(
            ranker.health(),
            model,
            corpus,
            refusal.detail if refusal else "",
            refusal.retry_after_seconds if refusal else 0.0,
            ranker.admission.outlook(running) if is_crowded else None,
        )
        is_same = not is_crowded and _without_time(state) == _without_time(self._state)
        if is_same and now < self._sent_at + SIGN_OF_LIFE_SECONDS:
            return
        self._state, self._sent_at = state, now
        for peer in self._peers.values():
            peer.link.send(state)
        for served, number in list(self._named.items()):
            if number not in (model and model.number, corpus and corpus.number):
                del self._named[served]
                kept_seconds = max(REPLACED_SECONDS, self.settings.deadline.default_seconds)
                asyncio.get_running_loop().call_later(kept_seconds, self._leave, number)

    def _described(self, scheduler: Scheduler[Any] | None) -> ServedNow | None:
        """What serves, with its number, which a new version gets here."""
        if scheduler is None:
            return None
        served = scheduler.loaded.served
        if served not in self._named:
            self._named[served] = number = next(self._numbers)
            self._schedulers[number] = scheduler
            scheduler.hold()
        for served_before in (self._state.model, self._state.corpus):
            if served_before is not None and served_before.number == self._named[served]:
                return served_before
        return ServedNow.of(self._named[served], served)

    def _leave(self, number: int) -> None:
        self._schedulers.pop(number).leave()

    # metrics

    async def exposition(self) -> bytes:
        """Every metric of this process, and those of each worker with the label `worker`. `ranker_worker_up` says which of all workers told
        theirs."""
        told = await asyncio.gather(*(self._metrics_of(peer) for peer in list(self._peers.values())))
        texts = {number: text.decode() for number, text in filter(None, told)}
        for number in range(1, self.settings.workers + 1):
            self.ranker.metrics.worker_up.labels(str(number)).set(number in texts)
        merged = CollectorRegistry()
        merged.register(Merged(self.ranker.metrics.registry, texts))
        return generate_latest(merged)

    async def _metrics_of(self, peer: Peer) -> tuple[int, bytes] | None:
        """The number of a worker and its metrics; None where it does not answer."""
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                told: tuple[int, bytes] = await peer.link.call("worker_exposition")
                return told
        except (TimeoutError, ConnectionError, InternalError):
            return None


class Merged(Collector):
    """The families of this process, with the samples of workers beside its own."""

    def __init__(self, registry: CollectorRegistry, texts: Mapping[int, str]) -> None:
        self._registry = registry
        self._texts = texts

    def describe(self) -> list[Metric]:
        """Nothing: registering must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Each family once."""
        families = {family.name: family for family in self._registry.collect()}
        for number, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.add_sample(sample.name, {**sample.labels, "worker": str(number)}, sample.value)
        yield from families.values()


def _without_time(state: EngineState) -> EngineState:
    return msgspec.structs.replace(state, retry_after_seconds=0.0)
