"""Puts the application together from settings and a service. Not for opening sockets: that is `server`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.routing import Route

from app import routes
from app.errors import NotReady, ServiceError
from app.lifecycle import State
from app.loading import build_service
from app.logs import RequestLog
from app.metrics import Metrics
from app.observe import Observe
from app.openapi import PREFERRED, describe_app
from app.problems import on_http_exception, on_service_error
from app.rank import RankEndpoint, Ranker
from app.rank_batch import BatchEndpoint
from app.service import RankingService
from app.settings import Settings
from app.tracing import RequestTracer, create_tracer

DESCRIPTION = (
    "Ranks feed candidates for one user with a Grok transformer. Every candidate is scored as if it were alone: for one "
    "checkpoint its numbers are the same bits whatever else is in the request."
)


def create_app(settings: Settings, service: RankingService | None = None) -> FastAPI:
    """The service as one ASGI application; its lifespan starts and stops the service.

    `app.state` holds `settings`, `service`, `metrics` and `side_apps`: applications with a (host, port) of their own.
    Raises SettingsProblem where tracing is asked for and not installed.
    """
    service = build_service(settings, Metrics()) if service is None else service
    apart = settings.probes.port is not None
    operations = [routes.probes(service), routes.info(service, settings)]
    operations += [] if apart else [routes.metrics(service)]
    tracer = create_tracer(settings.tracing)
    app = _application(settings, service, operations, tracer)
    ranker = Ranker(service, settings)
    # First in the list: what is asked most is found first.
    app.router.routes.insert(0, Route("/rank", RankEndpoint(ranker), methods=["POST"]))
    app.router.routes.insert(1, Route("/rank/batch", BatchEndpoint(ranker, settings.batching), methods=["POST"]))
    _observe(app, settings, operations, tracer)
    app.openapi = lambda: describe_app(app, _action_names(service))  # type: ignore[method-assign]
    if settings.probes.port is not None:
        app.state.side_apps[settings.probes.host, settings.probes.port] = create_probe_app(settings, service)
    return app


def create_probe_app(settings: Settings, service: RankingService) -> FastAPI:
    """Probes, metrics and /info alone, for a port that the outside does not see."""
    operations = [routes.probes(service), routes.metrics(service), routes.info(service, settings)]
    app = _application(settings, service, operations)
    _observe(app, settings, operations, None)
    return app


def _application(
    settings: Settings, service: RankingService, operations: list[APIRouter], tracer: RequestTracer | None = None
) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if service.lifecycle.state is State.STARTING:
            service.start()
        yield
        await service.stop(settings.drain.timeout_seconds)
        if tracer is not None:
            tracer.close()

    app = FastAPI(
        title="Phoenix ranking server",
        version=version("phoenix-ranking-server"),
        description=DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the Host header, which anyone may forge
        exception_handlers={ServiceError: on_service_error, HTTPException: on_http_exception},
    )
    for router in operations:
        app.include_router(router)
    app.state.settings, app.state.service, app.state.metrics = settings, service, service.metrics
    app.state.side_apps = {}
    return app


def _observe(app: FastAPI, settings: Settings, operations: list[APIRouter], tracer: RequestTracer | None) -> None:
    known = [*app.routes, *(route for router in operations for route in router.routes)]
    paths = {path for route in known if (path := getattr(route, "path", None))}
    request_log = RequestLog(settings.logs.success_sample)
    app.add_middleware(Observe, metrics=app.state.metrics, routes=paths, request_log=request_log, tracer=tracer)


def _action_names(service: RankingService) -> Any:
    try:
        return service.model.checkpoint.manifest.action_names
    except NotReady:
        return PREFERRED
