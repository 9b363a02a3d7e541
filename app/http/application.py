"""The ASGI application around a service: routes, error handlers, life. Not for opening sockets: that is `server`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

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


class Application(FastAPI):
    """FastAPI, but the endpoints that rank are called without its layers, which cost more than a small model takes."""

    direct: Mapping[tuple[str, str], ASGIApp] = {}  # (method, path) → endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Middleware that is added later does not see the direct endpoints."""
        endpoint = self.direct.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        await (endpoint or super().__call__)(scope, receive, send)


def create_app(settings: Settings, service: Service) -> FastAPI:
    """The service as one ASGI application; its lifespan starts and stops the service.

    `app.state` holds `service` and `metrics`. Raises SettingsProblem where tracing is asked for and not installed.
    """
    routers = [operations.probes(service), operations.info(service, settings)]
    routers += [] if settings.probes.port is not None else [operations.metrics(service)]
    tracer = create_tracer(settings.tracing)
    ranking = Ranking(service, settings)
    endpoints: dict[str, ASGIApp] = {
        "/rank": RankEndpoint(ranking),
        "/rank/batch": BatchEndpoint(ranking, settings.batching),
    }
    app = _application(settings, service, routers, endpoints, tracer)
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
    endpoints: Mapping[str, ASGIApp] | None = None,
    tracer: RequestTracer | None = None,
) -> Application:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop(settings.drain.timeout_seconds)
        if tracer is not None:
            tracer.close()

    endpoints = endpoints or {}
    app = Application(
        title="Phoenix ranking server",
        version=version("phoenix-ranking-server"),
        description=DESCRIPTION,
        routes=[Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()],  # for 405
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
    noted: dict[str, Any] = {
        "metrics": service.metrics,
        "routes": paths,
        "request_log": RequestLog(settings.logs.success_sample),
        "tracer": tracer,
    }
    app.add_middleware(Observe, **noted)
    app.direct = {("POST", path): Observe(endpoint, **noted) for path, endpoint in endpoints.items()}
    return app


def _action_names(service: Service) -> Any:
    try:
        return service.model.manifest.action_names
    except NotReady:
        return PREFERRED
