"""The plots of a load report, as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from loadtest.generate.samples import STAGES
from loadtest.measure.figures import over_time
from loadtest.measure.runs import Run

INK, GRID = "#1f2933", "#d9dee4"
COLOURS = {
    "p50": "#2a7f9e", "p95": "#e09f3e", "p99": "#c8553d", "offered": "#9aa5b1", "answered": "#2a7f9e", "good": "#4c956c",
    "parse": "#6c91bf", "queue": "#e09f3e", "forward": "#c8553d", "serialize": "#8e7dbe", "rest": "#c3cad2",
}  # fmt: skip
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.edgecolor": GRID, "axes.labelcolor": INK, "text.color": INK, "grid.color": GRID,
    "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "lines.linewidth": 1.4, "legend.frameon": False,
}  # fmt: skip
LATENCIES, RATES = ("p50", "p95", "p99"), ("offered", "answered", "good")


def _axes(rows: int = 1, height: float = 3.4) -> tuple[Figure, Any]:
    """A figure and its axes, to be made and drawn within `STYLE`."""
    figure = Figure(figsize=(9, height), layout="constrained")
    return figure, figure.subplots(rows, sharex=True)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def _legend(axis: Any) -> None:
    """Draw the legend above the axes, where it hides nothing."""
    axis.legend(ncols=6, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)


def _milliseconds(axis: Any, label: str, slo_ms: float) -> None:
    """Use a log scale labelled 1, 2, 5, 10, and mark the objective."""
    axis.axhline(slo_ms, label="objective", color=INK, linestyle=":", linewidth=1)
    axis.set(ylabel=label, yscale="log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


@matplotlib.rc_context(STYLE)
def latency_over_time(run: Run) -> bytes:
    """Percentiles of each second above, rates of each second below."""
    columns = over_time(run.samples, 1.0, run.slo)
    figure, (above, below) = _axes(2, height=5.0)
    for name in LATENCIES:
        above.plot(columns["seconds"], columns[name], color=COLOURS[name], label=name)
    _milliseconds(above, "ms from due time", run.slo.latency_ms)
    for name in RATES:
        below.step(columns["seconds"], columns[name], where="mid", color=COLOURS[name], label=name)
    below.set(xlabel="seconds into the run", ylabel="requests / s")
    below.set_ylim(bottom=0)
    _legend(above)
    _legend(below)
    return _png(figure)


@matplotlib.rc_context(STYLE)
def latency_distribution(run: Run) -> bytes:
    """Latency from the due time by share of requests, and from the send, as a closed-loop tool would report it."""
    ok = run.samples[run.samples.status == 200]
    figure, axis = _axes()
    sides = (("from the due time", ok.latency_seconds, "p99"), ("from the send", ok.service_seconds, "p50"))
    for label, values, colour in sides:
        slower = 1 - (np.arange(len(values)) + 0.5) / len(values)
        axis.plot(1 / slower, np.sort(1e3 * values), color=COLOURS[colour], label=label)
    axis.set(xscale="log", xlabel="share of requests that are at least this fast")
    axis.set_xticks([1, 2, 10, 100, 1000], ["all", "50 %", "90 %", "99 %", "99.9 %"])
    axis.minorticks_off()
    _milliseconds(axis, "ms", run.slo.latency_ms)
    axis.legend()
    return _png(figure)


@matplotlib.rc_context(STYLE)
def stage_breakdown(run: Run) -> bytes:
    """Where the time of median, slow and slowest requests goes: the server's stages, and the rest."""
    ok = run.samples[run.samples.status == 200]
    order = np.argsort(ok.latency_seconds)
    groups = {"around p50": (0.45, 0.55), "around p95": (0.93, 0.97), "slowest 1 %": (0.99, 1.0)}
    means = []
    for low, high in groups.values():
        first = int(low * len(order))
        part = ok[order[first : max(int(high * len(order)), first + 1)]]
        stages = np.nan_to_num(part.stages_ms).mean(axis=0)
        means.append([*stages, max(0.0, 1e3 * part.latency_seconds.mean() - stages.sum())])
    figure, axis = _axes(height=2.6)
    left = np.zeros(len(groups))
    for name, values in zip((*STAGES, "rest"), np.transpose(means), strict=True):
        label = "rest: HTTP, network, client" if name == "rest" else name
        axis.barh(list(groups), values, left=left, color=COLOURS[name], label=label, height=0.6)
        left += values
    axis.invert_yaxis()
    axis.set(xlabel="ms, mean of the group")
    _legend(axis)
    return _png(figure)


@matplotlib.rc_context(STYLE)
def latency_against_rate(trials: Sequence[Mapping[str, Any]], slo_ms: float, capacity_rps: float) -> bytes:
    """Every trial of a search: percentiles and goodput by offered rate, with lines through the medians."""
    offered = np.array([float(trial["rate_rps"]) for trial in trials])
    rates = np.unique(offered)
    figure, (above, below) = _axes(2, height=5.0)

    def draw(axis: Any, label: str, values: Sequence[float]) -> None:
        medians = [np.median(np.array(values)[offered == rate]) for rate in rates]
        axis.plot(rates, medians, color=COLOURS[label], label=label)
        axis.plot(offered, values, "o", color=COLOURS[label], markersize=3.5)

    summaries = [trial["summary"] for trial in trials]
    for name in LATENCIES:
        draw(above, name, [summary["latency_ms"].get(name, np.nan) for summary in summaries])
    _milliseconds(above, "ms from due time", slo_ms)
    below.plot(rates, rates, color=COLOURS["offered"], label="offered", linewidth=1)
    draw(below, "answered", [summary["answered_rps"] for summary in summaries])
    draw(below, "good", [summary["goodput_rps"] for summary in summaries])
    below.set(xlabel="offered requests / s", ylabel="requests / s")
    for axis in (above, below):
        if capacity_rps:
            axis.axvline(capacity_rps, color=COLOURS["good"], linewidth=1, linestyle="--", label="capacity")
        _legend(axis)
    return _png(figure)
