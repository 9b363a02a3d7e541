"""Ranking over HTTP: one request, several in one call, and contexts computed in advance."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import orjson
from fastapi import APIRouter
from msgspec import UNSET
from msgspec.json import Decoder
from numpy.typing import NDArray
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import Response

from app import columns, replies, schema
from app.api.caller import Caller, CallerInfo, cancelled_with
from app.api.route import Route
from app.api.window import Window
from app.columns import Vocabulary, Wishes
from app.errors import MalformedJson, Overloaded, ServiceError, TooLarge, told
from app.interface import Job, Ranked, Ranker, ServedModel
from app.schema import PROBLEMS, BatchReply, BatchRequest, ContextReply, ContextRequest, RankReply, RankRequest
from app.shares import Shares
from app.telemetry.exchange import Exchange
from model.engine import CacheResult
from model.inputs import Candidates, Context

JSON = "application/json"
RANK, CONTEXT = Decoder(RankRequest), Decoder(ContextRequest)
NO_IDS, NO_NUMBERS = np.zeros(0, np.uint64), np.zeros(0, np.int64)
NO_CANDIDATES = Candidates(NO_IDS, NO_IDS, NO_NUMBERS, NO_NUMBERS)
RANKED = schema.reply_of(RankReply, "The ranking.") | PROBLEMS

router = APIRouter(tags=["ranking"], route_class=Route)


@router.post(
    "/rank", operation_id="rank", openapi_extra=schema.body_of(RankRequest), response_class=Response, responses=RANKED
)
async def rank(request: Request, caller: Caller) -> Response:
    """Rank one user's candidates. Each is scored as if it were alone: its numbers depend only on the user, the history and itself."""
    return await _rank(request, caller)


@router.post(
    "/rank/batch",
    operation_id="rank_batch",
    openapi_extra=schema.body_of(BatchRequest),
    response_class=Response,
    responses=schema.reply_of(BatchReply, "One entry for each request, in order.") | PROBLEMS,
)
async def rank_batch(request: Request, caller: Caller) -> Response:
    """Rank several requests in one call. The status is 200 even if some of them fail: those have an `error`, the others their scores."""
    state, exchange = request.app.state, caller.exchange
    exchange.is_named_by_caller = True  # so that no request of the batch names the call
    with exchange.measured("parse"):
        items, is_bare = schema.split_batch(caller.body, state.settings.limits.max_batch_requests)
    exchange.requests = len(items)
    with Batch(state, caller) as batch:
        results = await cancelled_with(request, batch.results(items))
    ranked = [each for each in results if isinstance(each, Result)]
    model = ranked[-1].model if ranked else state.ranker.model()
    cache = "hit" if ranked and all(each.cache == "hit" for each in ranked) else "miss"
    handle = ranked[0].handle if len(ranked) == 1 else ""
    body = b"[%b]" % b",".join([each.body if isinstance(each, Result) else _failed(each) for each in results])
    fields = replies.headers(model.manifest.version, cache, exchange, handle)
    return Response(body if is_bare else b'{"results":%b}' % body, media_type=JSON, headers=fields)


@router.post(
    "/rank/{name}",
    operation_id="rank_with",
    openapi_extra=schema.body_of(RankRequest),
    response_class=Response,
    responses=RANKED,
)
async def rank_with(request: Request, caller: Caller, name: str) -> Response:
    """Rank only with the checkpoint of this `name` or `name@version`; 404 if another one serves."""
    return await _rank(request, caller, name)


@router.post(
    "/context",
    operation_id="context",
    openapi_extra=schema.body_of(ContextRequest),
    response_class=Response,
    responses=schema.reply_of(ContextReply, "The handle of the context.") | PROBLEMS,
)
async def context(request: Request, caller: Caller) -> Response:
    """Compute the context of a user and a history in advance. Later requests can name it by its handle, as long as it stays in the cache
    (see 412)."""
    state, exchange = request.app.state, caller.exchange
    model: ServedModel = state.ranker.model()
    vocabulary: Vocabulary = state.vocabularies.of(model.manifest)
    with exchange.measured("parse"):
        asked = schema.read(CONTEXT, caller.body, state.settings.limits, vocabulary.index)
    exchange.history = schema.count_of(asked.history)
    with admitted(state, caller, model, candidates=0, history=exchange.history) as job:
        with exchange.measured("parse"):
            viewer = columns.context_of(asked, vocabulary, model.manifest.config)
            request_id = None if asked.request_id is UNSET else asked.request_id
            note(state, exchange, viewer, request_id)
        del asked  # as in `_rank`
        ranked = await cancelled_with(request, state.ranker.rank(job, viewer, NO_CANDIDATES))
    timings = timings_of(exchange, exchange.stages["parse"], ranked)
    with exchange.measured("serialize"):
        body = replies.context_reply(ranked, request_id, vocabulary, timings)
    return Response(body, media_type=JSON, headers=replies.headers_of(model, ranked, exchange))


