"""Ranking over HTTP: one request, several in one call, and contexts computed in advance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple, Self

import orjson
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from msgspec.json import Decoder
from starlette.responses import Response

from app import features, replies, schema
from app.api.caller import Caller, CallerInfo
from app.api.in_flight import InFlight
from app.api.route import JsonReply, Route
from app.errors import MalformedJson, Overloaded, ServiceError, TooLarge, service_error_of
from app.features import CheckedRequest
from app.interface import Job, PlaceRequest, Ranked, ServedModel
from app.replies import Placement
from app.schema import PROBLEMS, BatchReply, BatchRequest, ContextReply, ContextRequest, RankReply, RankRequest
from app.telemetry.exchange import Exchange
from model.inputs import NO_CANDIDATES

RANK, CONTEXT = Decoder(RankRequest), Decoder(ContextRequest)
RANKED = schema.reply_of(RankReply, "The ranking.") | PROBLEMS

router = APIRouter(tags=["ranking"], route_class=Route)


@router.post(
    "/rank", operation_id="rank", openapi_extra=schema.body_of(RankRequest), response_class=Response, responses=RANKED
)
async def rank(caller: Caller) -> Response:
    """Rank one user's candidates. Each is scored as if it were alone: its numbers depend only on the user, the history and itself."""
    return await _rank(caller)


@router.post(
    "/rank/batch",
    operation_id="rank_batch",
    openapi_extra=schema.body_of(BatchRequest),
    response_class=Response,
    responses=schema.reply_of(BatchReply, "One entry for each request, in order.") | PROBLEMS,
)
async def rank_batch(caller: Caller) -> Response:
    """Rank several requests in one call. The status is 200 even if some of them fail: those have an `error`, the others their scores."""
    state, exchange = caller.state, caller.exchange
    exchange.is_named_by_caller = True  # so that no request of the batch names the call
    with exchange.measured("parse"):
        items, is_bare = schema.split_batch(caller.body, state.settings.limits.max_batch_requests)
    exchange.requests = len(items)
    with BatchCall(caller) as batch:
        results = await batch.results(items)
    ranked = [result for result in results if isinstance(result, Result)]
    model = ranked[-1].model if ranked else state.ranker.model()
    with exchange.measured("serialize"):
        for result in ranked:  # only now: a body that is no JSON is refused as a whole
            caller.note_served(result.checked, result.ranked, result.placement, result.served_us)
    cache = "hit" if ranked and all(result.ranked.cache == "hit" for result in ranked) else "miss"
    handle = ranked[0].ranked.handle if len(ranked) == 1 else ""
    bodies = [result.body if isinstance(result, Result) else _failed(result) for result in results]
    body = b"[%b]" % b",".join(bodies)
    fields = replies.headers(model.manifest.version, cache, exchange, handle)
    return JsonReply(body if is_bare else b'{"results":%b}' % body, fields)


@router.post(
    "/rank/{name}",
    operation_id="rank_with",
    openapi_extra=schema.body_of(RankRequest),
    response_class=Response,
    responses=RANKED,
)
async def rank_with(caller: Caller, name: str) -> Response:
    """Rank only with the checkpoint of this `name` or `name@version`; 404 if another one serves."""
    return await _rank(caller, name)


@router.post(
    "/context",
    operation_id="context",
    openapi_extra=schema.body_of(ContextRequest),
    response_class=Response,
    responses=schema.reply_of(ContextReply, "The handle of the context.") | PROBLEMS,
)
async def context(caller: Caller) -> Response:
    """Compute the context of a user and a history in advance. Later requests can name it by its handle, as long as it stays in the cache
    (see 412)."""
    state, exchange = caller.state, caller.exchange
    model = state.ranker.model()
    vocabulary, config = model.vocabulary, model.manifest.config
    with exchange.measured("parse"):
        context_request = schema.read(CONTEXT, caller.body, state.settings.limits, vocabulary.index)
    request_id = None if context_request.request_id is UNSET else context_request.request_id
    caller.note(request_id, config, history=schema.count_of(context_request.history))
    with state.ranker.admit(model, caller.place_request(candidates=0, history=exchange.history)) as job:
        with exchange.measured("parse", since=exchange.spans["parse"][1]):
            user = features.context_of(context_request, vocabulary, config)
        del context_request  # as in `_rank`
        asked_at = time.perf_counter()
        ranked = await state.ranker.rank(job, user, NO_CANDIDATES)
    timings = note_timings(exchange, exchange.stages["parse"], ranked, asked_at)
    with exchange.measured("serialize"):
        body = replies.context_reply(ranked, request_id, vocabulary, timings)
    return JsonReply(body, replies.headers_of(model, ranked, exchange))


async def _rank(caller: CallerInfo, name: str = "") -> Response:
    ranker, exchange = caller.state.ranker, caller.exchange
    model = ranker.model(name)
    rank_request, place_request = _read(caller, model, caller.body)
    with ranker.admit(model, place_request) as job:
        checked = _check(exchange, model, rank_request, since=exchange.spans["parse"][1])
        del rank_request  # its objects take several times the memory of the arrays that wait
        asked_at = time.perf_counter()
        ranked = await ranker.rank(job, checked.context, checked.candidates)
    body, placement = _reply(exchange, checked, ranked, exchange.stages["parse"], asked_at)
    with exchange.measured("serialize"):
        caller.note_served(checked, ranked, placement)
    return JsonReply(body, replies.headers_of(model, ranked, exchange))


