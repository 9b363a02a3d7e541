"""`POST /rank`, and what every ranking shares: from headers and bytes to scores and a reply, in the order in which things may fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from app.errors import ServiceError
from app.http.arms import ANY, HEADER, Arms, named
from app.http.call import Call, Endpoint, Fields, Reply, timings_ms
from app.http.headers import (
    RANK,
    Headers,
    KeyRing,
    Wires,
    by_name,
    check_accept,
    check_length,
    is_compressed,
    timeout_seconds_of,
    wire_of,
)
from app.http.observe import Recorder
from app.interface import Ranked, ServedModel, Service, Ticket
from app.request import body, features
from app.request.body import Typed
from app.request.codec import Codec, Packed, load_library
from app.request.coding import inflate
from app.request.reply import ROWS_IN_A_PIECE, ReplyFormat
from app.request.validate import Request
from app.request.vocabulary import Vocabulary
from app.request.wires import BINARY, LENGTH, Render, Wire, media_type
from app.settings import Limits, Settings
from app.telemetry.exchange import Exchange
from model.inputs import Candidates, Context
from weights.format.manifest import Manifest

T = TypeVar("T", bound=Typed)
MOST_WORDS = 4  # for both checkpoints and those that they replaced


@dataclass(slots=True)
class Terms:
    """What the headers of a request say. `deadline` in seconds of the service's clock, None where the caller sets none; `wanted` are
    name and version of the model that it names, empty for any."""

    wire: Wire
    deadline: float | None
    is_compressed: bool
    wanted: tuple[str, str] = ANY


class Parsed(NamedTuple, Generic[T]):
    """A decoded request, read with the vocabulary of `model` and not checked yet; `candidates` and `history` are its sizes."""

    typed: T
    candidates: int
    history: int
    model: ServedModel
    vocabulary: Vocabulary
    form: ReplyFormat


@dataclass(slots=True)
class Prepared:
    """A valid request with its place in the queue of one model version, which answers it even after a swap. `context`: or its handle."""

    model: ServedModel
    ticket: Ticket
    request: Request
    context: Context | str
    candidates: Candidates
    form: ReplyFormat
    check_seconds: float


class Words:
    """The vocabulary and the reply format of a model, with its codec, kept for the manifests used last. Models with the same words share
    a codec: what was read for one of them needs not be read again for the other."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._library = load_library()
        self._last: list[tuple[Manifest, Vocabulary, ReplyFormat]] = []

    def of(self, manifest: Manifest) -> tuple[Vocabulary, ReplyFormat]:
        """The vocabulary and the reply format of this model."""
        for known, vocabulary, form in self._last:
            if known is manifest:
                return vocabulary, form
        vocabulary = Vocabulary.of(manifest)
        codec = next((other.codec for known, other, _ in self._last if _speech(known) == _speech(manifest)), None)
        if codec is None and self._library is not None:
            codec = Codec(self._library, manifest, vocabulary, self._limits)
        vocabulary, form = replace(vocabulary, codec=codec), replace(ReplyFormat.of(manifest), codec=codec)
        self._last = [(manifest, vocabulary, form), *self._last[: MOST_WORDS - 1]]
        return vocabulary, form


