"""Reloads as a front sees them: names are resolved and directories watched by the engine process."""

from __future__ import annotations

from pathlib import Path

from app.fronts import frames
from app.fronts.remote import RemoteService
from app.fronts.retrieval import raise_failure
from app.interface import ServedModel, ServedRetrieval


class RemoteReloads:
    """`interface.Reloads` over the link of a service."""

    def __init__(self, service: RemoteService) -> None:
        self.service = service

    def resolve(self, name: str) -> Path:
        """The name as it is."""
        return Path(name)

    async def reload(self, path: Path | None = None, *, second: bool = False) -> ServedModel:
        """As in the engine process. Raises CheckpointNotFound besides."""
        raise_failure(await self.service.uplink.ask(frames.Reload, None if path is None else str(path), None, second))
        found = self.service.second if second else None
        return self.service.model if found is None or found.model is None else found.model

    async def reload_retrieval(self, checkpoint: Path | None = None, corpus: Path | None = None) -> ServedRetrieval:
        """As in the engine process. Raises CheckpointNotFound besides."""
        names = (None if path is None else str(path) for path in (checkpoint, corpus))
        return await self.service.retrieval.reload(*names)

    def reload_soon(self) -> None: ...

    def watch(self, seconds: float) -> None: ...

    def stop(self) -> None: ...
