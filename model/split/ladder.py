"""Tries ways of computing on one device, fastest first, and serves with the first that passes its own checks."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model.config import CandidatePositions
from model.dense import DenseEngine
from model.engine import CacheStats, Engine, EngineError, EngineInfo, Item, Outcome
from model.inputs import Context
from model.ranker import Ranker
from model.selftest import Definition
from model.split.engine import SplitEngine
from model.split.graphs import Recorder

TRIES = 2  # starts that may be lost within one rung before it is left out


@dataclass(frozen=True, slots=True)
class Rung:
    """One way of computing, by name."""

    name: str
    build: Callable[[], Engine]


def cuda_rungs(
    ranker: Ranker,
    device: torch.device,
    dtype: torch.dtype,
    positions: CandidatePositions,
    cache_bytes: int,
    **options: Any,
) -> list[Rung]:
    """All ways for CUDA, fastest first. `options` go to `SplitEngine`; `recorder` in them makes a new one each time."""
    make_recorder: Callable[[], Recorder] | None = options.pop("recorder", None)

    def split(*, plain: bool) -> Engine:
        recorder = make_recorder() if make_recorder and not plain else None
        shared = (ranker, device, dtype, positions, cache_bytes)
        return SplitEngine(*shared, kernels="fused", recorder=recorder, plain=plain, **options)

    return [
        Rung("recorded", lambda: split(plain=False)),
        Rung("plain", lambda: split(plain=True)),
        Rung("dense", lambda: DenseEngine(ranker.to(device), dtype, positions, cache_bytes)),
    ]


class LadderEngine:
    """Implements `Engine` with the first of `rungs` that passes its own warm-up and gives the definition's numbers.

    `info.notes` name the rung, and the ones above it with the reason why each was left. `tried` remembers across starts the rung
    in which a process was lost.
    """

    def __init__(self, ranker: Ranker, rungs: Sequence[Rung], info: EngineInfo, tried: Tried) -> None:
        self.config = ranker.config
        self.info = info
        self._rungs = list(rungs)
        self._definition = Definition(ranker)
        self._tried = tried
        self._engine: Engine | None = None

    def warm_up(self) -> None:
        """Try the rungs in order. Raises EngineError when none passes, sticky when the device is lost meanwhile."""
        left: list[dict[str, str]] = []
        for rung in self._rungs:
            reason = self._tried.begin(rung.name) or self._try(rung)
            if not reason:
                assert self._engine is not None
                self.info = self._engine.info
                self.info.notes.update(rung=rung.name, steps_down=left)
                return
            left.append({"rung": rung.name, "reason": reason})
            gc.collect()  # its weights are large, and cycles hold them
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
        raise EngineError("; ".join(f"{each['rung']}: {each['reason']}" for each in left))

    def _try(self, rung: Rung) -> str:
        """Build and check it. Returns why it must not serve, empty if it may."""
        engine: Engine | None = None
        try:
            engine = rung.build()
            engine.warm_up()
            engine.info.notes["difference_from_definition"] = self._definition.check(engine)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error) or 'no reason given'}"[:500]
            if (isinstance(error, EngineError) and error.sticky) or device_is_lost():
                self._tried.lost(rung.name)
                raise EngineError(f"{rung.name}: {reason}; the next start leaves it out", sticky=True) from error
            self._tried.end()
            if engine is not None:
                engine.close()
            return reason
        self._tried.end()
        self._engine = engine
        return ""

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        """See `Engine.forward`. On the rung `dense` bits may depend on how many candidates an item has."""
        assert self._engine is not None
        return self._engine.forward(items)

    def context_of(self, handle: str, caller: str) -> Context | None:
        """See `Engine.context_of`."""
        return None if self._engine is None else self._engine.context_of(handle, caller)

    def cache_stats(self) -> CacheStats:
        """See `Engine.cache_stats`."""
        return CacheStats() if self._engine is None else self._engine.cache_stats()

    def close(self) -> None:
        """See `Engine.close`."""
        if self._engine is not None:
            self._engine.close()


class Tried:
    """Remembers in a file, for one device and one build of everything, in which rung starts ended without notice."""

    def __init__(self, directory: Path | None, build: str) -> None:
        self._file = directory and directory / "rungs.json"
        self._build = build

    def begin(self, rung: str) -> str:
        """Note that this rung is being tried. Returns why it must not be if `TRIES` starts were lost in it, else an empty text."""
        starts = self._read()
        if starts.get(rung, 0) >= TRIES:
            return f"{TRIES} starts, or the device, were lost in it; delete {self._file} to try it again"
        self._write(starts | {rung: starts.get(rung, 0) + 1, "now": rung})
        return ""

    def end(self) -> None:
        """Note that the rung begun last has ended, well or not: it may be tried again."""
        starts = self._read()
        starts.pop(starts.pop("now", ""), None)
        self._write(starts)

    def lost(self, rung: str) -> None:
        """Note that the device was lost in this rung: no start tries it again."""
        self._write(self._read() | {rung: TRIES})

    def _read(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, AttributeError):
            kept = json.loads(self._file.read_text()) if self._file else {}
            if kept.get("build") == self._build and isinstance(kept["starts"], dict):
                return dict(kept["starts"])
        return {}

    def _write(self, starts: dict[str, Any]) -> None:
        with suppress(OSError):  # a place that cannot be written remembers nothing
            if self._file:
                self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._file.write_text(json.dumps({"build": self._build, "starts": starts}))


def device_is_lost() -> bool:
    """Whether CUDA, if this process uses it, can do nothing more."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
