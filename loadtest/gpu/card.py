"""The clock and the ceilings of one device: times by device events, the matrix rate and the copy bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from loadtest.timing import Figure


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of the card: dense bf16 products in TFLOP/s, device copies in GB/s (bytes read plus written)."""

    tflops: float
    gigabytes_per_second: float


class Card:
    """A device to measure on. On a CPU it uses the host's clock, so that the whole script can be tried anywhere."""

    def __init__(self, device: torch.device, *, tiny: bool, fault: str = "") -> None:
        """`fault` is planted into every engine, see `faults`."""
        self.device = device
        self.tiny = tiny
        self.fault = fault
        self.is_cuda = device.type == "cuda"

    @property
    def name(self) -> str:
        """The device's name, to show."""
        return torch.cuda.get_device_name(self.device) if self.is_cuda else "cpu"

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def device_time(self, work: Callable[[], object], readings: int = 30, *, repeats: int = 1) -> Figure:
        """Milliseconds of one `work` on the device; each reading is the mean of `repeats` runs queued back to back."""
        readings, warm_up = (3, 1) if self.tiny else (readings, 5)
        seen = []
        for number in range(readings + warm_up):
            elapsed = self._events(work, repeats) if self.is_cuda else _wall_ms(work, repeats)
            if number >= warm_up:
                seen.append(elapsed / repeats)
        return Figure.of(seen)

    def wall_time(self, work: Callable[[], object], readings: int = 30) -> Figure:
        """Milliseconds of one `work` as its caller sees it; `work` must wait for its own result."""
        readings, warm_up = (3, 1) if self.tiny else (readings, 5)
        seen = [_wall_ms(work, 1) for _ in range(readings + warm_up)]
        return Figure.of(seen[warm_up:])

    def operations(self, work: Callable[[], object], calls: int = 20) -> dict[str, tuple[float, float]]:
        """Microseconds on the device and calls of each kernel in one `work`, by the kernel's name, from torch's profiler, so that the
        host's time to start them is not included; on a CPU, of each of torch's operations."""
        kind = ProfilerActivity.CUDA if self.is_cuda else ProfilerActivity.CPU
        calls = 2 if self.tiny else calls
        work()
        with profile(activities=[kind]) as seen:
            for _ in range(calls):
                work()
            self.synchronize()
        by_name = {}
        for event in seen.key_averages():
            microseconds = event.self_device_time_total if self.is_cuda else event.self_cpu_time_total
            by_name[event.key] = (microseconds / calls, event.count / calls)
        return by_name

    def recorded(self, work: Callable[[], object]) -> Callable[[], object]:
        """Run the work twice to compile it, then return a graph that replays it; on a CPU, the work itself."""
        for _ in range(2):
            work()
        if not self.is_cuda:
            return work
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return graph.replay

    def ceilings(self) -> Ceilings:
        """Measure a large square bf16 product on random data, and a copy much larger than any cache."""
        side, copied = (128, 2**16) if self.tiny else (8192, 2**31)
        left, right = (torch.randn(side, side, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(left)
        product = self.device_time(lambda: torch.mm(left, right, out=out), 20)
        source = torch.randint(0, 255, (copied,), device=self.device, dtype=torch.uint8)
        target = torch.empty_like(source)
        copy = self.device_time(lambda: target.copy_(source), 20)
        return Ceilings(2 * side**3 / product.median / 1e9, 2 * copied / copy.median / 1e6)

    def _events(self, work: Callable[[], object], repeats: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        start.record()
        for _ in range(repeats):
            work()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop))


def _wall_ms(work: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return 1e3 * (time.perf_counter() - start)
