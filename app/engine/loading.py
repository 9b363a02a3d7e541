"""What an engine thread runs first: verify a checkpoint, build its engine, warm it up. Not for what happens to a request."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import torch

from app.budgets import USER_VECTOR_BYTES
from app.interface import Changed, ServedModel, ServedRetrieval
from app.settings import Settings
from model.create import EngineOptions, create_engine, find_device
from model.engine import Engine, EngineError
from model.retrieval.engine import RetrievalEngine, RetrievalOptions
from model.retrieval.inputs import Change, Mark, NewPosts, PostChange
from weights.checkpoint import Checkpoint, CheckpointError, Encoder, load_checkpoint, load_encoder
from weights.corpus.changes import ChangeLog
from weights.corpus.compaction import Compaction, Part, load_changed
from weights.corpus.importer import encode
from weights.corpus.records import mark_after, no_posts
from weights.corpus.store import StoredCorpus
from weights.errors import NotStored

NICE = 10  # about a tenth of a serving thread's time where both want the same core


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A checkpoint with its warm engine. `engine` is used by its own thread only, `engine.cache_stats` by any."""

    checkpoint: Checkpoint
    engine: Engine
    served: ServedModel = field(init=False)

    def __post_init__(self) -> None:
        self.served = ServedModel(self.checkpoint.manifest, self.engine.info)

    def changed_file(self) -> str:
        """A sentence if a file that is being served was written to after it was read; else empty."""
        return self.checkpoint.mapped.changed()

    def labels(self) -> dict[str, str]:
        """The labels of `model_info`."""
        manifest, info = self.checkpoint.manifest, self.engine.info
        return {
            "name": manifest.name,
            "version": manifest.version,
            "checkpoint": manifest.digest,
            "dtype": info.dtype,
            "device": info.device,
        }

    def steps_down(self) -> int:
        """How many faster ways of computing failed their checks here; 0 for an engine with one way."""
        return len(self.engine.info.notes.get("steps_down", ()))

    def device_memory_bytes(self) -> int | None:
        """Held by tensors on the CUDA device; None on a CPU."""
        return torch.cuda.memory_allocated() if self.engine.info.device.startswith("cuda") else None


class Steps:
    """Progress and cancellation of a load. Used in the engine's thread, except `stop`."""

    def __init__(self, warming: Callable[[], None]) -> None:
        self._warming = warming
        self._stopped = threading.Event()

    def warming(self) -> None:
        """The checkpoint has been read and the warm-up begins."""
        self.go_on()
        self._warming()

    def go_on(self, *_: object) -> None:
        """Call this often. Raises EngineError once `stop` was called."""
        if self._stopped.is_set():
            raise EngineError("the load was given up")

    def stop(self) -> None:
        """Give up this load: the next `go_on` raises."""
        self._stopped.set()


Loader = Callable[[Steps], LoadedModel]
"""Runs in an engine thread."""


