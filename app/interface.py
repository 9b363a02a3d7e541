"""The seam between a request and its ranking: everything the HTTP side knows about the service. Imports neither torch nor HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.errors import ServiceError
from app.telemetry.metrics import Metrics
from model.engine import CacheResult, EngineInfo
from model.inputs import Candidates, Context, Scores
from model.retrieval.inputs import Mark, PostChange, Query, Retrieved
from weights.corpus.manifest import CorpusManifest
from weights.format.manifest import Manifest


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ServedModel:
    """One model version that this process serves, by identity: loading the same checkpoint again makes another one."""

    manifest: Manifest
    engine: EngineInfo


@dataclass(frozen=True, slots=True)
class Second:
    """The second checkpoint of the process. `model`: None while it is loaded and once it has failed; `reason` says which, or why it
    shadows nothing. `answers`: requests of its users are for it now."""

    model: ServedModel | None
    reason: str
    answers: bool


class Ranked(msgspec.Struct, frozen=True, eq=False):
    """One request's result. `queue_seconds` until its first forward, `forward_seconds` summed over its chunks. `handle`: of its context,
    for later requests of the same API key; empty where the cache does not keep it. `history_used`: events that the model has seen, and
    `history_dropped` older ones that it has not."""

    scores: Scores
    cache: CacheResult
    queue_seconds: float
    forward_seconds: float
    handle: str = ""
    history_used: int = 0
    history_dropped: int = 0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ServedRetrieval:
    """One retrieval checkpoint with one corpus, as they are served, by identity. `hidden`: rows that no search returns, `duplicates`
    of them for a post id that came before. `notes` say what runs, as plain JSON values."""

    manifest: Manifest
    corpus: CorpusManifest
    hidden: int
    duplicates: int
    notes: dict[str, Any]


class Found(msgspec.Struct, frozen=True, eq=False):
    """One request's posts, and the seconds that it waited and that its batch took to encode users and to search. The history as in
    `Ranked`."""

    posts: Retrieved
    queue_seconds: float
    encode_seconds: float
    search_seconds: float
    history_used: int = 0
    history_dropped: int = 0


@dataclass(frozen=True, slots=True)
class Changed:
    """`posts`: how many a search can return now. `changes` since the corpus was written, in records of its log. `deleted`: how many of the
    ids were there. `mark`: which changes it has had, ever."""

    corpus: CorpusManifest
    posts: int
    changes: int
    deleted: int
    mark: Mark


class Ticket(Protocol):
    """A reserved place in the queue of one model version. Give one of `Service.admit` to `Service.rank`, or release it."""

    def release(self) -> None:
        """Free the place and drop what is not computed: `done` is not called any more. A second call does nothing."""


FoundDone = Callable[[Found | ServiceError], None]
"""Called once at the end of a search: its posts, or DeadlineExceeded or EngineDown."""


class Retrieval(Protocol):
    """Retrieves posts. All methods belong to the event loop; deadlines are in seconds of the service's clock."""

    @property
    def served(self) -> ServedRetrieval:
        """What serves new requests. Raises CorpusNotLoaded."""

    def retrieve(
        self, served: ServedRetrieval, query: Query, deadline: float, key: str | None, done: FoundDone
    ) -> Ticket:
        """Find the best posts in `served`, for a request of this API key. `done` is called once, later, unless the ticket
        is released before.

        Raises Overloaded, DeadlineExceeded, CorpusBehind, CorpusNotLoaded where `served` is gone, or ContextUnknown, also where what is
        kept of the context is less than the user tower reads.
        """

    async def change(self, change: PostChange) -> Changed:
        """Change the corpus that serves, in one step that every search sees whole. It is on the disk when this returns, and seen by
        searches that begin from then on. Raises CorpusNotLoaded, ChangedByFeed, or CheckpointError where it cannot be written: then
        nothing changed.
        """

    async def compact(self) -> Changed:
        """Write the corpus that serves anew with its changes, in its place on the disk, and serve that, beside running searches.

        Raises CorpusNotLoaded, ReloadInProgress, or CheckpointError or EngineError where it fails: then the old one serves on.
        """


@dataclass(frozen=True, slots=True)
class Health:
    """What the probes say. `reason` is a sentence, empty when ready; `started`: a model has been loaded and warmed up; `feed`: why the
    feed of posts cannot be read, which is no reason against readiness before the posts are too old."""

    ready: bool
    started: bool
    failed: bool
    draining: bool
    reason: str
    feed: str = ""


Done = Callable[[Ranked | ServiceError], None]
"""Called once at the end of a request: its scores, or DeadlineExceeded, NonFiniteScores, EngineDown or an engine process's refusal."""