class Ranking:
    """What one request and a batch share: bytes → prepared request → scores → bytes."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self.service = service
        self.limits = settings.limits
        self.default_seconds = settings.deadline.default_seconds
        self.keys = KeyRing(settings.auth)
        self.metrics = service.metrics
        self.arms = Arms(service, settings.split)
        self._words = Words(self.limits)
        self._read_last: tuple[Manifest | None, Any, Any] = None, None, None  # with its words

    def enter(self, headers: Headers, exchange: Exchange) -> None:
        """Check the API key and that the service is open."""
        exchange.key = self.keys.caller(headers)
        self.service.check_open(exchange.key)

    def open(self, headers: Headers, exchange: Exchange, wires: Wires, wanted: tuple[str, str] = ANY) -> Terms:
        """The terms of a request over HTTP whose path names this model. Refusals that need no body come here."""
        self.enter(headers, exchange)
        wire, compressed = wire_of(headers, wires), is_compressed(headers)
        check_length(headers, self.limits.max_body_bytes)
        seconds = timeout_seconds_of(headers)
        deadline = None if seconds is None else self.deadline(seconds)
        return Terms(wire, deadline, compressed, self.wanted(headers, *wanted))

    def wanted(self, headers: Headers, name: str = "", version: str = "") -> tuple[str, str]:
        """Name and version of the model that a request asks for: a version beside the name comes before the header's. Raises NotFound."""
        if HEADER in headers and not version:
            version = headers[HEADER].decode("latin-1")
        if name or version:
            named(self.service, name, version)
        return name, version

    def deadline(self, *timeouts: float | None) -> float | None:
        """The earliest of several timeouts, as a deadline from now; None if none is set."""
        seconds = [timeout for timeout in timeouts if timeout is not None]
        return self.service.clock() + min(seconds) if seconds else None

    def plain(self, body: bytes | bytearray, terms: Terms) -> bytes | bytearray:
        """The body without its content coding, no longer than the limit."""
        return inflate(body, self.limits.max_body_bytes) if terms.is_compressed else body

    def decode(self, read: Callable[[Vocabulary], T], exchange: Exchange, wanted: tuple[str, str] = ANY) -> Parsed[T]:
        """Decode one request with `read`; record how much work it asks for and how long this took."""
        started = time.perf_counter()
        model = self.service.model if wanted == ANY else named(self.service, *wanted)
        manifest, vocabulary, form = self._read_last
        if manifest is not model.manifest:
            vocabulary, form = self.words_of(model.manifest)
            self._read_last = model.manifest, vocabulary, form
        typed = read(vocabulary)
        parsed = Parsed(typed, typed.count("candidates"), typed.count("history"), model, vocabulary, form)
        exchange.candidates += parsed.candidates
        exchange.history += parsed.history
        exchange.stages["parse"] = exchange.stages.get("parse", 0.0) + time.perf_counter() - started
        return parsed

    def prepare(
        self,
        parsed: Parsed[Any],
        wire: Wire,
        deadline: float | None,
        exchange: Exchange,
        wanted: tuple[str, str] = ANY,
        *,
        again: bool = False,
        waits: bool = False,
    ) -> Prepared:
        """Admit, check, and make features. A request refused because the queue is full is not checked.

        `wanted` as in `Terms`; `again` and `waits` as of `Service.admit`.
        """
        started, typed = time.perf_counter(), parsed.typed
        model = self.model_of(parsed.vocabulary.user_of(typed.user_id) if self.arms.differ else 0, wanted)
        if typed.timeout_seconds is not None:
            deadline = min(filter(None, (deadline, self.deadline(typed.timeout_seconds))))
        ticket = self.service.admit(
            model,
            candidates=parsed.candidates,
            history=parsed.history,
            deadline=deadline,
            key=exchange.key,
            again=again,
            waits=waits,
        )
        context: Context | str
        try:
            vocabulary, form = parsed.vocabulary, parsed.form
            if model is not parsed.model:
                vocabulary, form = self.words_of(model.manifest)
            if isinstance(typed, Packed) and typed.codec is not vocabulary.codec:  # of another model
                typed = body.decode(typed.body, self.limits)
            if isinstance(typed, Packed):
                request, context, candidates = typed.unpack(model.manifest.config)
            else:
                request, config = wire.check(typed, vocabulary), model.manifest.config
                context, candidates = features.context_of(request, config), features.candidates_of(request, config)
        except BaseException:
            ticket.release()
            raise
        if request.handle is not None:
            context = request.handle
        elif len(context.post_ids) < request.history_length:
            self.metrics.history_truncated.inc()
            if len(request.history.post_ids):
                request = request.without_history()
        seconds = time.perf_counter() - started
        exchange.stages["parse"] = exchange.stages.get("parse", 0.0) + seconds
        if request.request_id is not None and not exchange.is_named_by_caller:
            exchange.request_id = request.request_id
        return Prepared(model, ticket, request, context, candidates, form, seconds)

    def model_of(self, user_id: int | str, wanted: tuple[str, str] = ANY) -> ServedModel:
        """The model that ranks for this user; `wanted` as in `Terms`. Raises NotFound or NotReady."""
        return self.arms.model(user_id, wanted) if self.arms.differ or wanted != ANY else self.service.model

    def render(
        self, job: Prepared, ranked: Ranked, parse_seconds: float, exchange: Exchange, write: Render
    ) -> Iterator[bytes]:
        """The reply to one request, in pieces: other requests should be served between those of a long one."""
        stages = {"parse": parse_seconds, "queue": ranked.queue_seconds, "forward": ranked.forward_seconds}
        for stage in ("queue", "forward"):  # requests of a batch run side by side
            exchange.stages[stage] = max(exchange.stages.get(stage, 0.0), stages[stage])
        exchange.scored.append((job.form.action_names, ranked.scores.probabilities))
        started = time.perf_counter()
        request, used = job.request, ranked.history_used
        request.handle, request.history_length = ranked.handle or None, used + ranked.history_dropped
        for piece in write(request, ranked.scores, job.form, history_used=used, timings_ms=timings_ms(stages)):
            exchange.stages["serialize"] = exchange.stages.get("serialize", 0.0) + time.perf_counter() - started
            yield piece
            started = time.perf_counter()

    def headers(self, model: ServedModel, results: Sequence[Ranked], exchange: Exchange) -> list[tuple[bytes, bytes]]:
        """Headers of a reply with scores; a context counts as a hit when all of it came from the cache."""
        cache = "hit" if results and all(ranked.cache == "hit" for ranked in results) else "miss"
        return self.told(model.manifest.version, cache, exchange, results[0].handle if len(results) == 1 else "")

    def told(self, version: str, cache: str, exchange: Exchange, handle: str = "") -> list[tuple[bytes, bytes]]:
        """Headers that name the version, the context and where the time went."""
        exchange.version, exchange.cache = version, cache
        timing = ", ".join([f"{stage};dur={seconds * 1000:.3f}" for stage, seconds in exchange.stages.items()])
        fields = [
            (b"x-model-version", version.encode()),
            (b"x-context-cache", cache.encode()),
            (b"server-timing", timing.encode()),
        ]
        if handle:
            fields.append((b"x-context", handle.encode()))
        return fields

    def words_of(self, manifest: Manifest) -> tuple[Vocabulary, ReplyFormat]:
        """The vocabulary and the reply format of a ranking model."""
        return self._words.of(manifest)


