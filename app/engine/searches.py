"""The queue of searches: fair between keys, batches that share one scan, short ones computed at once and others in a thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import structlog

from app.budgets import Budget
from app.engine.loading import LoadedRetrieval
from app.engine.tell import tell
from app.errors import DeadlineExceeded, EngineDown, Overloaded, ServiceError
from app.interface import Found, FoundDone
from app.scheduling.forecast import ForwardTime
from app.scheduling.job import Clock
from app.settings import Settings
from app.telemetry.metrics import Metrics
from model.retrieval.inputs import Answers, Query

RETRIEVAL_THREAD = "retrieval"
SMOOTHING = 0.2  # share of the newest batch in the mean of their times

SHORT_SECONDS = 1e-3
"""A batch predicted to take less is computed in the event loop. Most of it is Python, so in another thread it would hold the
interpreter lock all the same, and the hand-over there and back adds two switches between threads."""

T = TypeVar("T")

log = structlog.get_logger("app.engine.searches")


@dataclass(slots=True, eq=False, repr=False)
class Version:
    """What one swap brought. `places`: searches that wait for it and batches that run on it; `retired`: another serves."""

    loaded: LoadedRetrieval
    places: int = 0
    retired: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Search:
    """One request, an `interface.Ticket`. Its text would hold all that it leads to, the corpus included."""

    queue: Searches
    query: Query
    version: Version
    key: str | None
    arrived: float
    done: FoundDone | None  # None once it has ended
    timer: asyncio.TimerHandle | None = None

    def release(self) -> None:
        """As `Ticket.release`."""
        self.queue.drop(self)

    def finish(self, result: Found | ServiceError) -> None:
        """It ends, unless it has."""
        if (done := self.done) is not None:
            self.queue.end(self)
            tell(done, result)


class Searches:
    """Belongs to the event loop. One batch, or one `between`, is computed at a time."""

    def __init__(self, settings: Settings, metrics: Metrics, clock: Clock) -> None:
        self.settings = settings
        self.metrics = metrics
        self.clock = clock
        self.versions: list[Version] = []  # that serve, or that somebody still needs: what is in no list goes at once
        self.excluded = metrics.watch_budget("excluded_ids", Budget(settings.budgets.excluded_ids))
        self.idle = asyncio.Event()
        self.idle.set()
        self._queues: dict[str | None, deque[Search]] = {}  # by key, the next one first
        self._alone: deque[Search] = deque()  # of a batch that failed: each is tried by itself
        self._calls: deque[tuple[Callable[[], object], asyncio.Future[object]]] = deque()
        self._running: list[Search] = []
        self._begun: float | None = None  # clock seconds, while something is computed
        self._batch_seconds = 0.0
        self._encode_time, self._search_time = ForwardTime(), ForwardTime()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=RETRIEVAL_THREAD)

    @property
    def waiting(self) -> int:
        """Searches that are not begun."""
        return len(self._alone) + sum(map(len, self._queues.values()))

    @property
    def is_busy(self) -> bool:
        """Whether searches wait or are computed."""
        return self._begun is not None or bool(self.waiting)

    def silent_seconds(self) -> float:
        """How long the present batch has been computed; 0 without one."""
        return 0.0 if self._begun is None else self.clock() - self._begun

    # callers

    def find(self, version: Version, query: Query, deadline: float, key: str | None, done: FoundDone) -> Search:
        """Answer one query; as `interface.Retrieval.retrieve`. Raises Overloaded and DeadlineExceeded."""
        now, loop = self.clock(), asyncio.get_running_loop()
        self._admit(now, deadline, key)
        excluded = len(query.filters.exclude)
        if not self.excluded.take(excluded):
            raise Overloaded("Searches that wait exclude too many posts.", retry_after_seconds=1.0)
        search = Search(self, query, version, key, now, done)
        search.timer = loop.call_later(max(0.0, deadline - now), self._expire, search)
        version.places += 1
        self.idle.clear()
        self._queues.setdefault(key, deque()).append(search)
        if self._begun is None:
            loop.call_soon(self._begin)  # what else arrives in this turn of the loop shares the scan
        return search

    def drop(self, search: Search) -> None:
        """For `Search.release`: what is not being computed never will be."""
        if search.done is not None:
            self.metrics.cancelled.labels("forward" if search in self._running else "queue").inc()
            self._unqueue(search)
            self.end(search)

    def end(self, search: Search) -> None:
        """It is answered or dropped: what it held is free."""
        assert search.timer is not None
        search.done = None
        search.timer.cancel()
        self.excluded.give(len(search.query.filters.exclude))
        self.leave(search.version)
        self._rest()

    def _expire(self, search: Search) -> None:
        self._unqueue(search)
        search.finish(DeadlineExceeded())

    def _unqueue(self, search: Search) -> None:
        if search in self._alone:
            self._alone.remove(search)
        elif search in (queue := self._queues.get(search.key, deque())):
            queue.remove(search)
            if not queue:
                del self._queues[search.key]

    async def between(self, call: Callable[[], T]) -> T:
        """What `call` returns, made in the thread between two batches."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.append((call, future))  # type: ignore[arg-type]  # the future of the same call
        self.idle.clear()
        self._begin()
        return await future

    def retire(self, version: Version) -> None:
        """Free it once nobody needs it."""
        version.retired = True
        self._free_if_done(version)

    def abandon(self, error: Callable[[], ServiceError]) -> None:
        """Answer everyone who waits, or whose search is being computed, with this."""
        queued = [search for queue in (self._alone, *self._queues.values()) for search in queue]
        self._alone.clear()
        self._queues.clear()
        for search in [*queued, *self._running]:
            search.finish(error())

    def close(self) -> None:
        """Free all versions and end the thread after what it computes."""
        for version in self.versions:
            self._executor.submit(version.loaded.engine.close)
        self.versions.clear()
        self._executor.shutdown(wait=False)

    # admission

    def _admit(self, now: float, deadline: float, key: str | None) -> None:
        """Raises Overloaded and DeadlineExceeded for what would wait too long, or holds more than a key's share of the room."""
        limits, queue = self.settings.retrieval, self.settings.queue
        waiting, own = self.waiting, len(self._queues.get(key, ()))
        ahead = own + sum(min(len(one), own + 1) for name, one in self._queues.items() if name != key)
        batches = (len(self._alone) + ahead) // limits.batch_requests + (self._begun is not None)
        wait_seconds, most, share = batches * self._batch_seconds, queue.max_wait_seconds, queue.max_share_per_key
        refusal: tuple[type[ServiceError], str, str] | None = None
        if waiting >= limits.max_waiting:
            refusal = Overloaded, "queue_full", f"{limits.max_waiting} searches wait already"
        elif key is not None and share < 1 and own >= share / (1 - share) * (limits.max_waiting - waiting):
            refusal = Overloaded, "queue_full", f"{own} searches of this key wait already, its share of the room"
        elif most and wait_seconds > most:
            detail = f"a search would wait {wait_seconds:.2f} s, at most {most:g} s are allowed"
            refusal = Overloaded, "queue_full", detail
        elif now + wait_seconds >= deadline:
            refusal = DeadlineExceeded, "deadline", "the search would begin after the deadline"
        if refusal is not None:
            kind, reason, detail = refusal
            self.metrics.rejected.labels(reason).inc()
            raise kind(f"Refused on arrival: {detail}.", retry_after_seconds=round(max(wait_seconds, 0.1), 1))

    # a batch

    def _begin(self) -> None:
        """Compute the next batch, or what is to be done between two."""
        if self._begun is not None:
            return
        if not (self._calls or self._alone or self._queues):
            self.idle.set()
            return
        loop = asyncio.get_running_loop()
        if self._calls:
            call, future = self._calls.popleft()
            self._begun = self.clock()
            loop.run_in_executor(self._executor, call).add_done_callback(lambda done: self._called(future, done))
            return
        batch = self._take()
        version, queries = batch[0].version, [search.query for search in batch]
        engine = version.loaded.engine
        version.places += 1
        self._running, self._begun = batch, self.clock()
        result: Answers | BaseException | None = None
        try:
            users = engine.look_up(queries)
            if self._is_short(queries, users.unknown_tokens):
                result = engine.retrieve(queries, users)
        except Exception as error:
            result = error
        if result is None:
            handed = loop.run_in_executor(self._executor, engine.retrieve, queries, users)
            handed.add_done_callback(lambda done: self._end(batch, done.exception() or done.result()))
            return
        if self.waiting or self._calls:
            loop.call_soon(self._end, batch, result)  # so that a long queue leaves turns to others
        else:
            self._end(batch, result)

    def _take(self) -> list[Search]:
        """The searches that share the next scan: one of each key in turn, all on one version."""
        if self._alone:
            return [self._alone.popleft()]
        batch: list[Search] = []
        turns = deque(self._queues)
        while turns and len(batch) < self.settings.retrieval.batch_requests:
            key = turns.popleft()
            queue = self._queues[key]
            if not batch or queue[0].version is batch[0].version:
                batch.append(queue.popleft())
                del self._queues[key]
                if queue:
                    self._queues[key] = queue  # others come first the next time
                    turns.append(key)
        return batch

    def _is_short(self, queries: Sequence[Query], unknown_tokens: int) -> bool:
        """Whether all of them take less than handing them over is worth."""
        encode = self._encode_time.seconds(unknown_tokens) if unknown_tokens else 0.0
        search = self._search_time.seconds(_cost(queries))
        return encode is not None and search is not None and encode + search < SHORT_SECONDS

    def _called(self, future: asyncio.Future[object], done: asyncio.Future[object]) -> None:
        self._begun = None
        if not future.done():
            error = done.exception()
            future.set_result(done.result()) if error is None else future.set_exception(error)
        self._begin()

    def _end(self, batch: Sequence[Search], result: Answers | BaseException) -> None:
        """Answer, and begin the next batch. A batch that raises is split, so that only the one to blame fails."""
        assert self._begun is not None
        begun, self._begun, self._running = self._begun, None, []
        seconds, loop = self.clock() - begun, asyncio.get_running_loop()
        ended: list[Found | ServiceError] = []  # none where each is tried by itself
        if not isinstance(result, BaseException):
            for search, posts in zip(batch, result.retrieved, strict=True):
                ended.append(Found(posts, begun - search.arrived, result.encode_seconds, result.search_seconds))
        else:
            log.error("a search failed", requests=len(batch), exc_info=result)
            if len(batch) == 1:
                ended.append(EngineDown("The search failed on this request.", retry_after_seconds=1.0))
            else:
                self._alone.extend(search for search in batch if search.done is not None)
        self.leave(batch[0].version)
        self._begin()
        for search, one in zip(batch, ended, strict=False):
            search.finish(one)
        if not isinstance(result, BaseException):
            loop.call_soon(self._learn, batch, result, begun, seconds)  # after the forward that was asked for has begun

    def _learn(self, batch: Sequence[Search], answers: Answers, begun: float, seconds: float) -> None:
        """What a batch took, for the forecasts and the metrics."""
        metrics, queries = self.metrics, [search.query for search in batch]
        self._batch_seconds += SMOOTHING * (seconds - self._batch_seconds) if self._batch_seconds else seconds
        made = sum(
            1 + len(query.context) for query, posts in zip(queries, answers.retrieved, strict=True) if not posts.cached
        )
        self._encode_time.observe(made, answers.encode_seconds)
        self._search_time.observe(_cost(queries), answers.search_seconds)
        metrics.searches.observe(len(batch))
        metrics.stage["encode"].observe(answers.encode_seconds)
        metrics.stage["search"].observe(answers.search_seconds)
        for search, posts in zip(batch, answers.retrieved, strict=True):
            metrics.stage["queue"].observe(begun - search.arrived)
            metrics.visible_rows.observe(posts.visible)
            metrics.scored_rows.observe(posts.scored)
            metrics.user_vectors.labels("cache" if posts.cached else "tower").inc()

    def keep(self, version: Version) -> None:
        """Somebody may still ask for it, until `leave`."""
        version.places += 1

    def leave(self, version: Version) -> None:
        """One place on it is free."""
        version.places -= 1
        self._free_if_done(version)

    def _free_if_done(self, version: Version) -> None:
        if version.retired and not version.places and version in self.versions:
            self.versions.remove(version)
            self._executor.submit(version.loaded.engine.close)

    def _rest(self) -> None:
        if self._begun is None and not (self._calls or self._alone or self._queues):
            self.idle.set()


def _cost(queries: Sequence[Query]) -> int:
    """What a search takes besides the scan: posts to be found, and ids to be hidden."""
    return sum(1 + query.k + len(query.filters.exclude) for query in queries)