# --- The steps of a ranking, which one request and those of a batch share --------------------------------------------------------------


def _read(caller: CallerInfo, model: ServedModel, body: bytes) -> tuple[RankRequest, PlaceRequest]:
    """Decode a request, the caller's body or one of a batch. Return it with its request for a place."""
    with caller.exchange.measured("parse"):
        rank_request = schema.read(RANK, body, caller.state.settings.limits, model.vocabulary.index)
    sizes = rank_request.sizes()
    caller.note(rank_request.request_id, model.manifest.config, **sizes)
    return rank_request, caller.place_request(**sizes)


def _check(
    exchange: Exchange, model: ServedModel, rank_request: RankRequest, since: float | None = None
) -> CheckedRequest:
    """Check a request against this checkpoint. `since`: when it was decoded, where its admission counts as parsing."""
    with exchange.measured("parse", since):
        return features.check(rank_request, model.vocabulary, model.manifest.config, exchange.request_id)


def _reply(
    exchange: Exchange, checked: CheckedRequest, ranked: Ranked, parse_seconds: float, asked_at: float
) -> tuple[bytes, Placement]:
    """Write the reply. Return it with the order of its candidates. `asked_at` as in `note_timings`."""
    timings = note_timings(exchange, parse_seconds, ranked, asked_at)
    with exchange.measured("serialize"):
        return replies.rank_reply(checked, ranked, timings)


def note_timings(exchange: Exchange, parse_seconds: float, ranked: Ranked, asked_at: float) -> dict[str, float]:
    """Note how long a request waited and was computed, and return its reply's timings. The ranker was asked at `asked_at`, on the clock of
    `Exchange`, and has answered just now. The call's stages are those of its slowest request, since requests of a batch run side by side.
    """
    stages, computed = exchange.stages, ranked.forward_seconds
    waited = exchange.passed(asked_at, {"forward": computed})
    stages["queue"] = max(stages.get("queue", 0.0), waited)
    stages["forward"] = max(stages.get("forward", 0.0), computed)
    return replies.timings_of({"parse": parse_seconds, "queue": waited, "forward": computed})


# --- A batch ---------------------------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """One request of a batch with its scores. `served_us`: when it was ranked, Unix microseconds."""

    body: bytes
    model: ServedModel
    checked: CheckedRequest
    ranked: Ranked
    placement: Placement
    served_us: int


class Row(NamedTuple):
    """One request of a batch that may be ranked, and for how many seconds it was read and checked."""

    checked: CheckedRequest
    job: Job
    request: PlaceRequest
    parse_seconds: float


class BatchCall:
    """The requests of one call. Leaving it gives back its share of what all such calls together may hold."""

    def __init__(self, caller: CallerInfo) -> None:
        state = self._state = caller.state
        self._limits = state.settings.limits
        self._caller = caller
        self._in_flight = InFlight(state.ranker, state.settings.batching)
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
            begun = [tasks.create_task(self._result(index, item)) for index, item in enumerate(items)]
        results = [task.result() for task in begun]
        for result in results:
            if isinstance(result, MalformedJson):
                raise result
        return results

    async def _result(self, index: int, item: bytes) -> Result | ServiceError:
        try:
            with ExitStack() as places:
                async with self._turn:  # requests are read and admitted one by one
                    await asyncio.sleep(0)  # lets other callers in
                    row = await self._begin(index, item, places)
                checked, asked_at = row.checked, time.perf_counter()
                ranked = await self._in_flight.rank(row.job, row.request, checked.context, checked.candidates)
            body, placement = _reply(self._caller.exchange, checked, ranked, row.parse_seconds, asked_at)
        except (ServiceError, MemoryError) as error:
            return service_error_of(error)
        return Result(body, row.job.model, checked, ranked, placement, time.time_ns() // 1000)

    async def _begin(self, index: int, item: bytes, places: ExitStack) -> Row:
        """Read, admit and check a request."""
        caller, ranker = self._caller, self._state.ranker
        before = caller.exchange.stages["parse"]
        rank_request, place_request = _read(caller, ranker.model(), item)
        name = self._name(rank_request.request_id, index)  # before it may be refused: a retry has the same names
        self._take(place_request.candidates)
        job = await self._in_flight.enter(places, ranker.model, place_request)
        checked = _check(caller.exchange, job.model, rank_request)  # another model may serve by now
        checked.options.name = checked.options.request_id = name
        return Row(checked, job, place_request, caller.exchange.stages["parse"] - before)

    def _name(self, own: str | UnsetType, index: int) -> str:
        """A name for the request with this index that no other one of the call has: its `request_id`, if no earlier one has got it."""
        name = f"{self._caller.exchange.request_id}/{index}" if own is UNSET else own
        while name in self._names:
            name += f"/{index}"
        self._names.add(name)
        return name

    def _take(self, candidates: int) -> None:
        """Count them. Raises TooLarge or Overloaded where this call, its key, or all calls together would hold too many."""
        if self._candidates + candidates > self._limits.max_batch_candidates:
            raise TooLarge(f"The batch holds more than {self._limits.max_batch_candidates} candidates.")
        batches = self._state.batches
        if not batches.has_room(self._caller.key, candidates, self._candidates):
            raise Overloaded("Too many candidates of batches are being ranked.", retry_after_seconds=1.0)
        self._candidates += candidates
        batches.take(self._caller.key, candidates)


def _failed(error: ServiceError) -> bytes:
    return orjson.dumps({"error": error.problem()})
