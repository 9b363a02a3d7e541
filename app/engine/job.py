"""One request on one engine: its place in the queue, its work, and the callback for its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from app.engine.batching import Job
from app.errors import NonFiniteScores, ServiceError, told
from app.interface import Found, Ranked
from model.engine import CacheResult, Item, Outcome
from model.inputs import Candidates, Context, Scores
from model.retrieval.inputs import Answers, Query

log = structlog.get_logger("app.engine.job")


class Place(Protocol):
    """The part of its worker that a job uses."""

    @property
    def model(self) -> Any:
        """The loaded model: `LoadedModel` or `LoadedRetrieval`."""
        ...

    def hold(self) -> None:
        """Count one more job."""
        ...

    def leave(self) -> None:
        """Count one job less."""
        ...

    def submit(self, job: Any) -> None:
        """Queue a job whose work and `done` are set."""
        ...

    def cancel(self, job: Any) -> None:
        """Drop a job, unless it is in the running forward."""
        ...


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class QueuedJob(Job, ABC):
    """An `interface.Ticket`: a reserved place, and work once `done` is set. Used by the event loop only.

    `on_release` is called once, when the place becomes free; a job that is garbage-collected releases itself.
    """

    worker: Place
    on_release: Callable[[Any], None]
    reserved: bool = True
    done: Callable[[Any], object] | None = None
    started: float | None = None  # when its first forward began
    forward_seconds: float = 0.0
    state: Any = None  # its context's state, passed from one chunk to the next

    def release(self) -> None:
        """Free the place and drop work not yet computed. A second call does nothing."""
        if self.reserved:
            self.reserved = False
            self.on_release(self)

    def __del__(self) -> None:
        self.release()

    @abstractmethod
    def part(self, start: int, stop: int) -> Any:
        """Return candidates `start … stop - 1` as the engine takes them."""

    @abstractmethod
    def take(self, outcome: Any) -> ServiceError | None:
        """Keep the engine's outcome for the last part. Return an error to end the job."""

    @abstractmethod
    def result(self) -> Any:
        """Return the result for `done`, once all parts are computed."""

    @property
    def queue_seconds(self) -> float:
        """Seconds from its arrival to its first forward; 0 before that."""
        return 0.0 if self.started is None else self.started - self.arrived

    def finish(self, error: ServiceError | None = None) -> None:
        """Free the place and call `done` with the result or this error. Only the first call counts.

        Errors raised by `done` are logged, so that the other jobs of the batch are still answered.
        """
        done, self.done = self.done, None
        if done is None:
            return
        self.release()
        try:
            result = error or self.result()
        except Exception as fault:  # out of memory, for example
            log.error("scores_not_joined", exc_info=fault)
            result = told(fault)
        try:
            done(result)
        except Exception as fault:
            log.error("callback_failed", exc_info=fault)


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class RankJob(QueuedJob):
    """One request to rank."""

    context: Context | None = None
    items: Candidates | None = None
    scores: list[Scores] = field(default_factory=list)
    cache: CacheResult = "miss"
    handle: str = ""

    def part(self, start: int, stop: int) -> Item:
        """As `QueuedJob.part`."""
        assert self.context is not None
        assert self.items is not None
        whole = stop - start == self.candidates
        return Item(self.context, self.items if whole else self.items.chunk(start, stop), self.state, self.key or "")

    def take(self, outcome: Outcome) -> ServiceError | None:
        """As `QueuedJob.take`."""
        if not (outcome.scores.finite or outcome.scores.is_finite()):
            return NonFiniteScores()
        self.scores.append(outcome.scores)
        if not self.served:
            self.cache, self.handle = outcome.cache, outcome.handle
        self.state = outcome.state
        return None

    def result(self) -> Ranked:
        """As `QueuedJob.result`."""
        scores = self.scores[0] if len(self.scores) == 1 else Scores.concatenate(self.scores)
        assert self.context is not None
        used, dropped = len(self.context.post_ids), self.context.dropped
        return Ranked(scores, self.cache, self.queue_seconds, self.forward_seconds, self.handle, used, dropped)


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class SearchJob(QueuedJob):
    """One search. It counts as one candidate without context."""

    query: Query
    found: tuple[Answers, int] | None = None  # the answers of its batch, and its place in them

    def part(self, start: int, stop: int) -> Query:
        """As `QueuedJob.part`."""
        return self.query

    def take(self, outcome: tuple[Answers, int]) -> ServiceError | None:
        """As `QueuedJob.take`."""
        self.found = outcome
        return None

    def result(self) -> Found:
        """As `QueuedJob.result`."""
        assert self.found is not None
        answers, place = self.found
        context, seconds = self.query.context, (self.queue_seconds, answers.encode_seconds, answers.search_seconds)
        return Found(answers.retrieved[place], *seconds, len(context.post_ids), context.dropped)