def stand_back() -> None:
    """From now on this thread, and every thread that it starts, yields to others that want the same core."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def checkpoint_loader(path: Path, settings: Settings, *, stands_back: bool = False) -> Loader:
    """Loads this checkpoint. `stands_back`: on a CPU, the threads in which its engine computes stand back behind all others.

    Raises CheckpointError or EngineError, with a sentence for people.
    """

    def load(steps: Steps) -> LoadedModel:
        try:
            checkpoint = load_checkpoint(path, steps.go_on)
            steps.warming()
            options = engine_options(settings)
            if stands_back and not torch.cuda.is_available():
                with ThreadPoolExecutor(1, initializer=stand_back) as maker:
                    engine = maker.submit(create_engine, checkpoint.ranker, options).result()
            else:
                engine = create_engine(checkpoint.ranker, options)
            steps.go_on()
            engine.warm_up()
        except (CheckpointError, EngineError):
            raise
        except (MemoryError, RuntimeError) as error:  # the second is how torch and threading say it
            raise EngineError(
                f"{path} cannot be loaded: {(str(error) or 'not enough memory').splitlines()[0]}"
            ) from error
        for step in engine.info.notes.get("steps_down", ()):
            structlog.get_logger("app").warning("fast_path_refused", **step)
        return LoadedModel(checkpoint, engine)

    return load


@dataclass(frozen=True, slots=True, eq=False)
class LoadedRetrieval:
    """A retrieval checkpoint and a corpus with their warm engine, which is used by one thread only, and the log of its changes."""

    engine: RetrievalEngine
    served: ServedRetrieval
    log: ChangeLog
    encoder: Encoder
    stored: StoredCorpus
    again: RetrievalLoader
    """Reads the same checkpoint and corpus once more."""

    def state(self, deleted: int = 0) -> Changed:
        """The present state of the corpus, after a change that deleted this many posts by name."""
        return Changed(self.served.corpus, self.engine.posts, self.engine.changes, deleted, self.engine.mark)

    def changed_file(self) -> str:
        """As `LoadedModel.changed_file`, of both."""
        return self.encoder.mapped.changed() or self.stored.mapped.changed()

    def _check_files(self) -> None:
        """Refuse to write anything that was computed from changed files. Raises NotStored."""
        if changed := self.changed_file():
            raise NotStored(changed)

    def record(self, changes: Sequence[PostChange], position: str) -> Change:
        """Encode the new posts and write the changes to the log, which is held, as one; it is on the disk then. In any thread, one at a
        time. `position`: of the last one in its feed.

        Raises CheckpointError, and then nothing has changed.
        """
        mark = self.log.mark
        for one in changes:
            mark = mark_after(mark, one)
        merged = changes[0] if len(changes) == 1 else PostChange.merged(changes)
        upsert, posts = merged.upsert, no_posts(self.served.corpus.width)
        if len(upsert.post_ids):
            vectors = encode(self.encoder, upsert.post_ids, upsert.author_ids).numpy()
            columns = upsert.post_ids, upsert.author_ids, upsert.created_at, upsert.topics
            posts = NewPosts(*columns, vectors, upsert.texts)
        recorded = Change(merged.delete, posts, mark._replace(position=position), merged.delete_texts)
        self._check_files()
        self.log.append(recorded)
        return recorded

    def compact(self, parts: Sequence[Part], mark: Mark) -> CompactedRetrieval:
        """Write the corpus anew, as its engine's `parts` with this mark, and make an engine of that. It serves nobody yet.

        In any thread, one at a time. Raises CheckpointError or EngineError; the old corpus stays in force then.
        """
        compaction = Compaction(self.stored.path.resolve(), self.stored.manifest, self.log)
        self._check_files()
        written = compaction.write(parts, mark)
        try:
            self._check_files()
            engine = RetrievalEngine(self.encoder.towers, written.corpus, self.engine.options)
            engine.warm_up()
        except BaseException:
            compaction.drop()
            raise
        return CompactedRetrieval(engine, self.encoder, written, compaction, self.again)


@dataclass(frozen=True, slots=True, eq=False)
class CompactedRetrieval:
    """A corpus that was written anew, with its warm engine, and that is not in force yet."""

    engine: RetrievalEngine
    encoder: Encoder
    written: StoredCorpus
    compaction: Compaction
    again: RetrievalLoader

    def commit(self, changes: Sequence[Change]) -> LoadedRetrieval:
        """Put it in force, on the disk too, with what has changed since. Raises CheckpointError; then the old corpus stays in force."""
        for change in changes:
            self.engine.change(change)
        try:
            log = self.compaction.commit(self.written.manifest, changes)
        except BaseException:
            self.engine.close()
            raise
        return _loaded(self.engine, self.encoder, self.written, log, self.again)


RetrievalLoader = Callable[[], LoadedRetrieval]
"""Runs in a thread beside those that serve."""


def retrieval_loader(checkpoint: Path, corpus: Path, settings: Settings) -> RetrievalLoader:
    """Loads both, as one. Raises CheckpointError or EngineError, with a sentence for people."""

    def load() -> LoadedRetrieval:
        encoder = load_encoder(checkpoint)
        stored, log, changes = load_changed(corpus, encoder.manifest)
        if log.passed_over:
            structlog.get_logger("app").warning(
                "change_log_cut", log=str(log.path), passed_over_bytes=log.passed_over, changes=len(changes)
            )
        options = engine_options(settings)
        found = RetrievalOptions(
            "auto",
            "torch" if options.backend == "dense" else options.backend,
            USER_VECTOR_BYTES,
            options.threads,
            options.vectors,
            device=find_device(settings.device).type,
        )
        engine = RetrievalEngine(encoder.towers, stored.corpus, found)
        engine.warm_up()
        for change in changes:
            engine.change(change)
        return _loaded(engine, encoder, stored, log, load)

    return load


def _loaded(
    engine: RetrievalEngine, encoder: Encoder, stored: StoredCorpus, log: ChangeLog, again: RetrievalLoader
) -> LoadedRetrieval:
    engine.mark = log.mark
    hidden, duplicates = int(stored.corpus.hidden.sum()), stored.corpus.duplicates
    served = ServedRetrieval(encoder.manifest, stored.manifest, hidden, duplicates, engine.notes)
    return LoadedRetrieval(engine, served, log, encoder, stored, again)


def engine_options(settings: Settings) -> EngineOptions:
    """The part of the settings that the engine understands."""
    return EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        backend="native" if settings.backend == "native-avx2" else settings.backend,
        candidate_positions=settings.candidate_positions,
        cache_bytes=settings.cache.bytes,
        threads=settings.threads,
        vectors="avx2" if settings.backend == "native-avx2" else "auto",
    )
