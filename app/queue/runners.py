"""Runs forwards in an engine's thread, in native threads or, if they are short, in the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import structlog

from app.queue.forecast import Clock, ForwardTime
from app.telemetry.metrics import Metrics
from model.engine import Engine, EngineError, Item, Outcome, OverlappingEngine
from model.memory import shortage
from model.retrieval.engine import RetrievalEngine, Users
from model.retrieval.inputs import Answers, Query

ENGINE_THREAD, RETRIEVAL_THREAD = "engine", "retrieval"

HAND_OVER_SECONDS = 100e-6  # measured: waking the other thread, being woken by it, and cold caches

EARLY_CANDIDATES = 384
"""With this many waiting, an idle native engine begins its forward at once, not at the end of the loop iteration: the loop reads the
next requests while the kernel's threads compute these."""

SHORT_SEARCH_SECONDS = 1e-3
"""A batch of searches predicted to take less is computed in the event loop. Most of it is Python, so in another thread it would hold
the interpreter lock anyway, and handing over and back adds two thread switches."""

log = structlog.get_logger("app.queue.runners")

Result = Sequence[Any] | BaseException
OnResult = Callable[[Any, float], None]
"""Called in the event loop with the result or exception, and the clock seconds at which it was ready."""


class Runner(Protocol):
    """Computes forwards of one engine, one at a time. Used by the event loop only. Exceptions are passed as results."""

    closed: asyncio.Future[None]
    is_native: bool  # the event loop keeps running while native threads compute

    def forward(self, parts: Sequence[Any], cost: int, on_result: OnResult) -> None:
        """Compute one batch of that many tokens."""
        ...

    def call(self, call: Callable[[], Any], on_result: OnResult) -> None:
        """Run this call in the engine's thread."""
        ...

    def close(self) -> None:
        """Free the engine; `closed` is done then."""
        ...


class Steps:
    """Progress and cancellation of a load. Used in the engine's thread, except `stop` and `is_warming`."""

    def __init__(self) -> None:
        self.is_warming = False
        self._stopped = threading.Event()

    def warming(self) -> None:
        """Note that the checkpoint was read and the warm-up begins. Raises EngineError once the load was cancelled."""
        self.go_on()
        self.is_warming = True

    def go_on(self, *_: object) -> None:
        """Call this often. Raises EngineError once the load was cancelled."""
        if self._stopped.is_set():
            raise EngineError("the load was cancelled")

    def stop(self) -> None:
        """Give this load up: the next `go_on` raises."""
        self._stopped.set()


class Loaded(Protocol):
    """What a load returns: an engine, what it serves, and the files that it serves from."""

    @property
    def engine(self) -> Any: ...

    @property
    def served(self) -> Any: ...

    def changed_file(self) -> str:
        """A sentence if a file that is served from was written to since it was read, else empty. For any thread."""
        ...


