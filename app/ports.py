"""All ports of a process that speaks HTTP: the service, and where they are set probes and admin."""

from __future__ import annotations

import os

from app.http.admin import create_admin_app
from app.http.application import Application, create_app, create_probe_app
from app.interface import Reloads, Service
from app.server.process import Other, Port, RankingServer
from app.settings import ADMIN_HOST, Settings, SettingsProblem


def build_server(
    settings: Settings, service: Service, reloads: Reloads, kind: type[RankingServer] = RankingServer
) -> RankingServer:
    """A server that listens once it runs, on `settings.addresses()` in this order."""
    app = create_app(settings, service)
    ports = [Port(settings.host, settings.port, app, True)]
    if settings.probes.port is not None:
        probes = create_probe_app(settings, service)
        ports.append(Port(settings.probes.host, settings.probes.port, probes, False))
    if settings.admin.port is not None:
        admin = create_admin_app(settings.admin, reloads, service)
        ports.append(Port(ADMIN_HOST, settings.admin.port, admin, False))
    others = [] if settings.grpc.port is None else [create_grpc_server(app, settings)]
    return kind(ports, service, reloads, settings, others, app.close)


def create_grpc_server(app: Application, settings: Settings) -> Other:
    """What the application ranks, over gRPC. Raises SettingsProblem where that is not installed."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # else callers' mistakes bypass the log
    try:
        from app.http.grpc_server import InferenceServer
    except ImportError as error:
        raise SettingsProblem(f"RANKER_GRPC__PORT needs the `grpc` extra: {error}") from error
    assert app.ranking is not None
    return InferenceServer(app.ranking, app.recorder, settings)
