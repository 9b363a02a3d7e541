"""The ranker as a worker sees it: `app.interface.RankingService` over a link to the engine process, which decides who is admitted."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import structlog
from numpy.typing import NDArray

from app.errors import (
    CorpusNotLoaded,
    DeadlineExceeded,
    Draining,
    EngineDown,
    ModelNotFound,
    NoCorpus,
    NotReady,
    Overloaded,
    ServiceError,
)
from app.interface import (
    CorpusState,
    Health,
    Job,
    PlaceRequest,
    Ranked,
    SearchRequest,
    SearchResult,
    ServedCorpus,
    ServedModel,
)
from app.lateness import PAST_DEADLINE, TOO_LATE
from app.processes.link import Link
from app.processes.messages import (
    MAX_BYTES,
    Admit,
    Answer,
    Call,
    Cancel,
    EngineState,
    Failed,
    FromEngine,
    Rank,
    Search,
    encode,
)
from app.queue.admission import CROWDED_SECONDS
from app.queue.batching import chunk_count
from app.settings import Settings
from app.telemetry.logs import of_exception
from app.telemetry.metrics import Metrics
from model.inputs import Candidates, Context

CONNECT_SECONDS = 0.02  # between two attempts
SOON_SECONDS, PAUSE_SECONDS = 1.0, 1.0  # a link that ends so soon is followed by the next one after this pause
RETRY_AFTER_SECONDS = 2.0  # while the engine process starts
GRACE_SECONDS = 0.25  # after a deadline, for the engine process to answer first
SILENT_SECONDS = 4.0  # the longest time without a sign of life, which comes once a second
MOST_UNREAD_BYTES = MAX_BYTES // 4  # more may not wait for an engine process that reads too slowly
SMALLEST_COST = 2  # tokens of a request: the user and one candidate
REPLACED_KEPT = 4  # models and corpora that no longer serve, for requests under way
STARTING = EngineState(Health(False, False, False, False, "The engine process is starting."))
ENDED = EngineState(Health(False, False, True, False, "The engine process has ended."))

log = structlog.get_logger("app.processes.remote")


@dataclass(slots=True, eq=False)
class RemoteJob:
    """A request that the engine process admits or refuses when it is reserved, or else when it is sent. `link` and `place_id` say
    where it is reserved; the id is 0 without a place."""

    model: ServedModel
    request: PlaceRequest
    link: Link | None = None
    place_id: int = 0


class Numbered(NamedTuple):
    """What serves, with the engine process's number for it."""

    number: int
    served: Any


