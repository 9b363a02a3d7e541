"""Loads in an engine thread: verifies a checkpoint, builds its engine and warms it up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from app.interface import ServedModel
from app.queue.runners import Steps
from app.settings import Settings
from model.create import EngineOptions, create_engine
from model.dense import candidate_attention
from model.engine import Engine, EngineError
from model.inputs import Candidates, Context
from model.retrieval.engine import RetrievalEngine
from weights.checkpoint import Checkpoint, load_checkpoint
from weights.errors import CheckpointError

log = structlog.get_logger("app.queue.loading")


@dataclass(slots=True, eq=False)
class LoadedModel:
    """A checkpoint with its warm engine. `engine` is used by its own thread only; its `cache_stats` and `context_of` by any."""

    checkpoint: Checkpoint
    engine: Engine
    served: ServedModel = field(init=False)
    changed_file: Callable[[], str] = field(init=False)
    """See `runners.Loaded.changed_file`. It is called after every forward."""

    def __post_init__(self) -> None:
        self.served = ServedModel(self.checkpoint.manifest, self.engine.info)
        self.changed_file = self.checkpoint.mapped.changed

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
        """How many faster engines failed their checks here; 0 if there are none."""
        return len(self.engine.info.notes.get("steps_down", ()))

    def device_memory_bytes(self) -> int | None:
        """Bytes held by tensors on the CUDA device; None on a CPU."""
        return torch.cuda.memory_allocated() if self.engine.info.device.startswith("cuda") else None

    def attention(self, context: Context, candidates: Candidates) -> NDArray[np.float32]:
        """Return `model.dense.candidate_attention` with the engine's positions. Any thread may call it, beside the engine."""
        positions = self.engine.info.candidate_positions
        return candidate_attention(self.checkpoint.ranker, context, candidates, positions)


Loader = Callable[[Path, Steps], LoadedModel]
"""Loads the checkpoint at a path, in an engine thread. Raises CheckpointError or EngineError, with a sentence for people."""


def checkpoint_loader(settings: Settings) -> Loader:
    """Return a loader that builds the engine that the settings ask for."""

    def load(path: Path, steps: Steps) -> LoadedModel:
        try:
            checkpoint = load_checkpoint(path, steps.go_on)
            steps.warming()
            engine = create_engine(checkpoint.ranker, engine_options(settings))
            with freed_on_error(engine):
                steps.go_on()
                engine.warm_up()
        except (CheckpointError, EngineError):
            raise
        except (MemoryError, RuntimeError) as error:  # torch and threading raise the second
            raise EngineError(
                f"{path} cannot be loaded: {(str(error) or 'not enough memory').splitlines()[0]}"
            ) from error
        log_refusals(engine.info.notes)
        return LoadedModel(checkpoint, engine)

    return load


@contextmanager
def freed_on_error(engine: Engine | RetrievalEngine) -> Iterator[None]:
    """A block that closes this engine if it raises: nobody else knows the engine yet, and its threads and memory would stay."""
    try:
        yield
    except BaseException:
        try:
            engine.close()
        except Exception as error:  # a lost device, for example: what the block raised says more
            log.error("engine_not_closed", exc_info=error)
        raise


def log_refusals(notes: Mapping[str, Any]) -> None:
    """Log from an engine's notes why faster engines cannot be used here. The log has the paths, which `/info` leaves out."""
    steps = [*notes.get("steps_down", ())]
    for part in (notes, notes.get("user_tower", {}), notes.get("search", {})):
        steps += [{"rung": "native", "reason": part[name]} for name in ("fallback", "reason") if name in part]
    if reason := notes.get("search", {}).get("not_on_device"):
        steps.append({"rung": "device", "reason": reason})
    for step in steps:
        log.warning("fast_path_refused", **step)


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
