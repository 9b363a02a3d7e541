"""The interface between HTTP and ranking: everything that the HTTP side knows of the service. Imports neither torch nor HTTP.

`app.service.local.LocalService` computes in this process, `app.processes.remote.RemoteService` asks the engine process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.telemetry.metrics import Metrics
from app.vocabulary import Vocabulary
from model.engine import CacheResult, EngineInfo
from model.inputs import Candidates, Context, Scores
from model.retrieval.inputs import Mark, PostChange, Query, Retrieved
from weights.corpus.manifest import CorpusManifest
from weights.format.manifest import Manifest


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One model version that this process serves, compared by identity: loading the same checkpoint again makes another one."""

    manifest: Manifest
    engine: EngineInfo

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What requests may name of it."""
        return Vocabulary.of(self.manifest)


class Ranked(msgspec.Struct, frozen=True, eq=False):
    """The result of one ranking.

    `forward_seconds`: of its forward passes together. `handle`: names its context for later requests
    of the same API key; empty if the cache does not keep it. `history_used`: events that the model has seen; `history_dropped`: older
    ones that did not fit its window. `context`: what a handle named, where the request had one; a worker gets it only if it logs what was
    served.
    """

    scores: Scores
    cache: CacheResult
    forward_seconds: float
    handle: str = ""
    history_used: int = 0
    history_dropped: int = 0
    context: Context | None = None


@dataclass(frozen=True, eq=False)
class ServedCorpus:
    """One retrieval checkpoint with one corpus, as they are served, compared by identity.

    `hidden`: rows that no search returns; `duplicates`: those of them whose post id came before. `notes`: what runs, as plain JSON values.
    """

    manifest: Manifest
    corpus: CorpusManifest
    hidden: int
    duplicates: int
    notes: dict[str, Any]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What requests may name of its retrieval checkpoint."""
        return Vocabulary.of(self.manifest)


class SearchResult(msgspec.Struct, frozen=True, eq=False):
    """The result of one search: its posts, and how long its batch took to encode users and to search. The history counts are those of
    `Ranked`."""

    posts: Retrieved
    encode_seconds: float
    search_seconds: float
    history_used: int = 0
    history_dropped: int = 0


@dataclass(frozen=True, slots=True)
class CorpusState:
    """The corpus as it is now. `posts`: how many a search can return. `topics`: all that its posts have had. `changes`: changes since the
    corpus was built. `deleted`: how many posts the last change deleted by name. `mark`: the changes that the corpus has ever had, as their
    number and a digest."""

    corpus: CorpusManifest
    posts: int
    topics: tuple[str, ...]
    changes: int
    deleted: int
    mark: Mark


@dataclass(frozen=True, slots=True)
class Health:
    """What the probes say. `reason` is a sentence, empty when ready. `started`: a model has been loaded and warmed up. `feed`: why the feed
    of posts cannot be read; the process stays ready until its posts are too old."""

    ready: bool
    started: bool
    failed: bool
    draining: bool
    reason: str
    feed: str = ""


class PlaceRequest(msgspec.Struct, frozen=True):
    """What a request for a place in the queue says of itself.

    `candidates`, `history`: how many posts it will score, and how many events its history has; both are counts of at least 0.
    `deadline`: seconds of the ranker's clock. `key`: the name of the API key, None where no keys are set.
    `leaves_at`: when the caller will likely have left, in seconds of the same clock, so that a reply that would come later is refused now;
    infinite where that is not known. `rated`: how many candidates it counts for in its key's rate, None for its own; 0 where another
    request of the call counts for it.
    """

    candidates: int
    history: int
    deadline: float
    key: str | None = None
    leaves_at: float = math.inf
    rated: int | None = None

    def context_tokens(self, history_length: int) -> int:
        """Tokens of the context that a model with this history length reads: the user and the newest events."""
        return 1 + min(self.history, history_length)


class SearchRequest(msgspec.Struct, frozen=True, eq=False):
    """What a search is for, and who waits for it.

    `deadline`: seconds of the ranker's clock. `key`, `leaves_at`: see `PlaceRequest`. `has_place`: the request holds a reserved place in
    the ranking queue, whose load does not refuse it again.
    """

    query: Query
    deadline: float
    key: str | None = None
    leaves_at: float = math.inf
    has_place: bool = False


class CheckpointNotFound(LookupError):
    """There is no checkpoint of that name below the root. Says nothing about what else may be there."""


class ReloadInProgress(RuntimeError):
    """Another reload is under way."""


class Job(Protocol):
    """One admitted request and its place in the queue, from `RankingService.admit`. Give it to `RankingService.rank` once.

    One that `rank` refuses with Overloaded may be reserved and given to it again.
    """

    @property
    def model(self) -> ServedModel:
        """The version that will score it, even if another one is loaded meanwhile."""
        ...


class CorpusService(Protocol):
    """Finds posts for a user. Used by the event loop only; deadlines are in seconds of the ranker's clock."""

    @property
    def served(self) -> ServedCorpus:
        """What serves new searches. Raises CorpusNotLoaded, or NoCorpus if the settings name none."""
        ...

    async def reach(self, at_least: str, key: str | None, deadline: float) -> None:
        """Wait until what serves has had this change: a number of changes, or a position of the feed. It may be another corpus than before.

        Raises CorpusBehind after half a second or at the deadline, and at once where many requests wait, or many of this API key.
        """
        ...

    async def search(self, served: ServedCorpus, request: SearchRequest) -> SearchResult:
        """Return the best posts of `served`. Cancelling it drops the work.

        Raises Overloaded, DeadlineExceeded, EngineDown, CorpusBehind, CorpusNotLoaded if `served` is gone, and ContextUnknown, also if the
        cache keeps less of the context than the user tower reads.
        """
        ...

    async def state(self) -> CorpusState | None:
        """Return the present state of the corpus, None if none is served."""
        ...


