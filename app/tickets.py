"""A request's place in the queue, and what it gets for it. Not for deciding who gets one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from app.admission import Work
from app.fleet import Serving
from model.engine import CacheResult
from model.inputs import Scores


@dataclass(frozen=True, slots=True)
class Ranked:
    """One request's result. `queue_seconds` until its first forward, `forward_seconds` summed over its parts."""

    scores: Scores
    cache: CacheResult
    queue_seconds: float
    forward_seconds: float


@dataclass(slots=True, eq=False)
class Ticket:
    """A place in the queue. Give it to `rank`, or `release` it; `with` does so. A dropped one releases itself."""

    free: Callable[[Ticket], None]
    serving: Serving
    work: Work
    key: str | None
    deadline: float
    open: bool = field(default=True)

    def release(self) -> None:
        """Free the place; a second time does nothing."""
        if self.open:
            self.open = False
            self.free(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()