class RemoteService:
    """`interface.RankingService` of one worker. Used by the event loop only."""

    def __init__(self, settings: Settings, path: str, metrics: Metrics, worker: int = 1) -> None:
        """`path` is that of the engine process's socket; `worker` is the number of this one, which its metrics and log lines have."""
        self.settings = settings
        self.metrics = metrics
        self.clock = time.monotonic
        self.on_fatal: Callable[[str], None] = lambda reason: None  # the parent decides what is fatal
        self.corpus = RemoteCorpus(self)
        self.state = STARTING
        self.linked = asyncio.Event()  # set while the engine process's state is known
        self._path = path
        self._worker = worker
        self._link: Link | None = None
        self._model: Numbered | None = None
        self._served_corpus: Numbered | None = None
        self._served: dict[int, Any] = {}  # models and corpora that serve or did lately, by number
        self._heard = 0.0
        self._questions: Counter[str | None] = Counter()  # without an answer, by API key
        self._sizes: Counter[str | None] = Counter()  # candidates and history events of those questions, by API key
        self._refused_at = float("-inf")  # clock seconds when the engine process last refused a request of this worker
        self._is_draining = self._refuses = self._has_started = False
        self._task: asyncio.Task[None] | None = None

    # life

    def start(self) -> None:
        """Keep a link to the engine process from now on. A second call does nothing."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep_linked())

    def begin_drain(self) -> None:
        """Report not ready, but keep serving requests."""
        self._is_draining = True

    async def stop(self, timeout_seconds: float) -> bool:
        """Wait for requests under way, then end the link. Return False if time ran out."""
        self._is_draining = self._refuses = True
        until = self.clock() + timeout_seconds
        while self._link is not None and self._link.questions and self.clock() < until:  # noqa: ASYNC110  # only at the end
            await asyncio.sleep(0.01)
        finished = self._link is None or not self._link.questions
        if self._task is not None:
            self._task.cancel()
        if self._link is not None:
            self._link.close()
        return finished

    def has_running_threads(self) -> bool:
        """Always False: a worker has no engine threads."""
        return False

    async def _keep_linked(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            ended = asyncio.Event()

            def on_close(link: Link, ended: asyncio.Event = ended) -> None:
                self._lose()
                ended.set()

            link = Link(FromEngine, self._take, self._on_open, on_close)
            try:
                await loop.create_unix_connection(lambda link=link: link, self._path)  # type: ignore[misc]
                made_at = self.clock()
                await ended.wait()
                if self.clock() < made_at + SOON_SECONDS:
                    await asyncio.sleep(PAUSE_SECONDS)
            except OSError:  # the engine process is starting or restarting
                pass
            except Exception as error:
                log.error("not_linked", **of_exception(error))
            await asyncio.sleep(CONNECT_SECONDS)

    def _on_open(self, link: Link) -> None:
        self._link, self._heard = link, self.clock()

    def _lose(self) -> None:
        self._link, self.state = None, ENDED
        self._model = self._served_corpus = None
        self._served.clear()
        self.linked.clear()
        if not self._refuses:
            log.error("engine_process_lost")

    def _take(self, link: Link, message: EngineState | Call | Cancel) -> None:
        self._heard = self.clock()
        if isinstance(message, Cancel):
            return  # calls are answered at once: this one has been
        if isinstance(message, Call):
            if message.method != "worker_exposition":
                raise ValueError(f"a worker has no method {message.method}")
            try:
                link.send(Answer(message.id, encode((self._worker, self.metrics.render()))))
            except ValueError as error:
                link.send(Failed.of(message.id, error))
            return
        self.state = message
        self._has_started = self._has_started or message.health.started
        if message.model is None:
            self._model = None
        elif self._model is None or self._model.number != message.model.number:
            self._model = self._numbered(message.model.number, message.model.model)
        if message.corpus is None:
            self._served_corpus = None
        elif self._served_corpus is None or self._served_corpus.number != message.corpus.number:
            self._served_corpus = self._numbered(message.corpus.number, message.corpus.served_corpus)
        self.linked.set()

    def _numbered(self, number: int, make: Callable[[], Any]) -> Numbered:
        if number not in self._served:
            self._served[number] = make()
            serving = {numbered.number for numbered in (self._model, self._served_corpus) if numbered is not None}
            for old in sorted(self._served.keys() - serving)[:-REPLACED_KEPT]:
                del self._served[old]
        return Numbered(number, self._served[number])

    # admission

    def model(self, name: str = "") -> ServedModel:
        """See `interface.RankingService.model`."""
        if self._model is None:
            raise NotReady(self.health().reason, retry_after_seconds=RETRY_AFTER_SECONDS)
        served: ServedModel = self._model.served
        manifest = served.manifest
        if name not in ("", manifest.name, f"{manifest.name}@{manifest.version}"):
            raise ModelNotFound
        return served

    def check_open(self, key: str | None, leaves_at: float = math.inf) -> None:
        """Raise what, as far as this worker knows, every request would get now. As in one process, the room is looked at only where the
        last refusal is not long ago: until then, a request that cannot be read is told so."""
        if self._refuses:
            self.metrics.rejected.labels("draining").inc()
            raise Draining(retry_after_seconds=RETRY_AFTER_SECONDS)
        health = self.health()
        if self._link is None or health.failed:
            raise self._down()
        if self._model is None:
            self.metrics.rejected.labels("not_ready").inc()
            raise NotReady(health.reason, retry_after_seconds=RETRY_AFTER_SECONDS)
        is_crowded = self.clock() < self._refused_at + CROWDED_SECONDS
        is_full = bool(self.state.closed) or self._has_too_many_questions(key)
        if self._fills_link(key, self._link) or (is_crowded and is_full):
            raise self._refused(self.state.closed or "the queue is full", max(self.state.retry_after_seconds, 0.1))
        self._check_in_time(SMALLEST_COST, 1, leaves_at)

    @contextmanager
    def admit(self, model: ServedModel, request: PlaceRequest) -> Iterator[Job]:
        """Prepare a request: the engine process admits or refuses it in `reserve`, or else in `rank`. Raises Overloaded or DeadlineExceeded
        for what it would certainly refuse because the caller leaves before: checking a request and sending it would cost more than all that
        came before."""
        cost = request.candidates + request.context_tokens(model.manifest.config.history_length)
        self._check_in_time(
            cost, chunk_count(request.candidates, self.settings.batching), request.leaves_at, request.deadline
        )
        job = RemoteJob(model, request)
        try:
            yield job
        finally:
            if job.link is not None and job.place_id:  # reserved, and not ranked to the end
                job.link.send(Cancel(job.place_id))

    def kept(self, model: ServedModel) -> AbstractContextManager[None]:
        """See `interface.RankingService.kept`."""
        return nullcontext()

    def _check_in_time(self, cost: int, chunks: int, leaves_at: float, deadline: float = math.inf) -> None:
        """Raise Overloaded where, as the engine process last told while it refused requests, a caller leaves before its reply, and
        DeadlineExceeded where its deadline passes first."""
        outlook = self.state.outlook
        if outlook is None or leaves_at == deadline == math.inf:
            return
        late_seconds = outlook.late_seconds(cost, chunks, min(leaves_at, deadline), self.clock())
        if late_seconds <= 0:
            return
        if deadline <= leaves_at:
            self.metrics.rejected.labels("deadline").inc()
            raise DeadlineExceeded(f"Refused on arrival: {PAST_DEADLINE}.", retry_after_seconds=late_seconds)
        raise self._refused(TOO_LATE, late_seconds)

    def _refused(self, detail: str, retry_after_seconds: float) -> Overloaded:
        self.metrics.rejected.labels("queue_full").inc()
        return Overloaded(f"Refused on arrival: {detail}.", retry_after_seconds=retry_after_seconds)

    def _has_too_many_questions(self, key: str | None) -> bool:
        """Whether as many questions of this key have no answer yet as it may have requests in the queue. The questions of other keys do not
        count: most of them will be refused."""
        queue = self.settings.queue
        share = 1.0 if key is None else queue.max_share_per_key
        return self._questions[key] >= share * queue.max_requests

    def _fills_link(self, key: str | None, link: Link) -> bool:
        """Whether the engine process reads more slowly than this worker writes, and this key has at least an equal part of the work under
        way: other keys do not answer for what it sends. If very much waits, the engine process does not read, and nobody may send more."""
        if not link.is_congested:
            return False
        has_large_part = key in self._sizes and self._sizes[key] * len(self._sizes) >= self._sizes.total()
        return has_large_part or link.unread_bytes > MOST_UNREAD_BYTES

    def _down(self) -> ServiceError:
        reason = self.health().reason
        kind: type[ServiceError] = EngineDown if self.state.health.failed or self._link is not None else NotReady
        return kind(reason, retry_after_seconds=RETRY_AFTER_SECONDS)

    def number_of(self, served: Any) -> int:
        """The engine process's number for a model or a corpus. Raises NotReady if it serves no more."""
        for number, model in self._served.items():
            if model is served:
                return number
        raise NotReady("The model of this request was replaced.", retry_after_seconds=0.0)

    async def ask(
        self, make: Callable[[int], Any], result: Any, deadline: float | None, key: str | None, size: int
    ) -> Any:
        """Ask the engine process on behalf of this key. `size`: how many candidates and history events the question holds. Raises
        EngineDown where the process ends, and DeadlineExceeded where it does not answer in time."""
        size += 1
        self._questions[key] += 1
        self._sizes[key] += size
        try:
            return await self._answer(lambda link: link.ask(make, result), deadline)
        finally:
            self._questions[key] -= 1
            self._sizes[key] -= size
            if not self._questions[key]:
                del self._questions[key], self._sizes[key]

    async def call(self, method: str, *arguments: Any, deadline: float | None = None) -> Any:
        """Call a method of the engine process. Raises as `ask` does."""
        return await self._answer(lambda link: link.call(method, *arguments), deadline)

    async def _answer(self, ask: Callable[[Link], Awaitable[Any]], deadline: float | None) -> Any:
        if self._link is None:
            raise self._down()
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline + GRACE_SECONDS - self.clock())):
                return await ask(self._link)
        except Overloaded:
            self._refused_at = self.clock()
            raise
        except TimeoutError:
            raise DeadlineExceeded from None
        except ConnectionError:
            raise EngineDown(ENDED.health.reason, retry_after_seconds=RETRY_AFTER_SECONDS) from None

    # ranking

    async def reserve(self, job: Job) -> None:
        """Have the engine process admit it before its work is known."""
        assert isinstance(job, RemoteJob)
        if job.place_id:
            return
        number, request, link, place_id = self.number_of(job.model), job.request, self._link, 0

        def admit(id: int) -> Admit:
            nonlocal place_id
            place_id = id
            return Admit(id, number, request)

        await self.ask(admit, None, request.deadline, request.key, size=0)
        job.link, job.place_id = link, place_id

    async def rank(self, job: Job, context: Context | str, candidates: Candidates) -> Ranked:
        """Have the engine process rank it, which admits it first unless it is reserved."""
        assert isinstance(job, RemoteJob)
        if job.link is not self._link and job.place_id:
            raise EngineDown(ENDED.health.reason, retry_after_seconds=RETRY_AFTER_SECONDS)
        number, request = self.number_of(job.model), job.request
        ranked = await self.ask(
            lambda id: Rank(id, number, context, candidates, request, job.place_id),
            Ranked,
            request.deadline,
            request.key,
            size=request.candidates + request.history,
        )
        job.place_id = 0
        return cast(Ranked, ranked)

    async def context(self, model: ServedModel, handle: str, key: str | None, deadline: float) -> Context:
        """See `interface.RankingService.context`."""
        return cast(Context, await self.call("context", self.number_of(model), handle, key, deadline=deadline))

    async def attention(
        self, model: ServedModel, context: Context, candidates: Candidates, deadline: float
    ) -> NDArray[np.float32]:
        """See `interface.RankingService.attention`."""
        attention = await self.call(
            "attention", self.number_of(model), context, candidates, deadline, deadline=deadline
        )
        return cast(NDArray[np.float32], attention)

    def health(self) -> Health:
        """Whether requests may be sent here, and why not."""
        engine_health = self.state.health
        failed, reason = engine_health.failed, engine_health.reason
        silent = self.clock() - self._heard
        if self._link is not None and silent > SILENT_SECONDS:
            failed, reason = True, f"The engine process has been silent for {silent:.1f} s."
        if self._is_draining and not failed:
            reason = "The process is shutting down."
        return Health(
            not reason,
            self._has_started,
            failed,
            self._is_draining or engine_health.draining,
            reason,
            engine_health.feed,
        )

    async def exposition(self) -> bytes:
        """The metrics of all processes. Raises EngineDown while the engine process is gone."""
        return cast(bytes, await self.call("exposition", deadline=self.clock() + SILENT_SECONDS))

    @property
    def served_corpus(self) -> ServedCorpus | None:
        """The corpus that serves, with its retrieval checkpoint, as last told."""
        return None if self._served_corpus is None else cast(ServedCorpus, self._served_corpus.served)


