"""Loads in an engine thread: verifies a checkpoint, builds its engine and warms it up. The same for retrieval and a corpus."""

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
from weights.checkpoint import Checkpoint, Encoder, load_checkpoint, load_encoder
from weights.corpus.changes import ChangeLog
from weights.corpus.compaction import Compaction, Part, load_changed
from weights.corpus.importer import encode
from weights.corpus.records import mark_after, no_posts
from weights.corpus.store import StoredCorpus
from weights.errors import CheckpointError, NotStored

NICE = 10  # gets about a tenth of the time of a serving thread on the same core


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A checkpoint with its warm engine. `engine` is used by its own thread only, `engine.cache_stats` by any."""

    checkpoint: Checkpoint
    engine: Engine
    served: ServedModel = field(init=False)

    def __post_init__(self) -> None:
        self.served = ServedModel(self.checkpoint.manifest, self.engine.info)

    def changed_file(self) -> str:
        """A sentence if a file that is served from was written to since it was read, else empty."""
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
        """How many faster ways of computing failed their checks here; 0 for an engine that has only one way."""
        return len(self.engine.info.notes.get("steps_down", ()))

    def device_memory_bytes(self) -> int | None:
        """Bytes held by tensors on the CUDA device; None on a CPU."""
        return torch.cuda.memory_allocated() if self.engine.info.device.startswith("cuda") else None


class Steps:
    """Progress and cancellation of a load. Used in the engine's thread, except `stop`."""

    def __init__(self, warming: Callable[[], None]) -> None:
        self._warming = warming
        self._stopped = threading.Event()

    def warming(self) -> None:
        """Report that the checkpoint was read and the warm-up begins."""
        self.go_on()
        self._warming()

    def go_on(self, *_: object) -> None:
        """Call this often. Raises EngineError once the load was cancelled."""
        if self._stopped.is_set():
            raise EngineError("the load was cancelled")

    def stop(self) -> None:
        """Give this load up: the next `go_on` raises."""
        self._stopped.set()


Loader = Callable[[Steps], LoadedModel]
"""Runs in an engine thread."""


def stand_back() -> None:
    """From now on run this thread, and all that it starts, at low priority."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def checkpoint_loader(path: Path, settings: Settings, *, stands_back: bool = False) -> Loader:
    """Return a loader of this checkpoint. `stands_back`: on a CPU, its engine's threads run at low priority.

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
        except (MemoryError, RuntimeError) as error:  # torch and threading raise the second
            raise EngineError(
                f"{path} cannot be loaded: {(str(error) or 'not enough memory').splitlines()[0]}"
            ) from error
        for step in engine.info.notes.get("steps_down", ()):
            structlog.get_logger("app").warning("fast_path_refused", **step)
        return LoadedModel(checkpoint, engine)

    return load


@dataclass(frozen=True, slots=True, eq=False)
class LoadedRetrieval:
    """A retrieval checkpoint and a corpus with their warm engine, which only one thread uses, and the corpus's change log."""

    engine: RetrievalEngine
    served: ServedRetrieval
    log: ChangeLog
    encoder: Encoder
    stored: StoredCorpus
    again: RetrievalLoader
    """Reads the same checkpoint and corpus once more."""

    def state(self, deleted: int = 0) -> Changed:
        """Return the present state of the corpus. `deleted` is how many posts the last change deleted by name."""
        return Changed(self.served.corpus, self.engine.posts, self.engine.changes, deleted, self.engine.mark)

    def changed_file(self) -> str:
        """As `LoadedModel.changed_file`, for the encoder and the corpus."""
        return self.encoder.mapped.changed() or self.stored.mapped.changed()

    def _check_files(self) -> None:
        """Raise NotStored if a file has changed, so that nothing made from wrong numbers is written."""
        if changed := self.changed_file():
            raise NotStored(changed)

    def record(self, changes: Sequence[PostChange], position: str) -> Change:
        """Encode the new posts and write the changes to the log, which must be held, as one change that is then on the disk. Runs in
        any thread, one call at a time. `position` is that of the last change in its feed.

        Raises CheckpointError; nothing has changed then.
        """
        has_texts = self.served.corpus.ids == "text"
        if any(bool(one.delete_texts or one.upsert.texts) != has_texts for one in changes):
            raise NotStored("The corpus was replaced meanwhile by one with another kind of ids. Nothing was changed.")
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
        """Rewrite the corpus from its engine's `parts` and this mark, and build an engine on it. It does not serve yet.

        Runs in any thread, one call at a time. Raises CheckpointError or EngineError; the old corpus stays in use then.
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
    """A rewritten corpus with its warm engine, not yet in use."""

    engine: RetrievalEngine
    encoder: Encoder
    written: StoredCorpus
    compaction: Compaction
    again: RetrievalLoader

    def commit(self, changes: Sequence[Change]) -> LoadedRetrieval:
        """Put it in use, on the disk too, with the changes made since. Raises CheckpointError; the old corpus then stays in use."""
        self.engine.replay(changes)
        try:
            log = self.compaction.commit(self.written.manifest, changes)
        except BaseException:
            self.engine.close()
            raise
        return _loaded(self.engine, self.encoder, self.written, log, self.again)


RetrievalLoader = Callable[[], LoadedRetrieval]
"""Runs in a thread beside those that serve."""


def retrieval_loader(checkpoint: Path, corpus: Path, settings: Settings) -> RetrievalLoader:
    """Return a loader of both together. It raises CheckpointError or EngineError, with a sentence for people."""

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
        engine.replay(changes)
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
    """Return the engine's part of the settings."""
    return EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        backend="native" if settings.backend == "native-avx2" else settings.backend,
        candidate_positions=settings.candidate_positions,
        cache_bytes=settings.cache.bytes,
        threads=settings.threads,
        vectors="avx2" if settings.backend == "native-avx2" else "auto",
    )
