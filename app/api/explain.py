"""`POST /explain`: what changes when something is left out of a request, and what the model attends to. Keys take turns, one at a time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
from fastapi import APIRouter, Depends
from msgspec import UNSET
from msgspec.json import Decoder
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from app import replies, schema
from app.api.caller import Caller, CallerInfo
from app.api.in_flight import InFlight
from app.api.route import JsonReply, Route
from app.api.state import state_of
from app.errors import DeadlineExceeded, Overloaded, TooLarge
from app.explanation import MAX_EXPLAINED, Question, render
from app.interface import Ranked, ServedModel
from app.schema import PROBLEMS, ExplainReply, ExplainRequest
from model.inputs import Candidates, Context, Scores

EXPLAIN = Decoder(ExplainRequest)
TURN_SECONDS = 0.0025
"""Roughly the time of what an explanation ranks at once."""
REST_TIMES = 2.0
"""Then it leaves the engine to others for this many times as long, until half of its time is over."""

router = APIRouter(tags=["ranking"], route_class=Route)


class Explanations:
    """One explanation runs at a time. Each key may have one that runs or waits, and they run in the order in which they came; so no key
    shuts out another. Used by the event loop only."""

    def __init__(self) -> None:
        self._keys: set[str | None] = set()  # that have one
        self._running = asyncio.Lock()  # which lets in who waits in order

    def check(self, key: str | None) -> None:
        """Raise Overloaded if this key has one; None stands for all callers where no keys are set."""
        if key in self._keys:
            raise Overloaded(
                "Another explanation of this key runs or waits; each key may have one.", retry_after_seconds=1.0
            )

    @asynccontextmanager
    async def turn(self, key: str | None, seconds: float) -> AsyncIterator[None]:
        """Hold the turn of this key. Raises Overloaded if the key has one, or if its turn does not come within so many seconds."""
        self.check(key)
        self._keys.add(key)
        try:
            try:
                async with asyncio.timeout(max(0.0, seconds)):
                    await self._running.acquire()
            except TimeoutError:
                raise Overloaded("Explanations of other keys come first.", retry_after_seconds=1.0) from None
            try:
                yield
            finally:
                self._running.release()
        finally:
            self._keys.discard(key)


async def check_no_explanation(request: Request) -> None:
    """Refuse before the body is read: first a caller without a key, then one whose key already has an explanation. Raises Unauthorized or
    Overloaded."""
    state = state_of(request)
    state.explanations.check(state.keys.caller(dict(request.scope["headers"])))


@router.post(
    "/explain",
    dependencies=[Depends(check_no_explanation)],
    openapi_extra=schema.body_of(ExplainRequest),
    response_class=Response,
    responses=schema.reply_of(ExplainReply, "Why candidates rank where they do.") | PROBLEMS,
)
async def explain(caller: Caller) -> Response:
    """Explain why candidates rank where they do: how the result changes without each history item, and what the model attends to.

    Each item costs a ranking of its own, so this can take hundreds of times as long as `/rank`. Only one call runs at a time. Each API key
    may have one that runs or waits for its turn.
    """
    state, exchange = caller.state, caller.exchange
    ranker = state.ranker
    latest = ranker.clock() + state.settings.deadline.default_seconds
    deadline = min(latest, caller.deadline)
    asked_at = time.perf_counter()
    async with state.explanations.turn(caller.key, (deadline - ranker.clock()) / 2):
        turn_seconds = exchange.passed(asked_at, {})
        model = ranker.model()
        with exchange.measured("parse"):
            caller = replace(caller, deadline=deadline, leaves_at=math.inf)  # what is computed last would be late
            question = await _question(caller, model)
        with ranker.kept(model):
            ranked, without, attention = await Explaining(caller, model, question).run()
        exchange.stages["queue"] += turn_seconds
        timings = replies.work_timings(exchange)
        with exchange.measured("serialize"):
            written: list[bytes] = []
            for piece in render(question, ranked, without, attention, timings):
                written.append(piece)
                await asyncio.sleep(0)  # let other requests in
    return JsonReply(b"".join(written), replies.headers_of(model, ranked, exchange))


async def _question(caller: CallerInfo, model: ServedModel) -> Question:
    """Read and check a request of a caller whose deadline is set. Raises MalformedJson, TooLarge, InvalidRequest, or what
    `RankingService.context` raises."""
    state, vocabulary, config = caller.state, model.vocabulary, model.manifest.config
    request = schema.read(EXPLAIN, caller.body, state.settings.limits, vocabulary.index)
    if len(request.explain) > MAX_EXPLAINED:
        raise TooLarge(f"explain: {len(request.explain)} items, but at most {MAX_EXPLAINED} are allowed.")
    caller.note(request.request_id, config, **request.sizes())
    cached = None
    if request.context is not UNSET:
        cached = await state.ranker.context(model, request.context, caller.key, caller.deadline)
    return Question.of(request, cached, vocabulary, config)


@dataclass(slots=True)
class Explaining:
    """One explanation on one model version. Each of its contexts is a request of its own to the ranker, with a place in the queue like
    any other. The caller's deadline is set."""

    caller: CallerInfo
    model: ServedModel
    question: Question
    has_begun: bool = False
    """Whether one of its contexts was admitted."""
    rated: int = 0
    """How many candidates the next context counts for in the key's rate: the first one for all, so that it is refused before any work."""
    queue_seconds: float = 0.0
    """How long the first context, that of the request itself, has waited."""

    async def run(self) -> tuple[Ranked, list[Scores], NDArray[np.float32]]:
        """Return the ranking that is explained, the scores without each of `Question.contexts`, and the attention of `render`."""
        question, exchange, ranker = self.question, self.caller.exchange, self.caller.state.ranker
        groups = question.groups(slots_matter=self.model.engine.candidate_positions == "sequential")
        without = ((context, group) for context in question.contexts() for group in groups)
        self.rated = len(question.checked.candidates) + question.left_out * len(question.explained)
        started = time.perf_counter()
        own, *others = await self._ranked(chain([(question.context, question.checked.candidates)], without))
        exchange.requests = 1 + len(others)
        computed = {"forward": time.perf_counter() - started - self.queue_seconds}
        exchange.stages |= {"queue": exchange.passed(started, computed)} | computed
        with exchange.measured("attention"):
            deadline = self.caller.deadline
            attention = [await ranker.attention(self.model, question.context, group, deadline) for group in groups]
        scores, size = [other.scores for other in others], len(groups)
        joined = [Scores.of_chunks(scores[start : start + size]) for start in range(0, len(scores), size)]
        return own, joined, np.concatenate(attention, 2)

    async def _ranked(self, work: Iterable[tuple[Context, Candidates]]) -> list[Ranked]:
        """Rank each context through the queue and the engine, a few at a time, with rests that leave the engine to others."""
        clock, deadline = self.caller.state.ranker.clock, self.caller.deadline
        ranked: list[Ranked] = []
        rest, rests_until = iter(work), (clock() + deadline) / 2
        together, took = 1, 0.0  # contexts of a turn, and seconds of the last one
        for first in rest:
            await asyncio.sleep(min(REST_TIMES * took, rests_until - clock()))
            began = time.perf_counter()
            ranked += await self._turn(chain([first], islice(rest, together - 1)))
            took = time.perf_counter() - began
            if len(ranked) == 1:
                self.queue_seconds = max(0.0, took - ranked[0].forward_seconds)
            together = max(1, together // 2 if took > TURN_SECONDS else together * 2)
        return ranked

    async def _turn(self, turn: Iterable[tuple[Context, Candidates]]) -> list[Ranked]:
        """Rank several contexts at once."""
        state, lock = self.caller.state, asyncio.Lock()
        in_flight = InFlight(state.ranker, state.settings.batching)
        begun: list[asyncio.Task[Ranked]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                for context, candidates in turn:
                    begun.append(tasks.create_task(self._one(in_flight, lock, context, candidates)))
                    await asyncio.sleep(0)  # let other requests in
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in begun]

    async def _one(self, in_flight: InFlight, lock: asyncio.Lock, context: Context, candidates: Candidates) -> Ranked:
        ranker, deadline = self.caller.state.ranker, self.caller.deadline
        rated, self.rated = self.rated, 0
        place_request = self.caller.place_request(candidates=len(candidates), history=len(context), rated=rated)

        def model() -> ServedModel:
            if self.has_begun and ranker.clock() >= deadline:
                raise DeadlineExceeded  # admission would say that it was refused on arrival, but it is under way
            return self.model

        with ExitStack() as places:
            async with lock:
                job = await in_flight.enter(places, model, place_request)
                self.has_begun = True
            return await in_flight.rank(job, place_request, context, candidates)
