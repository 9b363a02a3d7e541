"""Where recorded steps run: CUDA graphs with pinned memory, or, for tests of everything around them, plain calls on the CPU."""

from __future__ import annotations

from collections.abc import Callable
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

    def mark(self) -> Callable[[], None]:
        """A point in the device's queue; calling the result waits for it."""


class CudaRecorder:
    """CUDA graphs that share one memory pool. Recording waits for the device; replaying does not."""

    def __init__(self) -> None:
        self.recorded = 0
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = (
            torch.cuda.Stream()
        )  # one for all recordings: the library keeps a workspace for each stream it sees

    def pinned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """See `Recorder.pinned`."""
        return torch.zeros(*shape, dtype=dtype, pin_memory=True)

    def record(self, work: Work, step: Step) -> Work:
        """See `Recorder.record`. The first, plain run compiles what is not compiled yet, which no graph may contain."""
        work(step)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # not torch.cuda.graph: it collects garbage at every recording. Other threads, such as the one that serves the
            # version before this one, may use the device meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work(step)
            finally:
                graph.capture_end()
        torch.cuda.synchronize()
        self.recorded += 1
        return lambda _: graph.replay()

    def mark(self) -> Callable[[], None]:
        """See `Recorder.mark`."""
        event = torch.cuda.Event()
        event.record()
        return event.synchronize


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

    def mark(self) -> Callable[[], None]:
        """See `Recorder.mark`; there is nothing to wait for."""
        return lambda: None