async def _rank(request: Request, caller: CallerInfo, name: str = "") -> Response:
    state, exchange = request.app.state, caller.exchange
    model: ServedModel = state.ranker.model(name)
    asked = _read(state, exchange, model, caller.body)
    with admitted(state, caller, model, **asked.sizes()) as job:
        checked = _check(state, exchange, model, asked)
        del asked  # its objects take several times the memory of the columns that wait
        ranked = await cancelled_with(request, state.ranker.rank(job, checked.context, checked.candidates))
    body = _reply(state, exchange, checked, ranked, exchange.stages["parse"])
    return Response(body, media_type=JSON, headers=replies.headers_of(model, ranked, exchange))


# --- The steps of a ranking, which one request and those of a batch share --------------------------------------------------------------


@dataclass(slots=True)
class CheckedRequest:
    """A request that has been checked against one checkpoint. `context`: or its handle. `post_ids`: as they are echoed. `created_at`:
    Unix seconds, int64 `[C]`; None where nothing logs it. `endpoint`: the route that it came by."""

    model: ServedModel
    vocabulary: Vocabulary
    context: Context | str
    candidates: Candidates
    post_ids: Sequence[int | str]
    wishes: Wishes
    impression_ts: int
    created_at: NDArray[np.int64] | None
    endpoint: str = "/rank"


def _read(state: State, exchange: Exchange, model: ServedModel, body: bytes) -> RankRequest:
    """Decode a request and note its size."""
    with exchange.measured("parse"):
        asked = schema.read(RANK, body, state.settings.limits, state.vocabularies.of(model.manifest).index)
    sizes = asked.sizes()
    exchange.candidates += sizes["candidates"]
    exchange.history += sizes["history"]
    return asked


def _check(state: State, exchange: Exchange, model: ServedModel, asked: RankRequest) -> CheckedRequest:
    """Check a request against this checkpoint."""
    with exchange.measured("parse"):
        vocabulary, config = state.vocabularies.of(model.manifest), model.manifest.config
        named = None if asked.context is UNSET else asked.context
        viewer = named or columns.context_of(asked, vocabulary, config)
        candidates = columns.candidates_of(asked, vocabulary, config)
        wishes = columns.wishes_of(asked, vocabulary)
        note(state, exchange, viewer, wishes.request_id)
        if wishes.warnings:
            state.vocabularies.log_once(vocabulary, wishes.warnings)
        wishes.name = wishes.request_id or exchange.request_id
        created_at = None if state.served is None else columns.created_at_of(asked)
        sent = columns.sent_ids(asked)
        return CheckedRequest(model, vocabulary, viewer, candidates, sent, wishes, asked.impression_ts, created_at)


def note(state: State, exchange: Exchange, viewer: Context | str, request_id: str | None) -> None:
    """Take the name that a request gives itself, and count a history that did not fit."""
    if request_id is not None and not exchange.is_named_by_caller:
        exchange.request_id = request_id
    if not isinstance(viewer, str) and viewer.dropped:
        state.ranker.metrics.history_truncated.inc()


def _reply(state: State, exchange: Exchange, checked: CheckedRequest, ranked: Ranked, parse_seconds: float) -> bytes:
    """Write the reply, and have the log of what was served take it."""
    timings = timings_of(exchange, parse_seconds, ranked)
    exchange.scored.append((checked.vocabulary.action_names, ranked.scores.probabilities))
    wishes, vocabulary = checked.wishes, checked.vocabulary
    with exchange.measured("serialize"):
        placement = replies.placement_of(checked.candidates, ranked.scores, wishes, vocabulary)
        body = replies.rank_reply(checked.post_ids, ranked, placement, wishes, vocabulary, timings)
        if state.served is not None:
            state.served.record(checked, ranked, placement, exchange.key)
    return body


