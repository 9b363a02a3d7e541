"""Shows where each microsecond of a request goes, as Markdown: the kernel's stages, the Python around it, the service around that."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch

from loadtest.bench.engines import CACHE_BYTES, item_of
from loadtest.bench.production import checkpoint_of
from loadtest.bench.service import all_answered, ranking_bodies
from loadtest.generate.samples import STAGES
from loadtest.geometries import GEOMETRIES
from loadtest.machine import machine
from loadtest.matrix import markdown
from loadtest.servers.launch import ranking_server
from model.native.engine import NativeEngine
from model.native.kernel import Kernel, load_kernel
from model.synthetic import random_ranker

Table = tuple[str, dict[str, dict[str, float]]]
"""A title, and microseconds by column and stage."""

# In the order of the kernel's own list, model/native/stages.h.
KERNEL_STAGES = (
    "between tasks", "tokens: gather and projection", "norms and residuals", "QKV product", "RoPE", "QKᵀ product",
    "soft cap and softmax", "weights × V product", "own key and normalising", "output product", "gate and value product",
    "gelu", "FFN output product", "final norm and heads", "packing keys and values", "waiting for another tile",
)  # fmt: skip


def kernel_tables(rounds: int) -> Iterator[Table]:
    """One table per geometry: microseconds of one thread by stage, cold and cached, C = 64 and 512, bf16."""
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
        yield f"{name}, one thread, µs (median of {rounds})", columns


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
        stages[0] = 0.0  # the time between forwards does not count
        readings.append([*stages, 1e6 * elapsed - sum(stages)])
    medians = [statistics.median(column) for column in zip(*readings[2:], strict=True)]
    return dict(zip((*KERNEL_STAGES, "Python: keys, hashes, jobs"), medians, strict=True))


def service_table(requests: int) -> Table:
    """One request through HTTP, one client, mini, contexts of the traffic model."""
    columns = {}
    with checkpoint_of("mini") as checkpoint, ranking_server(checkpoint=checkpoint) as server:
        for candidates in (64, 512):
            samples = all_answered(server.target, ranking_bodies(server.target, candidates, requests), clients=1)
            stages = dict(zip(STAGES, (1e3 * np.median(samples.stages_ms, axis=0)).tolist(), strict=True))
            total = 1e6 * float(np.median(samples.service_seconds))
            columns[f"C={candidates}"] = {**stages, "socket, HTTP, routing, client": total - sum(stages.values())}
    return f"POST /rank, mini, one client, two threads, µs (median of {requests})", columns


def measure(rounds: int = 30, requests: int = 400) -> None:
    """Where each microsecond of a request goes, as Markdown. Builds a kernel with timers.

    `rounds`: forwards per table. `requests`: sent by one client over HTTP.
    """
    run = machine()
    print(
        f"{run['cpu']}, commit {run['commit']}, torch {torch.__version__}, load {run['load_average_1m']}, {run['at']}"
    )
    for title, columns in [*kernel_tables(rounds), service_table(requests)]:
        shown = [row for row in next(iter(columns.values())) if any(column[row] >= 0.5 for column in columns.values())]
        rows = [[row, *(f"{column[row]:,.0f}" for column in columns.values())] for row in shown]
        total = ["**all**", *(f"{sum(column.values()):,.0f}" for column in columns.values())]
        print(f"\n### {title}\n\n{markdown(['stage', *columns], [*rows, total])}", flush=True)
