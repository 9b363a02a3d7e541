"""The contract between the server and the model: items of work in, outcomes out.

Not for policy: who is served next is the batcher's business.
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
    """Some or all candidates of one request, or none where only its context is to be computed. `state` is what an earlier forward of the
    same request returned, else None. `caller`: who may ask for the context by its handle, None where no handle is wanted."""

    context: Context
    candidates: Candidates
    state: Any = None
    caller: str | None = None


@dataclass(slots=True)
class Outcome:
    """Scores of an item, in its order. With `state` the next item of the same request needs no context; the caller only keeps it.

    `cache` says whether the context came whole (`hit`) or with its beginning (`prefix`) from the cache. `handle`: by which
    `Engine.context_of` finds it as long as the cache keeps it; empty where none is wanted, or it is not kept.
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
    """What runs, for people: e.g. device `cpu`, dtype `float32`, backend `native`.

    `notes` holds plain JSON values: why a choice was made, what was checked at warm-up.
    """

    device: str
    dtype: str
    backend: str
    candidate_positions: CandidatePositions
    notes: dict[str, Any]


class Engine(Protocol):
    """A loaded model that scores items. Used by one thread at a time; nothing compiles after `warm_up` returned."""

    config: ModelConfig
    info: EngineInfo

    def warm_up(self) -> None:
        """Compile, capture and check all that `forward` will use. Raises EngineError when the device or a check fails."""
        ...

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        """Outcomes in the order of the items. A candidate's bits do not depend on the other items."""
        ...

    def context_of(self, handle: str, caller: str) -> Context | None:
        """The context for which an outcome for this caller had this handle, None where it is not kept. Safe to call from any thread."""
        ...

    def cache_stats(self) -> CacheStats:
        """Safe to call from any thread."""
        ...

    def close(self) -> None:
        """Free the weights' and the cache's memory."""
        ...


@runtime_checkable
class OverlappingEngine(Engine, Protocol):
    """An engine that can also compute in native threads while its caller goes on: one forward at a time, begun, then finished.

    After `open`, all but `context_of`, `cache_stats` and `close` belong to one thread, and `forward` waits for nothing that was begun.
    """

    def open(self) -> int | None:
        """A descriptor that becomes readable when a forward has ended; None where the system has no thread left for it."""
        ...

    def begin(self, items: Sequence[Item]) -> None:
        """Begin what `forward` does. Raises EngineError where it cannot begin; then there is nothing to finish."""
        ...

    def finish(self) -> list[Outcome]:
        """What `forward` returns, of the forward that has ended. Raises EngineError."""
        ...


class EngineError(RuntimeError):
    """The engine cannot work. `sticky` means that only a new process can help (a lost device, for example)."""

    def __init__(self, message: str, *, sticky: bool = False) -> None:
        super().__init__(message)
        self.sticky = sticky
