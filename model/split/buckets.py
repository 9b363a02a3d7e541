"""Runs steps padded to a few sizes, each recorded once: CUDA graphs, double-buffered copies, and the check that every size
gives the same bits.
"""

from __future__ import annotations

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
from model.split.graphs import PlainRecorder, Recorder, Work, no_garbage
from model.split.kernels.contract import Step
from model.split.step import (
    CANDIDATE_TILES,
    CANDIDATES,
    ROWS,
    TILE_ROWS,
    ContextState,
    StepArrays,
    StepPlan,
    host_arrays,
    step_arrays,
    step_bytes,
    tile_slots,
    used_bytes,
)
from model.split.tables import TableSource
from model.split.trunk import SplitTrunk
from model.split.write import StepWriter

WHOLE_ROWS = 512  # up to here body and tail of a step often have the same size
SLOTS = 2  # host buffers: one is filled while the device reads the other
PROBE_CANDIDATES = 16
Collect = Callable[[], NDArray[np.float32]]
Probe = Callable[[int], StepPlan]
"""A plan of at most this many rows. For checks it has exactly as many, with the same candidates first and last."""


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
    """Sizes that waste little: steps of 64 rows up to 2048, of 128 up to 4096, of 512 beyond."""
    sizes = [*range(64, 2048, 64), *range(2048, 4096, 128), *range(4096, capacity, 512), capacity]
    return sorted({size for size in sizes if size <= capacity})


def recording_order(sizes: Sequence[int]) -> list[int]:
    """The largest first, then those with the largest power of two, so that any prefix of the list can serve every step."""
    return sorted(sizes, key=lambda size: (size != max(sizes), -(size & -size), size))