class Service(Protocol):
    """Ranks requests. All methods belong to the event loop; deadlines are in seconds of `clock`."""

    metrics: Metrics
    clock: Callable[[], float]
    on_fatal: Callable[[str], None]

    @property
    def retrieval(self) -> Retrieval:
        """The retrieval side of the service; it may have no corpus."""

    @property
    def model(self) -> ServedModel:
        """The version that serves new requests. Raises NotReady while nothing is loaded."""

    @property
    def second(self) -> Second | None:
        """The second checkpoint; None where none is configured."""

    def check_open(self, key: str | None = None) -> None:
        """Raise what any request of this API key would get now: NotReady, Draining, EngineDown or Overloaded."""

    def admit(
        self,
        model: ServedModel,
        *,
        candidates: int,
        history: int,
        deadline: float | None,
        key: str | None = None,
        again: bool = False,
        waits: bool = False,
    ) -> Ticket:
        """Reserve room for one request on `model`. `again`: the request was refused before. `waits`: a full queue is not yet a refusal.

        Raises NotReady, Draining, EngineDown, Overloaded or DeadlineExceeded."""

    def shrink(self, ticket: Ticket, candidates: int) -> None:
        """Reduce the ticket's count of candidates. Call it before `rank`."""

    def rank(self, ticket: Ticket, context: Context | str, candidates: Candidates, done: Done) -> None:
        """Score the candidates, in their order: for a context, or one that is known by its handle. Without candidates the context alone is
        computed. `done` is called once, later, unless the ticket is released before. Raises ContextUnknown."""

    async def context(self, model: ServedModel, handle: str, key: str | None) -> Context:
        """The context of this handle. Raises NotReady if `model` is gone, ContextUnknown, or EngineDown."""

    async def attention(
        self, model: ServedModel, context: Context, candidates: Candidates, deadline: float
    ) -> NDArray[np.float32]:
        """What the candidates attend to, `[L, N, C, 1 + h + 1]`, computed beside the engine: on the user, each event and themselves.

        Raises NotReady where `model` is gone, DeadlineExceeded, or EngineDown.
        """

    def health(self) -> Health:
        """Whether requests may be sent here, and why not."""

    async def corpus(self) -> Changed | None:
        """What `retrieval` serves as it is now; None where it serves nothing."""

    async def exposition(self) -> bytes:
        """Every metric, of all processes of the service. Raises EngineDown where they cannot be had."""

    def start(self) -> None:
        """Begin to load in the background; a second call does nothing."""

    def begin_drain(self) -> None:
        """Readiness is lost; requests are still served."""

    async def stop(self, timeout_seconds: float) -> bool:
        """Finish the admitted requests, then free the engines. Returns False when time ran out."""

    def has_running_threads(self) -> bool:
        """Whether native code still runs for which an orderly exit would wait."""


async def ranked(service: Service, ticket: Ticket, context: Context | str, candidates: Candidates) -> Ranked:
    """`Service.rank` as a coroutine. Raises the error that the request ended with; cancelling drops the work."""
    ended: asyncio.Future[Ranked | ServiceError] = asyncio.get_running_loop().create_future()

    def done(result: Ranked | ServiceError) -> None:
        if not ended.done():  # a cancelled task has yet to release its ticket
            ended.set_result(result)

    try:
        service.rank(ticket, context, candidates, done)
        result = await ended
    finally:
        ticket.release()
    if isinstance(result, ServiceError):
        raise result
    return result


class CheckpointNotFound(LookupError):
    """No checkpoint of that name lies below the root. Says nothing about what else may lie there."""


class ReloadInProgress(RuntimeError):
    """Another reload is under way."""


class Reloads(Protocol):
    """Changes the checkpoint of a running service."""

    def resolve(self, name: str) -> Path:
        """The directory that a relative name means. Raises CheckpointNotFound."""

    async def reload(self, path: Path | None = None, *, second: bool = False) -> ServedModel:
        """Serve this checkpoint, or read the present one again; with `second`, do so for the second checkpoint.

        Raises CheckpointError, EngineError, ReloadInProgress, Draining."""

    async def reload_retrieval(self, checkpoint: Path | None = None, corpus: Path | None = None) -> ServedRetrieval:
        """Serve that retrieval checkpoint and that corpus, or the present ones read again: both as one. Raises as `reload`."""

    def reload_soon(self) -> None:
        """Read the present checkpoint again in the background, then the towers and the corpus, if any."""

    def watch(self, seconds: float) -> None:
        """From now on, look this often for a new manifest, and load it."""

    def stop(self) -> None:
        """End the watch and any load under way."""


async def served_identity(service: Service, what: str) -> object:
    """What serves now as `second`, as `retrieval`, or as the first checkpoint: equal before and after a reload that changed nothing."""
    with suppress(ServiceError):
        if what == "retrieval":  # with its changes: a copy of the same corpus may lack some of them
            served, state = service.retrieval.served, await service.corpus()
            return served.manifest.digest, served.corpus.digest, served.hidden, state and state.mark
        held = service.second if what == "second" else None
        model = service.model if what != "second" else None if held is None else held.model
        return None if model is None else model.manifest.digest
    return None
