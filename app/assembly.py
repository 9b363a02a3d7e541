"""Puts one process together from its settings: the only module that knows every room."""

from __future__ import annotations

import os
import time

from starlette.types import ASGIApp

from app.engine.loading import checkpoint_loader, retrieval_loader
from app.http.admin import create_admin_app
from app.http.application import Application, create_app, create_probe_app
from app.scheduling.job import Clock
from app.server.process import Other, RankingServer, serve
from app.service.reload import Reloader
from app.service.service import RankingService
from app.settings import Settings, SettingsProblem
from app.telemetry.metrics import Metrics


def build_service(settings: Settings, metrics: Metrics, *, clock: Clock = time.monotonic) -> RankingService:
    """A service that has not begun to load; call its `start` in a running loop."""
    wanted = settings.retrieval
    retrieval = None
    if wanted.checkpoint is not None and wanted.corpus is not None:
        retrieval = retrieval_loader(wanted.checkpoint, wanted.corpus, settings)
    load = checkpoint_loader(settings.checkpoint, settings)
    return RankingService(load, settings, metrics, retrieval=retrieval, clock=clock)


def build_app(settings: Settings) -> Application:
    """The application of a process that serves by itself, without listeners: for tests and for other ASGI servers."""
    return create_app(settings, build_service(settings, Metrics()))


def build_server(settings: Settings, service: RankingService | None = None) -> RankingServer:
    """All ports of one process: the service, and where they are set probes and admin."""
    service = build_service(settings, Metrics()) if service is None else service
    reloader = create_reloader(service, settings)
    side_apps: list[tuple[str, int, ASGIApp]] = []
    if settings.probes.port is not None:
        side_apps.append((settings.probes.host, settings.probes.port, create_probe_app(settings, service)))
    if settings.admin.port is not None:
        admin = create_admin_app(settings.admin, reloader, service)
        side_apps.append((settings.admin.host, settings.admin.port, admin))
    app = create_app(settings, service)
    others = [] if settings.grpc.port is None else [create_grpc_server(app, settings)]
    return RankingServer(app, side_apps, service, reloader, settings, {(b"POST", b"/rank"): app.rank}, others)


def create_grpc_server(app: Application, settings: Settings) -> Other:
    """What the application ranks, over gRPC. Raises SettingsProblem where that is not installed."""
    os.environ.setdefault(
        "GRPC_VERBOSITY", "NONE"
    )  # else callers' mistakes are written to standard error, past the log
    try:
        from app.http.grpc_server import InferenceServer
    except ImportError as error:
        raise SettingsProblem(f"RANKER_GRPC__PORT needs the `grpc` extra: {error}") from error
    return InferenceServer(app.ranking, app.recorder, settings)


def run(settings: Settings) -> int:
    """Serve until a signal or the loss of the engine; the exit code of the process."""
    return serve(build_server(settings))


def create_reloader(service: RankingService, settings: Settings) -> Reloader:
    """Reloads below the configured root, by default where the first checkpoint lies; that itself where it lies at the very top."""
    place = settings.checkpoint.absolute()
    root = settings.admin.root or (place if place.parent == place.parent.parent else place.parent)
    wanted = settings.retrieval
    return Reloader(
        service,
        root,
        settings.checkpoint,
        lambda path: checkpoint_loader(path, settings),
        (wanted.checkpoint, wanted.corpus),
        lambda checkpoint, corpus: retrieval_loader(checkpoint, corpus, settings),
    )
