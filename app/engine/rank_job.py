"""One request on one engine: its place in the queue, what is to be scored, and who is told of the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from app.engine.tell import tell
from app.errors import InternalError, ServiceError
from app.interface import Done, Ranked
from app.scheduling.job import Job
from model.engine import CacheResult, Item
from model.inputs import Candidates, Context, Scores

if TYPE_CHECKING:
    from app.engine.worker import EngineWorker


@dataclass(slots=True, eq=False, kw_only=True)
class RankJob(Job):
    """First a ticket for a place that is `reserved`; once it has `done`, work. Belongs to the event loop.

    `on_release` is called once, when the place becomes free; a ticket that is dropped releases itself.
    """

    worker: EngineWorker
    on_release: Callable[[RankJob], None]
    reserved: bool = False
    context: Context | None = None
    items: Candidates | None = None
    done: Done | None = None
    scores: list[Scores] = field(default_factory=list)
    state: Any = None
    cache: CacheResult = "miss"
    started: float | None = None  # when its first forward began
    forward_seconds: float = 0.0

    def release(self) -> None:
        """Free the place, and drop what is not computed; a second time does nothing."""
        if self.reserved:
            self.reserved = False
            self.on_release(self)

    def __del__(self) -> None:
        self.release()

    def item(self, start: int, stop: int) -> Item:
        """Candidates `start … stop - 1` as the engine takes them."""
        assert self.context is not None
        assert self.items is not None
        whole = stop - start == len(self.items)
        return Item(self.context, self.items if whole else self.items.chunk(start, stop), self.state)

    def finish(self, error: ServiceError | None = None) -> None:
        """Free the place and tell the caller: the scores, or this error. Only the first time counts."""
        done, self.done = self.done, None
        if done is None:
            return
        self.release()
        tell(done, error or self._ranked())

    def _ranked(self) -> Ranked | ServiceError:
        started = self.arrived if self.started is None else self.started
        try:
            scores = Scores.concatenate(self.scores)
        except Exception as error:  # without memory, say: its mates in the batch are answered all the same
            structlog.get_logger("app").error("scores could not be joined", exc_info=error)
            return InternalError()
        return Ranked(scores, self.cache, started - self.arrived, self.forward_seconds)
