"""Where recorded steps run: CUDA graphs with pinned memory, or, for tests of everything around them, plain calls on the CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from model.split.kernels.contract import Step

Work = Callable[[Step], None]


class Recorder(Protocol):
    """Memory that the device can copy from and to asynchronously, and work recorded once and replayed often."""

    recorded: int

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeroed host memory."""

    def record(self, work: Work, step: Step) -> Work:
        """Run `work` once, then record it on exactly these tensors; calling the result replays it."""

    def has_room(self) -> bool:
        """Whether the device has memory for more recordings."""

    def mark(self) -> Callable[[], None]:
        """A point in the device's queue; calling the result waits for it."""


class CudaRecorder:
    """CUDA graphs that share one memory pool, captured on the engine's own `stream`. Recording waits for that stream alone;
    replaying waits for nothing. No graph may be dropped before the others, not even one whose recording fails: the
    library would clear the workspace that they share. With `replay` off a recording is the work itself, run anew each time.
    """

    def __init__(self, stream: torch.cuda.Stream, *, replay: bool = True) -> None:
        self.recorded = 0
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._stream = stream  # one for all recordings: the library keeps a workspace for each stream it sees
        self._replay = replay
        with torch.cuda.device(stream.device):
            self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """See `Recorder.pinned`."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def record(self, work: Work, step: Step) -> Work:
        """See `Recorder.record`. The first, plain run compiles what is not compiled yet, which no graph may contain."""
        with torch.cuda.stream(self._stream):
            work(step)
            self._stream.synchronize()
            if not self._replay:
                return work
            graph = torch.cuda.CUDAGraph()
            self.graphs.append(graph)
            # not torch.cuda.graph: it collects garbage at every recording. Other threads, such as the one that serves the
            # version before this one, may use the device meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work(step)
            finally:
                graph.capture_end()
        self._stream.synchronize()
        self.recorded += 1
        return lambda _: graph.replay()

    def has_room(self) -> bool:
        """See `Recorder.has_room`: a sixteenth of the device's memory stays free for states of contexts."""
        free, total = torch.cuda.mem_get_info(self._stream.device)
        return 16 * free >= total

    def mark(self) -> Callable[[], None]:
        """See `Recorder.mark`."""
        event = torch.cuda.Event()
        event.record()
        return event.synchronize


CALLS, READINGS = 20, 5


def device_seconds(run: Callable[[int], object], layers: int, device: torch.device) -> float:
    """Seconds that one call of `run(layer)` takes on the device: the least of a few replays of a graph of `CALLS` calls, over the
    layers in turn, between two events. The host's time to start a kernel is not included. On a CPU it uses the host's clock."""
    run(0)  # compiles, and raises errors before the capture begins
    if device.type != "cuda":
        start = time.perf_counter()
        run(0)
        return time.perf_counter() - start
    stream, graph = torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
    stream.synchronize()
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        for call in range(CALLS):
            run(call % layers)
    finally:
        graph.capture_end()
    seen: list[float] = []
    for _ in range(READINGS):
        start_of, end_of = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start_of.record()
        graph.replay()
        end_of.record()
        end_of.synchronize()
        seen.append(start_of.elapsed_time(end_of) / 1e3 / CALLS)
    return min(seen)


@contextmanager
def no_garbage() -> Iterator[None]:
    """Collect garbage first and not again inside: what a collection frees while a graph is recorded would break the recording."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class PlainRecorder:
    """Plain calls: a recording is the work itself."""

    def __init__(self) -> None:
        self.recorded = 0

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """See `Recorder.pinned`."""
        return torch.zeros(*shape, dtype=dtype)

    def record(self, work: Work, step: Step) -> Work:
        """See `Recorder.record`; works on the step that it is given."""
        work(step)
        self.recorded += 1
        return work

    def has_room(self) -> bool:
        """See `Recorder.has_room`; a recording takes none."""
        return True

    def mark(self) -> Callable[[], None]:
        """See `Recorder.mark`; there is nothing to wait for."""
        return lambda: None
