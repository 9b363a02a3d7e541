"""The engine process: one ranker for all workers. Its own ports, where they are set, have the admin interface, probes and metrics."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from app.engine.scheduler import Scheduler
from app.errors import InternalError, NotReady, ServiceError
from app.exits import EXIT_ENGINE_LOST, EXIT_FAILED
from app.processes.link import Link
from app.processes.messages import (
    METHODS,
    Answer,
    Call,
    Cancel,
    Failed,
    FromWorker,
    Rank,
    Search,
    Served,
    State,
    decoder,
    encode,
)
from app.service.ranker import LocalRanker
from app.settings import Settings
from app.telemetry.logs import of_exception

LOOK_SECONDS = 0.01  # between two looks for a change that workers should know
SIGN_OF_LIFE_SECONDS = 1.0
REPLACED_SECONDS = 5.0  # a replaced version is kept this long for requests that workers have begun to read for it
SCRAPE_SECONDS = 1.0  # for a worker to tell its metrics; one that is stopped is left out


log = structlog.get_logger("app.processes.engine")


@dataclass(slots=True, eq=False)
class Peer:
    """A linked worker and its questions under way, by id."""

    link: Link
    number: int
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)


class EngineProcess:
    """Serves workers until a signal or the loss of the engine. Used by the event loop only."""

    def __init__(self, ranker: LocalRanker, settings: Settings) -> None:
        self.ranker = ranker
        self.settings = settings
        self.exit_code = 0
        self._peers: dict[Link, Peer] = {}
        self._peer_numbers = itertools.count(1)
        self._numbers = itertools.count(1)
        self._named: dict[Any, int] = {}  # numbers of what serves, or was replaced just now
        self._kept: dict[int, Scheduler[Any]] = {}  # held, by number
        self._state = State(ranker.health())
        self._sent_at = 0.0
        self._ended = asyncio.Event()
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "exposition": self.exposition,
            "context": lambda model, handle, key: ranker.context(self._served(model), handle, key),
            "attention": lambda model, *rest: ranker.attention(self._served(model), *rest),
            "corpus_state": ranker.corpus.state,
            "change": ranker.corpus.change,
        }
        ranker.on_fatal = self._fatal

    async def serve(self, path: str) -> int:
        """Listen on a Unix socket at `path` until the end; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        loop.add_signal_handler(signal.SIGHUP, self.ranker.reloads.reload_soon)
        server = await loop.create_unix_server(lambda: Link(FromWorker, self._take, self._made, self._lost), path)
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

    def _fatal(self, reason: str) -> None:
        self.exit_code = EXIT_ENGINE_LOST if self.ranker.health().started else EXIT_FAILED
        log.error("fatal", reason=reason)
        self._send_state()
        asyncio.get_running_loop().call_later(0.05, self._ended.set)  # waiting requests have their errors by then

    # links

    def _made(self, link: Link) -> None:
        self._peers[link] = Peer(link, next(self._peer_numbers))
        link.send(self._state)

    def _lost(self, link: Link) -> None:
        for task in self._peers.pop(link).tasks.values():
            task.cancel()

    def _take(self, link: Link, message: Any) -> None:
        peer = self._peers[link]
        if isinstance(message, Cancel):
            if (task := peer.tasks.pop(message.id, None)) is not None:
                task.cancel()
            return
        if message.id in peer.tasks:
            raise ValueError("a question with an id in use")
        if isinstance(message, Rank):
            work: Awaitable[Any] = self._rank(message)
        elif isinstance(message, Search):
            work = self._search(message)
        elif isinstance(message, Call) and message.method in METHODS:
            kinds = METHODS[message.method][0]
            work = self._methods[message.method](
                *(decoder(kind).decode(each) for kind, each in zip(kinds, message.arguments, strict=True))
            )
        else:
            raise ValueError("no question of ours")
        peer.tasks[message.id] = asyncio.get_running_loop().create_task(self._answer(peer, message.id, work))

    async def _answer(self, peer: Peer, number: int, work: Awaitable[Any]) -> None:
        try:
            peer.link.send(Answer(number, encode(await work)))
        except Exception as error:
            if not isinstance(error, ServiceError):
                log.error("fault", **of_exception(error))
            peer.link.send(Failed.of(number, error))
        finally:
            peer.tasks.pop(number, None)

    async def _rank(self, asked: Rank) -> Any:
        ranker, model = self.ranker, self._served(asked.model)
        ranker.check_open(asked.key)
        has_context = not isinstance(asked.context, str)
        asked.candidates.check(model.manifest.config)
        if has_context:
            asked.context.check(model.manifest.config)  # type: ignore[union-attr]  # native code trusts it
        history = len(asked.context) if has_context else 0
        with ranker.admit(
            model, candidates=len(asked.candidates), history=history, deadline=asked.deadline, key=asked.key
        ) as job:
            ranked = await ranker.rank(job, asked.context, asked.candidates)
        is_logged = self.settings.served.directory is not None
        return ranked if is_logged or ranked.context is None else msgspec.structs.replace(ranked, context=None)

    async def _search(self, asked: Search) -> Any:
        served = self._served(asked.corpus)
        asked.query.check(served.manifest.config)
        self.ranker.check_open(asked.key)
        return await self.ranker.corpus.search(served, asked.query, asked.deadline, asked.key)

    def _served(self, number: int) -> Any:
        scheduler = self._kept.get(number)
        if scheduler is None:
            raise NotReady("The model of this request was replaced.", retry_after_seconds=0.0)
        return scheduler.model.served

    # what workers know

    async def _keep_sending_state(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._send_state()

    def _send_state(self) -> None:
        """Send the state to all workers if it has changed, or as a sign of life."""
        ranker = self.ranker
        refusal = ranker.admission.closed(ranker.versions.running())
        model, corpus = self._described(ranker.versions.current), self._described(ranker.corpus.versions.current)
        state = State(
            ranker.health(),
            model,
            corpus,
            refusal.detail if refusal else "",
            refusal.retry_after_seconds if refusal else 0.0,
        )
        now = ranker.clock()
        is_same = _without_time(state) == _without_time(self._state)
        if is_same and now < self._sent_at + SIGN_OF_LIFE_SECONDS:
            return
        self._state, self._sent_at = state, now
        for peer in self._peers.values():
            peer.link.send(state)
        for served, number in list(self._named.items()):
            if number not in (model and model.number, corpus and corpus.number):
                del self._named[served]
                asyncio.get_running_loop().call_later(REPLACED_SECONDS, self._leave, number)

    def _described(self, scheduler: Scheduler[Any] | None) -> Served | None:
        """What serves, with its number, which a new version gets here."""
        if scheduler is None:
            return None
        served = scheduler.model.served
        if served not in self._named:
            self._named[served] = number = next(self._numbers)
            self._kept[number] = scheduler
            scheduler.hold()
        for known in (self._state.model, self._state.corpus):
            if known is not None and known.number == self._named[served]:
                return known
        return Served.of(self._named[served], served)

    def _leave(self, number: int) -> None:
        self._kept.pop(number).leave()

    # metrics

    async def exposition(self) -> bytes:
        """Every metric of this process, and those of each worker with the label `worker`."""
        peers = list(self._peers.values())
        told = await asyncio.gather(*(self._metrics_of(peer) for peer in peers))
        texts = [(peer.number, text.decode()) for peer, text in zip(peers, told, strict=True) if text]
        merged = CollectorRegistry()
        merged.register(Merged(self.ranker.metrics.registry, texts))
        return generate_latest(merged)

    async def _metrics_of(self, peer: Peer) -> bytes:
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                found: bytes = await peer.link.call("exposition")
                return found
        except (TimeoutError, ConnectionError, InternalError):
            return b""


class Merged(Collector):
    """The families of this process, with the samples of workers beside its own."""

    def __init__(self, registry: CollectorRegistry, texts: list[tuple[int, str]]) -> None:
        self._registry = registry
        self._texts = texts

    def describe(self) -> list[Metric]:
        """Nothing: registering must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Each family once."""
        families = {family.name: family for family in self._registry.collect()}
        for number, text in self._texts:
            for family in text_string_to_metric_families(text):
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    known.add_sample(sample.name, {**sample.labels, "worker": str(number)}, sample.value)
        yield from families.values()


def _without_time(state: State) -> State:
    return msgspec.structs.replace(state, retry_after_seconds=0.0)
