"""Runs planned steps one after another, eagerly, on the CPU. For CUDA see `model.split.graphs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from model.config import CandidatePositions, ModelConfig
from model.split.kernels.contract import Step
from model.split.step import TILE_ROWS, StepPlan, host_arrays, step_arrays, step_bytes
from model.split.tables import TableSource
from model.split.trunk import SplitTrunk
from model.split.write import StepWriter

Probe = Callable[
    [int], StepPlan
]  # a plan of so many rows; to be checked, exactly so many, with the same candidates first and last
PROBE_CANDIDATES = 16


@dataclass(slots=True)
class RowCounts:
    """Rows that steps needed and rows that were computed, as running totals."""

    used: int = 0
    computed: int = 0

    def add(self, used: int, computed: int) -> None:
        """Count a step."""
        self.used += used
        self.computed += computed


class StepRunner(Protocol):
    """What computes steps."""

    counts: RowCounts

    @property
    def recorded(self) -> int:
        """How many recordings were made."""

    def warm_up(self, notes: dict[str, Any], probe: Probe, trial: Probe) -> None:
        """Compile, record and check by plans of `probe`, choose kernels by those of `trial`; says in `notes` what was checked.
        Raises EngineError when a check fails."""

    def run(self, plans: Sequence[StepPlan]) -> list[NDArray[np.float32]]:
        """Raw head outputs fp32 `[candidates, A + Z]` of each step."""


class EagerRunner:
    """One set of arrays, read where they were written."""

    def __init__(
        self, config: ModelConfig, mode: CandidatePositions, trunk: SplitTrunk, source: TableSource, capacity: int
    ) -> None:
        self.counts = RowCounts()
        self.recorded = 0
        self._trunk = trunk
        self._source = source
        buffer = torch.zeros(step_bytes(config, capacity), dtype=torch.uint8)
        self._arrays = step_arrays(buffer, config, capacity)
        self._host = host_arrays(buffer, config, capacity)
        self._writer = StepWriter(config, mode, trunk.mixed)

    def warm_up(self, notes: dict[str, Any], probe: Probe, trial: Probe) -> None:
        """See `StepRunner.warm_up`; there are no sizes to record."""
        notes["products"] = self._trunk.choose(self._written_for(trial), [TILE_ROWS])

    def run(self, plans: Sequence[StepPlan]) -> list[NDArray[np.float32]]:
        """See `StepRunner.run`."""
        return [self._run_step(plan) for plan in plans]

    def _written_for(self, trial: Probe) -> Callable[[int], Step]:
        def written(rows: int) -> Step:
            plan = trial(rows)
            self._writer.write(plan, self._host)
            return Step(self._trunk.mixed, self._arrays, self._host, plan.states())

        return written

    def _run_step(self, plan: StepPlan) -> NDArray[np.float32]:
        self._writer.write(plan, self._host)
        self._source.prepare(self._host, 0)
        step = Step(self._trunk.mixed, self._arrays, self._host, plan.states())
        rows, candidates = int(self._host.counts[0]), int(self._host.counts[1])
        if rows:
            self._trunk.body(step, _whole_tiles(rows))
            self.counts.add(rows, _whole_tiles(rows))
        if candidates:
            self._trunk.tail(step, _whole_tiles(candidates))
        outputs: NDArray[np.float32] = self._trunk.logits[:candidates].numpy().copy()
        return outputs


def _whole_tiles(rows: int) -> int:
    return -(-rows // TILE_ROWS) * TILE_ROWS
