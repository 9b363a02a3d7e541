"""POST /rank/batch: several requests in one call, each on its own terms. What one request goes through is in `rank`."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import orjson
from starlette.types import Receive, Scope

from app.errors import InvalidRequest, Overloaded, ServiceError, TooLarge
from app.exchange import Exchange, watching
from app.problems import problem
from app.rank import Endpoint, Job, Ranker
from app.service import LoadedModel, Ranked
from app.settings import Batching


class Part(NamedTuple):
    """One request of a batch as it ended: its reply or problem, and what computed it."""

    body: bytes
    model: LoadedModel | None = None
    ranked: Ranked | None = None


class BatchEndpoint(Endpoint):
    """A request that fails carries its own problem, and each that does not names its model."""

    def __init__(self, ranker: Ranker, batching: Batching) -> None:
        super().__init__(ranker)
        self.batching = batching

    async def answer(
        self, scope: Scope, receive: Receive, exchange: Exchange
    ) -> tuple[bytes, list[tuple[bytes, bytes]]]:
        ranker, service = self.ranker, self.ranker.service
        value, deadline = await ranker.read(scope, receive, exchange)
        items = self._items(value)
        exchange.requests = len(items)
        if deadline is None:  # one for all of them, from the start
            deadline = service.clock() + service.policies.default_deadline_seconds
        run = Run(ranker, self.batching, deadline, exchange)
        with watching(receive):
            parts = await run.all(items)
        models = [part.model for part in parts if part.model is not None]
        results = [part.ranked for part in parts if part.ranked is not None]
        headers = ranker.headers(models[-1] if models else service.model, results, exchange)
        body = b"[%b]" % b",".join(part.body for part in parts)
        return (body if type(value) is list else b'{"results":%b}' % body), headers

    def _items(self, value: Any) -> list[Any]:
        items = value.get("requests") if type(value) is dict and len(value) == 1 else value
        if type(items) is not list or not items:
            raise InvalidRequest([("requests", "must be a list of requests that is not empty, and nothing else")])
        limit = self.ranker.limits.max_batch_requests
        if len(items) > limit:
            raise TooLarge(f"requests: {len(items)}, and at most {limit} are taken.")
        return items


class Run:
    """The requests of one call. It keeps about one forward's worth in the queue, so that a batch neither fills the queue for
    others nor is refused for want of the room that it takes up itself."""

    def __init__(self, ranker: Ranker, batching: Batching, deadline: float, exchange: Exchange) -> None:
        self.ranker = ranker
        self.batching = batching
        self.deadline = deadline
        self.exchange = exchange
        self._queued: dict[asyncio.Task[Part], Job] = {}

    async def all(self, items: list[Any]) -> list[Part]:
        """How each of them ended, in order. Cancelling it drops what was not computed."""
        begun: list[Part | asyncio.Task[Part]] = []
        try:
            for item in items:
                begun.append(await self._begin(item))
                await asyncio.sleep(0)  # other callers' requests go between
            return [part if isinstance(part, Part) else await part for part in begun]
        finally:
            for task in self._queued:
                task.cancel()
            await asyncio.gather(*self._queued, return_exceptions=True)  # gone from the queue before the call is

    async def _begin(self, item: Any) -> Part | asyncio.Task[Part]:
        while True:
            while self._is_enough():
                await self._one_ends()
            try:
                job = self.ranker.prepare(item, self.deadline, self.exchange)
            except Overloaded as error:
                if not self._queued:
                    return _failed(error)
                await self._one_ends()
            except ServiceError as error:
                return _failed(error)
            else:
                task = asyncio.get_running_loop().create_task(self._finish(job))
                self._queued[task] = job
                return task

    async def _finish(self, job: Job) -> Part:
        try:
            ranked = await self.ranker.rank(job)
        except ServiceError as error:
            return _failed(error)
        return Part(await self.ranker.render(job, ranked, job.check_seconds, self.exchange), job.model, ranked)

    def _is_enough(self) -> bool:
        jobs = self._queued.values()
        return (
            sum(len(job.candidates) for job in jobs) >= self.batching.max_candidates
            or sum(1 + len(job.context) for job in jobs) >= self.batching.max_context_tokens
        )

    async def _one_ends(self) -> None:
        done, _ = await asyncio.wait(self._queued, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            del self._queued[task]


def _failed(error: ServiceError) -> Part:
    return Part(orjson.dumps({"error": problem(error)}))
