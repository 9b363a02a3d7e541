"""Puts one process together from its settings: the only module that knows every room."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import uvloop

from app import ports
from app.engine.loading import Loader, checkpoint_loader, retrieval_loader
from app.feeds.adapters import open_feed
from app.fronts.host import EngineHost
from app.fronts.role import Role
from app.http.application import Application, create_app
from app.loop_lag import Clock
from app.request.posts import read_change
from app.server.process import RankingServer, serve
from app.service.feed import FeedReader
from app.service.reload import Reloader
from app.service.service import RankingService
from app.settings import Settings, SettingsProblem
from app.telemetry import logs
from app.telemetry.metrics import Metrics


def build_service(settings: Settings, metrics: Metrics, *, clock: Clock = time.monotonic) -> RankingService:
    """Build the service. It does not load yet: call its `start` in a running loop."""
    wanted = settings.retrieval
    retrieval = None
    if wanted.checkpoint is not None and wanted.corpus is not None:
        retrieval = retrieval_loader(wanted.checkpoint, wanted.corpus, settings)
    load, second = checkpoint_loader(settings.checkpoint, settings), None
    if settings.shadow.checkpoint is not None:
        second = second_loader(settings.shadow.checkpoint, settings)
    service = RankingService(load, settings, metrics, retrieval=retrieval, second=second, clock=clock)
    if wanted.feed is not None:
        try:
            source = open_feed(wanted.feed.get_secret_value())
        except ImportError as error:
            raise SettingsProblem(f"RANKER_RETRIEVAL__FEED needs the `redis` or the `kafka` extra: {error}") from error
        feed = FeedReader(
            source,
            lambda body: read_change(body, service.retrieval.served.corpus.ids),
            metrics,
            wanted.feed_lag_seconds,
        )
        service.retrieval.feed = feed
    return service


def build_app(settings: Settings) -> Application:
    """The application of a process that serves by itself, without listeners: for tests and for other ASGI servers."""
    return create_app(settings, build_service(settings, Metrics()))


def build_server(settings: Settings, service: RankingService | None = None) -> RankingServer:
    """All ports of one process: the service, and where they are set probes and admin."""
    service = build_service(settings, Metrics()) if service is None else service
    return ports.build_server(settings, service, create_reloader(service, settings))


def run(settings: Settings, role: Role | None = None, service: RankingService | None = None) -> int:
    """Serve until a signal or the loss of the engine, as the engine process of fronts where that is the role; the exit code."""
    names = None if role is None else Path(role.path).with_suffix(".json")
    if names is not None and names.exists():
        settings = _as_loaded_last(settings, names)
    service = build_service(settings, Metrics()) if service is None else service
    service.watchdog.watch_loop()
    if role is None:
        return serve(build_server(settings, service))
    logs.configure(settings.logs)
    service.metrics.watch_log(logs.process_sink())
    reloader = create_reloader(service, settings)
    reloader.names = names
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(EngineHost(service, reloader, settings).serve(role.path))
    if service.has_running_threads():
        logs.process_sink().drain()
        os._exit(code)  # as in `serve`
    return code


def _as_loaded_last(settings: Settings, names: Path) -> Settings:
    """The settings with the paths that the engine process before this one has left there."""
    checkpoint, second, *pair = (name and Path(name) for name in json.loads(names.read_bytes()))
    retrieval = settings.retrieval.model_copy(update={"checkpoint": pair[0], "corpus": pair[1]})
    shadow = settings.shadow.model_copy(update={"checkpoint": second})
    admin = settings.admin.model_copy(update={"root": _root(settings)})
    changes = {"checkpoint": checkpoint, "shadow": shadow, "retrieval": retrieval, "admin": admin}
    return settings.model_copy(update=changes)


def _root(settings: Settings) -> Path:
    """Where reloads find what they name. Default: the first checkpoint's parent, or itself if it lies at the top."""
    place = settings.checkpoint.absolute()
    return settings.admin.root or (place if place.parent == place.parent.parent else place.parent)


def create_reloader(service: RankingService, settings: Settings) -> Reloader:
    """Reloads below the configured root."""
    wanted = settings.retrieval
    return Reloader(
        service,
        _root(settings),
        settings.checkpoint,
        lambda path: checkpoint_loader(path, settings),
        (wanted.checkpoint, wanted.corpus),
        lambda checkpoint, corpus: retrieval_loader(checkpoint, corpus, settings),
        settings.shadow.checkpoint,
        None if settings.shadow.checkpoint is None else lambda path: second_loader(path, settings),
    )


def second_loader(path: Path, settings: Settings) -> Loader:
    """The loader of the second checkpoint, whose threads yield to others unless it answers users."""
    return checkpoint_loader(path, settings, stands_back=not settings.split.users)
