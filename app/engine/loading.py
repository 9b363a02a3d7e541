"""What an engine thread runs first: verify a checkpoint, build its engine, warm it up. Not for what happens to a request."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from app.interface import ServedModel
from app.settings import Settings
from model.create import EngineOptions, create_engine
from model.engine import Engine, EngineError
from weights.checkpoint import Checkpoint, CheckpointError, load_checkpoint


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


class Steps:
    """What a load says on its way, and is told: used in the engine's thread, but for `stop`."""

    def __init__(self, warming: Callable[[], None]) -> None:
        self._warming = warming
        self._stopped = threading.Event()

    def warming(self) -> None:
        """The checkpoint is read, and the warm-up begins."""
        self.go_on()
        self._warming()

    def go_on(self, *_: object) -> None:
        """To be called often. Raises EngineError once nobody waits for this load any more."""
        if self._stopped.is_set():
            raise EngineError("the load was given up")

    def stop(self) -> None:
        """Nobody waits for it any more."""
        self._stopped.set()


Loader = Callable[[Steps], LoadedModel]
"""Runs in an engine thread."""


def checkpoint_loader(path: Path, settings: Settings) -> Loader:
    """Loads this checkpoint. Raises CheckpointError or EngineError, with a sentence for people."""

    def load(steps: Steps) -> LoadedModel:
        try:
            checkpoint = load_checkpoint(path, steps.go_on)
            steps.warming()
            engine = create_engine(checkpoint.ranker, engine_options(settings))
            steps.go_on()
            engine.warm_up()
        except (CheckpointError, EngineError):
            raise
        except (MemoryError, RuntimeError) as error:  # the second is how torch and threading say it
            raise EngineError(
                f"{path} cannot be loaded: {(str(error) or 'not enough memory').splitlines()[0]}"
            ) from error
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
