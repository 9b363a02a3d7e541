"""The endpoints besides ranking: probes, metrics, and what runs here. Not for the endpoints that rank."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from app.budgets import most_bytes
from app.errors import CorpusNotLoaded, Draining, EngineDown, NotReady, ServiceError
from app.interface import Changed, Health, Service
from app.settings import Settings
from app.telemetry.exposition import CONTENT_TYPE, Scrapes

PROBE_RETRY_SECONDS = 2.0
PRIVATE = (
    "auth",
    "admin",
    "checkpoint",
    "retrieval",
    "shadow",
)  # keys and paths are not published
PROBLEM = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}}  # added by `openapi`
NOT_NOW: dict[int | str, dict[str, Any]] = {503: PROBLEM | {"description": "Not now; `detail` says why."}}


def probes(service: Service) -> APIRouter:
    """Health, for the platform."""
    router = APIRouter(tags=["operations"])

    @router.get("/livez", summary="The process is alive")
    async def livez() -> dict[str, str]:
        """200 as long as the process can answer at all."""
        return {"status": "alive"}

    @router.get("/readyz", summary="Requests may be sent here", responses=NOT_NOW)
    async def readyz() -> dict[str, str]:
        """503 with the reason while loading, warming or draining, or when the engine has work and finishes none of it.

        On CUDA `engine` names the way of computing that passed its checks. `second`: how a second checkpoint is, `feed`: why the feed of
        posts cannot be read; neither is a reason against readiness, but for posts that are too old.
        """
        feed = check_ready(service).feed
        rung, second = service.model.engine.notes.get("rung"), service.second
        said = {} if second is None else {"second": second.reason or "held"}
        return {"status": "ready"} | ({"engine": str(rung)} if rung else {}) | said | ({"feed": feed} if feed else {})

    @router.get("/startupz", summary="Warm-up is done", responses=NOT_NOW)
    async def startupz() -> dict[str, str]:
        """503 until the first checkpoint is loaded and warm; 200 from then on."""
        health = service.health()
        if not health.started:
            raise NotReady(health.reason, retry_after_seconds=PROBE_RETRY_SECONDS)
        return {"status": "started"}

    return router


def check_ready(service: Service) -> Health:
    """Return what the probes say, or raise why no requests should be sent here: NotReady, Draining or EngineDown."""
    health = service.health()
    if not health.ready:
        kind: type[ServiceError] = EngineDown if health.failed else Draining if health.draining else NotReady
        raise kind(health.reason, retry_after_seconds=PROBE_RETRY_SECONDS)
    return health


def metrics(service: Service) -> APIRouter:
    """Prometheus exposition."""
    router, scrapes = APIRouter(tags=["operations"]), Scrapes(service.exposition)

    @router.get("/metrics", summary="Prometheus exposition", response_class=Response)
    async def scrape() -> Response:
        """All series, prefix `ranker_`."""
        return Response(await scrapes.get(), headers={"content-type": CONTENT_TYPE})

    return router


def info(service: Service, settings: Settings) -> APIRouter:
    """What runs here, for people and tools."""
    router, constant = APIRouter(tags=["operations"]), cache(lambda: of_settings(settings))

    @router.get("/info", summary="What runs here", responses=NOT_NOW, response_model=dict[str, Any])
    async def info() -> Response:
        """Model, checkpoint, architecture, action names, limits, device, dtype, build."""
        content = describe(service, settings, await service.corpus()) | constant()
        return Response(orjson.dumps(content), media_type="application/json")

    return router


def describe(service: Service, settings: Settings, corpus: Changed | None) -> dict[str, Any]:
    """Plain JSON values. Raises NotReady while nothing is loaded."""
    model = service.model
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
        "engine": engine.notes,
        "second": _second(service, settings),
        "retrieval": None if corpus is None else _retrieval(service, corpus),
        "memory_bytes": _most_bytes(service, settings),
    }


def of_settings(settings: Settings) -> dict[str, Any]:
    """The part of `/info` that never changes while the process lives."""
    return {
        "limits": settings.limits.model_dump(),
        "settings": {name: value for name, value in settings.effective().items() if name not in PRIVATE},
        "build": {
            "version": version("phoenix-ranking-server"),
            "python": platform.python_version(),
            "torch": version("torch"),
        },
    }


def _most_bytes(service: Service, settings: Settings) -> dict[str, int]:
    try:
        found = service.retrieval.served
    except CorpusNotLoaded:
        return most_bytes(settings, service.model.manifest.config)
    return most_bytes(settings, service.model.manifest.config, found.manifest.config, found.corpus.posts)


def _second(service: Service, settings: Settings) -> dict[str, Any] | None:
    """The second checkpoint; None where none is configured."""
    second = service.second
    if second is None:
        return None
    manifest = None if second.model is None else second.model.manifest
    return {
        "model": None if manifest is None else {"name": manifest.name, "version": manifest.version},
        "checkpoint": None if manifest is None else {"digest": manifest.digest},
        "actions": [] if manifest is None else list(manifest.action_names),
        "weights": {} if manifest is None else manifest.score_weights,
        "reason": second.reason,
        "shadows": 0.0 if settings.split.users else settings.shadow.share,
        "users": settings.split.users if second.answers else 0.0,
    }


def _retrieval(service: Service, state: Changed) -> dict[str, Any]:
    """The retrieval model and its corpus."""
    served, corpus = service.retrieval.served, state.corpus
    manifest = served.manifest
    return {
        "model": {"name": manifest.name, "version": manifest.version},
        "checkpoint": {"digest": manifest.digest},
        "architecture": manifest.config.to_dict(),
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
            "topics": list(corpus.topics),
            "has_times": "created_at" in corpus.tensors,
        },
        "engine": served.notes,
    }
