"""An engine process and its fronts in one event loop, with a real socket between them. Not a test itself."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.engine.loading import Loader, RetrievalLoader
from app.errors import ServiceError
from app.fronts.host import EngineHost
from app.fronts.remote import Place, RemoteService
from app.interface import Ranked
from app.service.reload import Reloader
from app.service.service import RankingService
from app.settings import Settings
from app.telemetry.metrics import Metrics
from tests.app.fakes import loader, request, until


@dataclass
class Linked:
    """What runs; `path` is of the socket."""

    path: str
    settings: Settings
    service: RankingService
    host: EngineHost
    server: asyncio.Server
    fronts: list[RemoteService] = field(default_factory=list)

    async def front(self) -> RemoteService:
        """One more front, ready."""
        front = RemoteService(self.settings, self.path, len(self.fronts) + 1, Metrics())
        self.fronts.append(front)
        front.start()
        await until(lambda: front.health().ready)
        return front

    def cut(self) -> None:
        """End every link, and let nobody in until `mend`."""
        self.server.close()
        for link in self.host._links:
            link._transport.abort()  # type: ignore[union-attr]

    async def mend(self) -> None:
        """Listen again."""
        self.server = await asyncio.get_running_loop().create_unix_server(self.host._link, self.path)


@asynccontextmanager
async def linked(
    engine: Any,
    fronts: int = 1,
    load: Loader | None = None,
    retrieval: RetrievalLoader | None = None,
    second: Loader | None = None,
    **groups: Any,
) -> AsyncIterator[Linked]:
    """Fronts that are ready, before a fake engine; reloads take `load`, those of the `second` one too. `groups` are of the settings."""
    settings = Settings(**groups)
    service = RankingService(loader(engine), settings, Metrics(), retrieval=retrieval, second=second)
    again: Any = {"second": settings.shadow.checkpoint, "second_loader": lambda path: load or loader(engine)}
    reloads = Reloader(service, Path(), Path(), lambda path: load or loader(engine), **again)
    host = EngineHost(service, reloads, settings)
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/engine"
        found = Linked(path, settings, service, host, await host.start(path))
        try:
            for _ in range(fronts):
                await found.front()
            yield found
        finally:
            for front in found.fronts:
                await front.stop(1.0)
            found.server.close()
            await host.stop()


def begin(front: RemoteService, user: int, candidates: int = 4, **options: Any) -> tuple[Place, asyncio.Future[Ranked]]:
    """Send one request; its place and its result."""
    context, posts = request(user, candidates)
    options.setdefault("deadline", None)
    place = front.admit(front.model, candidates=candidates, history=len(context), **options)
    future: asyncio.Future[Ranked] = asyncio.get_running_loop().create_future()

    def done(result: Ranked | ServiceError) -> None:
        if isinstance(result, ServiceError):
            future.set_exception(result)
        else:
            future.set_result(result)

    front.rank(place, context, posts, done)
    return place, future