class EngineThread:
    """Loads an engine, computes what its `Runner` hands over, and frees it. `ready` and `closed` are for the event loop only."""

    is_native = False

    def __init__(
        self,
        load: Callable[[Steps], Loaded],
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        name: str = ENGINE_THREAD,
    ) -> None:
        """Raises EngineError if no thread can be started."""
        self.steps = Steps()
        self.ready: asyncio.Future[Any] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._load = load
        self._loop = loop
        self._clock = clock
        self._engine: Any = None
        self._work: SimpleQueue[tuple[Callable[[], Any], OnResult] | None] = SimpleQueue()
        if problem := shortage(0):
            raise EngineError(f"cannot start a thread to load a model: {problem}")
        try:
            threading.Thread(target=self._main, name=name, daemon=True).start()
        except RuntimeError as error:
            raise EngineError(f"cannot start a thread to load a model: {error}") from error

    def forward(self, parts: Sequence[Item], cost: int, on_result: OnResult) -> None:
        """Compute one batch in this thread."""
        self._work.put((functools.partial(_forward, self._engine, parts), on_result))

    def call(self, call: Callable[[], Any], on_result: OnResult) -> None:
        """Make this call in this thread."""
        self._work.put((call, on_result))

    def close(self) -> None:
        """Free the engine after the work handed over so far; `closed` is done then."""
        self._work.put(None)

    def abandon(self, discard: Callable[[Any], None]) -> None:
        """Give the load up: it ends at its next step, and whatever it has made is freed. `discard` gets what it loaded all the same."""
        self.steps.stop()
        # asked for its exception, else asyncio logs it as never retrieved
        self.ready.add_done_callback(lambda ready: None if ready.exception() else discard(ready.result()))
        self.close()

    def _main(self) -> None:
        try:
            loaded = self._load(self.steps)
        except BaseException as error:  # raised to whoever waits for `ready`
            _clear_frames(error)
            _post(self._loop, self.ready.set_exception, error)
        else:
            self._engine = loaded.engine
            _post(self._loop, self.ready.set_result, loaded)
            self._serve()
        _post(self._loop, self.closed.set_result, None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            call, on_result = work
            try:
                result: Any = call()
            except BaseException as error:  # even SystemExit: the scheduler decides what it means
                result = error
            _post(self._loop, on_result, result, self._clock())
            del work, call, on_result, result  # else what they hold lives until the next batch
        try:
            self._engine.close()
        except Exception as error:  # a lost device, for example: `closed` is set all the same
            log.error("engine_not_closed", exc_info=error)
        self._engine = None


def _forward(engine: Engine, parts: Sequence[Item]) -> Sequence[Outcome]:
    return _checked(parts, engine.forward(parts))


def _checked(parts: Sequence[Item], outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """Raise EngineError if the numbers of scores are wrong: no request may get another's scores."""
    if [len(outcome.scores.logits) for outcome in outcomes] != [len(part.candidates.post_ids) for part in parts]:
        raise EngineError("the engine returned the wrong number of scores")
    return outcomes


def _clear_frames(error: BaseException | None) -> None:
    """Clear tracebacks, whose cycles keep a partial engine alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends, and nothing waits for this
        loop.call_soon_threadsafe(call, *arguments)


class NativeForwards:
    """Forwards of an engine that computes in native threads: the event loop begins each, and a descriptor signals the end.

    No Python runs beside the loop, so no thread competes for the interpreter lock. A forward that is shorter than
    the hand-over runs in the event loop.
    """

    is_native = True

    def __init__(
        self,
        thread: EngineThread,
        engine: OverlappingEngine,
        descriptor: int,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
    ) -> None:
        self.closed = thread.closed
        self.call = thread.call
        self._thread = thread
        self._engine = engine
        self._loop = loop
        self._clock = clock
        self._descriptor: int | None = descriptor
        self._parts: Sequence[Item] = ()
        self._on_result: OnResult | None = None
        self._time = ForwardTime()
        self._begun, self._cost = 0.0, 0
        loop.add_reader(descriptor, self._ready)

    def forward(self, parts: Sequence[Item], cost: int, on_result: OnResult) -> None:
        """Compute one batch: in native threads, or at once if that is predicted to be shorter than handing it over."""
        predicted = self._time.seconds(cost)
        self._begun, self._cost, self._parts, self._on_result = self._clock(), cost, parts, on_result
        if predicted is None or predicted > HAND_OVER_SECONDS:
            try:
                self._engine.begin(parts)
            except Exception as error:
                self._loop.call_soon(on_result, error, self._clock())
        else:
            self._loop.call_soon(on_result, *self._result(lambda: self._engine.forward(parts)))

    def close(self) -> None:
        """Stop watching the descriptor, and free the engine.

        A second call does nothing: another file may have the descriptor's number by then.
        """
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = self._on_result = None  # the callback refers back to this runner's owner
            self._thread.close()

    def _ready(self) -> None:
        assert self._on_result is not None
        self._on_result(*self._result(self._engine.finish))

    def _result(self, compute: Callable[[], Sequence[Outcome]]) -> tuple[Result, float]:
        parts, self._parts = self._parts, ()
        try:
            result: Result = _checked(parts, compute())
        except Exception as error:
            return error, self._clock()
        finished = self._clock()
        self._time.observe(self._cost, finished - self._begun)
        return result, finished


class SearchForwards:
    """Batches of searches: short ones in the event loop, others in the engine's thread."""

    is_native = False

    def __init__(
        self,
        thread: EngineThread,
        engine: RetrievalEngine,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.closed = thread.closed
        self.call = thread.call
        self.close = thread.close
        self._thread = thread
        self._engine = engine
        self._loop = loop
        self._clock = clock
        self._metrics = metrics
        self._encode_time, self._search_time = ForwardTime(), ForwardTime()

    def forward(self, parts: Sequence[Query], cost: int, on_result: OnResult) -> None:
        """Compute one batch: at once if it is predicted to be short, else in the engine's thread.

        Each result is the answers of the batch and a place in them.
        """
        try:
            users = self._engine.look_up(parts)
            is_short = self._is_short(parts, users)
        except Exception as error:
            self._loop.call_soon(on_result, error, self._clock())
            return
        if is_short:
            try:
                answers: Any = self._engine.retrieve(parts, users)
            except Exception as error:
                answers = error
            self._loop.call_soon(self._retrieved, parts, on_result, answers, self._clock())
        else:
            done = functools.partial(self._retrieved, parts, on_result)
            self._thread.call(functools.partial(self._engine.retrieve, parts, users), done)

    def _retrieved(self, parts: Sequence[Query], on_result: OnResult, answers: Any, finished: float) -> None:
        if isinstance(answers, BaseException):
            on_result(answers, finished)
        else:
            self._loop.call_soon(self._learn, parts, answers)  # later: `on_result` begins the next forward first
            on_result([(answers, place) for place in range(len(parts))], finished)

    def _is_short(self, queries: Sequence[Query], users: Users) -> bool:
        """Whether the batch is predicted to take less than `SHORT_SEARCH_SECONDS`."""
        encode = self._encode_time.seconds(users.uncached_tokens) if users.uncached_tokens else 0.0
        search = self._search_time.seconds(_search_cost(queries))
        return encode is not None and search is not None and encode + search < SHORT_SEARCH_SECONDS

    def _learn(self, queries: Sequence[Query], answers: Answers) -> None:
        """Record the batch's times for the forecasts and the metrics."""
        metrics, retrieved = self._metrics, answers.retrieved
        encoded_tokens = sum(
            1 + len(query.context) for query, posts in zip(queries, retrieved, strict=True) if not posts.cached
        )
        self._encode_time.observe(encoded_tokens, answers.encode_seconds)
        self._search_time.observe(_search_cost(queries), answers.search_seconds)
        metrics.searches.observe(len(queries))
        metrics.stage["encode"].observe(answers.encode_seconds)
        metrics.stage["search"].observe(answers.search_seconds)
        for posts in retrieved:
            metrics.visible_rows.observe(posts.visible)
            metrics.scored_rows.observe(posts.scored)
            metrics.user_vectors.labels("cache" if posts.cached else "tower").inc()


def _search_cost(queries: Sequence[Query]) -> int:
    """Cost of a batch of searches besides the scan: posts to find and ids to exclude."""
    return sum(1 + query.k + len(query.filters.exclude) for query in queries)


def rank_runner(thread: EngineThread, loop: asyncio.AbstractEventLoop, clock: Clock) -> Runner:
    """Return the runner for the engine that this thread has loaded: native threads if it has them, else the thread itself."""
    engine = thread.ready.result().engine
    if isinstance(engine, OverlappingEngine) and (descriptor := engine.open()) is not None:
        return NativeForwards(thread, engine, descriptor, loop, clock)
    return thread
