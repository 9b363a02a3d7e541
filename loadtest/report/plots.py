"""The plots of a load report, as PNG bytes. Computes no figures."""

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
    "p50": "#2a7f9e",
    "p95": "#e09f3e",
    "p99": "#c8553d",
    "offered": "#9aa5b1",
    "answered": "#2a7f9e",
    "good": "#4c956c",
    "parse": "#6c91bf",
    "queue": "#e09f3e",
    "forward": "#c8553d",
    "serialize": "#8e7dbe",
    "rest": "#c3cad2",
}


STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "text.color": INK,
    "grid.color": GRID,
}


class Canvas:
    """A figure that becomes PNG bytes when its `with` block ends."""

    png: bytes = b""


@contextmanager
def canvas(rows: int = 1, columns: int = 1, height: float = 3.4, sharex: bool = False) -> Iterator[tuple[Canvas, Any]]:
    """One figure with its axes, in the report's look."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, height), layout="constrained")
        axes = figure.subplots(rows, columns, sharex=sharex)
        for axis in np.atleast_1d(axes).ravel():
            axis.spines[["top", "right"]].set_visible(False)
            axis.set_axisbelow(True)
            axis.grid(True)
        drawn = Canvas()
        yield drawn, axes
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        drawn.png = buffer.getvalue()


def _legend(axis: Any) -> None:
    """Above the axes, where it hides nothing."""
    axis.legend(frameon=False, ncols=6, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)


def _milliseconds(axis: Any, label: str) -> None:
    """A log scale that reads 1, 2, 5, 10."""
    axis.set(ylabel=label, yscale="log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def latency_over_time(run: Run) -> bytes:
    """Percentiles a second above, rates a second below."""
    columns = over_time(run.samples, 1.0, run.slo)
    with canvas(2, height=5.0, sharex=True) as (drawn, (above, below)):
        for name in ("p50", "p95", "p99"):
            above.plot(columns["seconds"], columns[name], color=COLOURS[name], label=name, linewidth=1.4)
        above.axhline(run.slo.latency_ms, color=INK, linestyle=":", linewidth=1, label="objective")
        _milliseconds(above, "ms from due time")
        for name in ("offered", "answered", "good"):
            below.step(columns["seconds"], columns[name], where="mid", color=COLOURS[name], label=name, linewidth=1.4)
        below.set(xlabel="seconds into the run", ylabel="requests / s")
        below.set_ylim(bottom=0)
        for axis in (above, below):
            _legend(axis)
    return drawn.png


def latency_distribution(run: Run) -> bytes:
    """Latency from the due time by share of requests, beside the time on the wire that a closed-loop tool would report."""
    ok = run.samples.where(run.samples.status == 200)
    with canvas() as (drawn, axis):
        for values, label, colour in (
            (ok.latency_seconds, "from the due time", COLOURS["p99"]),
            (ok.service_seconds, "from the send", COLOURS["p50"]),
        ):
            ordered = np.sort(1e3 * values)
            slower = 1 - (np.arange(len(ordered)) + 0.5) / max(1, len(ordered))
            axis.plot(1 / slower, ordered, color=colour, label=label, linewidth=1.6)
        axis.axhline(run.slo.latency_ms, color=INK, linestyle=":", linewidth=1, label="objective")
        axis.set(xscale="log", xlabel="share of requests that are at least this fast")
        ticks = [1, 2, 10, 100, 1000]
        axis.set_xticks(ticks, ["all", "50 %", "90 %", "99 %", "99.9 %"])
        axis.minorticks_off()
        _milliseconds(axis, "ms")
        axis.legend(frameon=False)
    return drawn.png


def stage_breakdown(run: Run) -> bytes:
    """Where the time of a middling and of a slow request goes: the server's stages, and what is left for the rest."""
    ok = run.samples.where(run.samples.status == 200)
    order = np.argsort(ok.latency_seconds)
    groups = {"around p50": (0.45, 0.55), "around p95": (0.93, 0.97), "slowest 1 %": (0.99, 1.0)}
    with canvas(height=2.6) as (drawn, axis):
        for row, (low, high) in enumerate(groups.values()):
            part = order[int(low * len(order)) : max(int(high * len(order)), int(low * len(order)) + 1)]
            stages = np.nan_to_num(ok.stages_ms[part]).mean(axis=0)
            rest = max(0.0, float(1e3 * ok.latency_seconds[part].mean() - stages.sum()))
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


