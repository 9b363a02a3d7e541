"""Runs steps padded to a few sizes, each recorded once: double-buffered copies, and the check that every size gives the same bits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.config import CandidatePositions, ModelConfig
from model.engine import EngineError
from model.split.graphs import Recorder, Run
from model.split.kernels.contract import Step
from model.split.step import (
    TILE_ROWS,
    HostArrays,
    StepPlan,
    device_arrays,
    host_arrays,
    step_bytes,
    tile_slots,
    used_bytes,
)
from model.split.trunk import SplitTrunk
from model.split.write import StepWriter

FINE_ROWS = 512  # up to here every multiple of TILE_ROWS is a size, beyond it four for each doubling
SLOTS = 2  # host buffers: one is filled while the device reads the other
PROBE_CANDIDATES = 16
Outputs = NDArray[np.float32]
Probe = Callable[[int], StepPlan]
"""A plan of exactly so many rows, with the same candidates first and last."""


@dataclass(slots=True)
class RowCounts:
    """Rows that steps needed and rows that were computed, as running totals."""

    used: int = 0
    computed: int = 0

    def add(self, used: int, computed: int) -> None:
        """Count a step."""
        self.used += used
        self.computed += computed


def row_sizes(capacity: int) -> list[int]:
    """Sizes of steps: multiples of 64 up to 512, beyond it four for each doubling, and the capacity."""
    sizes, size = [], TILE_ROWS
    while size < capacity:
        sizes.append(size)
        size += TILE_ROWS if size < FINE_ROWS else (1 << size.bit_length() - 1) // 4
    return [*sizes, capacity]


def recording_order(sizes: Sequence[int]) -> list[int]:
    """The largest first, then those with the largest power of two, so that any prefix of the list can serve every step."""
    return sorted(sizes, key=lambda size: (size != max(sizes), -(size & -size), size))


class StepRunner:
    """Bodies and tails are recorded for each of `row_sizes`; a step takes the smallest that holds it. Where nothing is recorded it
    takes the fewest whole tiles."""

    def __init__(
        self, config: ModelConfig, mode: CandidatePositions, trunk: SplitTrunk, capacity: int, recorder: Recorder
    ) -> None:
        self.counts = RowCounts()
        self._config, self._trunk, self._capacity, self._recorder = config, trunk, capacity, recorder
        self._sizes = row_sizes(capacity) if recorder.records else list(range(TILE_ROWS, capacity + 1, TILE_ROWS))
        self._bodies: dict[int, Run] = {}
        self._tails: dict[int, Run] = {}
        self._writer = StepWriter(config, mode, trunk.mixed)
        room = step_bytes(config, capacity)
        self._staging = [recorder.pinned(room, dtype=torch.uint8) for _ in range(SLOTS)]
        self._host = [host_arrays(buffer, config, capacity) for buffer in self._staging]
        self._outputs = [recorder.pinned(capacity, trunk.logits.shape[1], dtype=torch.float32) for _ in range(SLOTS)]
        self._arrived = torch.zeros(room, dtype=torch.uint8, device=trunk.logits.device)
        self._device = device_arrays(self._arrived, config, capacity)

    @property
    def recorded(self) -> int:
        """How many recordings there are."""
        return self._recorder.recorded

    def compile(self, probe: Probe) -> None:
        """Compile what steps of every size launch; nothing is computed."""
        plan = probe(self._sizes[0])
        for size in (self._sizes[0], self._capacity):  # few and many rows: no constant of a kernel depends on more
            self._trunk.kernels.compile(partial(self._run_plain, plan, size))

    def warm_up(self, notes: dict[str, Any], probe: Probe) -> None:
        """Check products, record every size, then drop sizes whose replays of a probe give other bits than the plain run or the
        largest size. Writes to `notes` what was checked; raises EngineError when a check fails."""
        self.compile(probe)
        notes["products"] = self._trunk.kernels.check_products(self._trunk.linear_weights(), self._sizes)
        if not self._recorder.records:
            return
        plans = {size: probe(size) for size in self._sizes}
        expected = {size: self._run_plain(plan, size) for size, plan in plans.items()}
        for buffer in (*self._staging, self._arrived):
            buffer.zero_()  # a step of no rows
        gc.collect()
        notes["row_sizes_without_room"] = self._record()
        trusted = expected[self._capacity][:PROBE_CANDIDATES]
        failed = [size for size in self._sizes if not self._passes(plans[size], expected[size], trusted)]
        if self._capacity in failed:
            raise EngineError(f"a step of {self._capacity} rows gives other bits when it is replayed")
        self._sizes = [size for size in self._sizes if size not in failed]
        notes["row_sizes"], notes["row_sizes_refused"] = self._sizes, failed
        notes["graphs"] = self._recorder.recorded

    def _record(self) -> list[int]:
        """Record the largest size, then coarse ones before fine ones, as long as there is room; returns the sizes left out."""
        step = Step(self._trunk.mixed, self._device, self._host[0], ())
        for size in recording_order(self._sizes):
            if self._bodies and not self._recorder.has_room():
                break
            try:
                self._bodies[size] = self._recorder.record(self._trunk.body, step.at(size))
                self._tails[size] = self._recorder.record(self._trunk.tail, step.at(size))
            except torch.OutOfMemoryError:
                if not self._tails:
                    raise
                break
        left_out = [size for size in self._sizes if size not in self._tails]
        self._sizes = [size for size in self._sizes if size in self._tails]
        return left_out

    def run(self, plans: Sequence[StepPlan]) -> list[Outputs]:
        """Raw head outputs fp32 `[candidates, A + Z]` of each step. A host buffer is written again only after its step has ended
        on the device."""
        outputs: list[Outputs] = []
        waiting: list[Callable[[], Outputs]] = []
        for number, plan in enumerate(plans):
            if len(waiting) == SLOTS:
                outputs.append(waiting.pop(0)())
            waiting.append(self._start(plan, number % SLOTS))
        outputs.extend(collect() for collect in waiting)
        return outputs

    def _start(self, plan: StepPlan, slot: int) -> Callable[[], Outputs]:
        """Queue one step; the result waits for it and returns its outputs."""
        size = self._fitting(plan.rows, plan.tiles)
        step = self._sent(plan, slot)
        candidates = step.host.count("candidates")
        self.counts.add(step.used, size)
        self._bodies.get(size, self._trunk.body)(step.at(size))
        if candidates:
            tail = self._fitting(candidates, step.host.count("candidate_tiles"))
            self._tails.get(tail, self._trunk.tail)(step.at(tail))
        output = self._outputs[slot][:candidates]
        output.copy_(self._trunk.logits[:candidates], non_blocking=True)
        wait = self._recorder.mark()

        def collect() -> Outputs:
            wait()
            arrived: Outputs = output.numpy().copy()
            return arrived

        return collect

    def _fitting(self, rows: int, tiles: int) -> int:
        return next(size for size in self._sizes if rows <= size and tiles <= tile_slots(size))

    def _sent(self, plan: StepPlan, slot: int) -> Step:
        """Write the plan and start copying what the step uses to the device."""
        host: HostArrays = self._host[slot]
        self._writer.write(plan, host)
        for used in used_bytes(host, self._config, self._capacity):
            self._arrived[used].copy_(self._staging[slot][used], non_blocking=True)
        return Step(self._trunk.mixed, self._device, host, plan.states())

    def _run_plain(self, plan: StepPlan, size: int) -> Outputs:
        """The plan's outputs without any recording, in a step of this size."""
        step = self._sent(plan, 0)
        self._trunk.body(step.at(size))
        self._trunk.tail(step.at(size))
        outputs: Tensor = self._trunk.logits[: step.host.count("candidates")]
        return outputs.cpu().numpy().copy()

    def _passes(self, plan: StepPlan, expected: Outputs, trusted: Outputs) -> bool:
        """Whether the recorded step gives the bits of the plain one, and the probe's candidates, which come both first and last, have
        the same bits as in the largest step."""
        (outputs,) = self.run([plan])
        ends = (outputs[:PROBE_CANDIDATES], outputs[-PROBE_CANDIDATES:])
        return outputs.tobytes() == expected.tobytes() and all(end.tobytes() == trusted.tobytes() for end in ends)
