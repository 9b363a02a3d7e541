"""What an engine thread runs first: verify a checkpoint, build its engine, warm it up. Not for what happens to a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from app.interface import ServedModel, ServedRetrieval
from app.settings import Settings
from model.create import EngineOptions, create_engine
from model.engine import Engine
from model.retrieval.engine import RetrievalEngine, RetrievalOptions
from weights.checkpoint import Checkpoint, load_checkpoint, load_encoder
from weights.corpus.store import load_corpus


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A checkpoint with its warm engine. `engine` is used by its own thread only, `engine.cache_stats` by any."""

    checkpoint: Checkpoint
    engine: Engine
    served: ServedModel = field(init=False)

    def __post_init__(self) -> None:
        self.served = ServedModel(self.checkpoint.manifest, self.engine.info)

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

    def device_memory_bytes(self) -> int | None:
        """Held by tensors on the CUDA device; None on a CPU."""
        return torch.cuda.memory_allocated() if self.engine.info.device.startswith("cuda") else None


Loader = Callable[[Callable[[], None]], LoadedModel]
"""Runs in an engine thread. It calls its argument when the checkpoint is read and the warm-up begins."""


def checkpoint_loader(path: Path, settings: Settings) -> Loader:
    """Loads this checkpoint. Raises CheckpointError or EngineError, with a sentence for people."""

    def load(warming: Callable[[], None]) -> LoadedModel:
        checkpoint = load_checkpoint(path)
        warming()
        engine = create_engine(checkpoint.ranker, engine_options(settings))
        engine.warm_up()
        return LoadedModel(checkpoint, engine)

    return load


@dataclass(frozen=True, slots=True, eq=False)
class LoadedRetrieval:
    """A retrieval checkpoint and a corpus with their warm engine, which is used by one thread only."""

    engine: RetrievalEngine
    served: ServedRetrieval


RetrievalLoader = Callable[[], LoadedRetrieval]
"""Runs in a thread beside those that serve."""


def retrieval_loader(checkpoint: Path, corpus: Path, settings: Settings) -> RetrievalLoader:
    """Loads both, as one. Raises CheckpointError or EngineError, with a sentence for people."""

    def load() -> LoadedRetrieval:
        encoder = load_encoder(checkpoint)
        stored = load_corpus(corpus, encoder.manifest)
        options = RetrievalOptions(
            settings.retrieval.dtype,
            "torch" if settings.backend == "dense" else settings.backend,
            settings.retrieval.cache_bytes,
            settings.threads,
        )
        engine = RetrievalEngine(encoder.towers, stored.corpus, options)
        engine.warm_up()
        hidden, duplicates = int(stored.corpus.hidden.sum()), stored.corpus.duplicates
        return LoadedRetrieval(
            engine, ServedRetrieval(encoder.manifest, stored.manifest, hidden, duplicates, engine.notes)
        )

    return load


def engine_options(settings: Settings) -> EngineOptions:
    """The part of the settings that the engine understands."""
    return EngineOptions(
        device=settings.device,
        dtype=settings.dtype,
        backend=settings.backend,
        candidate_positions=settings.candidate_positions,
        cache_bytes=settings.cache.bytes,
        threads=settings.threads,
    )
