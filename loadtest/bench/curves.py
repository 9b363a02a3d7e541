"""Time and peak memory of one forward as candidates or history grow: numbers, and a picture of them."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from loadtest.bench.engines import CACHE_BYTES, item_of
from loadtest.geometries import GEOMETRIES, in_dtype
from loadtest.timing import Figure, alternate
from model.dense import DenseEngine
from model.engine import Engine, Item
from model.native.engine import NativeEngine
from model.synthetic import random_ranker

CANDIDATE_COUNTS = (64, 128, 256, 512, 1024, 2048, 4096)
HISTORY_LENGTHS = (16, 64, 128, 256, 512, 1022)
DENSE_LIMIT_TOKENS = 2100  # the dense mask's logits take gigabytes beyond


@dataclass(frozen=True, slots=True)
class Point:
    """One forward. `peak_mib` is resident memory above what stood before it; None where the system does not tell."""

    geometry: str
    candidates: int
    history: int
    side: str
    median_ms: float
    low_ms: float
    high_ms: float
    peak_mib: float | None


def measure(dtype: torch.dtype, rounds: int) -> list[Point]:
    """Over C for mini and nano with full histories, over H for nano with 64 candidates."""
    points = []
    for name in ("mini", "nano"):
        config = GEOMETRIES[name]
        engines = _engines(name, dtype)
        for count in CANDIDATE_COUNTS:
            points += _points(name, engines, count, config.history_length, rounds)
    engines = _engines("nano", dtype)
    for history in HISTORY_LENGTHS[:-1]:  # the longest was measured above
        points += _points("nano", engines, 64, history, rounds)
    return points


def _engines(name: str, dtype: torch.dtype) -> dict[str, Engine]:
    ranker = random_ranker(GEOMETRIES[name])
    return {
        "cold": NativeEngine(ranker, dtype),
        "cached": NativeEngine(ranker, dtype, cache_bytes=CACHE_BYTES),
        "dense": DenseEngine(in_dtype(random_ranker(GEOMETRIES[name]), dtype), dtype),
    }


def _points(name: str, engines: dict[str, Engine], candidates: int, history: int, rounds: int) -> list[Point]:
    item = item_of(GEOMETRIES[name], candidates, history)
    sides = {
        side: engine for side, engine in engines.items() if side != "dense" or candidates + history < DENSE_LIMIT_TOKENS
    }
    seconds = alternate({side: lambda engine=engine: engine.forward([item]) for side, engine in sides.items()}, rounds)  # type: ignore[misc]
    points = []
    for side, engine in sides.items():
        time_ms = Figure.of(seconds[side]).scaled(1e3)
        peak = peak_mib(engine, item)
        points.append(Point(name, candidates, history, side, time_ms.median, time_ms.low, time_ms.high, peak))
    return points


def peak_mib(engine: Engine, item: Item) -> float | None:
    """How far one forward raises the process's resident memory, MiB."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # or memory that was freed before would be taken again unseen
        Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to what is resident now
        before = _status_kib("VmHWM")
        engine.forward([item])
        return (_status_kib("VmHWM") - before) / 1024
    except (OSError, AttributeError):
        return None


def _status_kib(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1])


def as_numbers(points: Sequence[Point]) -> list[dict[str, Any]]:
    """For the results file."""
    return [asdict(point) for point in points]


def draw(points: Sequence[Point], path: Path) -> None:
    """Four panels: time over C for mini and nano, time over H for nano, memory over C for nano. Log scales."""
    import matplotlib  # late: a second of start-up that only the picture needs

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    full = {name: GEOMETRIES[name].history_length for name in ("mini", "nano")}
    by_candidates = {name: [p for p in points if p.geometry == name and p.history == full[name]] for name in full}
    by_history = [p for p in points if p.geometry == "nano" and p.candidates == 64]
    panels = (
        (axes[0][0], by_candidates["mini"], "candidates", "median_ms", "mini, H = 127: time, ms"),
        (axes[0][1], by_candidates["nano"], "candidates", "median_ms", "nano, H = 1022: time, ms"),
        (axes[1][0], by_history, "history", "median_ms", "nano, C = 64: time, ms"),
        (axes[1][1], by_candidates["nano"], "candidates", "peak_mib", "nano, H = 1022: peak memory of a forward, MiB"),
    )
    for axis, chosen, across, up, title in panels:
        for side, colour in (("dense", "tab:gray"), ("cold", "tab:blue"), ("cached", "tab:green")):
            line = sorted((getattr(p, across), getattr(p, up)) for p in chosen if p.side == side and getattr(p, up))
            axis.plot([x for x, _ in line], [y for _, y in line], "o-", color=colour, label=side, markersize=4)
            if up == "median_ms":
                spread = sorted((getattr(p, across), p.low_ms, p.high_ms) for p in chosen if p.side == side)
                axis.fill_between(*zip(*spread, strict=True), color=colour, alpha=0.15, linewidth=0)
        axis.set(xscale="log", yscale="log", xlabel=across, title=title)
        axis.grid(visible=True, which="both", alpha=0.25)
        axis.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