def client_beside_server(run: Run) -> bytes:
    """Percentiles as the client saw them and as `/metrics` counted them; the bars' whiskers are the edges of the buckets."""
    server = run.meta["server"].get("request_ms", {})
    names = [name for name in ("p50", "p90", "p95", "p99") if name in server]
    with canvas(height=3.0) as (drawn, axis):
        places = np.arange(len(names))
        latency, service = run.summary["latency_ms"], run.summary["service_ms"]
        axis.bar(
            places - 0.27,
            [latency[name] for name in names],
            0.25,
            color=COLOURS["p99"],
            label="client, from the due time",
        )
        axis.bar(places, [service[name] for name in names], 0.25, color=COLOURS["p95"], label="client, from the send")
        values = [server[name]["value"] for name in names]
        errors = [
            [server[name]["value"] - server[name]["low"] for name in names],
            [server[name]["high"] - server[name]["value"] for name in names],
        ]
        axis.bar(
            places + 0.27,
            values,
            0.25,
            color=COLOURS["p50"],
            label="server, /metrics",
            yerr=errors,
            ecolor=INK,
            capsize=3,
        )
        axis.set_xticks(places, names)
        axis.set(ylabel="ms")
        axis.legend(frameon=False)
    return drawn.png


def latency_against_rate(trials: Sequence[Mapping[str, Any]], slo_ms: float, capacity_rps: float) -> bytes:
    """Every trial of a search: percentiles and goodput by offered rate."""
    by_rate: dict[float, list[Mapping[str, Any]]] = {}
    for trial in trials:
        by_rate.setdefault(float(trial["rate_rps"]), []).append(trial["summary"])
    rates = sorted(by_rate)

    def draw(axis: Any, label: str, value: Callable[[Mapping[str, Any]], float]) -> None:
        """A point a trial, a line through the middle ones."""
        values = [[value(summary) for summary in by_rate[rate]] for rate in rates]
        axis.plot(rates, [np.median(one) for one in values], color=COLOURS[label], label=label, linewidth=1.4)
        spots = [(rate, one) for rate, many in zip(rates, values, strict=True) for one in many]
        axis.plot(*zip(*spots, strict=True), "o", color=COLOURS[label], markersize=3.5)

    with canvas(2, height=5.0, sharex=True) as (drawn, (above, below)):
        for name in ("p50", "p95", "p99"):
            draw(above, name, lambda summary, name=name: float(summary["latency_ms"].get(name, float("nan"))))  # type: ignore[misc]
        above.axhline(slo_ms, color=INK, linestyle=":", linewidth=1, label="objective")
        _milliseconds(above, "ms from due time")
        below.plot(rates, rates, color=COLOURS["offered"], label="offered", linewidth=1)
        draw(below, "answered", lambda summary: float(summary["answered_rps"]))
        draw(below, "good", lambda summary: float(summary["goodput_rps"]))
        below.set(xlabel="offered requests / s", ylabel="requests / s")
        for axis in (above, below):
            if capacity_rps:
                axis.axvline(capacity_rps, color=COLOURS["good"], linewidth=1, linestyle="--", label="capacity")
            _legend(axis)
    return drawn.png


def ratios(differences: Sequence[Mapping[str, Any]]) -> bytes:
    """B against A with intervals; the line at 1 is no change."""
    colours = {"better": COLOURS["good"], "worse": COLOURS["p99"], "no difference shown": COLOURS["offered"]}
    with canvas(height=2.4) as (drawn, axis):
        for row, one in enumerate(differences):
            low, high = one["ratio"] - one["ratio_low"], one["ratio_high"] - one["ratio"]
            errors = [[max(0.0, low)], [max(0.0, high)]]
            axis.errorbar(one["ratio"], row, xerr=errors, fmt="o", color=colours[one["verdict"]], capsize=4)
        axis.axvline(1, color=INK, linewidth=1)
        axis.set_yticks(range(len(differences)), [one["figure"] for one in differences])
        axis.invert_yaxis()
        axis.margins(y=0.2)
        axis.set(xlabel="B / A")
    return drawn.png


def peers(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Throughput and median latency of every server in the table."""
    names = [row["name"] for row in rows]
    with canvas(1, 2, height=0.5 + 0.42 * len(rows)) as (drawn, (left, right)):
        for axis, key, label in (
            (left, "throughput_rps", "requests / s, 32 clients"),
            (right, "single_p50_ms", "p50 ms, 1 client"),
        ):
            values = [row[key] for row in rows]
            colours = [COLOURS["good"] if row.get("ours") else COLOURS["p50"] for row in rows]
            bars = axis.barh(names, values, color=colours, height=0.6)
            axis.bar_label(bars, fmt="%.3g", padding=3)
            axis.invert_yaxis()
            axis.margins(x=0.15)
            axis.set(xlabel=label)
        right.set_yticklabels([])
    return drawn.png
