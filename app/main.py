"""The FastAPI application: `uvicorn --factory app.main:create_app`. Which files hold which endpoints, and what they share."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from app import DISTRIBUTION, schema
from app.api import admin, explain, infer, operations, rank, retrieve
from app.api.caller import Bodies, KeyRing
from app.api.middleware import HostMiddleware, RequestMiddleware
from app.api.pages import pages
from app.api.patience import Leavers
from app.api.read_queue import ReadQueue
from app.api.state import AppState
from app.interface import RankingService, ReloadableService
from app.served.log import ServedLog, create_served_log
from app.settings import ADMIN_HOST, Settings, SettingsProblem, load_settings, problem_of
from app.shares import Shares
from app.telemetry import logs
from app.telemetry.metrics import Metrics
from app.telemetry.tracing import RequestTracer, create_tracer

log = structlog.get_logger("app.main")
DESCRIPTION = (
    "Ranks the posts of a feed for one user with a Grok transformer. Each candidate is scored as if it were alone: with the same "
    "checkpoint its scores have the same bits, whatever else is in the request."
)


class Application(FastAPI):
    """FastAPI, but a request meets the middlewares that were added and then its route, and nothing else.

    The layers that FastAPI puts around them are for error pages, uploaded files and its own telemetry. `RequestMiddleware` answers every
    exception instead, so handlers of exceptions cannot be added.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.exception_handlers = MappingProxyType({})  # type: ignore[assignment]
        self.dependency_overrides = MappingProxyType({})  # type: ignore[assignment]  # `Route` would ignore them

    def build_middleware_stack(self) -> ASGIApp:
        """Return the middlewares around the routes, the one that was added last outermost."""
        app: ASGIApp = _routed(self.router)
        for kind, arguments, options in reversed(self.user_middleware):
            app = kind(app, *arguments, **options)
        return app


