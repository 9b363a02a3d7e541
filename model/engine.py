"""The contract between the server and the model: items of work in, outcomes out.

Holds no policy: the batcher decides what is served next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from model.config import CandidatePositions, ModelConfig
from model.inputs import Candidates, Context, Scores

CacheResult = Literal["hit", "prefix", "miss"]


@dataclass(slots=True)
class Item:
    """Some or all candidates of one request, or none to compute only its context. `state` is what an earlier forward of the same
    request returned, else None. `caller`: the caller that may ask for the context by its handle, None if no handle is wanted."""

    context: Context
    candidates: Candidates
    state: Any = None
    caller: str | None = None


@dataclass(slots=True)
class Outcome:
    """Scores of an item's candidates, in their order. Given the opaque `state`, the next item of the same request needs no context.

    `cache` says whether all of the context (`hit`), its beginning (`prefix`) or none of it (`miss`) came from the cache.
    `handle`: `Engine.context_of` finds the context by it while the cache keeps it; empty if none is wanted or it is not kept.
    """

    scores: Scores
    state: Any
    cache: CacheResult
    handle: str = ""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The context cache since start: bytes and entries now, lookups by result and evictions as running totals."""

    bytes: int = 0
    entries: int = 0
    hits: int = 0
    prefixes: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is running, for people to read: e.g. device `cpu`, dtype `float32`, backend `native`.

    `notes` holds plain JSON values: why a choice was made, what was checked at warm-up.
    """

    device: str
    dtype: str
    backend: str
    candidate_positions: CandidatePositions
    notes: dict[str, Any]


class Engine(Protocol):
    """A loaded model that scores items. Used by one thread at a time; nothing compiles after `warm_up` has returned."""

    config: ModelConfig
    info: EngineInfo

    def warm_up(self) -> None:
        """Compile, capture and check all that `forward` will use. Raises EngineError when the device or a check fails."""
        ...

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        """Outcomes in the order of the items. A candidate's bits do not depend on the other items."""
        ...

    def context_of(self, handle: str, caller: str) -> Context | None:
        """The context of a handle that an outcome gave this caller, None if it is not kept. Safe to call from any thread."""
        ...

    def cache_stats(self) -> CacheStats:
        """Safe to call from any thread."""
        ...

    def close(self) -> None:
        """Free the weights' and the cache's memory."""
        ...


@runtime_checkable
class OverlappingEngine(Engine, Protocol):
    """An engine that can also compute in native threads while its caller goes on: `begin` a forward, then `finish` it, one at a time.

    After `open`, only one thread may call anything but `context_of`, `cache_stats` and `close`. `forward` does not wait for a forward
    that was begun.
    """

    def open(self) -> int | None:
        """A descriptor that becomes readable when a forward has ended; None if the system has no thread left for it."""
        ...

    def begin(self, items: Sequence[Item]) -> None:
        """Start a forward. Raises EngineError if it cannot start; then there is nothing to finish."""
        ...

    def finish(self) -> list[Outcome]:
        """The outcomes of the forward that has ended, as `forward` returns them. Raises EngineError."""
        ...


class EngineError(RuntimeError):
    """The engine cannot work. `sticky` means that only a new process can help (a lost device, for example)."""

    def __init__(self, message: str, *, sticky: bool = False) -> None:
        super().__init__(message)
        self.sticky = sticky
