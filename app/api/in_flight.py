"""The requests of one call that are in the queue: about one forward's worth at a time, so that a call neither fills the queue for others
nor is refused because of its own requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack

from app.errors import Overloaded
from app.interface import Job, PlaceRequest, RankingService, ServedModel
from app.settings import Batching


class InFlight:
    """Of one call. Used by the event loop only, and entered by one task at a time."""

    def __init__(self, ranker: RankingService, batching: Batching) -> None:
        self._ranker = ranker
        self._batching = batching
        self._jobs = self._candidates = self._tokens = 0
        self._departures = 0  # requests that have left the queue
        self._left = asyncio.Event()

    async def enter(self, places: ExitStack, model: Callable[[], ServedModel], request: PlaceRequest) -> Job:
        """Admit one request once there is room; closing `places` frees its place. `model` returns the model that it is for, at each try.

        Raises what `RankingService.admit` describes, but Overloaded only if no request of this call is in the queue.
        """
        while True:
            while (
                self._candidates >= self._batching.max_candidates or self._tokens >= self._batching.max_context_tokens
            ):
                await self._one_leaves()
            jobs, departures = self._jobs, self._departures
            try:
                with ExitStack() as place:
                    job = place.enter_context(self._ranker.admit(model(), request))
                    await self._ranker.reserve(job)
                    places.push(place.pop_all())
            except Overloaded:
                if not jobs:
                    raise
                if (
                    self._departures == departures
                ):  # else there is room already: one left while the answer was on its way
                    await self._one_leaves()
                continue
            tokens = 1 + request.history
            self._count(1, request.candidates, tokens)
            places.callback(self._count, -1, -request.candidates, -tokens)
            return job

    def _count(self, jobs: int, candidates: int, tokens: int) -> None:
        self._jobs += jobs
        self._candidates += candidates
        self._tokens += tokens
        if jobs < 0:
            self._departures += 1
            self._left.set()

    async def _one_leaves(self) -> None:
        self._left.clear()
        await self._left.wait()
