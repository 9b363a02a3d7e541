"""`POST /context`: a user and a history are computed ahead of the requests that name them by the handle in the reply."""

from __future__ import annotations

import time

import numpy as np

from app.errors import ServiceError
from app.http.call import Call, Endpoint, Fields, Reply, timings_ms
from app.http.headers import BATCH, Headers, check_accept
from app.http.observe import Recorder
from app.http.rank import Ranking
from app.http.rank_batch import JSON_HEADER
from app.interface import Ranked
from app.request.context import Answered, ContextAsked, read_context, render
from app.request.wires import JSON
from model.inputs import Candidates

_NUMBERS = np.empty(0, np.int64)
NOTHING = Candidates(_NUMBERS.view(np.uint64), _NUMBERS.view(np.uint64), _NUMBERS, _NUMBERS)


class ContextEndpoint(Endpoint):
    """Makes a `ContextCall` of each request."""

    def __init__(self, ranking: Ranking, recorder: Recorder) -> None:
        super().__init__(recorder, "/context", ranking.limits.max_body_bytes)
        self.ranking = ranking

    def begin(self, headers: Fields, reply: Reply) -> ContextCall:
        """As `Endpoint.begin`."""
        return ContextCall(self, dict(headers), reply)


class ContextCall(Call):
    """One context: a ranking without candidates."""

    __slots__ = ("_asked", "_model", "_terms", "ranking")

    def __init__(self, endpoint: ContextEndpoint, headers: Headers, reply: Reply) -> None:
        super().__init__(endpoint, headers, reply)
        self.ranking = endpoint.ranking
        try:
            self._terms = self.ranking.open(headers, self.exchange, BATCH)
            check_accept(headers, JSON)
        except Exception as error:
            self.fail(error)

    def finish(self, body: bytes | bytearray) -> None:
        """As `Call.finish`."""
        ranking, exchange, terms, started = self.ranking, self.exchange, self._terms, time.perf_counter()
        try:
            plain = ranking.plain(body, terms)
            self._model = ranking.model_of(0, terms.wanted)
            asked = self._read(plain)
            if (own := ranking.model_of(asked.context.user_id, terms.wanted)) is not self._model:
                self._model = own
                asked = self._read(plain)
            self._asked = asked
            exchange.history += asked.history_length
            if asked.request_id is not None and not exchange.is_named_by_caller:
                exchange.request_id = asked.request_id
            if asked.context.dropped:
                ranking.metrics.history_truncated.inc()
            ticket = ranking.service.admit(
                self._model, candidates=0, history=asked.history_length, deadline=terms.deadline, key=exchange.key
            )
            self._tickets = (ticket,)
            exchange.stages["parse"] = time.perf_counter() - started
            ranking.service.rank(ticket, asked.context, NOTHING, self._ranked)
        except Exception as error:
            self.fail(error)

    def _read(self, body: bytes | bytearray) -> ContextAsked:
        manifest = self._model.manifest
        return read_context(body, self.ranking.limits, self.ranking.words_of(manifest)[0], manifest.config)

    def _ranked(self, result: Ranked | ServiceError) -> None:
        self._tickets = ()  # it has ended
        if isinstance(result, ServiceError):
            self.fail(result)
            return
        try:
            started, stages = time.perf_counter(), self.exchange.stages
            stages |= {"queue": result.queue_seconds, "forward": result.forward_seconds}
            answered = Answered(self._asked.history_length, self._asked.request_id, result.handle or None)
            form = self.ranking.words_of(self._model.manifest)[1]
            body = render(answered, form, history_used=result.history_used, timings_ms=timings_ms(stages))
            stages["serialize"] = time.perf_counter() - started
            self.answer(200, [JSON_HEADER, *self.ranking.headers(self._model, [result], self.exchange)], body)
        except Exception as error:
            self.fail(error)
