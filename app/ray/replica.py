"""One replica: the whole service with an engine of its own, spoken to by calls instead of over a socket. Imports nothing of Ray."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

from starlette.types import Message

from app.assembly import build_service, create_reloader
from app.errors import NotReady
from app.http.application import Application, create_app
from app.ray.autoscaling import LOAD
from app.ray.ingress import Asked, Reply
from app.service.reload import Reloader
from app.service.service import RankingService
from app.settings import Settings
from app.telemetry import logs
from app.telemetry.metrics import Metrics


class Replica:
    """A deployment's class: Ray Serve makes one in a process of its own, and calls its methods in one event loop."""

    service: RankingService
    app: Application
    reloads: Reloader | None = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Serve the checkpoint that `config` names: the first one before this replica gets requests, another one in its place while it
        serves. Raises what loading raises; a checkpoint that serves then serves on until Ray Serve ends the replica."""
        path = Path(config.get("checkpoint", self.settings.checkpoint))
        if self.reloads is None:
            await self._start(self.settings.model_copy(update={"checkpoint": path}))
        elif path != self.reloads.current:  # Ray Serve calls this for other changes, too
            await self.reloads.reload(path)

    def build(self, settings: Settings) -> RankingService:
        """Build the service that this replica runs."""
        return build_service(settings, Metrics())

    async def _start(self, settings: Settings) -> None:
        logs.configure(settings.logs)
        self.service = self.build(settings)
        self.service.metrics.watch_log(logs.process_sink())
        self.app = create_app(settings, self.service)
        self.service.start()
        await self.service.wait_ready()
        self.reloads = create_reloader(self.service, settings)

    async def answer(self, asked: Asked) -> Reply:
        """The application's reply. Cancelling this means that the client has disconnected."""
        started: Message = {}
        body: list[bytes] = []
        gone = asyncio.Event()
        unread = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> Message:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            started.update(message) if message["type"] == "http.response.start" else body.append(message["body"])

        answering = asyncio.ensure_future(self.app(asked.scope(), receive, send))
        try:
            await asyncio.shield(answering)
        except asyncio.CancelledError:
            gone.set()
            raise
        return Reply(started["status"], [tuple(header) for header in started["headers"]], b"".join(body))

    async def exposition(self) -> tuple[str, bytes]:
        """A name for this process, and all its metrics."""
        return f"{socket.gethostname()}:{os.getpid()}", self.service.metrics.render()

    async def check_health(self) -> None:
        """Raise if only a new process can help: Ray Serve then replaces this one."""
        health = self.service.health()
        if health.failed:
            raise NotReady(health.reason)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The present load, by which `autoscaling.ByLoad` decides."""
        return {LOAD: self.service.load.value}
