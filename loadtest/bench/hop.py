"""`python -m loadtest.bench.hop`: what the way from a front to the engine process and back costs, apart from queue and forward.

One front without HTTP in this process, before a real engine process whose engine takes no time. One JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from app.errors import ServiceError
from app.fronts.remote import RemoteService
from app.fronts.role import Role
from app.interface import Ranked
from app.settings import Settings
from app.telemetry.metrics import Metrics
from loadtest.machine import ROOT, machine
from loadtest.timing import Figure
from model.inputs import Candidates, Context

SIZES = ((7, 17), (64, 63))  # candidates and history of a request; the null engine keeps 16 of these
IN_FLIGHT = 32
TARGETS_MS = {"p50": 0.10, "p99": 0.30}
TARGET_LOOP_US = 25.0
NULL = (sys.executable, "-m", "loadtest.soak.null_engine")


class Front:
    """Sends requests of one size, and notes how long each took apart from queue and forward."""

    def __init__(self, service: RemoteService, candidates: int, history: int) -> None:
        self.service = service
        self.seconds: list[float] = []
        history = min(history, service.model.manifest.config.history_length)
        ids, zeros = (
            np.arange(1, 1 + max(candidates, history), dtype=np.uint64),
            np.zeros(max(candidates, history), np.int64),
        )
        actions = np.zeros((history, service.model.manifest.config.actions), np.float32)
        past, some = slice(history), slice(candidates)
        self.context = Context(7, ids[past], ids[past], actions, zeros[past], np.zeros(history, np.float32))
        self.candidates = Candidates(ids[some], ids[some], zeros[some], zeros[some])

    def send(self, then: Any = None) -> None:
        """One request; `then` is called at its end."""
        began = time.perf_counter()

        def done(result: Ranked | ServiceError) -> None:
            if isinstance(result, Ranked):  # else it was refused: the machine had no time for so many
                self.seconds.append(time.perf_counter() - began - result.queue_seconds - result.forward_seconds)
            if then is not None:
                then()

        service, candidates = self.service, len(self.candidates)
        place = service.admit(service.model, candidates=candidates, history=len(self.context), deadline=None)
        service.rank(place, self.context, self.candidates, done)

    async def pipelined(self, seconds: float) -> float:
        """Requests a second with `IN_FLIGHT` of them at a time."""
        self.seconds.clear()
        until = time.perf_counter() + seconds

        def again() -> None:
            if time.perf_counter() < until:
                self.send(again)

        for _ in range(IN_FLIGHT):
            self.send(again)
        await asyncio.sleep(seconds + 0.1)
        return len(self.seconds) / seconds

    async def paced(self, rate: float, seconds: float) -> None:
        """An open loop at that rate."""
        self.seconds.clear()
        began, sent = time.perf_counter(), 0
        while (now := time.perf_counter() - began) < seconds:
            while sent < now * rate:
                self.send()
                sent += 1
            await asyncio.sleep(0.0005)
        await asyncio.sleep(0.1)


def loop_seconds(process: int) -> float:
    """CPU time of a process's main thread, on which its event loop runs."""
    return int(Path(f"/proc/{process}/task/{process}/schedstat").read_text().split()[0]) / 1e9


async def measure(path: str, process: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each size."""
    service = RemoteService(Settings(), path, 1, Metrics())
    service.start()
    while not service.health().ready:  # noqa: ASYNC110  # another process
        await asyncio.sleep(0.05)
    rows: list[dict[str, Any]] = []
    for candidates, history in SIZES:
        front = Front(service, candidates, history)
        rates, medians, lates, loops, full = [], [], [], [], []
        for _ in range(options.rounds):
            before = loop_seconds(process)
            rates.append(await front.pipelined(options.seconds))
            full.append((loop_seconds(process) - before) / len(front.seconds) * 1e6)
            before = loop_seconds(process)
            await front.paced(options.rate or rates[-1] / 2, options.seconds)
            loops.append((loop_seconds(process) - before) / len(front.seconds) * 1e6)
            medians.append(float(np.percentile(front.seconds, 50)) * 1e3)
            lates.append(float(np.percentile(front.seconds, 99)) * 1e3)
        figures = {"per_s": rates, "p50_ms": medians, "p99_ms": lates, "engine_loop_us": loops}
        figures["engine_loop_full_us"] = full
        rows.append({"candidates": candidates} | {name: _rounded(values) for name, values in figures.items()})
    await service.stop(1.0)
    return rows


def _rounded(values: list[float]) -> list[float]:
    figure = Figure.of(values)
    return [float(f"{part:.3g}") for part in (figure.median, figure.low, figure.high)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 whether or not the targets are met."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.hop", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one reading")
    parser.add_argument("--rate", type=float, help="requests a second; by default half of what it can do")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        role = Role(f"{directory}/engine", os.getpid())
        environment = role.environment() | {"RANKER_LOGS__LEVEL": "error", "RANKER_QUEUE__MAX_WAIT_SECONDS": "0"}
        engine = subprocess.Popen(NULL, cwd=ROOT, env=environment)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                rows = runner.run(measure(role.path, engine.pid, options))
        finally:
            engine.terminate()
            engine.wait(20)
    for row in rows:  # each figure: median, 10th and 90th percentile
        print("; ".join(f"{name.replace('_', ' ')} {value}" for name, value in row.items()))
    targets = {**TARGETS_MS, "engine_loop_us": TARGET_LOOP_US}
    print(json.dumps({**machine(), "targets": targets, "hop": rows}, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
