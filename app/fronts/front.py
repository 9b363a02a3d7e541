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

LINK_SECONDS = 1.0  # connections wait this long for the link, so that a restarted front refuses none of them


class FrontServer(RankingServer):
    """A server in a process of the supervisor: SIGTERM drains, however often it comes; SIGUSR1 stops without the delay."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections once there is a link, or after `LINK_SECONDS` without one."""
        assert isinstance(self.service, RemoteService)
        self.service.start()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.service.linked.wait(), LINK_SECONDS)
        await super().startup(sockets)

    def handlers(self) -> dict[signal.Signals, Handler]:
        """Handle the supervisor's signals only: `Role.inherited` ignores those of a terminal."""
        return {signal.SIGTERM: self.handle_drain, signal.SIGUSR1: self.handle_stop}

    def handle_drain(self, sig: int, frame: FrameType | None) -> None:
        """Report not ready, serve for the delay, then stop."""
        self.soon(self.drain)

    def handle_stop(self, sig: int, frame: FrameType | None) -> None:
        """Stop now, as if the delay were over."""
        self.should_exit = True


def run(settings: Settings, role: Role) -> int:
    """Serve as the front whose number this process is assigned; return the exit code."""
    number, sockets = role.wait_assigned()
    service = RemoteService(settings, role.path, number, Metrics())
    server = build_server(settings, service, RemoteReloads(service), FrontServer)
    server.tells = number == 1
    gc.freeze()  # present objects stay, so the collector need not walk them again
    return serve(server, sockets, front=number)
