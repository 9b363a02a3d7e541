"""The two ways to run a service in a test: one process, or HTTP before an engine process, as with RANKER_WORKERS. The second runs both ends
here, in threads with event loops of their own, over a real socket; `tests/app/processes` has real processes. Not a test itself."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvloop

from app import server
from app.interface import RankingService
from app.processes.engine_process import EngineProcess
from app.processes.remote import RemoteService
from app.service.local import LocalService

has_several = False
"""Whether `tests.support.asgi` and `tests.app.api.live` put an engine process behind their services: the fixture `processes` sets it."""


@contextmanager
def fronting(ranker: LocalService) -> Iterator[RankingService]:
    """What the HTTP side is given for this ranker, which has not begun to load: itself, or a worker's link to an engine process with it.

    Both ends count into one `Metrics`, so that a figure is the sum over the processes.
    """
    if not has_several:
        yield ranker
        return
    with tempfile.TemporaryDirectory() as folder:
        path, engine = f"{folder}/engine", EngineProcess(ranker, ranker.settings)
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve(engine.serve(path), server.side_ports(ranker.settings, ranker, engine.exposition))

        def run() -> None:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield RemoteService(ranker.settings, path, ranker.metrics)
        finally:
            if loops and not loops[0].is_closed():
                loops[0].call_soon_threadsafe(engine.end)
            thread.join(30)


@asynccontextmanager
async def fronting_here(ranker: LocalService) -> AsyncIterator[RankingService]:
    """The same for a ranker that serves in this event loop already. It is stopped at the end."""
    if not has_several:
        yield ranker
        return
    with tempfile.TemporaryDirectory() as folder:
        engine = EngineProcess(ranker, ranker.settings)
        serving = asyncio.create_task(engine.serve(f"{folder}/engine"))
        front = RemoteService(ranker.settings, f"{folder}/engine", ranker.metrics)
        front.start()
        await front.linked.wait()
        try:
            yield front
        finally:
            await front.stop(1.0)
            engine.end()
            await serving
