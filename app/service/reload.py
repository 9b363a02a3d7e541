"""Changing the checkpoint of a running service: by name, by signal, by watching the directory. Not for how engines are swapped."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from app.engine.loading import Loader
from app.interface import CheckpointNotFound, ServedModel
from app.service.service import RankingService
from weights.checkpoint import load_manifest
from weights.format.manifest import MANIFEST_NAME

MAX_NAME_LENGTH = 512

log = structlog.get_logger("app.service.reload")


class Reloader:
    """Loads checkpoints below one root into the service, one at a time; a failure leaves the old one serving."""

    def __init__(
        self,
        service: RankingService,
        root: Path,
        current: Path,
        loader: Callable[[Path], Loader],
    ) -> None:
        """`current` is the checkpoint that was loaded first; `loader` makes what an engine thread runs."""
        self.service = service
        self.root = root
        self.current = self._first = current
        self._loader = loader
        self._tasks: set[asyncio.Task[None]] = set()

    def resolve(self, name: str) -> Path:
        """The place that a relative name means; a link stays one. Raises CheckpointNotFound, also for what leads out of the root."""
        if not name or len(name) > MAX_NAME_LENGTH or "\0" in name or name.startswith(("/", "~")) or "\\" in name:
            raise CheckpointNotFound
        if any(part in ("..", ".", "") for part in name.rstrip("/").split("/")):
            raise CheckpointNotFound
        path = self.root.absolute() / name
        self._target(path)
        return path

    def _target(self, path: Path) -> Path:
        """Where a place below the root leads now. Raises CheckpointNotFound."""
        try:
            root, target = self.root.resolve(strict=True), path.resolve(strict=True)
        except OSError:
            raise CheckpointNotFound from None
        if root not in target.parents or not (target / MANIFEST_NAME).is_file():
            raise CheckpointNotFound
        return target

    async def reload(self, path: Path | None = None) -> ServedModel:
        """Serve the checkpoint at `path`, which `resolve` has found, or the present one read again: a link that was changed is followed.

        Raises CheckpointError, EngineError, CheckpointNotFound, ReloadInProgress, Draining; then the model that served before serves on.
        """
        path = self.current if path is None else path
        began = time.monotonic()
        try:
            target = path if path == self._first else self._target(path)
            model = await self.service.swap(self._loader(target))
        except Exception as error:
            self.service.metrics.reloads.labels("failure").inc()
            log.error("reload_failed", checkpoint=str(path), reason=str(error) or type(error).__name__)
            raise
        self.current = path
        self.service.metrics.reloads.labels("success").inc()
        manifest = model.manifest
        seconds = round(time.monotonic() - began, 3)
        log.info("reloaded", checkpoint=str(path), version=manifest.version, digest=manifest.digest, seconds=seconds)
        return model

    def reload_soon(self) -> None:
        """Read the present checkpoint again in the background; the outcome is logged and counted. For SIGHUP."""
        self._keep(self._try())

    def watch(self, seconds: float) -> None:
        """From now on, look that often whether the present checkpoint has another manifest, and load it then."""
        self._keep(self._watch(seconds))

    def stop(self) -> None:
        """End the watch and whatever still loads."""
        for task in self._tasks:
            task.cancel()

    async def _watch(self, seconds: float) -> None:
        seen = await asyncio.to_thread(_identity, self.current)
        while True:
            await asyncio.sleep(seconds)
            now = await asyncio.to_thread(_identity, self.current)
            if now is None or now == seen:
                continue
            seen = now  # one that is refused is not tried again until it changes
            if await asyncio.to_thread(_digest, self.current) != self.service.model.manifest.digest:
                await self._try()

    async def _try(self) -> None:
        try:
            await self.reload()
        except Exception:
            return  # `reload` has logged and counted it

    def _keep(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _identity(checkpoint: Path) -> tuple[int, int, int] | None:
    """What changes when the manifest is replaced; None while there is none."""
    try:
        found = os.stat(checkpoint / MANIFEST_NAME)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _digest(checkpoint: Path) -> str | None:
    """The digest that a manifest claims; None where it cannot be read, which a reload will explain."""
    try:
        return load_manifest(checkpoint).digest
    except Exception:
        return None