class RankEndpoint(Endpoint):
    """Makes a `RankCall` of each request."""

    def __init__(
        self,
        ranking: Ranking,
        recorder: Recorder,
        path: str = "/rank",
        wires: Wires = RANK,
        wanted: tuple[str, str] = ANY,
    ) -> None:
        """`wires` by media type of the body; `wanted` are name and version of the model that the path names."""
        super().__init__(recorder, path, ranking.limits.max_body_bytes)
        self.ranking = ranking
        self.wires = wires
        self.wanted = wanted

    def begin(self, headers: Fields, reply: Reply) -> RankCall:
        """As `Endpoint.begin`."""
        return RankCall(self, by_name(headers), reply)


class RankCall(Call):
    """One request to rank."""

    __slots__ = ("_job", "_media_type", "_terms", "ranking")

    def __init__(self, endpoint: RankEndpoint, headers: Headers, reply: Reply) -> None:
        super().__init__(endpoint, headers, reply)
        self.ranking = endpoint.ranking
        self._job: Prepared | None = None
        try:
            self._terms = self.ranking.open(headers, self.exchange, endpoint.wires, endpoint.wanted)
        except Exception as error:
            self.fail(error)

    def finish(self, body: bytes | bytearray) -> None:
        """As `Call.finish`."""
        ranking, exchange, terms = self.ranking, self.exchange, self._terms
        try:
            read = partial(terms.wire.decode, ranking.plain(body, terms), self.headers, ranking.limits)
            parsed = ranking.decode(read, exchange, terms.wanted)
            self._media_type = media_type(parsed.typed)
            check_accept(self.headers, self._media_type)
            job = self._job = ranking.prepare(parsed, terms.wire, terms.deadline, exchange, terms.wanted)
            self._tickets = (job.ticket,)
            ranking.service.rank(job.ticket, job.context, job.candidates, self._ranked)
        except Exception as error:
            self.fail(error)

    def _ranked(self, result: Ranked | ServiceError) -> None:
        job = self._job
        assert job is not None
        self._tickets = ()  # the call has ended
        if isinstance(result, ServiceError):
            self.fail(result)
        else:
            pieces = self.ranking.render(
                job, result, self.exchange.stages["parse"], self.exchange, self._terms.wire.render
            )
            self._render(job, result, pieces, [])

    def _render(self, job: Prepared, ranked: Ranked, pieces: Iterator[bytes], done: list[bytes]) -> None:
        if self._reply is None:
            return
        try:
            for piece in pieces:
                done.append(piece)
                if len(job.candidates.post_ids) > ROWS_IN_A_PIECE:  # lets other requests in between
                    asyncio.get_running_loop().call_soon(self._render, job, ranked, pieces, done)
                    return
            fields = [(b"content-type", self._media_type)]
            if self._media_type is BINARY:
                fields.append((LENGTH, b"%d" % len(done[0])))
            fields += self.ranking.headers(job.model, [ranked], self.exchange)
            self.answer(200, fields, b"".join(done))
        except Exception as error:
            self.fail(error)


def _speech(manifest: Manifest) -> tuple[Any, ...]:
    """What a codec depends on; equal for models that can share one."""
    return manifest.ids, manifest.config, manifest.action_names, manifest.continuous, manifest.score_weights