def timings_of(exchange: Exchange, parse_seconds: float, ranked: Ranked) -> dict[str, float]:
    """Return a reply's timings; the call's stages are those of its slowest request, since requests of a batch run side by side."""
    found = {"parse": parse_seconds, "queue": ranked.queue_seconds, "forward": ranked.forward_seconds}
    for stage in ("queue", "forward"):
        exchange.stages[stage] = max(exchange.stages.get(stage, 0.0), found[stage])
    return replies.timings_of(found)


def admitted(
    state: State, caller: CallerInfo, model: ServedModel, *, candidates: int, history: int
) -> AbstractContextManager[Job]:
    """Return `Ranker.admit` for a request of this size and this caller."""
    ranker: Ranker = state.ranker
    return ranker.admit(
        model,
        candidates=candidates,
        history=history,
        deadline=caller.deadline,
        key=caller.key,
        leaves_at=caller.leaves_at,
    )


# --- A batch ---------------------------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """One request of a batch with its scores."""

    body: bytes
    model: ServedModel
    cache: CacheResult
    handle: str


class Batch:
    """The requests of one call. Leaving it gives back its share of what all such calls together may hold."""

    def __init__(self, state: State, caller: CallerInfo) -> None:
        self._state = state
        self._limits = state.settings.limits
        self._caller = caller
        if caller.deadline is None:  # one for all requests, from the start
            deadline = state.ranker.clock() + state.settings.deadline.default_seconds
            self._caller = replace(caller, deadline=deadline)
        self._window = Window(state.ranker, state.settings.batching)
        self._turn = asyncio.Lock()
        self._candidates = 0
        self._names: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._state.batches.take(self._caller.key, -self._candidates)

    async def results(self, items: Sequence[bytes]) -> list[Result | ServiceError]:
        """Return how each request ended. Raises MalformedJson where one is no JSON, since then the body is none."""
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(self._result(place, item)) for place, item in enumerate(items)]
        found = [task.result() for task in begun]
        for each in found:
            if isinstance(each, MalformedJson):
                raise each
        return found

    async def _result(self, place: int, item: bytes) -> Result | ServiceError:
        try:
            with ExitStack() as places:
                async with self._turn:  # requests are read and admitted one by one
                    await asyncio.sleep(0)  # lets other callers in
                    checked, job, parse_seconds = await self._begin(place, item, places)
                ranked = await self._state.ranker.rank(job, checked.context, checked.candidates)
            body = _reply(self._state, self._caller.exchange, checked, ranked, parse_seconds)
        except (ServiceError, MemoryError) as error:
            return told(error)
        return Result(body, checked.model, ranked.cache, ranked.handle)

    async def _begin(self, place: int, item: bytes, places: ExitStack) -> tuple[CheckedRequest, Job, float]:
        """Read, admit and check a request; the seconds are those that it was read and checked for."""
        state, exchange = self._state, self._caller.exchange
        before = exchange.stages["parse"]
        asked = _read(state, exchange, state.ranker.model(), item)
        sizes = asked.sizes()
        self._take(sizes["candidates"])

        def admit() -> AbstractContextManager[Job]:
            return admitted(state, self._caller, state.ranker.model(), **sizes)

        job = await self._window.enter(places, admit, sizes["candidates"], 1 + sizes["history"])
        checked = _check(state, exchange, job.model, asked)  # another model may serve by now
        checked.endpoint = "/rank/batch"
        self._name(checked.wishes, place)
        return checked, job, exchange.stages["parse"] - before

    def _name(self, wishes: Wishes, place: int) -> None:
        """Give the request at this place a name that no other one of the call has. The reply tells it, unless it has a `request_id` of its
        own."""
        by_place = f"{self._caller.exchange.request_id}/{place}"
        own = wishes.request_id
        wishes.name = by_place if own is None or own in self._names else own
        while wishes.name in self._names:
            wishes.name += f"/{place}"
        self._names.add(wishes.name)
        wishes.request_id = own or wishes.name

    def _take(self, candidates: int) -> None:
        """Count them. Raises TooLarge or Overloaded where this call, its key, or all calls together would hold too many."""
        if self._candidates + candidates > self._limits.max_batch_candidates:
            raise TooLarge(f"The batch holds more than {self._limits.max_batch_candidates} candidates.")
        batches: Shares = self._state.batches
        if not batches.has_room(self._caller.key, candidates, self._candidates):
            raise Overloaded("Too many candidates of batches are being ranked.", retry_after_seconds=1.0)
        self._candidates += candidates
        batches.take(self._caller.key, candidates)


def _failed(error: ServiceError) -> bytes:
    return orjson.dumps({"error": error.problem()})
