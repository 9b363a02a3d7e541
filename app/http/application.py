"""The ASGI application around a service: routes, error handlers, life. Not for opening sockets: that is `server`."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import InternalError, NotReady
from app.explore.pages import Kept, pages
from app.http import operations
from app.http.asgi import HeadAsGet
from app.http.direct import DirectEndpoint, RankEndpoint
from app.http.explain import ExplainEndpoint
from app.http.negotiation import INFER
from app.http.observe import Observe, Recorder
from app.http.open_inference import MODEL, VERSION, open_inference
from app.http.openapi import PREFERRED, describe_app
from app.http.problems import HANDLERS
from app.http.rank import Ranking
from app.http.rank_batch import BatchEndpoint
from app.http.retrieve import PostsEndpoint, RecommendCall, RetrieveCall
from app.interface import Service
from app.settings import Settings
from app.telemetry.logs import RequestLog
from app.telemetry.tracing import RequestTracer, create_tracer

PLAIN_TARGET = re.compile(rb"[\w./+-]+")  # neither a query nor escapes
INFER_PATH = re.compile(r"/v2/models/(?P<name>[^/]+)(/versions/(?P<version>[^/]+))?/infer")
DESCRIPTION = (
    "Ranks feed candidates for one user with a Grok transformer. Every candidate is scored as if it were alone: for one "
    "checkpoint its numbers are the same bits whatever else is in the request."
)


class Application(FastAPI):
    """FastAPI, but the endpoints that rank are called without its layers, which cost more than a small model takes.

    `direct` are endpoints, by path, for a server that can do without ASGI as well: see `endpoint_of`.
    """

    recorder: Recorder
    direct: Mapping[str, DirectEndpoint] = {}
    ranking: Ranking
    endpoints: Mapping[tuple[str, str], ASGIApp] = {}  # (method, path) → endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Middleware that is added later does not see these endpoints."""
        endpoint: ASGIApp | None = None
        if scope["type"] == "http":
            asked = scope["method"], scope["path"]
            endpoint = self.endpoints.get(asked) or self._inference(*asked)
        await (endpoint or super().__call__)(scope, receive, send)

    def endpoint_of(self, method: bytes, target: bytes) -> DirectEndpoint | None:
        """Who takes a request without ASGI; None also where ASGI has to read the target."""
        if method != b"POST" or not PLAIN_TARGET.fullmatch(target):
            return None
        path = target.decode()
        return self.direct.get(path) or self._inference("POST", path)

    def _inference(self, method: str, path: str) -> RankEndpoint | None:
        asked = INFER_PATH.fullmatch(path) if method == "POST" and self.endpoints else None
        if asked is None:
            return None
        return RankEndpoint(self.ranking, self.recorder, path, INFER, (asked["name"], asked["version"] or ""))


def create_app(settings: Settings, service: Service) -> Application:
    """The service as one ASGI application; its lifespan starts and stops the service.

    `app.state` holds `service` and `metrics`. Raises SettingsProblem where tracing is asked for and not installed.
    """
    routers = [operations.probes(service), operations.info(service, settings)]
    routers += [] if settings.probes.port is not None else [operations.metrics(service)]
    tracer = create_tracer(settings.tracing)
    routers += [open_inference(service), pages(service, settings)]
    paths = ["/rank", "/rank/batch", "/retrieve", "/recommend", f"{MODEL}/infer", f"{VERSION}/infer"]
    paths += ["/explain"] if settings.explores else []
    app = _application(settings, service, routers, paths, tracer)
    ranking = app.ranking = Ranking(service, settings)
    batch = Observe(BatchEndpoint(ranking, settings.batching, settings.budgets), app.recorder)
    app.direct = {
        "/rank": RankEndpoint(ranking, app.recorder),
        "/retrieve": PostsEndpoint(ranking, app.recorder, settings, "/retrieve", RetrieveCall),
        "/recommend": PostsEndpoint(ranking, app.recorder, settings, "/recommend", RecommendCall),
    }
    if settings.explores:
        explain = ExplainEndpoint(ranking, app.recorder, settings.batching, settings.explore)
        app.direct = {**app.direct, "/explain": explain}
    app.endpoints = {
        **{("POST", path): endpoint for path, endpoint in app.direct.items()},
        ("POST", "/rank/batch"): batch,
    }
    app.openapi = lambda: describe_app(app, _action_names(service), explores=settings.explores)  # type: ignore[method-assign]
    return app


def create_probe_app(settings: Settings, service: Service) -> Application:
    """Probes, metrics and /info alone, for a port that the outside does not see."""
    routers = [operations.probes(service), operations.metrics(service), operations.info(service, settings)]
    return _application(settings, service, routers)


def _application(
    settings: Settings,
    service: Service,
    routers: Sequence[APIRouter],
    ranking_paths: Sequence[str] = (),
    tracer: RequestTracer | None = None,
) -> Application:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop(settings.drain.timeout_seconds)
        if tracer is not None:
            tracer.close()

    app = Application(
        title="Phoenix ranking server",
        version=version("phoenix-ranking-server"),
        description=DESCRIPTION,
        routes=[Route(path, _not_reached, methods=["POST"]) for path in ranking_paths],  # for 405
        lifespan=lifespan,
        openapi_url=None,  # below, made once
        docs_url=None,  # app.explore has it, without a CDN
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the Host header, which anyone may forge
        exception_handlers=HANDLERS,
    )
    for router in routers:
        app.include_router(router)
    described: Kept[Any] = Kept(lambda names: orjson.dumps(app.openapi()), "application/json")

    async def openapi(request: Request) -> Response:
        return await described.reply(_action_names(service), request)

    app.add_route("/openapi.json", openapi, include_in_schema=False)
    app.state.service, app.state.metrics = service, service.metrics
    known = [*app.routes, *(route for router in routers for route in router.routes)]
    paths = {path for route in known if (path := getattr(route, "path", None))}
    app.add_middleware(HeadAsGet)
    app.recorder = Recorder(service.metrics, paths, RequestLog(settings.logs.success_sample), tracer)
    app.add_middleware(Observe, recorder=app.recorder)
    return app


async def _not_reached(request: Request) -> Response:
    raise InternalError


def _action_names(service: Service) -> Any:
    try:
        return service.model.manifest.action_names
    except NotReady:
        return PREFERRED
