"""Turns a stored run, search, comparison or peer table into one self-contained HTML page and PNG files. Measures nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from loadtest.generate.samples import CACHE_RESULTS, Samples
from loadtest.generate.traffic import KINDS
from loadtest.measure.figures import percentiles_ms
from loadtest.measure.runs import Run
from loadtest.report import plots

TEMPLATES = Path(__file__).parent / "templates"
SHOWN = ("p50", "p90", "p95", "p99", "p99.9", "max")
LATE = "the generator itself was late: these figures are not the server's alone"


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture with what it shows; `name` becomes `name.png` beside the page."""

    name: str
    title: str
    caption: str
    png: bytes

    @property
    def base64(self) -> str:
        """For a data URL."""
        return base64.b64encode(self.png).decode()


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text; the first column is left-aligned."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Page:
    """Everything on a report; its subtitle and details come from `meta`."""

    meta: Mapping[str, Any]
    title: str
    verdict: str
    is_good: bool
    tables: Sequence[Table]
    tiles: Mapping[str, str]
    plots: Sequence[Plot] = ()
    warnings: Sequence[str] = ()

    @property
    def subtitle(self) -> str:
        """What was measured where."""
        machine, info = self.meta["machine"], self.meta.get("server", {}).get("info", {})
        model = info.get("model") or {}
        device = " ".join(str(info[key]) for key in ("device", "dtype") if key in info)
        parts = [f"commit {machine['commit']}", machine["cpu"], f"{machine['cores']} cores", device]
        parts += [f"checkpoint {model.get('name', '?')} {model.get('version', '')}".strip() if model else ""]
        return " · ".join(part for part in (*parts, machine["at"]) if part)

    @property
    def details(self) -> list[tuple[str, str]]:
        """Names and JSON, to be unfolded."""
        keys = ("settings", "machine", "server", "generator", "plan")
        return [(key, json.dumps(self.meta[key], indent=1, ensure_ascii=False)) for key in keys if key in self.meta]

    def write(self, directory: Path) -> Path:
        """Write `report.html` and the PNG files; the path of the page."""
        for plot in self.plots:
            (directory / f"{plot.name}.png").write_bytes(plot.png)
        environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True)
        path = directory / "report.html"
        path.write_text(environment.get_template("report.html.j2").render(page=self))
        return path


def write_report(directory: Path) -> Path:
    """The report of whatever lies in `directory`. Raises FileNotFoundError without a `run.json`, ValueError for an unknown kind."""
    meta = json.loads((directory / "run.json").read_text())
    kind = meta.get("kind")
    pages = {"search": search_page, "comparison": comparison_page, "peers": peers_page}
    if kind == "open":
        return run_page(Run.load(directory)).write(directory)
    if kind not in pages:
        raise ValueError(f"{directory}/run.json is of kind {kind!r}, which no report knows")
    return pages[kind](meta).write(directory)


