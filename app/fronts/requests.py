"""In the engine process: a front's requests given to the service, and the answers sent back."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from app.budgets import MAX_EXPLAINED
from app.errors import InternalError, Overloaded, ServiceError, told
from app.fronts import frames
from app.fronts.models import Front, Models
from app.fronts.retrieval import posts_frame, query_of
from app.interface import Found, Ranked
from app.service.service import RankingService

Keep = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]

log = structlog.get_logger("app.fronts.requests")


class Answering:
    """`interface.Ticket` of a question that a task answers."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def release(self) -> None:
        """Nobody waits for it any more."""
        self._task.cancel()


class Requests:
    """`rank`, `search` and `attend` raise ValueError for what no front of ours sends. Belongs to the event loop."""

    def __init__(self, service: RankingService, models: Models, keep: Keep, look: Callable[[], object]) -> None:
        """`keep` runs a task to its end; `look` tells fronts what has changed."""
        self._service = service
        self._models = models
        self._keep = keep
        self._look = look

    def rank(self, front: Front, frame: frames.Rank) -> None:
        """Admit and rank, or say why not."""
        model, service, number = self._models.ranking(frame.model), self._service, frame.id
        if model is None or number in front.tickets:
            raise ValueError("a request on no model, or of a number that another has")
        try:
            if not frame.waits:
                service.check_open(frame.key)
            front.tickets[number] = ticket = service.admit(
                model,
                candidates=frame.candidates,
                history=frame.history,
                deadline=frame.deadline,
                key=frame.key,
                again=frame.again,
                waits=frame.waits,
            )
        except ServiceError as error:
            fail(front, number, error)
            if isinstance(error, Overloaded):
                self._look()
        else:
            context, candidates = frames.inputs_of(frame, model.manifest.config)
            service.rank(ticket, context, candidates, functools.partial(_answer, front, number))

    def search(self, front: Front, frame: frames.Search) -> None:
        """Search the corpus, or say why not."""
        corpus, service, number = self._models.retrieving(frame.corpus), self._service, frame.id
        if corpus is None or number in front.tickets:
            raise ValueError("a search of no corpus, or of a number that another has")
        query = query_of(frame, corpus.manifest.config)
        answer = functools.partial(_answer, front, number)
        try:
            service.check_open(frame.key)
            front.tickets[number] = service.retrieval.retrieve(corpus, query, frame.deadline, frame.key, answer)
        except ServiceError as error:
            fail(front, number, error)

    def attend(self, front: Front, frame: frames.Attend) -> None:
        """Compute attention, for an explanation."""
        model, number = self._models.ranking(frame.model), frame.id
        if model is None or number in front.tickets:
            raise ValueError("a question on no model, or of a number that another has")
        if frame.candidates > MAX_EXPLAINED:
            raise ValueError("attention of more candidates than an explanation may have")
        asked = frames.inputs_of(frame, model.manifest.config)
        answer = self._attention(front, number, self._service.attention(model, *asked, frame.deadline))
        front.tickets[number] = Answering(self._keep(answer))

    def cancel(self, front: Front, frame: frames.Cancel) -> None:
        """Its caller is gone."""
        ticket = front.tickets.pop(frame.id, None)
        if ticket is not None:
            ticket.release()

    async def _attention(self, front: Front, number: int, rows: Coroutine[Any, Any, NDArray[np.float32]]) -> None:
        try:
            found = await rows
            front.link.send(frames.Attended(number, found.shape, found.tobytes()))
        except ServiceError as error:
            fail(front, number, error)
        except Exception as error:  # such as an answer that is too long for a frame
            log.error("fault", exc_info=error)
            fail(front, number, told(error))
        finally:
            front.tickets.pop(number, None)


def fail(front: Front, number: int, error: ServiceError) -> None:
    """Answer a front's request or question with an error."""
    front.link.send(frames.Failed(number, error.code, error.detail, error.retry_after_seconds))


def _answer(front: Front, number: int, result: Ranked | Found | ServiceError) -> None:
    if front.tickets.pop(number, None) is None:
        return
    if not isinstance(result, ServiceError):
        try:
            front.link.send(posts_frame(number, result) if isinstance(result, Found) else _scores(number, result))
            return
        except ValueError as error:
            log.error("answer_too_long", reason=str(error))
            result = InternalError()
    fail(front, number, result)


def _scores(number: int, ranked: Ranked) -> frames.Answer:
    scores, times = ranked.scores, (ranked.queue_seconds, ranked.forward_seconds)
    return frames.Answer(number, ranked.cache, *times, scores.finite, frames.scores_bytes(scores))
