"""Tries ways of computing, fastest first, and serves with the first that passes its own checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from model.device import free_memory, is_lost, set_given_up
from model.engine import CacheStats, Engine, EngineError, EngineInfo, Item, Outcome
from model.inputs import Context
from model.ranker import Ranker
from model.selftest import Definition

REASON_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Rung:
    """One way of computing, by name. `probe` tries it where it can do no harm and returns why it must not serve, empty if it may.
    `device`: the card that it needs and on which its numbers are compared with the definition's, None for a CPU's engine."""

    name: str
    build: Callable[[], Engine]
    probe: Callable[[], str] = lambda: ""
    device: torch.device | None = None


class LadderEngine:
    """Implements `Engine` with the first of `rungs` that passes its probe and its own warm-up and gives the definition's numbers.

    `info.notes` name the `rung`, and in `steps_down` the ones above it, each with the reason why it was left. Nothing is remembered
    for the next start.
    """

    def __init__(self, ranker: Ranker, rungs: Sequence[Rung], info: EngineInfo) -> None:
        self.config = ranker.config
        self.info = info
        self._ranker = ranker
        self._rungs = list(rungs)
        self._engine: Engine | None = None

    def warm_up(self) -> None:
        """Try the rungs in order. Raises EngineError when none passes."""
        left: list[dict[str, str]] = []
        for rung in self._rungs:
            reason = self._try(rung)
            if self._engine is not None:
                self.info = self._engine.info
                self.info.notes.update(rung=rung.name, steps_down=left)
                for device in {rung.device for rung in self._rungs if rung.device is not None}:
                    set_given_up(device, rung.device is None)
                return
            left.append({"rung": rung.name, "reason": reason})
        raise EngineError("; ".join(f"{step['rung']}: {step['reason']}" for step in left))

    def _try(self, rung: Rung) -> str:
        """Probe, build and check it. Returns why it must not serve, empty if it may."""
        if rung.device is not None and is_lost(rung.device):
            return "this process has lost the device"
        if reason := rung.probe():
            return reason
        engine: Engine | None = None
        try:
            engine = rung.build()
            engine.warm_up()
            if rung.device is not None:
                definition = Definition(self._ranker, rung.device)
                engine.info.notes["difference_from_definition"] = definition.check(engine)
        except Exception as error:
            reason = sentence(error)
        else:
            self._engine = engine
            return ""
        if engine is not None:
            engine.close()
        engine = None
        if rung.device is not None:
            free_memory(rung.device)
        return reason

    def forward(self, items: Sequence[Item]) -> list[Outcome]:
        """See `Engine.forward`."""
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


def sentence(error: Exception) -> str:
    """What to tell people of an error that ended a rung."""
    return f"{type(error).__name__}: {str(error) or 'no reason given'}"[:REASON_CHARACTERS]
