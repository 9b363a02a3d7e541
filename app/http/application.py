"""Every endpoint of a port: ours as calls, FastAPI's pages and documents beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson
from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.errors import NotFound, NotReady
from app.explore.pages import Kept, pages
from app.http import operations
from app.http.asgi import Guest, PagesEndpoint, split_target
from app.http.call import Endpoint
from app.http.explain import ExplainEndpoint
from app.http.headers import CONTEXT, INFER, RANK
from app.http.observe import Recorder, RequestLog
from app.http.open_inference import MODEL, VERSION, open_inference
from app.http.openapi import PREFERRED, RANK_MODEL, describe_app
from app.http.problems import HANDLERS
from app.http.rank import RankEndpoint, Ranking
from app.http.rank_batch import BatchEndpoint
from app.http.retrieve import PostsEndpoint, RecommendCall, RetrieveCall
from app.interface import Service
from app.settings import Settings
from app.telemetry.tracing import RequestTracer, create_tracer
from weights.text_ids import IdKind

OF_ONE_MODEL = {
    re.compile(r"/rank/(?P<name>[^/]+?)(@(?P<version>[^/@]+))?"): RANK,
    re.compile(r"/v2/models/(?P<name>[^/]+)(/versions/(?P<version>[^/]+))?/infer"): INFER,
}
DESCRIPTION = (
    "Ranks feed candidates for one user with a Grok transformer. Every candidate is scored as if it were alone: for one "
    "checkpoint its numbers are the same bits whatever else is in the request."
)


class Application(dict[tuple[bytes, bytes], Endpoint]):
    """All endpoints of one port by method and request target. As an ASGI application it serves under any other server."""

    def __init__(
        self,
        service: Service,
        recorder: Recorder,
        pages: FastAPI,
        tracer: RequestTracer | None = None,
        endpoints: Mapping[str, Endpoint] | None = None,
        ranking: Ranking | None = None,
        drain_seconds: float = 0.0,
    ) -> None:
        """`pages` are FastAPI's; `endpoints` take POST, by path."""
        self.endpoints: Mapping[str, Endpoint] = endpoints or {}
        super().__init__({(b"POST", path.encode()): endpoint for path, endpoint in self.endpoints.items()})
        self.service = service
        self.recorder = recorder
        self.pages = pages
        self.ranking = ranking
        self._tracer = tracer
        self._drain_seconds = drain_seconds
        self._guest = Guest(self, service.start, self._stop)

    def __missing__(self, asked: tuple[bytes, bytes]) -> Endpoint:
        """The endpoint for any other request. A path with a host, a query or escapes is looked up without these."""
        method, target = asked
        if method == b"POST":
            path = unquote_to_bytes(split_target(target)[0])
            found = self.get((method, path)) or self._of_one_model(path.decode("latin-1"))
            if found is not None:
                return found
        return PagesEndpoint(self.pages, self.recorder, method, target)

    def _of_one_model(self, path: str) -> RankEndpoint | None:
        for pattern, wires in OF_ONE_MODEL.items():
            if self.ranking is not None and (asked := pattern.fullmatch(path)):
                counted = "/rank" if wires is RANK else path
                wanted = asked["name"], asked["version"] or ""
                return RankEndpoint(self.ranking, self.recorder, counted, wires, wanted)
        return None

    def close(self) -> None:
        """Called at the end of the process."""
        if self._tracer is not None:
            self._tracer.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI; its lifespan starts and stops the service."""
        await self._guest(scope, receive, send)

    async def _stop(self) -> None:
        await self.service.stop(self._drain_seconds)
        self.close()


def create_app(settings: Settings, service: Service) -> Application:
    """Every endpoint of the service's port. Raises SettingsProblem where tracing is asked for and not installed."""
    routers = [operations.probes(service), operations.info(service, settings)]
    routers += [] if settings.probes.port is not None else [operations.metrics(service)]
    tracer = create_tracer(settings.tracing)
    routers += [open_inference(service), pages(service, settings)]
    paths = [
        "/context",
        "/rank",
        "/rank/batch",
        RANK_MODEL,
        "/retrieve",
        "/recommend",
        f"{MODEL}/infer",
        f"{VERSION}/infer",
    ]
    paths += ["/explain"] if settings.explores else []
    fastapi = create_pages(routers, paths)

    def document() -> dict[str, Any]:
        names, ids = _words(service)
        return describe_app(fastapi, names, explores=settings.explores, ids=ids)

    fastapi.openapi = document  # type: ignore[method-assign]
    described: Kept[Any] = Kept(lambda words: orjson.dumps(fastapi.openapi()), "application/json")

    async def openapi(request: Request) -> Response:
        return await described.reply(_words(service), request)

    fastapi.add_route("/openapi.json", openapi)
    recorder = _recorder(fastapi, routers, service, settings, tracer)
    ranking = Ranking(service, settings)
    endpoints: dict[str, Endpoint] = {
        "/context": RankEndpoint(ranking, recorder, "/context", CONTEXT),
        "/rank": RankEndpoint(ranking, recorder),
        "/retrieve": PostsEndpoint(ranking, recorder, settings, "/retrieve", RetrieveCall),
        "/recommend": PostsEndpoint(ranking, recorder, settings, "/recommend", RecommendCall),
        "/rank/batch": BatchEndpoint(ranking, recorder, settings.batching),
    }
    if settings.explores:
        endpoints["/explain"] = ExplainEndpoint(ranking, recorder, settings.batching, settings.deadline.default_seconds)
    return Application(service, recorder, fastapi, tracer, endpoints, ranking, settings.drain.timeout_seconds)


def create_probe_app(settings: Settings, service: Service) -> Application:
    """Probes, metrics and /info alone, for a port that the outside does not see."""
    routers = [operations.probes(service), operations.metrics(service), operations.info(service, settings)]
    fastapi = create_pages(routers)
    return Application(service, _recorder(fastapi, routers, service, settings), fastapi)


def create_pages(routers: Sequence[APIRouter] = (), ranking_paths: Sequence[str] = ()) -> FastAPI:
    """FastAPI around these; other methods than POST of `ranking_paths` get 405."""
    app = FastAPI(
        title="Phoenix ranking server",
        version=version("phoenix-ranking-server"),
        description=DESCRIPTION,
        routes=[Route(path, _not_reached, methods=["POST"]) for path in ranking_paths],  # for 405
        openapi_url=None,  # made once, by `create_app`; and so no /docs, which app.explore has without a CDN
        redirect_slashes=False,  # a redirect would repeat the Host header, which anyone may forge
        exception_handlers=HANDLERS,
    )
    for router in routers:
        app.include_router(router)
    return app


def _recorder(
    app: FastAPI,
    routers: Sequence[APIRouter],
    service: Service,
    settings: Settings,
    tracer: RequestTracer | None = None,
) -> Recorder:
    known = [*app.routes, *(route for router in routers for route in router.routes)]
    paths = {path for route in known if (path := getattr(route, "path", None))}
    return Recorder(service.metrics, paths, RequestLog(settings.logs.success_sample), tracer)


async def _not_reached(request: Request) -> Response:
    raise NotFound  # a line feed behind the path: `$` of Starlette's patterns matches before it


def _words(service: Service) -> tuple[Sequence[str], IdKind]:
    """The action names and the kind of ids that examples use."""
    try:
        return service.model.manifest.action_names, service.model.manifest.ids
    except NotReady:
        return PREFERRED, "uint64"
