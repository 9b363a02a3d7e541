"""`POST /explain`: what changes when something is left out, and what the model attends to. In the order of possible failures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from app.budgets import EXPLANATIONS, MAX_EXPLAINED, MAX_EXPLAINED_EVENTS, Budget
from app.errors import DeadlineExceeded, Overloaded
from app.http.call import Answer, Call, Endpoint, Fields, Reply, TaskCall, timings_ms
from app.http.headers import BATCH, by_name, check_accept
from app.http.observe import Recorder
from app.http.rank import Ranking, Terms
from app.http.rank_batch import JSON_HEADER
from app.http.window import Window
from app.interface import Ranked, ServedModel, ranked
from app.request import explanation, features
from app.request.body import decode
from app.request.explanation import Question
from app.request.reply import ReplyFormat
from app.request.validate import check_explain
from app.request.wires import JSON
from app.settings import Batching
from app.telemetry.exchange import Exchange
from model.inputs import Candidates, Context, Scores

TURN_SECONDS = 0.0025  # roughly the time of what an explanation ranks at once
REST_TIMES = 2.0  # then it rests this many times as long, until half of its time is over


@dataclass(frozen=True, slots=True)
class Asked:
    """A valid question on one model version."""

    model: ServedModel
    form: ReplyFormat
    question: Question
    deadline: float


class ExplainEndpoint(Endpoint):
    """Each context is a request of its own to the ranker, with a place in the queue like any other."""

    def __init__(self, ranking: Ranking, recorder: Recorder, batching: Batching, default_seconds: float) -> None:
        super().__init__(recorder, "/explain", ranking.limits.max_body_bytes)
        self.ranking = ranking
        self.service = ranking.service
        self.batching = batching
        self.default_seconds = default_seconds
        self.running = ranking.metrics.watch_budget("explanations", Budget(EXPLANATIONS))

    def begin(self, headers: Fields, reply: Reply) -> Call:
        """As `Endpoint.begin`."""
        return ExplainCall(self, by_name(headers), reply)

    def check_room(self) -> None:
        """Raises Overloaded where all places are taken."""
        if self.running.used >= self.running.limit:
            self.running.refused += 1
            wait = "As many explanations as may run at once are running."
            raise Overloaded(wait, retry_after_seconds=1.0, may_wait=True)

    async def ask(self, raw: bytes | bytearray, terms: Terms, exchange: Exchange) -> Asked:
        """Decode and check, all on the model that serves now."""
        ranking, started = self.ranking, time.perf_counter()
        limits, most = ranking.limits, MAX_EXPLAINED
        parsed = ranking.decode(lambda _: decode(raw, limits, explain=most), exchange, terms.wanted)
        body = parsed.typed
        model = ranking.arms.model(parsed.vocabulary.user_of(body.user_id), terms.wanted)
        vocabulary, form = ranking.words_of(model.manifest)
        request, explained = check_explain(body, vocabulary)
        if request.request_id is not None and not exchange.is_named_by_caller:
            exchange.request_id = request.request_id
        config = model.manifest.config
        if request.handle is not None:
            known = await self.service.context(model, request.handle, exchange.key)
            request = explanation.with_context(request, known, model.manifest)
        if request.history_length > config.history_length:
            ranking.metrics.history_truncated.inc()
        until = self.service.clock() + self.default_seconds
        exchange.stages["parse"] = time.perf_counter() - started
        return Asked(
            model,
            form,
            Question.of(request, explained, config, MAX_EXPLAINED_EVENTS),
            until if terms.deadline is None else min(until, terms.deadline),
        )

    async def answer(self, asked: Asked, exchange: Exchange) -> tuple[bytes, Ranked]:
        """The reply, and the ranking that is explained."""
        config, question = asked.model.manifest.config, asked.question
        context, everyone = (
            features.context_of(question.request, config),
            features.candidates_of(question.request, config),
        )
        slots_matter = asked.model.engine.candidate_positions == "sequential"
        explained = question.candidates(config, slots_matter=slots_matter)
        without = ((other, some) for other in question.contexts(config) for some in explained)
        started = time.perf_counter()
        own, *others = await self._ranked(asked, chain([(context, everyone)], without), exchange)
        exchange.requests = 1 + len(others)
        exchange.stages |= {"queue": own.queue_seconds, "forward": time.perf_counter() - started}
        started = time.perf_counter()
        attention = await self._attention(asked, context, explained)
        exchange.stages["attention"] = time.perf_counter() - started
        started, question.request.handle = time.perf_counter(), own.handle or None
        pieces = explanation.render(
            question,
            own.scores,
            [Scores.concatenate(each) for each in _grouped([other.scores for other in others], len(explained))],
            attention,
            asked.form,
            history_used=len(context),
            timings_ms=timings_ms(exchange.stages),
        )
        written = []
        for piece in pieces:
            written.append(piece)
            await asyncio.sleep(0)  # let other requests in
        exchange.stages["serialize"] = time.perf_counter() - started
        self.ranking.metrics.stage["attention"].observe(exchange.stages["attention"])
        return b"".join(written), own

    async def _ranked(
        self, asked: Asked, work: Iterable[tuple[Context, Candidates]], exchange: Exchange
    ) -> list[Ranked]:
        """Rank each context through the queue and the engine, a few at a time, with rests that leave the engine to others."""
        service, window = self.service, Window(self.batching)
        tasks: list[asyncio.Task[Ranked]] = []
        begun, turn, together = time.perf_counter(), 0, 1
        rests_until = (service.clock() + asked.deadline) / 2
        try:
            for context, candidates in work:
                if tasks and service.clock() >= asked.deadline:  # it has arrived in time
                    raise DeadlineExceeded
                admit = partial(
                    service.admit,
                    asked.model,
                    candidates=len(candidates),
                    history=len(context),
                    deadline=asked.deadline,
                    key=exchange.key,
                )
                ticket = await window.admit(admit)
                ranking = ranked(service, ticket, context, candidates)
                tasks.append(window.begin(ranking, len(candidates), 1 + len(context)))
                await asyncio.sleep(0)  # let other requests in
                if len(tasks) - turn >= together:
                    await asyncio.wait(tasks[turn:])
                    took, turn = time.perf_counter() - begun, len(tasks)
                    together = max(1, together // 2 if took > TURN_SECONDS else together * 2)
                    await asyncio.sleep(min(REST_TIMES * took, rests_until - service.clock()))
                    begun = time.perf_counter()
            return [await task for task in tasks]
        finally:
            await window.close()

    async def _attention(self, asked: Asked, context: Context, explained: Sequence[Candidates]) -> NDArray[np.float32]:
        """`[L, N, n, 1 + h + 1]`."""
        service, model, deadline = self.service, asked.model, asked.deadline
        return np.concatenate([await service.attention(model, context, each, deadline) for each in explained], 2)


class ExplainCall(TaskCall):
    """One explanation."""

    __slots__ = ("_terms",)
    _endpoint: ExplainEndpoint
    _terms: Terms

    def open(self) -> None:
        """As `TaskCall.open`."""
        self._terms = self._endpoint.ranking.open(self.headers, self.exchange, BATCH)
        check_accept(self.headers, JSON)
        self._endpoint.check_room()  # the place is taken with the body, so a client that sends none holds none

    async def reply_to(self, body: bytes | bytearray) -> Answer:
        """As `TaskCall.reply_to`. It takes its place before anything is read."""
        endpoint, exchange, terms = self._endpoint, self.exchange, self._terms
        endpoint.check_room()
        endpoint.running.take(1)
        try:
            asked = await endpoint.ask(endpoint.ranking.plain(body, terms), terms, exchange)
            written, result = await endpoint.answer(asked, exchange)
        finally:
            endpoint.running.give(1)
        return 200, [JSON_HEADER, *endpoint.ranking.headers(asked.model, [result], exchange)], written


def _grouped(scores: list[Scores], size: int) -> list[list[Scores]]:
    return [scores[start : start + size] for start in range(0, len(scores), size)]
