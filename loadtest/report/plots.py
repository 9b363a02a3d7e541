"""The plots of a load report, as PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
}  # fmt: skip
DOTTED = {"color": INK, "linestyle": ":", "linewidth": 1}


class Canvas:
    """A figure that becomes PNG bytes when its `with` block ends."""

    png: bytes = b""


@contextmanager
def canvas(rows: int = 1, height: float = 3.4) -> Iterator[tuple[Canvas, Any]]:
    """One figure with its axes, in the style of the report."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, height), layout="constrained")
        axes = figure.subplots(rows, sharex=True)
        for axis in np.atleast_1d(axes):
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_axisbelow(True)
            axis.grid(True)
        drawn = Canvas()
        yield drawn, axes
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        drawn.png = buffer.getvalue()


def _legend(axis: Any) -> None:
    """Draw the legend above the axes, where it hides nothing."""
    axis.legend(frameon=False, ncols=6, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)


def _milliseconds(axis: Any, label: str, slo_ms: float) -> None:
    """Use a log scale labelled 1, 2, 5, 10, and mark the objective."""
    axis.axhline(slo_ms, label="objective", **DOTTED)
    axis.set(ylabel=label, yscale="log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def latency_over_time(run: Run) -> bytes:
    """Percentiles of each second above, rates of each second below."""
    columns = over_time(run.samples, 1.0, run.slo)
    with canvas(2, height=5.0) as (drawn, (above, below)):
        for name in ("p50", "p95", "p99"):
            above.plot(columns["seconds"], columns[name], color=COLOURS[name], label=name, linewidth=1.4)
        _milliseconds(above, "ms from due time", run.slo.latency_ms)
        for name in ("offered", "answered", "good"):
            below.step(columns["seconds"], columns[name], where="mid", color=COLOURS[name], label=name, linewidth=1.4)
        below.set(xlabel="seconds into the run", ylabel="requests / s")
        below.set_ylim(bottom=0)
        for axis in (above, below):
            _legend(axis)
    return drawn.png


def latency_distribution(run: Run) -> bytes:
    """Latency from the due time by share of requests, and from the send, as a closed-loop tool would report it."""
    ok = run.samples[run.samples.status == 200]
    sides = (("from the due time", ok.latency_seconds, "p99"), ("from the send", ok.service_seconds, "p50"))
    with canvas() as (drawn, axis):
        for label, values, colour in sides:
            ordered = np.sort(1e3 * values)
            slower = 1 - (np.arange(len(ordered)) + 0.5) / max(1, len(ordered))
            axis.plot(1 / slower, ordered, color=COLOURS[colour], label=label, linewidth=1.6)
        axis.set(xscale="log", xlabel="share of requests that are at least this fast")
        axis.set_xticks([1, 2, 10, 100, 1000], ["all", "50 %", "90 %", "99 %", "99.9 %"])
        axis.minorticks_off()
        _milliseconds(axis, "ms", run.slo.latency_ms)
        axis.legend(frameon=False)
    return drawn.png


def stage_breakdown(run: Run) -> bytes:
    """Where the time of median, slow and slowest requests goes: the server's stages, and the rest."""
    ok = run.samples[run.samples.status == 200]
    order = np.argsort(ok.latency_seconds)
    groups = {"around p50": (0.45, 0.55), "around p95": (0.93, 0.97), "slowest 1 %": (0.99, 1.0)}
    with canvas(height=2.6) as (drawn, axis):
        for row, (low, high) in enumerate(groups.values()):
            first = int(low * len(order))
            part = ok[order[first : max(int(high * len(order)), first + 1)]]
            stages = np.nan_to_num(part.stages_ms).mean(axis=0)
            rest = max(0.0, float(1e3 * part.latency_seconds.mean() - stages.sum()))
            left = 0.0
            for name, value in zip((*STAGES, "rest"), (*stages.tolist(), rest), strict=True):
                label = {"rest": "rest: HTTP, network, client"}.get(name, name)
                axis.barh(row, value, left=left, color=COLOURS[name], label=label if not row else None, height=0.6)
                left += value
        axis.set_yticks(range(len(groups)), list(groups))
        axis.invert_yaxis()
        axis.set(xlabel="ms, mean of the group")
        _legend(axis)
    return drawn.png


def latency_against_rate(trials: Sequence[Mapping[str, Any]], slo_ms: float, capacity_rps: float) -> bytes:
    """Every trial of a search: percentiles and goodput by offered rate."""
    by_rate: dict[float, list[Mapping[str, Any]]] = {}
    for trial in trials:
        by_rate.setdefault(float(trial["rate_rps"]), []).append(trial["summary"])
    rates = sorted(by_rate)

    def draw(axis: Any, label: str, value: Callable[[Mapping[str, Any]], float]) -> None:
        """Draw a point per trial and a line through the medians."""
        values = [[value(summary) for summary in by_rate[rate]] for rate in rates]
        axis.plot(rates, [np.median(one) for one in values], color=COLOURS[label], label=label, linewidth=1.4)
        spots = [(rate, one) for rate, many in zip(rates, values, strict=True) for one in many]
        axis.plot(*zip(*spots, strict=True), "o", color=COLOURS[label], markersize=3.5)

    with canvas(2, height=5.0) as (drawn, (above, below)):
        for name in ("p50", "p95", "p99"):
            draw(above, name, lambda summary, name=name: float(summary["latency_ms"].get(name, float("nan"))))  # type: ignore[misc]
        _milliseconds(above, "ms from due time", slo_ms)
        below.plot(rates, rates, color=COLOURS["offered"], label="offered", linewidth=1)
        draw(below, "answered", lambda summary: float(summary["answered_rps"]))
        draw(below, "good", lambda summary: float(summary["goodput_rps"]))
        below.set(xlabel="offered requests / s", ylabel="requests / s")
        for axis in (above, below):
            if capacity_rps:
                axis.axvline(capacity_rps, color=COLOURS["good"], linewidth=1, linestyle="--", label="capacity")
            _legend(axis)
    return drawn.png
