"""Changing a running service's checkpoint, or its retrieval checkpoint and corpus: by name, by signal, by watching."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from app.corpus.searches import Searches
from app.errors import NoCorpus
from app.interface import CheckpointNotFound, ReloadInProgress, ServedCorpus, ServedModel
from app.queue.job import RankJob
from app.queue.versions import Versions
from app.settings import Settings
from app.telemetry.metrics import Metrics
from weights.checkpoint import load_manifest
from weights.corpus.store import load_corpus_manifest
from weights.errors import CheckpointError
from weights.format.manifest import MANIFEST_NAME

MAX_NAME_LENGTH = 512
AGAIN_SECONDS = 0.5  # before a reload that another load kept out is tried again

log = structlog.get_logger("app.service.reload")

Identity = tuple[int, ...] | None
"""Device, inode, size, and the times of the last write and change of a manifest, of which some change when it is replaced, also by one
on another volume; None while there is none."""

Paths = tuple[Path, Path | None, Path | None]
"""Of the checkpoint, the retrieval checkpoint and the corpus."""


class Kept(msgspec.Struct, frozen=True):
    """What an engine process leaves to the one that takes its place.

    `paths`: what is read again. `directories`: where these paths led when they were loaded. `passed_by`: by what a reload has named (see
    RELOADED), hashes of the manifests that were then where the settings name them. Once others are there, the watch follows the settings
    again.
    """

    paths: Paths
    directories: list[Path | None]
    passed_by: dict[str, list[str | None]]


KEPT = msgspec.json.Decoder(Kept, dec_hook=lambda kind, value: kind(value))


@dataclass(slots=True)
class Record:
    """What is logged of one reload, and, once it has ended, whether it changed what serves."""

    log_fields: dict[str, Any]
    is_changed: bool = False


class Reloader:
    """The `interface.Reloads` of one process: loads checkpoints below one root, one at a time; a failure leaves the old one serving."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        versions: Versions[RankJob],
        corpus: Searches,
        serve: Callable[[Path], Awaitable[ServedModel]],
    ) -> None:
        """`serve` loads a checkpoint and has it serve new requests."""
        self.root = _root(settings)
        self.checkpoint = settings.checkpoint
        self.retrieval = settings.retrieval.checkpoint, settings.retrieval.corpus
        self._metrics = metrics
        self._versions = versions
        self._corpus = corpus
        self._serve = serve
        self.first_checkpoint, self.first_retrieval = self.checkpoint, self.retrieval
        """What the settings name. Of all checkpoints, only this one may lie outside the root."""
        self._passed_by: dict[str, list[str | None]] = {}  # as in `Kept`
        self._begins_with: Paths = (self.checkpoint, *self.retrieval)  # read by the first load
        self._directories = [*self._begins_with]  # as in `Kept`
        self._paths_file: Path | None = None  # for the `Kept` of this process
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way = 0  # reloads
        self._idle = asyncio.Event()  # set while none is
        self._idle.set()
        self._is_due = False  # whether a signal waits for those under way

    def resume(self, paths_file: Path) -> None:
        """Begin with what the engine process before this one served, if that has left it in this file and it is still there; and leave
        there what this one serves. Call it before the first load."""
        self._paths_file = paths_file
        try:
            kept = KEPT.decode(paths_file.read_bytes())
            checkpoint, *retrieval = map(_place, kept.paths, kept.directories)
            assert checkpoint is not None
            load_manifest(checkpoint)
        except FileNotFoundError:
            return
        except (OSError, CheckpointError) as error:
            log.error("reload_not_kept", reason=str(error))
            return
        if kept.paths[0] != self.first_checkpoint and _below(self.root, checkpoint) is None:
            log.error("reload_not_kept", reason=f"{checkpoint} leads out of the root of reloads")
            return
        self.checkpoint, self.retrieval = kept.paths[0], kept.paths[1:]
        self._passed_by = kept.passed_by
        self._begins_with = checkpoint, retrieval[0], retrieval[1]

    def begin(self) -> Paths:
        """Return what the first load reads. When it has ended well, call `keep`."""
        self._directories = [*map(_directory, self._begins_with)]
        return self._begins_with

    def keep(self) -> None:
        """Leave what serves to an engine process that takes the place of this one, if there will be one."""
        if self._paths_file is None:
            return
        kept = Kept((self.checkpoint, *self.retrieval), self._directories, self._passed_by)
        partial = self._paths_file.with_suffix(".partial")
        try:
            partial.write_bytes(msgspec.json.encode(kept, enc_hook=str))
            partial.rename(self._paths_file)
        except OSError as error:
            log.error("reload_not_kept", reason=error.strerror)
            with suppress(OSError):
                self._paths_file.unlink()  # else what served earlier would come back

    async def reload(self, name: str | None = None) -> tuple[ServedModel, bool]:
        """Serve the checkpoint of this name below the root, or read the present one again, following a changed link. Return what serves,
        and whether that has changed.

        Raises CheckpointNotFound, CheckpointError, EngineError, ReloadInProgress or Draining; then the old one keeps serving.
        """
        path = self.checkpoint if name is None else self._resolve(name)
        async with self._recorded("checkpoint", self._model_identity, checkpoint=str(path)) as record:
            directory, passed_by = _directory(path), _manifests([self.first_checkpoint])
            model = await self._serve(path if path == self.first_checkpoint else self._target(path))
            record.log_fields |= {"version": model.manifest.version, "digest": model.manifest.digest}
        self.checkpoint, self._directories[0] = path, directory
        if name is not None:
            self._passed_by["checkpoint"] = passed_by
        self.keep()
        return model, record.is_changed

    async def reload_corpus(
        self, checkpoint: str | None = None, corpus: str | None = None
    ) -> tuple[ServedCorpus, bool]:
        """Serve this retrieval checkpoint and this corpus, or the present ones read again: both are replaced together. Return what serves,
        and whether that has changed.

        Raises what `reload` raises, and NoCorpus where one is neither named nor present.
        """
        checkpoint_path = self.retrieval[0] if checkpoint is None else self._resolve(checkpoint)
        corpus_path = self.retrieval[1] if corpus is None else self._resolve(corpus)
        if checkpoint_path is None or corpus_path is None:
            raise NoCorpus("Name both a retrieval checkpoint and a corpus: none is served yet.")
        paths = {"retrieval": str(checkpoint_path), "corpus": str(corpus_path)}
        async with self._recorded("corpus", self._corpus_identity, **paths) as record:
            directories = [_directory(checkpoint_path), _directory(corpus_path)]
            passed_by = _manifests(self.first_retrieval)
            served = await self._corpus.swap(checkpoint_path, corpus_path)
            record.log_fields |= {"version": served.manifest.version, "corpus_version": served.corpus.version}
        self.retrieval, self._directories[1:] = (checkpoint_path, corpus_path), directories
        if checkpoint is not None or corpus is not None:
            self._passed_by["corpus"] = passed_by
        self.keep()
        return served, record.is_changed

    def reload_soon(self) -> None:
        """Read the present checkpoint again in the background, then the retrieval checkpoint and the corpus. Outcomes are logged
        and counted. For SIGHUP.

        Reloads that are under way may have read what has been replaced since, so they end first. Calls until then count as one.
        """
        if not self._is_due:
            self._is_due = True
            self._keep(self._reload_everything())

    def watch(self, seconds: float) -> None:
        """Check every `seconds` whether the manifest of the present checkpoint, retrieval checkpoint or corpus was replaced, or a file that
        is served from was written to, and then load what is there, unless it serves."""
        self._keep(self._watch(seconds))

    def stop(self) -> None:
        """End the watch and any reload under way."""
        for task in self._tasks:
            task.cancel()

    # names

    def _resolve(self, name: str) -> Path:
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
        target = _below(self.root, path)
        if target is None:
            raise CheckpointNotFound
        return target

    # what a reload did

    @asynccontextmanager
    async def _recorded(self, of: str, identity: Callable[[], object], **what: Any) -> AsyncIterator[Record]:
        """Count and log one reload and whether it changed what serves. `identity` tells what serves; `of` is one of RELOADED."""
        self._under_way += 1
        self._idle.clear()
        try:
            async with self._counted(of, identity, Record(what)) as record:
                yield record
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    @asynccontextmanager
    async def _counted(self, of: str, identity: Callable[[], object], record: Record) -> AsyncIterator[Record]:
        began, before, what = time.monotonic(), identity(), record.log_fields
        try:
            if self._versions.current is None:
                raise ReloadInProgress("the first load has not ended")  # and would fail if another load had begun
            yield record
        except ReloadInProgress as error:  # the checkpoint was not looked at
            self._metrics.reloads.labels("busy").inc()
            log.info("reload_busy", **what, reason=str(error))
            raise
        except Exception as error:
            self._metrics.reloads.labels("failure").inc()
            self._metrics.reload_failed.labels(of).set(1)
            log.error("reload_failed", **what, reason=str(error) or type(error).__name__)
            raise
        record.is_changed = before != identity()
        self._metrics.reload_failed.labels(of).set(0)
        self._metrics.reloads.labels("success" if record.is_changed else "unchanged").inc()
        seconds = round(time.monotonic() - began, 3)
        log.info("reloaded" if record.is_changed else "unchanged", **what, seconds=seconds)

    def _model_identity(self) -> object:
        current = self._versions.current
        return None if current is None else current.loaded.served.manifest.digest

    def _corpus_identity(self) -> object:
        """With its changes: a copy of the same corpus may lack some of them."""
        state = self._corpus.present()
        if state is None:
            return None
        served = self._corpus.served
        return served.manifest.digest, served.corpus.digest, served.hidden, state.mark

    # by itself

    async def _watch(self, seconds: float) -> None:
        # The first look compares what is there with what serves: it may have been switched after the first load had read it.
        seen: tuple[Identity, str] = None, ""
        seen_posts: tuple[list[Identity], str] = [], ""
        while True:
            await asyncio.sleep(seconds)
            if self._versions.current is None:
                continue  # not known yet what the first load has read
            if self.retrieval != self.first_retrieval and await self._has_others("corpus", self.first_retrieval):
                self.retrieval = self.first_retrieval
            if self.checkpoint != self.first_checkpoint and await self._has_others(
                "checkpoint", [self.first_checkpoint]
            ):
                self.checkpoint = self.first_checkpoint
            posts = await asyncio.to_thread(_identities, self.retrieval), self._corpus.changed_file()
            if posts != seen_posts and None not in posts[0] and await self._follow_corpus():
                seen_posts = posts
            model = await asyncio.to_thread(_identity, self.checkpoint), self._versions.current.loaded.changed_file()
            if model != seen and model[0] is not None and await self._follow():
                seen = model  # a refused one is not tried again until it changes

    async def _has_others(self, of: str, paths: Sequence[Path | None]) -> bool:
        """Whether other manifests are at these paths, which the settings name, than at the last reload by name."""
        manifests = await asyncio.to_thread(_manifests, paths)
        return None not in manifests and manifests != self._passed_by.get(of)

    async def _follow(self) -> bool:
        """Load the checkpoint that is there now, unless it serves. Return False if that has to be tried again."""
        current = self._versions.current
        digest = await asyncio.to_thread(_digest, self.checkpoint)
        if current is None or digest != current.loaded.served.manifest.digest or current.loaded.changed_file():
            return await _try(self.reload())
        self._metrics.reload_failed.labels("checkpoint").set(0)  # one that was refused has been replaced by what serves
        return True

    async def _follow_corpus(self) -> bool:
        """The same for the retrieval checkpoint and the corpus."""
        if not await asyncio.to_thread(self._serves_these_posts):
            return await _try(self.reload_corpus())
        self._metrics.reload_failed.labels("corpus").set(0)
        return True

    def _serves_these_posts(self) -> bool:
        """Whether the retrieval checkpoint and the corpus that serve are those on the disk. A copy of the corpus is not: it may have other
        changes."""
        checkpoint, corpus = self.retrieval
        try:
            served = self._corpus.served
            return (
                checkpoint is not None
                and corpus is not None
                and self._corpus.is_in(corpus)
                and not self._corpus.changed_file()
                and load_corpus_manifest(corpus).digest == served.corpus.digest
                and _digest(checkpoint) == served.manifest.digest
            )
        except Exception:  # nothing serves, or it cannot be read, which a reload will explain
            return False

    async def _reload_everything(self) -> None:
        while True:  # the first load, too, may have read what was replaced since
            await self._idle.wait()
            if self._versions.current is not None:
                break
            await asyncio.sleep(AGAIN_SECONDS)
        self._is_due = False
        await _until_tried(self.reload)
        if None not in self.retrieval:
            await _until_tried(self.reload_corpus)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _until_tried(reload: Callable[[], Awaitable[object]]) -> None:
    """Run a reload once no other keeps it out."""
    while True:
        if await _try(reload()):
            return
        await asyncio.sleep(AGAIN_SECONDS)


