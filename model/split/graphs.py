"""Where steps run: on CUDA with pinned memory and recorded as graphs, on a CPU as plain calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from model.device import collecting
from model.split.kernels.contract import Step

Run = Callable[[Step], None]


class Recorder(Protocol):
    """Memory that the device can copy from and to asynchronously, and, if it `records`, work recorded once and replayed often."""

    records: bool
    recorded: int

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Zeroed host memory."""

    def record(self, work: Run, step: Step) -> Run:
        """Run `work` once, then record it on exactly these tensors; calling the result replays it."""

    def has_room(self) -> bool:
        """Whether the device has memory for more recordings."""

    def mark(self) -> Callable[[], None]:
        """A point in the device's queue; calling the result waits for it."""


class CudaRecorder:
    """CUDA graphs that share one memory pool, captured on the engine's own `stream`. Recording waits for that stream alone;
    replaying waits for nothing. No graph may be dropped before the others, not even one whose recording fails: the
    library would clear the workspace that they share.
    """

    def __init__(self, stream: torch.cuda.Stream, *, records: bool = True) -> None:
        self.records = records
        self.recorded = 0
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._stream = stream  # one for all recordings: the library keeps a workspace for each stream it sees
        with torch.cuda.device(stream.device):
            self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """See `Recorder.pinned`."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def record(self, work: Run, step: Step) -> Run:
        """See `Recorder.record`. The first, plain run compiles what is not compiled yet, which no graph may contain."""
        with torch.cuda.stream(self._stream):
            work(step)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            self.graphs.append(graph)
            # not torch.cuda.graph: it collects garbage at every recording. Other threads, such as the one that serves the
            # version before this one, may use the device meanwhile
            with no_garbage():
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
        """See `Recorder.mark`. The waiting thread sleeps: it would else keep a processor busy."""
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event.synchronize


@contextmanager
def no_garbage() -> Iterator[None]:
    """Collect no garbage inside, in any thread: what a collection frees while a graph is recorded would break the recording."""
    with collecting:
        was_on = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_on:
                gc.enable()


class PlainRecorder:
    """Plain calls on a CPU. With `records` steps are padded to a few sizes as on CUDA, and a recording is the work itself."""

    def __init__(self, *, records: bool = True) -> None:
        self.records = records
        self.recorded = 0

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """See `Recorder.pinned`."""
        return torch.zeros(*shape, dtype=dtype)

    def record(self, work: Run, step: Step) -> Run:
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