def _routed(router: APIRouter) -> ASGIApp:
    """The router, except that a route whose path has no parameters is looked up: the router tries one pattern after the other.

    Below a path of a proxy, or of another application that this one is mounted in, the router does it all.
    """
    fixed: dict[tuple[str, str], APIRoute] = {}
    for route in router.routes:
        if isinstance(route, APIRoute) and not route.param_convertors:
            for method in route.methods or ():
                scope = {"type": "http", "method": method, "path": route.path}
                if next(other for other in router.routes if other.matches(scope)[0] == Match.FULL) is route:
                    fixed[method, route.path] = route

    def app(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        is_below = scope["type"] != "http" or scope.get("root_path")
        route = None if is_below else fixed.get((scope["method"], scope["path"]))
        if route is None:
            return router(scope, receive, send)
        scope["route"], scope["endpoint"], scope["path_params"] = route, route.endpoint, {}
        return route.app(scope, receive, send)

    return app


def operation_id(route: APIRoute) -> str:
    """The name of a route in /openapi.json and in code that is made from it: `/v2/models/{name}/infer` is `v2_models_infer`."""
    return "_".join(part for part in route.path.split("/") if part and "{" not in part)


def create_app(
    settings: Settings | None = None,
    ranker: RankingService | None = None,
    on_stop: Callable[[bool], object] = lambda finished: None,
) -> FastAPI:
    """The application with every endpoint of the main port. Its lifespan loads the ranker, warms it up and drains it.

    Without `settings`, they are read from the environment, and another server than ours runs the application: then an error that only a
    new process can mend ends the process with SIGTERM. `on_stop` is told at the end whether the ranker finished all that it had begun.
    Raises SettingsProblem if a setting cannot be used, or no checkpoint is there.
    """
    has_settings = settings is not None
    if settings is None:
        settings = load_settings()
        logs.configure(settings.logs)
        if problem := problem_of(settings.checkpoint):
            raise SettingsProblem(f"{settings.checkpoint.absolute()} {problem}")
    if ranker is None:
        from app.service.local import create_ranker  # the only import that needs torch

        ranker = create_ranker(settings, Metrics())
        if not has_settings:
            ranker.on_fatal = end_process
    tracer, served_log = create_tracer(settings.tracing), create_served_log(settings.served, ranker.metrics)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ranker.start()
        if served_log is not None:
            served_log.start()
        yield
        on_stop(await ranker.stop(settings.drain.timeout_seconds))
        if served_log is not None:
            await asyncio.to_thread(served_log.close)
        if tracer is not None:
            tracer.close()

    hosts = settings.allowed_hosts(settings.host)
    app = _application(settings, ranker, hosts, tracer=tracer, served_log=served_log, lifespan=lifespan)
    routers = [rank.router, retrieve.router, infer.router, operations.probes, operations.info]
    if settings.probes.port is None:
        routers.append(operations.metrics)
    if settings.explores:
        routers.append(explain.router)
    _include(app, routers)
    app.openapi = lambda: describe(app, settings)  # type: ignore[method-assign]
    _include(app, [pages(settings, app.openapi)])
    return app


def end_process(reason: str) -> None:
    """End this process as its supervisor would, so that the server that runs it finishes what it has begun."""
    log.error("fatal", reason=reason)
    os.kill(os.getpid(), signal.SIGTERM)


def create_probe_app(settings: Settings, ranker: RankingService) -> FastAPI:
    """Only probes, metrics and /info, for a port that is not open to the outside."""
    app = _application(settings, ranker, settings.allowed_hosts(settings.probes.host, is_main=False))
    _include(app, [operations.probes, operations.metrics, operations.info])
    return app


def create_admin_app(settings: Settings, ranker: ReloadableService) -> FastAPI:
    """Reloads and changes of posts, for the admin port on loopback."""
    hosts = settings.allowed_hosts(ADMIN_HOST, is_main=False)
    app = _application(settings, ranker, hosts, operator=admin.Operator(settings.admin))
    _include(app, [admin.router])
    return app


def _application(
    settings: Settings,
    ranker: RankingService,
    hosts: list[str],
    *,
    tracer: RequestTracer | None = None,
    served_log: ServedLog | None = None,
    operator: admin.Operator | None = None,
    lifespan: Any = None,
) -> FastAPI:
    app = Application(
        title="Phoenix ranking server",
        version=version(DISTRIBUTION),
        description=DESCRIPTION,
        openapi_url=None,  # with /docs in `pages`: FastAPI's page loads scripts from elsewhere
        telemetry={"tracing": False, "metrics": False, "logs": False},  # ours is asked for by TRACING__ENABLED
        redirect_slashes=False,  # a redirect would repeat the Host header, which anyone may forge
        lifespan=lifespan,
    )
    bodies = Bodies(settings.limits.buffered_bytes, settings.queue.max_share_per_key)
    leavers = Leavers()
    app.state = AppState(  # type: ignore[assignment]
        ranker=ranker,
        settings=settings,
        keys=KeyRing(settings.auth),
        bodies=bodies,
        batches=Shares(settings.limits.batch_candidates, settings.queue.max_share_per_key),
        explanations=explain.Explanations(),
        about=operations.of_settings(settings),
        scrapes=operations.Scrapes(ranker.exposition),
        served_log=served_log,
        operator=operator,
        leavers=leavers,
        read_queue=ReadQueue(settings.queue.max_wait_seconds),
    )
    if hosts != ["*"]:
        app.add_middleware(HostMiddleware, allowed_hosts=hosts)
    app.add_middleware(
        RequestMiddleware,
        metrics=ranker.metrics,
        bodies=bodies,
        leavers=leavers,
        root_path=settings.root_path,
        success_sample=settings.logs.success_sample,
        tracer=tracer,
    )
    return app


def _include(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """`app.include_router` would look for each request's route twice."""
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute):
                route.operation_id = route.operation_id or operation_id(route)
        app.router.routes.extend(router.routes)


def describe(app: FastAPI, settings: Settings) -> dict[str, Any]:
    """`/openapi.json`: what FastAPI makes of the routes, with the schemas of the bodies that msgspec reads."""
    if app.openapi_schema is None:
        servers = [{"url": settings.root_path or "."}]  # below whatever path a proxy has put this
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes, servers=servers
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schema.components())
        for operation in (operation for path in document["paths"].values() for operation in path.values()):
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]  # FastAPI's, of parameters: ours are texts, and our 422 is a problem
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{}, {"key": []}]
        app.openapi_schema = document
    return app.openapi_schema
