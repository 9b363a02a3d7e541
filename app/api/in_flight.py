"""The requests of one call that are in the queue: about one forward's worth at a time, so that a call neither fills the queue for others
nor is refused because of its own requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from app.errors import Overloaded
from app.interface import Job, PlaceRequest, Ranked, RankingService, ServedModel
from app.settings import Batching
from model.inputs import Candidates, Context


class InFlight:
    """Of one call. Each request goes through `enter`, one at a time, and at once through `rank`. Used by the event loop only.

    A worker learns only in `rank` whether the engine process has admitted a request. So requests are sent without waiting for each other's
    admission, until one is refused. It tries again before any other enters, and from then on each request of the call reserves its place
    before the next one is sent.
    """

    def __init__(self, ranker: RankingService, batching: Batching) -> None:
        self._ranker = ranker
        self._batching = batching
        self._jobs = self._candidates = self._tokens = 0
        self._refused = 0  # requests that `rank` refused and that have no place yet
        self._reserves = False
        self._departures = 0  # requests that have left the queue
        self._changed = asyncio.Event()
        self._retry_turn = asyncio.Lock()

    async def enter(self, places: ExitStack, model: Callable[[], ServedModel], request: PlaceRequest) -> Job:
        """Admit one request once there is room; closing `places` frees its place. `model` returns the model that it is for, at each try.

        Raises what `RankingService.admit` describes, but Overloaded only if no request of this call is in the queue.
        """
        while True:
            while self._is_full() or self._refused:
                await self._change()
            departures = self._departures
            try:
                with ExitStack() as place:
                    job = place.enter_context(self._ranker.admit(model(), request))
                    if self._reserves:
                        await self._ranker.reserve(job)
                    places.push(place.pop_all())
            except Overloaded:
                if not self._may_try_again(departures):
                    raise
                await self._departure_after(departures)
            else:
                return job

    async def rank(self, job: Job, request: PlaceRequest, context: Context | str, candidates: Candidates) -> Ranked:
        """Rank the request, which has just entered with this job. Raises what `RankingService.rank` and `enter` describe."""
        departures = self._departures
        try:
            return await self._rank(job, request, context, candidates)
        except Overloaded:
            if not self._may_try_again(departures):
                raise
        self._reserves = True
        self._refused += 1
        try:
            async with self._retry_turn:
                await self._reserve(job, departures)
        finally:
            self._refused -= 1
            self._changed.set()
        return await self._rank(job, request, context, candidates)

    async def _rank(self, job: Job, request: PlaceRequest, context: Context | str, candidates: Candidates) -> Ranked:
        with self._counted(request):
            ranked: Ranked = await self._ranker.rank(job, context, candidates)
            return ranked

    async def _reserve(self, job: Job, departures: int) -> None:
        """Reserve a place for a refused job. `departures`: how many requests had left the queue before the try that was refused."""
        while True:
            await self._departure_after(departures)
            departures = self._departures
            try:
                await self._ranker.reserve(job)
            except Overloaded:
                if not self._may_try_again(departures):
                    raise
            else:
                return

    def _is_full(self) -> bool:
        """Whether the requests in the queue fill about one forward."""
        return self._candidates >= self._batching.max_candidates or self._tokens >= self._batching.max_context_tokens

    def _may_try_again(self, departures: int) -> bool:
        """Whether a refused request may find room at another try: others of the call are in the queue, or more than `departures` have left
        it."""
        return self._jobs > 0 or self._departures > departures

    async def _departure_after(self, departures: int) -> None:
        """Return once more than `departures` requests have left the queue, or none is in it."""
        while self._jobs and self._departures == departures:
            await self._change()

    @contextmanager
    def _counted(self, request: PlaceRequest) -> Iterator[None]:
        """Count a request as in the queue during the block. One that is refused has not been there."""
        tokens = 1 + request.history
        self._jobs += 1
        self._candidates += request.candidates
        self._tokens += tokens
        departed = 1
        try:
            yield
        except Overloaded:
            departed = 0
            raise
        finally:
            self._jobs -= 1
            self._candidates -= request.candidates
            self._tokens -= tokens
            self._departures += departed
            self._changed.set()

    async def _change(self) -> None:
        """Wait until a request has left the queue, or one that was refused has its place."""
        self._changed.clear()
        await self._changed.wait()
