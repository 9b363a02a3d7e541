"""The endpoints for operators: probes, metrics, and what runs here. They need no key, and never reveal a path or a secret."""

from __future__ import annotations

import asyncio
import platform
import re
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from app import DISTRIBUTION
from app.api.route import Route
from app.api.state import state_of
from app.errors import Draining, EngineDown, NotReady, ServiceError
from app.interface import CorpusState, Health, RankingService
from app.replies import JSON
from app.schema import problems_of
from app.settings import Settings
from app.telemetry.metrics import CONTENT_TYPE

PROBE_RETRY_SECONDS = 2.0
SCRAPE_SHARE = 0.05  # of the event loop, for callers who scrape as fast as they can
MOST_REST_SECONDS = 1.0  # between two scrapes
PRIVATE = ("auth", "admin", "checkpoint", "retrieval", "served")  # settings with keys and paths
PATH = re.compile(r"(?<![\w.…])~?/[^\s'\"`,;:)]+")
NOT_NOW = problems_of(NotReady, Draining, EngineDown)

probes, metrics, info = (APIRouter(tags=["operations"], route_class=Route) for _ in range(3))


class Described(BaseModel):
    """A reply whose fields are described by the text below them."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Status(Described):
    """The reply of a probe that succeeds."""

    status: str
    """`alive`, `ready` or `started`."""
    engine: str | None = None
    """Only `/readyz` on CUDA: which engine passed its checks."""
    feed: str | None = None
    """Only `/readyz`, and only if the feed of posts cannot be read: why."""


class Build(Described):
    """What is installed."""

    version: str
    """Version of the service."""
    python: str
    """Version of Python."""
    torch: str
    """Version of torch."""


class Info(Described):
    """What runs here."""

    model: dict[str, str]
    """Name and version of the checkpoint that ranks."""
    checkpoint: dict[str, str]
    """SHA-256 of its files."""
    architecture: dict[str, Any]
    """Sizes and switches of the model."""
    ids: str
    """Which kind of id users, posts and authors have: `uint64` or `text`."""
    actions: list[str]
    """Names of the probability columns."""
    continuous: list[dict[str, str]]
    """Name and unit of each continuous output."""
    weights: dict[str, float]
    """The score weights for requests that send none."""
    device: str
    """`cpu` or `cuda`."""
    dtype: str
    """Data type of the trunk."""
    backend: str
    """Which engine runs the model."""
    candidate_positions: str
    """`shared` or `sequential`."""
    engine: dict[str, Any]
    """What the engine reports about itself."""
    retrieval: dict[str, Any] | None
    """The retrieval checkpoint and its corpus; null if none is served."""
    limits: dict[str, int]
    """What a request may hold."""
    settings: dict[str, Any]
    """The settings in force, without keys, tokens and paths."""
    build: dict[str, str]
    """What is installed, as in `/version`."""


def answers(kind: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers 200 with this."""
    return {200: {"model": kind}}


def json_reply(content: dict[str, Any]) -> Response:
    """200 with JSON."""
    return Response(orjson.dumps(content), media_type=JSON)


@probes.get("/livez", responses=answers(Status), response_class=Response)
async def livez() -> Response:
    """The process is alive: it can answer at all."""
    return json_reply({"status": "alive"})


@probes.get("/readyz", responses=answers(Status) | NOT_NOW, response_class=Response)
async def readyz(request: Request) -> Response:
    """Requests may be sent here. 503 with the reason while the process loads, warms up or drains, or if its engine is stuck."""
    ranker = state_of(request).ranker
    feed = check_ready(ranker).feed
    rung = ranker.model().engine.notes.get("rung")
    return json_reply({"status": "ready"} | ({"engine": str(rung)} if rung else {}) | ({"feed": feed} if feed else {}))


@probes.get("/health", summary="Health", responses=answers(Status) | NOT_NOW, response_class=Response)
async def health(request: Request) -> Response:
    """The same as `/readyz`, under the name that many balancers ask for."""
    return await readyz(request)


@probes.get("/startupz", responses=answers(Status) | NOT_NOW, response_class=Response)
async def startupz(request: Request) -> Response:
    """Warm-up is done: 503 until the first checkpoint is loaded and warmed up, 200 from then on."""
    health = state_of(request).ranker.health()
    if not health.started:
        raise NotReady(health.reason, retry_after_seconds=PROBE_RETRY_SECONDS)
    return json_reply({"status": "started"})


@info.get("/version", summary="Version", responses=answers(Build), response_class=Response)
async def build(request: Request) -> Response:
    """Versions of the service, Python and torch; answers as soon as the process listens."""
    return json_reply(state_of(request).about["build"])