def run_page(run: Run) -> Page:
    """One run at one rate."""
    summary, slo, settings = run.summary, run.slo, run.meta["settings"]
    holds, generator = summary["holds_slo"], run.meta["generator"]
    objective = f"the objective of {100 * slo.share:g} % {'holds' if holds else 'is missed'}."
    tiles = {
        "offered / s": _n(summary["offered_rps"]),
        "answered / s": _n(summary["answered_rps"]),
        "goodput / s": _n(summary["goodput_rps"]),
        "candidates / s": _n(summary["candidates_rps"]),
        **{f"{name}, ms": _n(summary["latency_ms"].get(name)) for name in ("p50", "p95", "p99", "p99.9")},
        "rejected (429)": str(summary["statuses"].get("429", 0)),
        "failures": str(sum(summary["failures"].values())),
        "context cache hits": _percent(summary["cache_hit_share"]),
        "generator lag p99, ms": _n(generator["lag_p99_ms"]),
    }
    return Page(
        run.meta,
        f"Load test, open loop, {settings['rate_rps']:g} requests / s, {settings['arrivals']} arrivals",
        f"{100 * summary['good_share']:.2f} % answered within {slo.latency_ms:g} ms: {objective}",
        holds,
        [_by_kind(run.samples), _by_outcome(run.samples)],
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
    rows = []
    for number, trial in enumerate(meta["trials"], 1):
        summary = trial["summary"]
        cells = [summary["offered_rps"], summary["goodput_rps"], *(summary["latency_ms"].get(name) for name in SHOWN)]
        share = _percent(summary["good_share"])
        rows.append([str(number), trial["verdict"], *map(_n, cells), share, _n(trial["generator"]["lag_p99_ms"])])
    head = ["trial", "verdict", "offered / s", "goodput / s", *SHOWN, "good", "lag p99, ms"]
    picture = plots.latency_against_rate(meta["trials"], slo["latency_ms"], capacity)
    late = ["the generator was late in at least one trial: the server may take more"]
    return Page(
        meta,
        "Capacity",
        f"{_n(capacity)} requests / s, {meta['settings']['arrivals']} arrivals, with {objective} of their due time.",
        capacity > 0,
        [Table("Trials", head, rows)],
        {"capacity, requests / s": _n(capacity), "objective": objective, "trials": str(len(rows))},
        [Plot("rate", "Latency against rate", "Every trial, ordered by rate.", picture)],
        late if meta["limited_by_generator"] else [],
    )


def comparison_page(meta: Mapping[str, Any]) -> Page:
    """Two sides, block by block."""
    comparison = meta["comparison"]
    rows = []
    for one in comparison["differences"]:
        interval = f"{one['ratio_low']:.3f} … {one['ratio_high']:.3f}"
        figures = [_n(one["a"]), _n(one["b"]), f"{one['ratio']:.3f}", interval, f"{one['p']:.4f}"]
        rows.append([one["figure"], *figures, one["verdict"]])
    verdict, least = comparison["verdict"], f"{100 * comparison['smallest_effect']:g} %"
    return Page(
        meta,
        f"{meta['a']} (A) against {meta['b']} (B)",
        f"B is {verdict}." if verdict != "no difference shown" else "No difference shown.",
        verdict != "worse",
        [Table("Figures", ["figure", "A", "B", "B / A", "95 %", "p (Holm)", "verdict"], rows)],
        {"blocks a side": str(comparison["blocks"]), "smallest effect": f"below {least}, nothing is judged"},
        warnings=comparison["warnings"],
    )


def peers_page(meta: Mapping[str, Any]) -> Page:
    """The servers of a peer run."""
    head = ["server", "engine", "requests / s, 32 clients", "spread", "p50, ms", "p99, ms", "p50 alone, ms", "× first"]
    keys = ("throughput_rps", "throughput_spread_rps", "p50_ms", "p99_ms", "single_p50_ms")
    rows = [
        [row["name"], row["engine"], *(_n(row[key]) for key in keys), f"{row['ratio']:.2f}×"] for row in meta["rows"]
    ]
    return Page(meta, "Peers", meta["verdict"], True, [Table("Servers", head, rows)], {})


def _by_kind(samples: Samples) -> Table:
    """Latency of first visits, later pages, … and of hits and misses of the context cache."""
    ok = samples[samples.status == 200]
    groups = [(kind.replace("_", " "), ok[ok.kind == index]) for index, kind in enumerate(KINDS)]
    groups += [(f"context cache {name}", ok[ok.cache == index]) for index, name in enumerate(CACHE_RESULTS) if name]
    return _latencies("Latency by kind of request", ["kind", "answered"], groups)


def _by_outcome(samples: Samples) -> Table:
    statuses = np.unique(samples.status).tolist()
    groups = [(str(status or "no reply"), samples[samples.status == status]) for status in statuses]
    return _latencies("Outcomes", ["status", "requests"], groups)


def _latencies(title: str, head: list[str], groups: Sequence[tuple[str, Any]]) -> Table:
    """A line a group that is not empty."""
    rows = []
    for name, part in groups:
        figures = percentiles_ms(part.latency_seconds)
        if figures:
            rows.append([name, str(len(part)), *(_n(figures[key]) for key in SHOWN)])
    return Table(f"{title}, ms from the due time", [*head, *SHOWN], rows)


def _n(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"
