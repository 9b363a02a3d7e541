"""One admitted request on one engine: its work, and the future of its result."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import structlog

from app.errors import NonFiniteScores, ServiceError, service_error_of
from app.interface import Ranked, SearchResult, ServedModel
from app.queue.batching import Work
from model.engine import CacheResult, Item, Outcome
from model.inputs import Candidates, Context, Scores
from model.retrieval.inputs import Answers, Query

log = structlog.get_logger("app.queue.job")


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class Job(Work, ABC):
    """Work that somebody waits for. Used by the event loop only.

    `future` gets the result or a ServiceError once; it is cancelled when the waiting task is. Times are clock seconds.
    """

    future: asyncio.Future[Any]
    started: float | None = None  # when its first forward began
    forward_seconds: float = 0.0
    state: Any = None  # its context's state, passed from one chunk to the next

    @abstractmethod
    def part(self, start: int, stop: int) -> Any:
        """Return candidates `start … stop - 1` as the engine takes them."""

    @abstractmethod
    def take(self, outcome: Any) -> ServiceError | None:
        """Keep the engine's outcome of the last part. Return an error to end the job."""

    @abstractmethod
    def result(self) -> Any:
        """Return the result, once all parts are computed."""

    @property
    def is_waited_for(self) -> bool:
        """Whether somebody still waits for the result."""
        return not self.future.done()

    def finish(self) -> None:
        """Give the result to the waiting task, if there still is one."""
        if self.is_waited_for:
            try:
                result = self.result()
            except Exception as fault:  # out of memory, for example: the others of the batch get theirs
                log.error("scores_not_joined", exc_info=fault)
                self.fail(service_error_of(fault))
            else:
                self.future.set_result(result)

    def fail(self, error: ServiceError) -> None:
        """Raise this error in the waiting task, if there still is one."""
        if self.is_waited_for:
            self.future.set_exception(error)


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class RankJob(Job):
    """One request to rank, an `interface.Job`. Without candidates its context alone is computed."""

    model: ServedModel
    context: Context | None = None
    items: Candidates | None = None
    scores: list[Scores] = field(default_factory=list)
    cache: CacheResult = "miss"
    handle: str = ""

    def part(self, start: int, stop: int) -> Item:
        """Return these candidates with the context and its state, as the engine takes them."""
        assert self.context is not None
        assert self.items is not None
        whole = stop - start == self.candidates
        return Item(self.context, self.items if whole else self.items.chunk(start, stop), self.state, self.key or "")

    def take(self, outcome: Outcome) -> ServiceError | None:
        """Keep the scores of a chunk. Scores that are not finite numbers end the job."""
        if not (outcome.scores.finite or outcome.scores.is_finite()):
            return NonFiniteScores()
        self.scores.append(outcome.scores)
        if not self.computed:
            self.cache, self.handle = outcome.cache, outcome.handle
        self.state = outcome.state
        return None

    def result(self) -> Ranked:
        """Return the scores of all chunks, in the order of the candidates, with the checkpoint's calibration."""
        scores = self.scores[0] if len(self.scores) == 1 else Scores.of_chunks(self.scores)
        if (corrections := self.model.manifest.corrections) is not None:
            scores = Scores(scores.logits, corrections.probabilities(scores.logits), scores.continuous)
        assert self.context is not None
        used, dropped = len(self.context.post_ids), self.context.dropped
        return Ranked(scores, self.cache, self.forward_seconds, self.handle, used, dropped)


@dataclass(slots=True, eq=False, kw_only=True, repr=False)
class SearchJob(Job):
    """One search. It counts as one candidate without context."""

    query: Query
    outcome: tuple[Answers, int] | None = None  # the answers of its batch, and its place in them

    def part(self, start: int, stop: int) -> Query:
        """Return the query: a search has one part."""
        return self.query

    def take(self, outcome: tuple[Answers, int]) -> ServiceError | None:
        """Keep the answers of the batch and the place of this search in them."""
        self.outcome = outcome
        return None

    def result(self) -> SearchResult:
        """Return the posts, and how long they took."""
        assert self.outcome is not None
        answers, place = self.outcome
        context, seconds = self.query.context, (answers.encode_seconds, answers.search_seconds)
        return SearchResult(answers.retrieved[place], *seconds, len(context.post_ids), context.dropped)