class RemoteCorpus:
    """`interface.CorpusService` of one worker. Used by the event loop only."""

    def __init__(self, ranker: RemoteService) -> None:
        self._ranker = ranker

    @property
    def served(self) -> ServedCorpus:
        """See `interface.CorpusService.served`."""
        served = self._ranker.served_corpus
        if served is None:
            if self._ranker.settings.retrieval.checkpoint is None:
                raise NoCorpus
            raise CorpusNotLoaded(retry_after_seconds=RETRY_AFTER_SECONDS)
        return served

    async def reach(self, at_least: str, key: str | None, deadline: float) -> None:
        """See `interface.CorpusService.reach`."""
        await self._ranker.call("reach", at_least, key, deadline, deadline=deadline)

    async def search(self, served: ServedCorpus, request: SearchRequest) -> SearchResult:
        """See `interface.CorpusService.search`."""
        number = self._ranker.number_of(served)
        result = await self._ranker.ask(
            lambda id: Search(id, number, request),
            SearchResult,
            request.deadline,
            request.key,
            size=len(request.query.context),
        )
        return cast(SearchResult, result)

    async def state(self) -> CorpusState | None:
        """See `interface.CorpusService.state`."""
        return cast(
            CorpusState | None, await self._ranker.call("corpus_state", deadline=self._ranker.clock() + SILENT_SECONDS)
        )