class ChangeableCorpus(CorpusService, Protocol):
    """A corpus whose engine is in this process, so that its posts can be changed here."""

    async def change(self, change: PostChange) -> CorpusState:
        """Change the corpus that serves, in one step: a search sees all of the change or none. It is on disk when this returns.

        Raises CorpusNotLoaded, NoCorpus, ChangedByFeed, Overloaded, EngineDown, or CheckpointError if it cannot be written: then nothing
        changed.
        """
        ...


class Reloads(Protocol):
    """Changes the checkpoint of a running service, one at a time. A failure leaves what serves in place."""

    async def reload(self, name: str | None = None) -> tuple[ServedModel, bool]:
        """Serve the checkpoint of this name below the root; None reads the present one again. Return what serves, and whether that has
        changed.

        Raises CheckpointNotFound, CheckpointError, EngineError, ReloadInProgress, Draining.
        """
        ...

    async def reload_corpus(
        self, checkpoint: str | None = None, corpus: str | None = None
    ) -> tuple[ServedCorpus, bool]:
        """Serve this retrieval checkpoint and this corpus together; None means the present one, read again. Return what serves, and whether
        that has changed.

        Raises what `reload` raises, and NoCorpus if one is neither named nor served.
        """
        ...

    def reload_soon(self) -> None:
        """Read the present checkpoint again in the background, then the retrieval checkpoint and corpus, if any. Logged and counted."""
        ...


class RankingService(Protocol):
    """Ranks requests. Used by the event loop only; deadlines are in seconds of `clock`.

    `on_fatal(reason)` is called once, when only a new process can help and every waiting request has its error.
    """

    metrics: Metrics
    clock: Callable[[], float]
    on_fatal: Callable[[str], None]

    @property
    def corpus(self) -> CorpusService:
        """The search side; it may serve no corpus."""
        ...

    def start(self) -> None:
        """Begin to load in the background, and to watch for new checkpoints if the settings say so. A second call does nothing."""
        ...

    def begin_drain(self) -> None:
        """Report that the process is not ready, but keep serving requests."""
        ...

    async def stop(self, timeout_seconds: float) -> bool:
        """Finish the admitted requests, then free the engines. Return False if time ran out; the rest are answered 503."""
        ...

    def has_running_threads(self) -> bool:
        """Whether a thread is still in native code. An orderly exit of the process would wait for it."""
        ...

    def health(self) -> Health:
        """Whether requests may be sent here, and if not, why."""
        ...

    def model(self, name: str = "") -> ServedModel:
        """Return the version that serves new requests. `name` is "" for whatever serves, "name" or "name@version".

        Raises NotReady while nothing is loaded, ModelNotFound if another model serves.
        """
        ...

    def check_open(self, key: str | None, leaves_at: float = math.inf) -> None:
        """Raise the error that any request of this API key would get now, before it is read: NotReady, Draining, EngineDown, Overloaded.
        `leaves_at`: see `PlaceRequest`."""
        ...

    def admit(self, model: ServedModel, request: PlaceRequest) -> AbstractContextManager[Job]:
        """Take a place in the queue of `model` for one request. Leaving the block frees it and drops what is not computed.

        A refusal (NotReady, Draining, EngineDown, Overloaded, DeadlineExceeded) comes from entering the block, or from the first call of
        `reserve` or `rank` with its job; a job that `reserve` has returned for is never refused for lack of room again.
        """
        ...

    def kept(self, model: ServedModel) -> AbstractContextManager[None]:
        """A block in which `model` ranks, also once another one serves. Raises NotReady if it is gone already.

        With several workers the engine process keeps a replaced model for the default deadline, and the block does nothing.
        """
        ...

    async def reserve(self, job: Job) -> None:
        """Return once the job has its place for certain. Call it before other work for the request.

        Raises as `admit` describes. A second call does nothing.
        """
        ...

    async def rank(self, job: Job, context: Context | str, candidates: Candidates) -> Ranked:
        """Score the candidates, in their order. Without candidates the context alone is computed. `context`: a str is a handle.

        This frees its place in the queue when it ends; cancelling it drops the work.
        Raises ContextUnknown, DeadlineExceeded, EngineDown or NonFiniteScores; for a job that was not reserved, also what `admit` names.
        """
        ...

    async def context(self, model: ServedModel, handle: str, key: str | None, deadline: float) -> Context:
        """Return the context that this handle names for this API key.

        Raises ContextUnknown, NotReady if `model` is gone, DeadlineExceeded or EngineDown.
        """
        ...

    async def attention(
        self, model: ServedModel, context: Context, candidates: Candidates, deadline: float
    ) -> NDArray[np.float32]:
        """Return what the candidates attend to, `[L, N, C, 1 + h + 1]`: the user, each event, themselves. Computed beside the engine.

        Raises NotReady if `model` is gone, DeadlineExceeded or EngineDown.
        """
        ...

    async def exposition(self) -> bytes:
        """Return every metric, of all processes of the service. Raises EngineDown if they cannot be collected."""
        ...


class ReloadableService(RankingService, Protocol):
    """A ranker whose engine is in this process, so that its checkpoint and its corpus can be changed here."""

    @property
    def corpus(self) -> ChangeableCorpus:
        """The search side; it may serve no corpus."""
        ...

    @property
    def reloads(self) -> Reloads:
        """Changes what serves."""
        ...
