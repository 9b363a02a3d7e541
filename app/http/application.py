"""The ASGI application around a service: routes, error handlers, life. Not for opening sockets: that is `server`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute, Route

from app.errors import NotReady
from app.http import operations
from app.http.asgi import HeadAsGet
from app.http.observe import Observe
from app.http.openapi import PREFERRED, describe_app
from app.http.problems import HANDLERS
from app.http.rank import RankEndpoint, Ranking
from app.http.rank_batch import BatchEndpoint
from app.interface import Service
from app.settings import Settings
from app.telemetry.logs import RequestLog
from app.telemetry.tracing import RequestTracer, create_tracer

DESCRIPTION = (
    "Ranks feed candidates for one user with a Grok transformer. Every candidate is scored as if it were alone: for one "
    "checkpoint its numbers are the same bits whatever else is in the request."
)


def create_app(settings: Settings, service: Service) -> FastAPI:
    """The service as one ASGI application; its lifespan starts and stops the service.

    `app.state` holds `service` and `metrics`. Raises SettingsProblem where tracing is asked for and not installed.
    """
    routers = [operations.probes(service), operations.info(service, settings)]
    routers += [] if settings.probes.port is not None else [operations.metrics(service)]
    tracer = create_tracer(settings.tracing)
    ranking = Ranking(service, settings)
    routes = [
        Route("/rank", RankEndpoint(ranking), methods=["POST"]),
        Route("/rank/batch", BatchEndpoint(ranking, settings.batching), methods=["POST"]),
    ]
    app = _application(settings, service, routers, routes, tracer)
    app.openapi = lambda: describe_app(app, _action_names(service))  # type: ignore[method-assign]
    return app


def create_probe_app(settings: Settings, service: Service) -> FastAPI:
    """Probes, metrics and /info alone, for a port that the outside does not see."""
    routers = [operations.probes(service), operations.metrics(service), operations.info(service, settings)]
    return _application(settings, service, routers)


def _application(
    settings: Settings,
    service: Service,
    routers: Sequence[APIRouter],
    routes: Sequence[BaseRoute] = (),
    tracer: RequestTracer | None = None,
) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop(settings.drain.timeout_seconds)
        if tracer is not None:
            tracer.close()

    app = FastAPI(
        title="Phoenix ranking server",
        version=version("phoenix-ranking-server"),
        description=DESCRIPTION,
        routes=list(routes),  # before all others, for what is asked most is found first
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the Host header, which anyone may forge
        exception_handlers=HANDLERS,
    )
    for router in routers:
        app.include_router(router)
    app.state.service, app.state.metrics = service, service.metrics
    known = [*app.routes, *(route for router in routers for route in router.routes)]
    paths = {path for route in known if (path := getattr(route, "path", None))}
    app.add_middleware(HeadAsGet)
    request_log = RequestLog(settings.logs.success_sample)
    app.add_middleware(Observe, metrics=service.metrics, routes=paths, request_log=request_log, tracer=tracer)
    return app


def _action_names(service: Service) -> Any:
    try:
        return service.model.manifest.action_names
    except NotReady:
        return PREFERRED
