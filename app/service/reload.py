"""Changing a running service's checkpoint, or its towers and corpus: by name, by signal, by watching."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import structlog

from app.engine.loading import Loader, RetrievalLoader
from app.errors import CorpusNotLoaded
from app.interface import CheckpointNotFound, ReloadInProgress, ServedModel, ServedRetrieval, served_identity
from app.service.service import RankingService
from weights.checkpoint import load_manifest
from weights.corpus.store import load_corpus_manifest
from weights.errors import CheckpointError
from weights.format.manifest import MANIFEST_NAME

MAX_NAME_LENGTH = 512
NO_SECOND = "No second checkpoint is configured (RANKER_SHADOW__CHECKPOINT)."

log = structlog.get_logger("app.service.reload")


class Reloader:
    """Loads checkpoints below one root into the service, one at a time; a failure leaves the old one serving."""

    def __init__(
        self,
        service: RankingService,
        root: Path,
        current: Path,
        loader: Callable[[Path], Loader],
        retrieval: tuple[Path | None, Path | None] = (None, None),
        retrieval_loader: Callable[[Path, Path], RetrievalLoader] | None = None,
        second: Path | None = None,
        second_loader: Callable[[Path], Loader] | None = None,
    ) -> None:
        """`current` is the checkpoint that was loaded first, `retrieval` the retrieval checkpoint and the corpus, `second` the second
        checkpoint, if there are any. The loaders return functions that another thread runs."""
        self.service = service
        self.root = root
        self.current = current
        self.second = second
        self.retrieval = retrieval
        self.names: Path | None = None
        """Where an engine process that takes the place of this one finds the paths that were loaded last."""
        self._given = current, second  # paths from the settings, which may lie anywhere
        self._loader = loader
        self._retrieval_loader = retrieval_loader
        self._second_loader = second_loader
        self._tasks: set[asyncio.Task[None]] = set()

    def resolve(self, name: str) -> Path:
        """Return the path for a relative name, without following links. Raises CheckpointNotFound, also if it leads out of the root."""
        if not name or len(name) > MAX_NAME_LENGTH or "\0" in name or name.startswith(("/", "~")) or "\\" in name:
            raise CheckpointNotFound
        if any(part in ("..", ".", "") for part in name.rstrip("/").split("/")):
            raise CheckpointNotFound
        path = self.root.absolute() / name
        self._target(path)
        return path

    def _target(self, path: Path) -> Path:
        """Resolve a path below the root, following links. Raises CheckpointNotFound."""
        try:
            root, target = self.root.resolve(strict=True), path.resolve(strict=True)
            is_found = root in target.parents and (target / MANIFEST_NAME).is_file()
        except (OSError, RuntimeError):  # the second for links in a circle, before Python 3.13
            raise CheckpointNotFound from None
        if not is_found:
            raise CheckpointNotFound
        return target

    async def reload(self, path: Path | None = None, *, second: bool = False) -> ServedModel:
        """Serve the checkpoint at `path`, which `resolve` has found, or read the present one again, following a changed link.
        `second` does the same for the second checkpoint.

        Raises CheckpointError, EngineError, CheckpointNotFound, ReloadInProgress, Draining; the old model then keeps serving.
        """
        path = path or (self.second if second else self.current)
        async with self._recorded(**{"second" if second else "checkpoint": str(path)}) as said:
            if path is None or (second and self._second_loader is None):
                raise CheckpointError(NO_SECOND)
            target = path if path in self._given else self._target(path)
            if second and self._second_loader is not None:
                model = await self.service.second_checkpoint.swap(self._second_loader(target))
            else:
                model = await self.service.swap(self._loader(target))
            said |= {"version": model.manifest.version, "digest": model.manifest.digest}
        if second:
            self.second = path
        else:
            self.current = path
        self._keep_names()
        return model

    async def reload_retrieval(self, checkpoint: Path | None = None, corpus: Path | None = None) -> ServedRetrieval:
        """Serve this retrieval checkpoint and this corpus, or read the present ones again; both are replaced together.

        Raises CorpusNotLoaded if one is neither named nor present, and what `reload` raises.
        """
        checkpoint, corpus = checkpoint or self.retrieval[0], corpus or self.retrieval[1]
        if checkpoint is None or corpus is None or self._retrieval_loader is None:
            raise CorpusNotLoaded("Name both a retrieval checkpoint and a corpus: none is served yet.")
        async with self._recorded(retrieval=str(checkpoint), corpus=str(corpus)) as said:
            served = await self.service.retrieval.swap(self._retrieval_loader(checkpoint, corpus))
            said |= {"version": served.manifest.version, "corpus_version": served.corpus.version}
        self.retrieval = checkpoint, corpus
        self._keep_names()
        return served

    def _keep_names(self) -> None:
        if self.names is None:
            return
        paths, partial = (self.current, self.second, *self.retrieval), self.names.with_suffix(".partial")
        try:
            partial.write_text(json.dumps([path and str(path) for path in paths]))
            partial.rename(self.names)
        except OSError as error:
            log.error("reload_not_kept", reason=error.strerror)

    @asynccontextmanager
    async def _recorded(self, **what: Any) -> AsyncIterator[dict[str, Any]]:
        """Count and log one reload and whether it changed anything. Entries added to the yielded dict are logged too."""
        kind = next(iter(what))
        began, before, said = time.monotonic(), await served_identity(self.service, kind), what
        try:
            if not self.service.lifecycle.started:
                raise ReloadInProgress("the first load has not ended")  # and would fail if another load had begun
            yield said
        except Exception as error:
            self.service.metrics.reloads.labels("failure").inc()
            log.error("reload_failed", **what, reason=str(error) or type(error).__name__)
            raise
        is_changed = before != await served_identity(self.service, kind)
        self.service.metrics.reloads.labels("success" if is_changed else "unchanged").inc()
        log.info("reloaded" if is_changed else "unchanged", **said, seconds=round(time.monotonic() - began, 3))

    def reload_soon(self) -> None:
        """Read the present checkpoints again in the background, then towers and corpus. Outcomes are logged and counted. For SIGHUP."""
        self._keep(self._everything())

    def watch(self, seconds: float) -> None:
        """Check every `seconds` whether the manifest of a present checkpoint or corpus has changed, and then load it."""
        self._keep(self._watch(seconds))

    def stop(self) -> None:
        """End the watch and any reload under way."""
        for task in self._tasks:
            task.cancel()

    async def _watch(self, seconds: float) -> None:
        seen, seen_posts = await asyncio.to_thread(self._both), await asyncio.to_thread(self._posts)
        while True:
            await asyncio.sleep(seconds)
            if not self.service.lifecycle.started:
                continue  # not known yet what the first load has read
            posts = await asyncio.to_thread(self._posts)
            # a compaction replaces the manifest, too
            if (
                posts != seen_posts
                and None not in posts
                and (await asyncio.to_thread(self._retrieves_already) or await self._try(self.reload_retrieval()))
            ):
                seen_posts = posts
            for place, found in enumerate(await asyncio.to_thread(self._both)):
                if found not in (None, seen[place]) and await self._follow(second=bool(place)):
                    seen[place] = found  # a refused one is not tried again until it changes

    async def _follow(self, *, second: bool) -> bool:
        """Load the checkpoint that is there now, unless it is loaded. Return False if that has to be tried again."""
        path, held = (self.second, self.service.second) if second else (self.current, None)
        model = self.service.model if not second else None if held is None else held.model
        if path is None or (model is not None and await asyncio.to_thread(_digest, path) == model.manifest.digest):
            return True
        return await self._try(self.reload(second=second))

    async def _everything(self) -> None:
        await self._try(self.reload())
        if self.second is not None:
            await self._try(self.reload(second=True))
        if None not in self.retrieval:
            await self._try(self.reload_retrieval())

    async def _try(self, reload: Awaitable[object]) -> bool:
        """Run a reload. Return False if another reload kept it out, else True, even if it failed."""
        try:
            await reload
        except ReloadInProgress:
            return False
        except Exception:
            return True  # it has been logged and counted
        return True

    def _both(self) -> list[tuple[int, int, int] | None]:
        """Identities of the manifests of the first and second checkpoint; they change when a manifest is replaced."""
        return [None if path is None else _identity(path) for path in (self.current, self.second)]

    def _posts(self) -> list[tuple[int, int, int] | None]:
        """The same for the manifests of the retrieval checkpoint and the corpus."""
        return [_identity(path) for path in self.retrieval if path is not None]

    def _retrieves_already(self) -> bool:
        """Whether the towers and the corpus that serve are those on the disk, the corpus with the log that this process writes."""
        checkpoint, corpus = self.retrieval
        worker = self.service.retrieval.versions.current
        if worker is None or checkpoint is None or corpus is None:
            return False
        served: ServedRetrieval = worker.model.served
        try:
            return (
                load_corpus_manifest(corpus).digest == served.corpus.digest
                and worker.model.log.is_in(corpus)
                and _digest(checkpoint) == served.manifest.digest
            )
        except (CheckpointError, OSError):
            return False

    def _keep(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _identity(checkpoint: Path) -> tuple[int, int, int] | None:
    """Inode, time and size of the manifest, which change when it is replaced; None while there is none."""
    try:
        found = os.stat(checkpoint / MANIFEST_NAME)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _digest(checkpoint: Path) -> str | None:
    """The digest that a manifest claims; None if it cannot be read, which a reload will explain."""
    try:
        return load_manifest(checkpoint).digest
    except Exception:
        return None
