"""What an engine thread runs first: verify a checkpoint, build its engine, warm it up. Not for what happens to a request."""

from __future__ import annotations

from pathlib import Path

from app.engine.versions import LoadedModel, Loader, Say
from app.settings import Settings
from model.create import EngineOptions, create_engine
from weights.checkpoint import load_checkpoint


def checkpoint_loader(path: Path, settings: Settings) -> Loader:
    """What an engine thread runs: verify and load the checkpoint, build its engine, warm it up.

    Raises CheckpointError or EngineError, with a sentence for people.
    """

    def load(say: Say) -> LoadedModel:
        checkpoint = load_checkpoint(path)
        say("warming")
        engine = create_engine(checkpoint.ranker, engine_options(settings))
        engine.warm_up()
        return LoadedModel(checkpoint, engine)

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
