"""Where each microsecond of one request goes, as Markdown: the kernel's stages, Python around it, the service around that.

`python -m loadtest.profile` (`make profile`) writes the tables of docs/profile.md. Builds a kernel with timers.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from loadtest.bench.engines import CACHE_BYTES, item_of
from loadtest.bench.service import all_answered, mini_checkpoint, ranking_bodies
from loadtest.generate.samples import STAGES
from loadtest.geometries import GEOMETRIES
from loadtest.machine import machine
from loadtest.servers.launch import ranking_server
from model.engine import Item
from model.native.engine import NativeEngine
from model.native.kernel import Kernel, load_kernel
from model.synthetic import random_ranker, random_request
from weights.checkpoint import load_checkpoint

DEMO = Path(__file__).resolve().parents[1] / "weights" / "demo"

# In the order of the kernel's own list, model/native/stages.h.
KERNEL_STAGES = (
    "between tasks", "tokens: gather and projection", "norms and residuals", "QKV product", "RoPE", "QKᵀ product",
    "soft cap and softmax", "weights × V product", "own key and normalising", "output product", "gate and value product",
    "gelu", "FFN output product", "final norm and heads", "packing keys and values", "waiting for another tile",
)  # fmt: skip


def kernel_tables(rounds: int) -> Iterator[str]:
    """One table a geometry: microseconds of one thread by stage, cold and cached, C = 64 and 512, bf16."""
    kernel = load_kernel(None, "RANKER_STAGES")
    for name in ("mini", "nano"):
        config = GEOMETRIES[name]
        ranker = random_ranker(config)
        columns = {}
        for candidates in (64, 512):
            for side, cache_bytes in (("cold", 0), ("cached", CACHE_BYTES)):
                engine = NativeEngine(ranker, torch.bfloat16, cache_bytes=cache_bytes, threads=1, kernel=kernel)
                item = item_of(config, candidates)
                columns[f"C={candidates} {side}"] = _stages(engine, kernel, [item], rounds)
        yield _table(f"{name}, one thread, µs (median of {rounds})", columns)


def _stages(engine: NativeEngine, kernel: Kernel, items: list, rounds: int) -> dict[str, float]:  # type: ignore[type-arg]
    nanoseconds = (ctypes.c_int64 * len(KERNEL_STAGES))()
    readings: list[list[float]] = []
    for _ in range(rounds + 2):
        kernel.library.ranker_stages(nanoseconds)
        start = time.perf_counter()
        engine.forward(items)
        elapsed = time.perf_counter() - start
        kernel.library.ranker_stages(nanoseconds)
        stages = [value / 1e3 for value in nanoseconds]
        stages[0] = 0.0  # the time between forwards is no part of a forward
        readings.append([*stages, 1e6 * elapsed - sum(stages)])
    medians = [statistics.median(column) for column in zip(*readings[2:], strict=True)]
    return dict(zip((*KERNEL_STAGES, "Python: keys, hashes, jobs"), medians, strict=True))


def lock_table(seconds: float = 1.0) -> str:
    """An event loop of 100 µs turns of Python and an engine thread with the demo checkpoint: each alone, and both at once."""
    ranker = load_checkpoint(DEMO).ranker
    engine = NativeEngine(ranker, torch.bfloat16, cache_bytes=CACHE_BYTES, threads=1)
    columns = {}
    for count, history, candidates in ((1, 17, 7), (16, 17, 7), (1, 63, 64)):
        items = [Item(*random_request(ranker.config, history, candidates, seed)) for seed in range(count)]
        engine.forward(items)
        turns, _ = _at_once(None, [], seconds)
        _, forwards = _at_once(engine, items, seconds, turn=0.0)
        turns_beside, forwards_beside = _at_once(engine, items, seconds)
        columns[f"{count} × C={candidates}"] = {
            "one forward, the loop asleep": 1e6 / forwards,
            "one forward, the loop busy": 1e6 / forwards_beside,
            "what a forward takes from the loop": 1e6 * (1 - turns_beside / turns) / forwards_beside,
        }
    return _table("The interpreter lock, demo, one engine thread, cached, µs", columns, total=False)


def _at_once(engine: NativeEngine | None, items: list[Item], seconds: float, turn: float = 1e-4) -> tuple[float, float]:
    """Turns and forwards a second; a turn of 0 seconds is a loop that sleeps."""
    done = threading.Event()
    forwards = turns = 0

    def compute() -> None:
        nonlocal forwards
        while engine is not None and not done.is_set():
            finite = [outcome.scores.is_finite() for outcome in engine.forward(items)]
            forwards += all(finite)

    async def handle() -> None:
        nonlocal turns
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for _ in range(round(turn / 5e-6)):
                sum(range(250))  # about 5 µs
            turns += 1
            await asyncio.sleep(0 if turn else seconds)

    thread = threading.Thread(target=compute)
    thread.start()
    asyncio.run(handle())
    done.set()
    thread.join()
    return turns / seconds, forwards / seconds


def service_table(requests: int) -> str:
    """One request through HTTP, one client, mini, contexts of the traffic model."""
    columns = {}
    with mini_checkpoint() as checkpoint, ranking_server(checkpoint=checkpoint) as server:
        for candidates in (64, 512):
            samples = all_answered(server.target, ranking_bodies(server.target, candidates, requests), clients=1)
            stages = dict(zip(STAGES, (1e3 * np.median(samples.stages_ms, axis=0)).tolist(), strict=True))
            total = 1e6 * float(np.median(samples.service_seconds))
            columns[f"C={candidates}"] = {**stages, "socket, HTTP, routing, client": total - sum(stages.values())}
    return _table(f"POST /rank, mini, one client, two threads, µs (median of {requests})", columns)


def _table(title: str, columns: dict[str, dict[str, float]], *, total: bool = True) -> str:
    rows = next(iter(columns.values()))
    lines = [f"### {title}", "", f"| stage | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    lines += [
        f"| {row} | {' | '.join(f'{column[row]:,.0f}' for column in columns.values())} |"
        for row in rows
        if _shown(row, columns)
    ]
    if total:
        lines.append(f"| **all** | {' | '.join(f'{sum(column.values()):,.0f}' for column in columns.values())} |")
    return "\n".join([*lines, ""])


def _shown(row: str, columns: dict[str, dict[str, float]]) -> bool:
    return any(column[row] >= 0.5 for column in columns.values())


def main() -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.profile", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=400)
    options = parser.parse_args()
    run = machine()
    print(
        f"{run['cpu']}, commit {run['commit']}, torch {torch.__version__}, load average {run['load_average_1m']}, {run['at']}\n"
    )
    for table in kernel_tables(options.rounds):
        print(table)
    print(lock_table())
    print(service_table(options.requests))


if __name__ == "__main__":
    main()
