"""A report of one page, in Markdown with one plot: of a run at one rate, or of a search for capacity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from loadtest.measure.figures import over_time
from loadtest.measure.runs import Run
from loadtest.rows import markdown

matplotlib.use("Agg")
SHOWN = ("p50", "p90", "p95", "p99", "p99.9", "max")
LATE = "**The generator itself was late: the server may be faster than this.**"


def run_report(run: Run, out: Path) -> Path:
    """Write report.md and over_time.png of a run; return the report's path."""
    summary, slo, generator = run.summary, run.slo, run.meta["generator"]
    settings = run.meta["settings"]
    verdict = "holds" if summary["holds_slo"] else "is missed"
    figures = [
        (name, _number(summary[name])) for name in ("offered_rps", "answered_rps", "goodput_rps", "candidates_rps")
    ]
    figures += [(f"{name}, ms from the due time", _number(summary["latency_ms"].get(name))) for name in SHOWN]
    figures += [
        (f"{stage}, median ms in the server", _number(times.get("p50")))
        for stage, times in summary["stages_ms"].items()
    ]
    figures += [("status 200", count) for status, count in summary["statuses"].items() if status == "200"]
    figures += [(f"no ranking: {reason}", count) for reason, count in summary["failures"].items()]
    parts = [
        f"# Open loop, {settings['rate_rps']:g} requests/s, {settings['arrivals']} arrivals",
        f"**{100 * slo.share:g} % within {slo.latency_ms:g} ms of the due time {verdict}: {100 * summary['good_share']:.2f} %.**",
        LATE if generator["is_bottleneck"] else "",
        _where(run.meta),
        markdown(("figure", ""), figures),
    ]
    if summary["latency_ms"]:
        _save(_over_time(run), out / "over_time.png")
        parts.append("![Latency and rates of each second](over_time.png)")
    return _write(parts, out)


def capacity_report(search: Mapping[str, Any], out: Path) -> Path:
    """Write report.md and rate.png of a search; return the report's path."""
    slo, trials = search["settings"]["slo"], search["trials"]
    rows = []
    for number, trial in enumerate(trials, 1):
        summary = trial["summary"]
        latencies = [_number(summary["latency_ms"].get(name)) for name in SHOWN]
        rows.append(
            [
                f"{number}, {trial['verdict']}",
                _number(summary["offered_rps"]),
                *latencies,
                f"{100 * summary['good_share']:.2f} %",
            ]
        )
    out.mkdir(parents=True, exist_ok=True)
    _save(_against_rate(trials, slo["latency_ms"]), out / "rate.png")
    objective = f"{100 * slo['share']:g} % within {slo['latency_ms']:g} ms of the due time"
    parts = [
        "# Capacity",
        f"**{_number(search['capacity_rps'])} requests/s with {objective}.**"
        if search["capacity_rps"]
        else f"**At no rate did {objective} hold {search['plan']['confirmations']} times.**",
        LATE if search["limited_by_generator"] else "",
        _where(search),
        "![Latency against rate](rate.png)",
        markdown(("trial", "offered/s", *SHOWN, "good"), rows),
    ]
    return _write(parts, out)


def _over_time(run: Run) -> Figure:
    columns = over_time(run.samples, 1.0, run.slo)
    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, sharex=True)
    for name in ("p50", "p95", "p99"):
        above.plot(columns["seconds"], columns[name], label=name)
    for name in ("offered", "answered", "good"):
        below.step(columns["seconds"], columns[name], where="mid", label=name)
    above.axhline(run.slo.latency_ms, color="black", linestyle=":", linewidth=1)
    above.set(ylabel="ms from the due time", yscale="log")
    below.set(xlabel="seconds", ylabel="requests/s", ylim=(0, None))
    for axis in (above, below):
        axis.legend(ncols=3)
        axis.grid(alpha=0.3)
    return figure


def _against_rate(trials: Sequence[Mapping[str, Any]], slo_ms: float) -> Figure:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axis = figure.subplots()
    rates = np.array([trial["rate_rps"] for trial in trials])
    for name in ("p50", "p95", "p99"):
        axis.plot(rates, [trial["summary"]["latency_ms"].get(name, np.nan) for trial in trials], "o", label=name)
    axis.axhline(slo_ms, color="black", linestyle=":", linewidth=1)
    axis.set(xlabel="offered requests/s", ylabel="ms from the due time", yscale="log")
    axis.legend(ncols=3)
    axis.grid(alpha=0.3)
    return figure


def _where(meta: Mapping[str, Any]) -> str:
    machine, info = meta["machine"], meta["server"]["info"]
    model = info.get("model", {})
    parts = [
        f"commit {machine['commit']}",
        machine["cpu"],
        f"{machine['cores']} cores",
        info.get("device", ""),
        info.get("dtype", ""),
    ]
    return " · ".join(part for part in (*parts, model.get("name", ""), machine["at"]) if part)


def _number(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)


def _write(parts: Sequence[str], out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.md"
    path.write_text("\n\n".join(part for part in parts if part) + "\n")
    return path