@metrics.get("/metrics", summary="Metrics", responses={200: {"content": {CONTENT_TYPE: {}}}}, response_class=Response)
async def scrape(request: Request) -> Response:
    """All metrics in the Prometheus text format. The names of our own begin with `ranker_`."""
    return Response(await state_of(request).scrapes.get(), headers={"content-type": CONTENT_TYPE})


@info.get("/info", summary="Info", responses=answers(Info) | NOT_NOW, response_class=Response)
async def what_runs(request: Request) -> Response:
    """What runs here: model, checkpoint, architecture, action names, limits, device, dtype, build."""
    ranker = state_of(request).ranker
    return json_reply(describe(ranker, await ranker.corpus.state()) | state_of(request).about)


def check_ready(ranker: RankingService) -> Health:
    """Return what the probes say, or raise why no requests should be sent here: NotReady, Draining or EngineDown."""
    health = ranker.health()
    if not health.ready:
        kind: type[ServiceError] = EngineDown if health.failed else Draining if health.draining else NotReady
        raise kind(health.reason, retry_after_seconds=PROBE_RETRY_SECONDS)
    return health


def describe(ranker: RankingService, corpus: CorpusState | None) -> dict[str, Any]:
    """Plain JSON values. Raises NotReady while nothing is loaded."""
    model = ranker.model()
    manifest, engine = model.manifest, model.engine
    return {
        "model": {"name": manifest.name, "version": manifest.version},
        "checkpoint": {"digest": manifest.digest},
        "architecture": manifest.config.to_dict(),
        "ids": manifest.ids,
        "actions": list(manifest.action_names),
        "continuous": [{"name": output.name, "unit": output.unit} for output in manifest.continuous],
        "weights": manifest.score_weights,
        "device": engine.device,
        "dtype": engine.dtype,
        "backend": engine.backend,
        "candidate_positions": engine.candidate_positions,
        "engine": without_paths(engine.notes),
        "retrieval": None if corpus is None else _retrieval(ranker, corpus),
    }


def without_paths(notes: Any) -> Any:
    """An engine's notes as `/info` may show them: only the first line of each text, with paths of this machine replaced by `…`. Compilers
    and drivers name such paths; the log has the whole text."""
    if isinstance(notes, dict):
        return {name: without_paths(value) for name, value in notes.items()}
    if isinstance(notes, list | tuple):
        return [without_paths(value) for value in notes]
    return PATH.sub("…", notes.partition("\n")[0]) if isinstance(notes, str) else notes


def of_settings(settings: Settings) -> dict[str, Any]:
    """The part of `/info` that never changes while the process lives."""
    return {
        "limits": settings.limits.model_dump(),
        "settings": {name: value for name, value in settings.effective().items() if name not in PRIVATE},
        "build": {
            "version": version(DISTRIBUTION),
            "python": platform.python_version(),
            "torch": version("torch"),
        },
    }


def _retrieval(ranker: RankingService, state: CorpusState) -> dict[str, Any]:
    """The retrieval model and its corpus."""
    served, corpus = ranker.corpus.served, state.corpus
    return {
        "model": {"name": served.manifest.name, "version": served.manifest.version},
        "checkpoint": {"digest": served.manifest.digest},
        "architecture": served.manifest.config.to_dict(),
        "corpus": {
            "name": corpus.name,
            "version": corpus.version,
            "digest": corpus.digest,
            "posts": state.posts,
            "changes": state.changes,
            "sequence": state.mark.sequence,
            "changes_digest": state.mark.digest,
            "position": state.mark.position,
            "hidden": served.hidden,
            "duplicates": served.duplicates,
            "topics": list(state.topics),
            "has_times": "created_at" in corpus.tensors,
        },
        "engine": without_paths(served.notes),
    }


class Scrapes:
    """Makes one scrape at a time. Callers that ask before it begins share it, so none gets an older one; then the event loop rests from
    scrapes, so that they take no more than `SCRAPE_SHARE` of it, for at most `MOST_REST_SECONDS`. What a scrape waits for other processes
    does not count."""

    def __init__(self, make: Callable[[], Awaitable[bytes]]) -> None:
        self._make = make
        self._next: asyncio.Task[bytes] | None = None
        self._render_lock = asyncio.Lock()
        self._free_at = 0.0  # of the monotonic clock

    async def get(self) -> bytes:
        """The next scrape. Raises what `make` raises."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._run())
        return await asyncio.shield(self._next)

    async def _run(self) -> bytes:
        async with self._render_lock:
            await asyncio.sleep(self._free_at - time.monotonic())
            self._next, began = None, time.thread_time()
            try:
                return await self._make()
            finally:
                rest = (time.thread_time() - began) / SCRAPE_SHARE
                self._free_at = time.monotonic() + min(rest, MOST_REST_SECONDS)
