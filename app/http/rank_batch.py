"""POST /rank/batch: several requests in one call, each on its own terms. What one request goes through is in `rank`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import orjson

from app.budgets import Budget, rest_seconds
from app.errors import Overloaded, ServiceError, TooLarge
from app.http.call import Answer, Call, Endpoint, Fields, Reply, TaskCall
from app.http.headers import BATCH, by_name, check_accept
from app.http.observe import Recorder
from app.http.rank import Parsed, Prepared, Ranking, Terms
from app.http.window import Window
from app.interface import Ranked, ServedModel, ranked
from app.request.body import BatchDecoder
from app.request.wires import JSON, OBJECTS
from app.settings import Batching
from app.telemetry.exchange import Exchange

JSON_HEADER = (b"content-type", JSON)


class Ended(NamedTuple):
    """One request of a batch as it ended: its reply or problem, and what computed it.

    `again`: it was refused while others of the batch were queued, and may be tried when they are not.
    """

    body: bytes
    model: ServedModel | None = None
    ranked: Ranked | None = None
    again: Parsed[Any] | None = None


class BatchEndpoint(Endpoint):
    """Several requests. One that fails carries its own problem, and each that does not names its model."""

    def __init__(self, ranking: Ranking, recorder: Recorder, batching: Batching) -> None:
        super().__init__(recorder, "/rank/batch", ranking.limits.max_body_bytes)
        self.ranking = ranking
        self.batching = batching
        self.decoder = BatchDecoder(ranking.limits.max_batch_requests)
        self.candidates = ranking.metrics.watch_budget("batch_candidates", Budget(ranking.limits.batch_candidates))

    def begin(self, headers: Fields, reply: Reply) -> Call:
        """As `Endpoint.begin`."""
        return BatchCall(self, by_name(headers), reply)


class BatchCall(TaskCall):
    """One batch."""

    __slots__ = ("_terms",)
    _endpoint: BatchEndpoint
    _terms: Terms

    def open(self) -> None:
        """As `TaskCall.open`."""
        self.exchange.is_named_by_caller = True  # or not at all: the name of one of its requests is not the batch's
        self._terms = self._endpoint.ranking.open(self.headers, self.exchange, BATCH)
        check_accept(self.headers, JSON)

    async def reply_to(self, body: bytes | bytearray) -> Answer:
        """As `TaskCall.reply_to`."""
        endpoint, exchange, terms = self._endpoint, self.exchange, self._terms
        ranking = endpoint.ranking
        started, held = time.perf_counter(), time.thread_time()
        items, is_bare = endpoint.decoder.split(ranking.plain(body, terms))
        held = time.thread_time() - held
        exchange.stages["parse"] = time.perf_counter() - started
        exchange.requests = len(items)
        # one deadline for all, from the start
        deadline = terms.deadline or ranking.deadline(ranking.default_seconds)
        run = Run(ranking, endpoint.batching, deadline, exchange, endpoint.candidates, held, terms.wanted)
        try:
            answers = await run.all(items)
        finally:
            endpoint.candidates.give(run.candidates)
        models = [answer.model for answer in answers if answer.model is not None]
        results = [answer.ranked for answer in answers if answer.ranked is not None]
        fields = [JSON_HEADER, *ranking.headers(models[-1] if models else ranking.service.model, results, exchange)]
        whole = b"[%b]" % b",".join(answer.body for answer in answers)
        return 200, fields, whole if is_bare else b'{"results":%b}' % whole


class Run:
    """The requests of one call."""

    def __init__(
        self,
        ranking: Ranking,
        batching: Batching,
        deadline: float | None,
        exchange: Exchange,
        budget: Budget,
        held_seconds: float,
        wanted: tuple[str, str],
    ) -> None:
        self.ranking = ranking
        self.deadline = deadline
        self.exchange = exchange
        self.wanted = wanted
        self.candidates = 0  # of its requests so far; their places in the budget are given back when all is answered
        self.held_seconds = held_seconds  # of the event loop, in processor time, since the last rest
        self._budget = budget
        self._window = Window(batching)

    async def all(self, items: list[bytes]) -> list[Ended]:
        """How each of them ended, in order. Cancelling it drops what was not computed."""
        begun: list[Ended | asyncio.Task[Ended]] = []
        try:
            for item in items:
                begun.append(await self._begin(item))
                held, self.held_seconds = self.held_seconds, 0.0
                await asyncio.sleep(rest_seconds(held))  # let other callers in
            answers = [answer if isinstance(answer, Ended) else await answer for answer in begun]
            return [answer if answer.again is None else await self._alone(answer.again) for answer in answers]
        finally:
            await self._window.close()

    async def _begin(self, item: bytes) -> Ended | asyncio.Task[Ended]:
        try:
            with self._holding():
                parsed = self.ranking.decode(
                    lambda words: OBJECTS.decode(item, {}, self.ranking.limits, words), self.exchange, self.wanted
                )
            self._count(parsed.candidates)
        except ServiceError as error:
            return _failed(error)
        return await self._queue(parsed)

    async def _alone(self, parsed: Parsed[Any]) -> Ended:
        begun = await self._queue(parsed, again=True)
        return begun if isinstance(begun, Ended) else await begun

    async def _queue(self, parsed: Parsed[Any], again: bool = False) -> Ended | asyncio.Task[Ended]:
        def admit(*, again: bool, waits: bool) -> Prepared:
            with self._holding():
                terms = self.deadline, self.exchange, self.wanted
                return self.ranking.prepare(parsed, OBJECTS, *terms, again=again, waits=waits)

        try:
            job = await self._window.admit(admit, again=again)
        except ServiceError as error:
            return _failed(error)
        history = 0 if isinstance(job.context, str) else len(job.context)  # of a handle's context nothing is known here
        return self._window.begin(self._finish(job, parsed), len(job.candidates), 1 + history)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        started = time.thread_time()  # not by the clock: a busy machine holds the loop as well
        try:
            yield
        finally:
            self.held_seconds += time.thread_time() - started

    def _count(self, candidates: int) -> None:
        """Raise TooLarge or Overloaded if this call, or all calls together, would hold too many."""
        if self.candidates + candidates > self.ranking.limits.max_batch_candidates:
            raise TooLarge(f"The batch holds more than {self.ranking.limits.max_batch_candidates} candidates.")
        if not self._budget.take(candidates):
            raise Overloaded("Too many candidates of batches are being answered.", retry_after_seconds=1.0)
        self.candidates += candidates

    async def _finish(self, job: Prepared, parsed: Parsed[Any]) -> Ended:
        try:
            result = await ranked(self.ranking.service, job.ticket, job.context, job.candidates)
        except Overloaded as error:  # refused by an engine process; in a single process `prepare` raises
            return _failed(error, parsed if len(self._window) > 1 else None)
        except ServiceError as error:
            return _failed(error)
        pieces = []
        for piece in self.ranking.render(job, result, job.check_seconds, self.exchange, OBJECTS.render):
            pieces.append(piece)
            await asyncio.sleep(0)
        return Ended(b"".join(pieces), job.model, result)


def _failed(error: ServiceError, again: Parsed[Any] | None = None) -> Ended:
    return Ended(orjson.dumps({"error": error.problem()}), again=again)
