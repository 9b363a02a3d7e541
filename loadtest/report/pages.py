"""Turns a stored run or search into one self-contained HTML page and PNG files, a table into Markdown. Measures nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np

from loadtest.generate.samples import CACHE_RESULTS, Samples
from loadtest.generate.traffic import KINDS
from loadtest.measure.figures import percentiles_ms
from loadtest.measure.runs import Run
from loadtest.report import plots

TEMPLATES = Path(__file__).parent / "templates"
SHOWN = ("p50", "p90", "p95", "p99", "p99.9", "max")
LATE = "the generator itself was late: the server may be quicker than this"
DETAILS = ("settings", "machine", "server", "generator", "plan")

Rows = Sequence[Sequence[str]]
"""Cells as text, the names of the columns first."""


class Plot(NamedTuple):
    """A picture with what it shows; `name` becomes `name.png` beside the page."""

    name: str
    title: str
    caption: str
    png: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """Everything on a report, but for what `meta` says of the machine, the server and the settings. `tables` by title."""

    title: str
    verdict: str
    is_good: bool
    tables: Mapping[str, Rows]
    tiles: Mapping[str, str] = field(default_factory=dict)
    plots: Sequence[Plot] = ()
    warnings: Sequence[str] = ()


def write_report(directory: Path) -> Path:
    """Write `report.html` and PNG files, or the `report.md` of a comparison or of peers, beside `run.json`; the path of the report.

    Raises FileNotFoundError without a `run.json`, ValueError for an unknown kind.
    """
    meta = json.loads((directory / "run.json").read_text())
    if "report" in meta:
        (directory / "report.md").write_text(meta["report"])
        return directory / "report.md"
    if meta.get("kind") not in ("open", "search"):
        raise ValueError(f"{directory}/run.json is of kind {meta.get('kind')!r}, which no report knows")
    page = search_page(meta) if meta["kind"] == "search" else run_page(Run.load(directory))
    for plot in page.plots:
        (directory / f"{plot.name}.png").write_bytes(plot.png)
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True)
    environment.filters["data_url"] = lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}"
    details = {key: json.dumps(meta[key], indent=1, ensure_ascii=False) for key in DETAILS if key in meta}
    path = directory / "report.html"
    path.write_text(environment.get_template("report.html.j2").render(page=page, where=_where(meta), details=details))
    return path


def _where(meta: Mapping[str, Any]) -> str:
    """Commit, machine, model."""
    machine, info = meta["machine"], meta.get("server", {}).get("info", {})
    model = info.get("model") or {}
    parts = [f"commit {machine['commit']}", machine["cpu"], f"{machine['cores']} cores"]
    parts += [str(info.get(key, "")) for key in ("device", "dtype")]
    parts += [f"checkpoint {model.get('name', '?')} {model.get('version', '')}" if model else "", machine["at"]]
    return " · ".join(part for part in parts if part)


def run_page(run: Run) -> Page:
    """One run at one rate."""
    summary, slo, settings = run.summary, run.slo, run.meta["settings"]
    holds, generator = summary["holds_slo"], run.meta["generator"]
    rates = {"offered_rps": "offered / s", "answered_rps": "answered / s", "goodput_rps": "goodput / s"}
    tiles = {
        **{title: _n(summary[key]) for key, title in rates.items()},
        "candidates / s": _n(summary["candidates_rps"]),
        **{f"{name}, ms": _n(summary["latency_ms"].get(name)) for name in ("p50", "p95", "p99", "p99.9")},
        "rejected (429)": str(summary["statuses"].get("429", 0)),
        "failures": str(sum(summary["failures"].values())),
        "context cache hits": _percent(summary["cache_hit_share"]),
        "generator lag p99, ms": _n(generator["lag_p99_ms"]),
    }
    good = f"{100 * summary['good_share']:.2f} % answered within {slo.latency_ms:g} ms"
    return Page(
        f"Load test, open loop, {settings['rate_rps']:g} requests / s, {settings['arrivals']} arrivals",
        f"{good}: the objective of {100 * slo.share:g} % {'holds' if holds else 'is missed'}.",
        holds,
        {"Latency by kind of request": _by_kind(run.samples), "Outcomes": _by_outcome(run.samples)},
        tiles,
        _pictures(run),
        [LATE] if generator["is_bottleneck"] else [],
    )


def _pictures(run: Run) -> list[Plot]:
    """What can be drawn: nothing where nothing was answered, no stages where the server names none."""
    if not run.summary["latency_ms"]:
        return []
    each, apart = "Percentiles and rates of each second; log scale.", "They part where requests waited to be sent."
    pictures = [
        Plot("over_time", "Over time", each, plots.latency_over_time(run)),
        Plot("distribution", "Distribution", apart, plots.latency_distribution(run)),
    ]
    if not np.isnan(run.samples.stages_ms).all():
        caption = "Stages as the server's Server-Timing header names them."
        pictures.append(Plot("stages", "Where the time goes", caption, plots.stage_breakdown(run)))
    return pictures


def search_page(meta: Mapping[str, Any]) -> Page:
    """A search for capacity."""
    slo, capacity = meta["settings"]["slo"], meta["capacity_rps"]
    objective = f"{100 * slo['share']:g} % within {slo['latency_ms']:g} ms"
    rows = [["trial", "verdict", "offered / s", "goodput / s", *SHOWN, "good", "lag p99, ms"]]
    for number, trial in enumerate(meta["trials"], 1):
        summary = trial["summary"]
        cells = [summary["offered_rps"], summary["goodput_rps"], *(summary["latency_ms"].get(name) for name in SHOWN)]
        share = _percent(summary["good_share"])
        rows.append([str(number), trial["verdict"], *map(_n, cells), share, _n(trial["generator"]["lag_p99_ms"])])
    picture = plots.latency_against_rate(meta["trials"], slo["latency_ms"], capacity)
    return Page(
        "Capacity",
        f"{_n(capacity)} requests / s, {meta['settings']['arrivals']} arrivals, with {objective} of their due time.",
        capacity > 0,
        {"Trials": rows},
        {"capacity, requests / s": _n(capacity), "objective": objective},
        [Plot("rate", "Latency against rate", "Every trial, ordered by rate.", picture)],
        [LATE] if meta["limited_by_generator"] else [],
    )


def _by_kind(samples: Samples) -> Rows:
    """Latency of first visits, later pages, … and of hits and misses of the context cache."""
    ok = samples[samples.status == 200]
    groups = {kind.replace("_", " "): ok[ok.kind == index] for index, kind in enumerate(KINDS)}
    groups |= {f"context cache {name}": ok[ok.cache == index] for index, name in enumerate(CACHE_RESULTS) if name}
    return _latencies("kind", groups)


def _by_outcome(samples: Samples) -> Rows:
    statuses = np.unique(samples.status).tolist()
    return _latencies("status", {str(each or "no reply"): samples[samples.status == each] for each in statuses})


def _latencies(head: str, groups: Mapping[str, Any]) -> Rows:
    """A line a group that is not empty, in ms from the due time."""
    rows = [[head, "requests", *SHOWN]]
    for name, part in groups.items():
        figures = percentiles_ms(part.latency_seconds)
        if figures:
            rows.append([name, str(len(part)), *(_n(figures[key]) for key in SHOWN)])
    return rows


def _n(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"
