"""Turns a stored run, search, comparison or peer table into `report.md` and plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.generate.samples import CACHE_RESULTS
from loadtest.generate.traffic import KINDS
from loadtest.matrix import markdown
from loadtest.measure.figures import percentiles_ms
from loadtest.measure.runs import Run
from loadtest.report import plots

SHOWN = ("p50", "p90", "p95", "p99", "p99.9", "max")
LATE = "**The generator itself was late: the server may be quicker than this.**"

Pictures = dict[str, bytes]
"""PNG bytes by the file's name without its suffix."""


def write_report(directory: Path) -> Path:
    """Write `report.md` and PNG files next to `run.json`; return the path of the report.

    Raises FileNotFoundError without a `run.json`, ValueError for an unknown kind.
    """
    meta = json.loads((directory / "run.json").read_text())
    if "report" in meta:  # comparisons and peer tables bring their own text
        text, pictures = meta["report"], dict[str, bytes]()
    elif meta.get("kind") == "search":
        text, pictures = search_report(meta)
    elif meta.get("kind") == "open":
        text, pictures = run_report(Run.load(directory))
    else:
        raise ValueError(f"{directory}/run.json is of kind {meta.get('kind')!r}, which no report knows")
    for name, png in pictures.items():
        (directory / f"{name}.png").write_bytes(png)
    (directory / "report.md").write_text(text)
    return directory / "report.md"


def _where(meta: Mapping[str, Any]) -> str:
    """One line with commit, machine and model."""
    machine, info = meta["machine"], meta.get("server", {}).get("info", {})
    model = info.get("model") or {}
    parts = [f"commit {machine['commit']}", machine["cpu"], f"{machine['cores']} cores"]
    parts += [str(info.get(key, "")) for key in ("device", "dtype")]
    parts += [f"checkpoint {model.get('name', '?')} {model.get('version', '')}" if model else "", machine["at"]]
    return " · ".join(part for part in parts if part) + ". Settings, machine and the server's `/info`: `run.json`."


def run_report(run: Run) -> tuple[str, Pictures]:
    """The report of one run at one rate. Without answered requests or server stages, their plots are left out."""
    summary, slo, settings = run.summary, run.slo, run.meta["settings"]
    generator, samples, pictures, shown = run.meta["generator"], run.samples, dict[str, bytes](), list[str]()
    if summary["latency_ms"]:
        pictures = {"over_time": plots.latency_over_time(run), "distribution": plots.latency_distribution(run)}
        shown = ["## Over time\n\n![Percentiles and rates of each second; log scale](over_time.png)"]
        shown += [
            "## Distribution\n\nThe lines part where requests waited to be sent.\n\n![Distribution](distribution.png)"
        ]
    if any(summary["stages_ms"].values()):
        pictures["stages"] = plots.stage_breakdown(run)
        shown += [
            "## Where the time goes\n\nStages as the server's `Server-Timing` names them.\n\n![Stages](stages.png)"
        ]
    rates = {"offered_rps": "offered / s", "answered_rps": "answered / s", "goodput_rps": "goodput / s"}
    figures = {
        **{title: _n(summary[key]) for key, title in rates.items()},
        "candidates / s": _n(summary["candidates_rps"]),
        **{f"{name}, ms": _n(summary["latency_ms"].get(name)) for name in ("p50", "p95", "p99", "p99.9")},
        "rejected (429)": summary["statuses"].get("429", 0),
        "failures": sum(summary["failures"].values()),
        "context cache hits": _percent(summary["cache_hit_share"]),
        "generator lag p99, ms": _n(generator["lag_p99_ms"]),
    }
    ok = samples[samples.status == 200]
    kinds = {kind.replace("_", " "): ok[ok.kind == index] for index, kind in enumerate(KINDS)}
    kinds |= {f"context cache {name}": ok[ok.cache == index] for index, name in enumerate(CACHE_RESULTS) if name}
    statuses = np.unique(samples.status).tolist()
    outcomes = {str(each or "no reply"): samples[samples.status == each] for each in statuses}
    good = f"{100 * summary['good_share']:.2f} % answered within {slo.latency_ms:g} ms"
    verdict = f"**{good}: the objective of {100 * slo.share:g} % {'holds' if summary['holds_slo'] else 'is missed'}.**"
    title = f"# Load test, open loop, {settings['rate_rps']:g} requests / s, {settings['arrivals']} arrivals"
    return _joined(
        title, verdict, LATE * generator["is_bottleneck"], _where(run.meta), markdown(("figure", ""), figures.items()),
        *shown, f"## Latency by kind of request\n\n{_latencies('kind', kinds)}", f"## Outcomes\n\n{_latencies('status', outcomes)}",
    ), pictures  # fmt: skip


def search_report(meta: Mapping[str, Any]) -> tuple[str, Pictures]:
    """The report of a search for capacity."""
    slo, capacity = meta["settings"]["slo"], meta["capacity_rps"]
    rows = []
    for number, trial in enumerate(meta["trials"], 1):
        summary = trial["summary"]
        cells = [summary["offered_rps"], summary["goodput_rps"], *(summary["latency_ms"].get(name) for name in SHOWN)]
        share = _percent(summary["good_share"])
        rows.append([f"{number}, {trial['verdict']}", *map(_n, cells), share, _n(trial["generator"]["lag_p99_ms"])])
    head = ("trial", "offered / s", "goodput / s", *SHOWN, "good", "lag p99, ms")
    objective = f"{100 * slo['share']:g} % within {slo['latency_ms']:g} ms"
    verdict = (
        f"**{_n(capacity)} requests / s, {meta['settings']['arrivals']} arrivals, with {objective} of their due time.**"
    )
    picture, late = "![Latency against rate: every trial](rate.png)", LATE * meta["limited_by_generator"]
    text = _joined("# Capacity", verdict, late, _where(meta), picture, f"## Trials\n\n{markdown(head, rows)}")
    return text, {"rate": plots.latency_against_rate(meta["trials"], slo["latency_ms"], capacity)}


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _latencies(head: str, groups: Mapping[str, Any]) -> str:
    """One line per group that is not empty, in ms from the due time."""
    rows = []
    for name, part in groups.items():
        figures = percentiles_ms(part.latency_seconds)
        if figures:
            rows.append([name, str(len(part)), *(_n(figures[key]) for key in SHOWN)])
    return markdown((head, "requests", *SHOWN), rows)


def _n(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"
