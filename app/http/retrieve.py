"""`POST /retrieve` and `POST /recommend`: from bytes to posts, and to posts with scores, in the order in which things may fail."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from starlette.types import Receive, Scope, Send

from app.http.asgi import Watching, exchange_of, rest, send_reply
from app.http.negotiation import BATCH, check_accept
from app.http.rank import Ranking, add_seconds
from app.http.rank_batch import JSON_HEADER
from app.interface import Found, Ranked, ServedModel, ServedRetrieval, Ticket, ranked
from app.request import features, reply
from app.request.posts_body import DEFAULT_K, RecommendBody, RetrieveBody, decode_recommend, decode_retrieve
from app.request.retrieval import RetrievalRequest, check_recommend, check_retrieve, joined, render
from app.request.vocabulary import Vocabulary
from app.request.wires import JSON
from app.settings import Settings
from app.telemetry.exchange import Exchange
from model.inputs import Context, Scores
from model.retrieval.inputs import Query
from weights.format.manifest import Manifest


@dataclass(slots=True)
class Asked:
    """A valid request, on the versions that it ends on. `ticket` is its place in the ranker's queue, where there is one, and `context`
    what the ranker reads of its history."""

    served: ServedRetrieval
    request: RetrievalRequest
    query: Query
    model: ServedModel | None = None
    ticket: Ticket | None = None
    context: Context | None = None


class _Endpoint(ABC):
    """What both endpoints share. They raise ServiceError and ClientGone, which the layers around them answer."""

    def __init__(self, ranking: Ranking, settings: Settings) -> None:
        self.ranking = ranking
        self.service = ranking.service
        self.max_seconds = settings.deadline.max_seconds
        self._words: tuple[Manifest, Vocabulary] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ranking, exchange, headers = self.ranking, exchange_of(scope), dict(scope["headers"])
        terms = ranking.open(headers, exchange, BATCH)
        check_accept(headers, JSON)
        now = self.service.clock()
        deadline = now + self.service.default_deadline_seconds if terms.deadline is None else terms.deadline
        deadline = min(deadline, now + self.max_seconds)  # one for both stages
        _ = self.service.retrieval.served  # refuses before the body is read
        raw = await ranking.receive(headers, receive)
        started, held = time.perf_counter(), time.thread_time()
        try:
            asked = self.ask(ranking.plain(raw, terms), deadline, exchange)
        finally:
            del raw
            rest(scope, time.thread_time() - held)
        try:
            if asked.request.request_id is not None and not exchange.is_named_by_caller:
                exchange.request_id = asked.request.request_id
            if len(asked.query.context) < asked.request.history_length:
                ranking.metrics.history_truncated.inc()
            exchange.stages["parse"] = time.perf_counter() - started
            with Watching(receive):
                found = await self.service.retrieval.retrieve(asked.served, asked.query, deadline, exchange.key)
                exchange.stages |= {
                    "queue": found.queue_seconds, "encode": found.encode_seconds, "search": found.search_seconds
                }  # fmt: skip
                body, scored = await self.answer(asked, found, exchange)
        finally:
            if asked.ticket is not None:
                asked.ticket.release()
        await send_reply(send, 200, self._headers(asked, found, scored, exchange), body)

    @abstractmethod
    def ask(self, raw: bytes | bytearray, deadline: float, exchange: Exchange) -> Asked:
        """Decode, admit, check. Nothing is awaited here, so that a swap cannot come between."""

    @abstractmethod
    async def answer(self, asked: Asked, found: Found, exchange: Exchange) -> tuple[bytes, Ranked | None]:
        """The reply, and the ranking that it holds."""

    def vocabulary(self, manifest: Manifest) -> Vocabulary:
        """Of the retrieval model, kept for the manifest used last."""
        if self._words is None or self._words[0] is not manifest:
            self._words = (manifest, Vocabulary.of(manifest))
        return self._words[1]

    def _headers(
        self, asked: Asked, found: Found, scored: Ranked | None, exchange: Exchange
    ) -> list[tuple[bytes, bytes]]:
        model = asked.served.manifest if asked.model is None else asked.model.manifest
        exchange.version = model.version
        hit = found.posts.cached if scored is None else scored.cache == "hit"
        exchange.cache = "hit" if hit else "miss"
        for stage in ("parse", "serialize"):
            self.ranking.metrics.stage[stage].observe(exchange.stages.get(stage, 0.0))
        timing = ", ".join(f"{stage};dur={seconds * 1000:.3f}" for stage, seconds in exchange.stages.items())
        return [
            JSON_HEADER,
            (b"x-model-version", exchange.version.encode()),
            (b"x-corpus-version", asked.served.corpus.version.encode()),
            (b"x-context-cache", exchange.cache.encode()),
            (b"server-timing", timing.encode()),
        ]


class RetrieveEndpoint(_Endpoint):
    """The posts."""

    def ask(self, raw: bytes | bytearray, deadline: float, exchange: Exchange) -> Asked:
        """As `_Endpoint.ask`."""
        served = self.service.retrieval.served
        vocabulary = self.vocabulary(served.manifest)
        body = decode_retrieve(raw, self.ranking.limits, vocabulary)
        _note(exchange, body)
        request = check_retrieve(body, vocabulary)
        return Asked(served, request.without_history(), request.query(served.manifest.config))

    async def answer(self, asked: Asked, found: Found, exchange: Exchange) -> tuple[bytes, Ranked | None]:
        """As `_Endpoint.answer`."""
        started = time.perf_counter()
        stages = _timings(exchange, ("parse", "queue", "encode", "search"))
        used = len(asked.query.context)
        body = render(found.posts, asked.request, asked.served, history_used=used, timings_ms=stages)
        add_seconds(exchange, "serialize", time.perf_counter() - started)
        return body, None


class RecommendEndpoint(_Endpoint):
    """The posts, ranked: exactly what /rank says of what /retrieve returns."""

    def ask(self, raw: bytes | bytearray, deadline: float, exchange: Exchange) -> Asked:
        """As `_Endpoint.ask`. The place in the ranker's queue is taken before the search: a request that it would refuse
        costs none, and one that is admitted ends, also in a drain."""
        served, model = self.service.retrieval.served, self.service.model
        vocabularies = [self.vocabulary(served.manifest), self.ranking.words_of(model.manifest)[0]]
        body = decode_recommend(raw, self.ranking.limits, vocabularies)
        _note(exchange, body)
        count, history = body.k or DEFAULT_K, body.events
        ticket = self.service.admit(model, candidates=count, history=history, deadline=deadline, key=exchange.key)
        try:
            request = check_recommend(body, vocabularies)
            assert request.ranker is not None
            query = request.query(served.manifest.config)
            context = features.context_of(request.ranker, model.manifest.config)
            return Asked(served, request.without_history(), query, model, ticket, context)
        except BaseException:
            ticket.release()
            raise

    async def answer(self, asked: Asked, found: Found, exchange: Exchange) -> tuple[bytes, Ranked | None]:
        """As `_Endpoint.answer`."""
        assert asked.model is not None
        assert asked.ticket is not None
        assert asked.context is not None
        posts, manifest = found.posts, asked.model.manifest
        config, form = manifest.config, self.ranking.words_of(manifest)[1]
        request = asked.request.ranking(posts)
        context, scored = asked.context, None
        scores = Scores(
            *(np.empty((0, n), np.float32) for n in (config.actions, config.actions, config.continuous_actions))
        )
        if len(posts):
            self.service.shrink(asked.ticket, len(posts))
            scored = await ranked(self.service, asked.ticket, context, features.candidates_of(request, config))
            scores = scored.scores
            exchange.stages["queue"] += scored.queue_seconds
            exchange.stages["forward"] = scored.forward_seconds
            self.ranking.metrics.reply_probabilities.record(form.action_names, scores.probabilities)
        started = time.perf_counter()
        stages = _timings(exchange, ("parse", "queue", "encode", "search", "forward"))
        adds = joined(posts, asked.served, manifest)
        body = reply.render_joined(request, scores, form, adds, history_used=len(context), timings_ms=stages)
        add_seconds(exchange, "serialize", time.perf_counter() - started)
        return body, scored


def _note(exchange: Exchange, body: RetrieveBody | RecommendBody) -> None:
    exchange.candidates += body.k or DEFAULT_K
    exchange.history += body.events


def _timings(exchange: Exchange, stages: tuple[str, ...]) -> dict[str, float]:
    return {stage: round(exchange.stages.get(stage, 0.0) * 1000, 3) for stage in stages}
