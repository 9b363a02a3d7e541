"""`POST /retrieve` and `POST /recommend`: from bytes to posts, and to posts with scores, in the order in which things may fail."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod

import numpy as np

from app.errors import CorpusNotLoaded, ServiceError
from app.http.arms import HEADER
from app.http.call import Call, Endpoint, Fields, Reply, timings_ms
from app.http.headers import BATCH, Headers, at_least_of, by_name, check_accept
from app.http.observe import Recorder
from app.http.rank import Ranking, Words
from app.http.rank_batch import JSON_HEADER
from app.interface import Found, Ranked, ServedModel
from app.request import reply
from app.request.reply import Joined
from app.request.retrieval import (
    Models,
    PostsRequest,
    Reading,
    check_posts,
    joined,
    read_posts,
    render,
)
from app.request.validate import Request
from app.request.wires import JSON
from app.settings import Settings
from model.inputs import Scores


class PostsEndpoint(Endpoint):
    """What both endpoints share; `call` makes a call of one request."""

    def __init__(
        self, ranking: Ranking, recorder: Recorder, settings: Settings, path: str, call: type[PostsCall]
    ) -> None:
        super().__init__(recorder, path, ranking.limits.max_body_bytes)
        self.ranking = ranking
        self.deadline = settings.deadline
        self.words = Words(ranking.limits)  # of the retrieval model
        self.call = call

    def begin(self, headers: Fields, reply: Reply) -> PostsCall:
        """As `Endpoint.begin`."""
        return self.call(self, by_name(headers), reply)


class PostsCall(Call):
    """One request for posts, answered by the versions that it began with."""

    __slots__ = ("_at_least", "_deadline", "_found", "_model", "_request", "_served", "_terms", "ranking")
    _endpoint: PostsEndpoint
    _model: ServedModel | None

    def __init__(self, endpoint: PostsEndpoint, headers: Headers, reply: Reply) -> None:
        super().__init__(endpoint, headers, reply)
        self.ranking = endpoint.ranking
        try:
            self._open()
        except Exception as error:
            self.fail(error)

    def _open(self) -> None:
        ranking, service = self.ranking, self.ranking.service
        self._terms = ranking.open(self.headers, self.exchange, BATCH)
        check_accept(self.headers, JSON)
        now, deadline = service.clock(), self._endpoint.deadline
        wanted = now + deadline.default_seconds if self._terms.deadline is None else self._terms.deadline
        self._deadline = min(wanted, now + deadline.max_seconds)  # one for both stages
        self._at_least = at_least_of(self.headers)
        _ = service.retrieval.served  # raises before the body is read

    def finish(self, body: bytes | bytearray) -> None:
        """As `Call.finish`."""
        ranking, exchange, retrieval = self.ranking, self.exchange, self.ranking.service.retrieval
        started = time.perf_counter()
        try:
            self._model = self._ranker(0)
            served = self._served = retrieval.served
            request = self._request = self._read(ranking.plain(body, self._terms))
            if request.request_id is not None and not exchange.is_named_by_caller:
                exchange.request_id = request.request_id
            if len(request.query.context.post_ids) < request.history_length:
                ranking.metrics.history_truncated.inc()
            query = request.query
            query.at_least, query.handle = self._at_least, request.handle or ""
            query.excludes_history = request.excludes_history
            exchange.stages["parse"] = time.perf_counter() - started
            search = retrieval.retrieve(served, query, self._deadline, exchange.key, self._searched)
            self._tickets += (search,)
        except Exception as error:
            self.fail(error)

    def _read(self, body: bytes | bytearray) -> PostsRequest:
        """Decode, admit, check."""
        exchange, models = self.exchange, self._models()
        typed = read_posts(body, self.ranking.limits, models)
        if (
            self.ranking.arms.differ
            and (own := self._ranker(models[-1].vocabulary.user_of(typed.user_id))) is not self._model
        ):
            self._model = own
            models = self._models()
            typed = read_posts(body, self.ranking.limits, models)
        if models[0].vocabulary.ids != models[-1].vocabulary.ids:
            raise CorpusNotLoaded("No corpus is served whose ids are of the same kind as the ranking model's.")
        posts, history = typed.posts, typed.history_length
        exchange.candidates += posts
        exchange.history += history
        self._admit(posts, history)
        return check_posts(typed, models)

    def _models(self) -> Models:
        manifest = self._served.manifest
        models = [Reading(self._endpoint.words.of(manifest)[0], manifest.config)]
        if self._model is not None:
            manifest = self._model.manifest
            models.append(Reading(self.ranking.words_of(manifest)[0], manifest.config))
        return models

    def _ranker(self, user_id: int | str) -> ServedModel | None:
        """The model that ranks the posts for this user, None for `/retrieve`. Raises NotFound or NotReady."""
        return None

    def _admit(self, posts: int, history: int) -> None:
        """Take a place in the ranker's queue, if the request needs one."""

    def _searched(self, result: Found | ServiceError) -> None:
        if isinstance(result, ServiceError):
            self.fail(result)
            return
        self.exchange.stages |= {
            "queue": result.queue_seconds,
            "encode": result.encode_seconds,
            "search": result.search_seconds,
        }
        self._found = result
        self._request.history_length = result.history_used + result.history_dropped
        try:
            self._go_on()
        except Exception as error:
            self.fail(error)

    @abstractmethod
    def _go_on(self) -> None:
        """The posts are found."""

    def _send(self, body: bytes, began: float, version: str, cached: bool, handle: str = "") -> None:
        """Reply with what was written since `began`."""
        self.exchange.stages["serialize"] = time.perf_counter() - began
        fields = self.ranking.told(version, "hit" if cached else "miss", self.exchange, handle)
        mark, corpus = self._found.posts.mark, self._served.corpus
        label = f"{corpus.label(mark)}.{mark.digest[:8]}" if mark.sequence else corpus.version
        self.answer(200, [JSON_HEADER, (b"x-corpus-version", label.encode()), *fields], body, at_once=True)


