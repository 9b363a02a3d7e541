"""The thread of one engine: builds and warms it up, runs the forwards of an engine that blocks, and frees it at the end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import structlog

from app.engine.loading import LoadedModel, Loader, Steps
from app.scheduling.forecast import ForwardTime
from app.scheduling.job import Clock
from model.engine import EngineError, Item, Outcome, OverlappingEngine
from model.memory import shortage

ENGINE_THREAD = "engine"

HAND_OVER_SECONDS = 100e-6  # measured: waking the other thread, being woken up, and caches that are cold then

Result = Sequence[Outcome] | BaseException
OnResult = Callable[[Result, float], None]
"""Called in the event loop with the result and the clock seconds when it was there."""


class EngineThread:
    """`ready` and `closed` belong to the event loop. Every call of the engine but those of `NativeForwards` is made here."""

    def __init__(
        self, load: Loader, warming: Callable[[], None], loop: asyncio.AbstractEventLoop, clock: Clock
    ) -> None:
        """`warming` is called in the loop when the checkpoint is read and the warm-up begins. Raises EngineError without a thread."""
        self.ready: asyncio.Future[LoadedModel] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self._load = load
        self._loop = loop
        self._steps = Steps(functools.partial(_post, loop, warming))  # not of `self`: that would be a circle
        self._clock = clock
        self._work: SimpleQueue[tuple[Sequence[Item], OnResult] | None] = SimpleQueue()
        if problem := shortage(0):
            raise EngineError(f"no thread can be had to load a model in: {problem}")
        try:
            threading.Thread(target=self._main, name=ENGINE_THREAD, daemon=True).start()
        except RuntimeError as error:
            raise EngineError(f"no thread can be had to load a model in: {error}") from error

    def forward(self, items: Sequence[Item], cost: int, on_result: OnResult) -> None:
        """Compute one batch of that many tokens, and tell the event loop. An exception is a result."""
        self._work.put((items, on_result))

    def close(self) -> None:
        """Free the engine after what it was given; `closed` is done then."""
        self._work.put(None)

    def abandon(self) -> None:
        """Nobody waits for `ready` any more: the load ends at its next step, and what it has made is freed."""
        self._steps.stop()
        self.ready.add_done_callback(lambda ready: ready.exception())  # it is nobody's
        self.close()

    def _main(self) -> None:
        try:
            model = self._load(self._steps)
        except BaseException as error:  # it belongs to the one who waits for `ready`
            _empty_frames(error)
            _post(self._loop, self.ready.set_exception, error)
        else:
            _post(self._loop, self.ready.set_result, model)
            self._serve(model)
        _post(self._loop, self.closed.set_result, None)

    def _serve(self, model: LoadedModel) -> None:
        while (work := self._work.get()) is not None:
            items, on_result = work
            try:
                result: Result = model.engine.forward(items)
            except BaseException as error:  # even SystemExit: the worker decides what it means
                result = error
            _post(self._loop, on_result, result, self._clock())
            del work, items, on_result, result  # what they hold would live until the next batch
        try:
            model.engine.close()
        except Exception as error:  # a device that is lost: whoever waits for the end is told all the same
            structlog.get_logger("app").error("an engine could not be closed", exc_info=error)


def _empty_frames(error: BaseException | None) -> None:
    """Forget what was half made: errors that are passed on make circles with their frames, and those would keep it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends, and nothing waits for this
        loop.call_soon_threadsafe(call, *arguments)


class NativeForwards:
    """Forwards of an engine that computes in native threads: the event loop begins each, and is told by a descriptor.

    No Python runs beside the loop, so no thread competes for the interpreter lock. A forward that takes less time than handing it over
    does is not handed over.
    """

    def __init__(
        self, engine: OverlappingEngine, descriptor: int, loop: asyncio.AbstractEventLoop, clock: Clock
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._clock = clock
        self._descriptor: int | None = descriptor
        self._on_result: OnResult | None = None
        self._time = ForwardTime()
        self._begun, self._cost = 0.0, 0
        loop.add_reader(descriptor, self._ready)

    def forward(self, items: Sequence[Item], cost: int, on_result: OnResult) -> None:
        """As `EngineThread.forward`. `cost` is what it takes in tokens."""
        predicted = self._time.seconds(cost)
        self._begun, self._cost, self._on_result = self._clock(), cost, on_result
        if predicted is None or predicted > HAND_OVER_SECONDS:
            try:
                self._engine.begin(items)
            except Exception as error:
                self._loop.call_soon(on_result, error, self._clock())
        else:
            self._loop.call_soon(on_result, *self._result(lambda: self._engine.forward(items)))

    def close(self) -> None:
        """Nothing more is begun. A second time does nothing: the number of its descriptor may be another one's by then."""
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = self._on_result = None  # the second leads back to who has this

    def _ready(self) -> None:
        assert self._on_result is not None
        self._on_result(*self._result(self._engine.finish))

    def _result(self, compute: Callable[[], Sequence[Outcome]]) -> tuple[Result, float]:
        try:
            result: Result = compute()
        except Exception as error:
            return error, self._clock()
        finished = self._clock()
        self._time.observe(self._cost, finished - self._begun)
        return result, finished