class StepRunner:
    """Bodies and tails are recorded for each of `sizes`; a step takes the smallest that holds it. Without a recorder, on a CPU, it
    takes the fewest whole tiles, and nothing is recorded."""

    def __init__(
        self,
        config: ModelConfig,
        mode: CandidatePositions,
        trunk: SplitTrunk,
        source: TableSource,
        capacity: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.counts = RowCounts()
        self._config = config
        self._trunk = trunk
        self._source = source
        self._is_recorded = recorder is not None
        self._recorder = recorder = recorder or PlainRecorder()
        self._capacity = capacity
        self._sizes = row_sizes(capacity) if self._is_recorded else list(range(TILE_ROWS, capacity + 1, TILE_ROWS))
        self._bodies: dict[int, Work] = {}
        self._tails: dict[int, Work] = {}
        self._whole: dict[int, Work] = {}
        self._writer = StepWriter(config, mode, trunk.mixed)
        room = step_bytes(config, capacity)
        self._staging = [recorder.pinned(room, dtype=torch.uint8) for _ in range(SLOTS)]
        self._host = [host_arrays(buffer, config, capacity) for buffer in self._staging]
        self._outputs = [recorder.pinned(capacity, trunk.logits.shape[1], dtype=torch.float32) for _ in range(SLOTS)]
        self._arrived = torch.zeros(room, dtype=torch.uint8, device=trunk.logits.device)
        self._device = step_arrays(self._arrived, config, capacity)

    @property
    def recorded(self) -> int:
        """How many recordings there are."""
        return self._recorder.recorded

    def warm_up(self, notes: dict[str, Any], probe: Probe, trial: Probe) -> None:
        """Compile, choose kernels with plans from `trial`, record every size, then drop sizes where plans from `probe` give other bits
        than the plain run or the largest size. Writes to `notes` what was checked; raises EngineError when a check fails."""
        kernels = self._trunk.kernels
        if not self._is_recorded:
            notes["products"] = self._trunk.choose(lambda size: self._written(trial(size)), [TILE_ROWS])
            return
        # the reference comes first: it must not use what is still to be checked
        kernels.use_reference()
        plans = {size: probe(size) for size in self._sizes}
        with no_garbage():
            kernels.compile(partial(self.run_plain, plans[self._sizes[0]]))
            expected = {size: self.run_plain(plan) for size, plan in plans.items()}
            notes["products"] = self._trunk.choose(lambda size: self._written(trial(size)), self._sizes)
            for buffer in (*self._staging, self._arrived):
                buffer.zero_()  # a step of no rows: the states of the probes are gone
            notes["row_sizes_without_room"] = self._record()
        trusted = expected[self._capacity][:PROBE_CANDIDATES]
        failed = [size for size in self._sizes if not self._passes(plans[size], expected[size], trusted)]
        notes["row_sizes"] = [size for size in self._sizes if size not in failed]
        notes["row_sizes_refused"] = failed
        if self._capacity in failed:
            raise EngineError(f"a step of {self._capacity} rows gives other bits when it is replayed")
        for size in failed:
            self._sizes.remove(size)
        if not failed:
            kernels.keep_choices()
        notes["graphs"] = self._recorder.recorded

    def _record(self) -> list[int]:
        """Record the largest size, then coarse ones before fine ones, as long as there is room; returns the sizes left out. A size
        has a body, a tail, and up to `WHOLE_ROWS` both in one, for steps whose contexts are known."""
        step = Step(self._trunk.mixed, self._device, self._host[0], ())

        for size in recording_order(self._sizes):
            if self._bodies and not self._recorder.has_room():
                break
            halves = (
                (self._bodies, self._trunk.body),
                (self._tails, self._trunk.tail),
                (self._whole, self._trunk.whole),
            )
            try:
                for recorded, work in halves if size <= WHOLE_ROWS else halves[:2]:
                    recorded[size] = self._recorder.record(work, step.at(size))
            except torch.OutOfMemoryError:
                if not self._tails:
                    raise
                break
        left_out = [size for size in self._sizes if size not in self._tails]
        self._sizes = [size for size in self._sizes if size in self._tails]
        return left_out

    def run(self, plans: Sequence[StepPlan]) -> list[NDArray[np.float32]]:
        """Raw head outputs fp32 `[candidates, A + Z]` of each step. A host buffer is written again only after its step has ended
        on the device."""
        outputs: list[NDArray[np.float32]] = []
        waiting: list[Collect] = []
        for number, plan in enumerate(plans):
            if len(waiting) == SLOTS:
                outputs.append(waiting.pop(0)())
            waiting.append(self._start(plan, number % SLOTS))
        outputs.extend(collect() for collect in waiting)
        return outputs

    def rehearse(self, plans: Sequence[StepPlan]) -> Callable[[], None]:
        """The device's work in `run`, for measurements: steps are written now, every call of the result queues them again and
        returns at once. Raises EngineError if tables are on the host, because their work would be missing.
        """
        if self._source.placement != "device":
            raise EngineError("only steps whose tables are on the device can be queued again")
        queued = []
        for plan in plans:
            size = self._fitting(plan.rows, plan.tiles)
            staged = self._recorder.pinned(len(self._arrived), dtype=torch.uint8)
            host = host_arrays(staged, self._config, self._capacity)
            self._writer.write(plan, host)
            queued.append(partial(self._queue, size, staged, host, plan.states()))

        def again() -> None:
            for queue in queued:
                candidates = queue()
                self._outputs[0][:candidates].copy_(self._trunk.logits[:candidates], non_blocking=True)

        return again

    def _queue(self, size: int, staged: Tensor, host: StepArrays, states: Sequence[ContextState]) -> int:
        """Copy one written step to the device and replay it; returns how many candidates it has."""
        step = self._sent(staged, host, states)
        candidates = int(host.counts[CANDIDATES])
        tail = self._fitting(candidates, int(host.counts[CANDIDATE_TILES])) if candidates else 0
        if tail == size and size in self._whole:
            self._whole[size](step.at(size))
            return candidates
        self._bodies.get(size, self._trunk.body)(step.at(size))
        if candidates:
            self._tails.get(tail, self._trunk.tail)(step.at(tail))
        return candidates

    def _start(self, plan: StepPlan, slot: int) -> Collect:
        """Queue one step; the result waits for it and returns its outputs."""
        size = self._fitting(plan.rows, plan.tiles)
        host = self._host[slot]
        self._writer.write(plan, host)
        self.counts.add(int(host.counts[ROWS]), size)
        self._source.prepare(host, slot)
        candidates = self._queue(size, self._staging[slot], host, plan.states())
        output = self._outputs[slot][:candidates]
        output.copy_(self._trunk.logits[:candidates], non_blocking=True)
        wait = self._recorder.mark()

        def collect() -> NDArray[np.float32]:
            wait()
            arrived: NDArray[np.float32] = output.numpy().copy()
            return arrived

        return collect

    def _fitting(self, rows: int, tiles: int) -> int:
        return next(size for size in self._sizes if rows <= size and tiles <= tile_slots(size))

    def _sent(self, staged: Tensor, host: StepArrays, states: Sequence[ContextState]) -> Step:
        """Start copying the parts of the buffer that the step uses."""
        for used in used_bytes(host, self._config, self._capacity):
            self._arrived[used].copy_(staged[used], non_blocking=True)
        return Step(self._trunk.mixed, self._device, host, states)

    def _written(self, plan: StepPlan) -> Step:
        """Write the plan and start copying it to the device."""
        self._writer.write(plan, self._host[0])
        self._source.prepare(self._host[0], 0)
        return self._sent(self._staging[0], self._host[0], plan.states())

    def run_plain(self, plan: StepPlan) -> NDArray[np.float32]:
        """The plan's outputs without any recording."""
        step = self._written(plan)
        candidates = int(step.host.counts[CANDIDATES])
        self._trunk.body(step.at(self._fitting(plan.rows, plan.tiles)))
        self._trunk.tail(step.at(self._fitting(candidates, int(step.host.counts[CANDIDATE_TILES]))))
        outputs: NDArray[np.float32] = self._trunk.logits[:candidates].cpu().numpy().copy()
        return outputs

    def _passes(self, plan: StepPlan, expected: NDArray[np.float32], trusted: NDArray[np.float32]) -> bool:
        """Whether the recorded step, whole and in two halves, gives the bits of the plain one, and the probe's candidates, which come
        both first and last, have the same bits as in the largest step.
        """
        outputs, whole = self.run([plan]), self._whole
        self._whole = {}
        outputs += self.run([plan])
        self._whole = whole
        ends = [end for output in outputs for end in (output[:PROBE_CANDIDATES], output[-PROBE_CANDIDATES:])]
        same = all(output.tobytes() == expected.tobytes() for output in outputs)
        return same and all(end.tobytes() == trusted.tobytes() for end in ends)