async def _try(reload: Awaitable[object]) -> bool:
    """Run a reload. Return False if another reload kept it out, else True, even if it failed."""
    try:
        await reload
    except ReloadInProgress:
        return False
    except Exception:
        return True  # it has been logged and counted
    return True


def _directory(path: Path | None) -> Path | None:
    """Where a path leads now."""
    return None if path is None else Path(os.path.realpath(path))


def _place(path: Path | None, directory: Path | None) -> Path | None:
    """The path where it still leads to this directory, or where nothing is in the directory any more; else the directory."""
    return path if directory is None or directory == _directory(path) or _identity(directory) is None else directory


def _manifests(paths: Iterable[Path | None]) -> list[str | None]:
    """The hash of each manifest, None for one that cannot be read."""

    def of(path: Path | None) -> str | None:
        try:
            return None if path is None else hashlib.sha256((path / MANIFEST_NAME).read_bytes()).hexdigest()
        except OSError:
            return None

    return [*map(of, paths)]


def _below(root: Path, path: Path) -> Path | None:
    """A checkpoint's path after all links; None if no checkpoint is there, or if it lies outside the root."""
    try:
        root, target = root.resolve(strict=True), path.resolve(strict=True)
        is_found = root in target.parents and (target / MANIFEST_NAME).is_file()
    except (OSError, RuntimeError):  # the second for links in a circle, before Python 3.13
        return None
    return target if is_found else None


def _root(settings: Settings) -> Path:
    """Where reloads find what they name. Default: the first checkpoint's parent, or itself if it lies at the top."""
    place = settings.checkpoint.absolute()
    return settings.admin.root or (place if place.parent == place.parent.parent else place.parent)


def _identities(checkpoints: Iterable[Path | None]) -> list[Identity]:
    return [None if path is None else _identity(path) for path in checkpoints]


def _identity(checkpoint: Path) -> Identity:
    try:
        status = os.stat(checkpoint / MANIFEST_NAME)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _digest(checkpoint: Path) -> str | None:
    """The digest that a manifest claims; None if it cannot be read, which a reload will explain."""
    try:
        return load_manifest(checkpoint).digest
    except Exception:
        return None
