"""One front process: the HTTP side of the service around a link to the engine process. Needs no torch."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from types import FrameType

from app.fronts.remote import RemoteReloads, RemoteService
from app.fronts.role import Role
from app.ports import build_server
from app.server.process import Handler, RankingServer, serve
from app.settings import Settings
from app.telemetry.metrics import Metrics

LINK_SECONDS = 1.0  # how long connections wait for the link, so that a restarted front refuses none of them


class FrontServer(RankingServer):
    """A server whose process is the supervisor's: SIGTERM drains, however often it comes, SIGUSR1 leaves out the delay."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept once there is a link, or after a while without."""
        assert isinstance(self.service, RemoteService)
        self.service.start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.service.linked.wait(), LINK_SECONDS)
        await super().startup(sockets)

    def handlers(self) -> dict[signal.Signals, Handler]:
        """The terminal's signals are ignored since `Role.inherited`."""
        return {signal.SIGTERM: self.handle_drain, signal.SIGUSR1: self.handle_stop}

    def handle_drain(self, sig: int, frame: FrameType | None) -> None:
        """Lose readiness, serve for the delay, then stop."""
        self.soon(self.drain)

    def handle_stop(self, sig: int, frame: FrameType | None) -> None:
        """Stop now, as after the delay."""
        self.should_exit = True


def run(settings: Settings, role: Role) -> int:
    """Serve as a front; return the exit code."""
    number, sockets = role.wait_assigned()
    service = RemoteService(settings, role.path, number, Metrics())
    server = build_server(settings, service, RemoteReloads(service), FrontServer)
    server.tells = number == 1
    gc.freeze()  # objects that exist now stay: the collector need not walk them again
    return serve(server, sockets, front=number)