class RetrieveCall(PostsCall):
    """The posts."""

    __slots__ = ()

    def _open(self) -> None:
        self.headers = {
            name: value for name, value in self.headers.items() if name != HEADER
        }  # no ranking model is asked
        super()._open()

    def _go_on(self) -> None:
        began, posts, request = time.perf_counter(), self._found.posts, self._request
        used = self._found.history_used
        body = render(
            posts,
            request,
            self._served.manifest,
            self._served.corpus,
            history_used=used,
            timings_ms=timings_ms(self.exchange.stages),
        )
        self._send(body, began, self._served.manifest.version, posts.cached)


class RecommendCall(PostsCall):
    """The posts, ranked: exactly what /rank says of what /retrieve returns."""

    __slots__ = ("_joined", "_to_rank")

    _joined: Joined | None
    _model: ServedModel
    _to_rank: Request

    def _ranker(self, user_id: int | str) -> ServedModel | None:
        """As `PostsCall._ranker`."""
        return self.ranking.model_of(user_id, self._terms.wanted)

    def _admit(self, posts: int, history: int) -> None:
        """Called before the search: a request that the ranker would refuse costs no search, and an admitted one ends even in a drain."""
        service, key = self.ranking.service, self.exchange.key
        ticket = service.admit(self._model, candidates=posts, history=history, deadline=self._deadline, key=key)
        self._tickets = (ticket,)

    def _go_on(self) -> None:
        posts, request, service = self._found.posts, self._request, self.ranking.service
        config, self._joined = self._model.manifest.config, None
        if count := len(posts.post_ids):
            if count < request.query.k:
                service.shrink(self._tickets[0], count)
            context = request.handle or request.context
            assert context is not None
            service.rank(self._tickets[0], context, request.candidates(posts, config), self._ranked)
            asyncio.get_running_loop().call_soon(self._prepare)  # while the forward runs
        else:
            widths = config.actions, config.actions, config.continuous_actions
            nothing = Scores(*(np.empty((0, width), np.float32) for width in widths))
            self._write(nothing, cached=False, handle=request.handle or "")

    def _prepare(self) -> None:
        """Prepare the parts of the reply that do not depend on scores; a second call does nothing."""
        if self._joined is not None:
            return
        manifest = self._model.manifest
        form = self.ranking.words_of(manifest)[1]
        self._to_rank = self._request.ranking(self._found.posts)
        names = reply.names_of(self._to_rank, form)
        self._joined = joined(self._found.posts, self._served.manifest, self._served.corpus, manifest, names)

    def _ranked(self, result: Ranked | ServiceError) -> None:
        self._tickets = ()
        if isinstance(result, ServiceError):
            self.fail(result)
            return
        stages = self.exchange.stages
        stages["queue"] += result.queue_seconds
        stages["forward"] = result.forward_seconds
        try:
            self.exchange.scored.append((self._model.manifest.action_names, result.scores.probabilities))
            self._write(result.scores, cached=result.cache == "hit", handle=result.handle)
        except Exception as error:
            self.fail(error)

    def _write(self, scores: Scores, *, cached: bool, handle: str = "") -> None:
        began, manifest = time.perf_counter(), self._model.manifest
        self.exchange.stages.setdefault("forward", 0.0)
        self._prepare()  # a short forward may end before this was done
        assert self._joined is not None
        self._to_rank.handle = handle or None
        pieces = reply.render(
            self._to_rank,
            scores,
            self.ranking.words_of(manifest)[1],
            history_used=min(self._request.history_length, manifest.config.history_length),
            timings_ms=timings_ms(self.exchange.stages),
            joined=self._joined,
        )
        self._send(b"".join(pieces), began, manifest.version, cached, handle)
