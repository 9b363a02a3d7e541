"""A comparison as one self-contained HTML page and one JSON file. Computes nothing."""

from __future__ import annotations

import json
import math
import zlib
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from weights.format.manifest import Manifest
from weights.training.evaluate.compare import Comparison

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.15rem .7rem;text-align:right;border-bottom:1px solid #ccc}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%;background:#fff}"
)


def write_comparison(
    out: Path, pair: tuple[Manifest, Manifest], comparison: Comparison, explorer: str
) -> dict[str, Any]:
    """Write `index.html` and `figures.json` into `out`, which may exist; the figures, without the scores themselves, are returned."""
    out.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {"checkpoints": [{"name": each.name, "version": each.version} for each in pair]}
    values |= {name: _plain(value) for name, value in asdict(comparison).items() if name != "scores"}
    (out / "figures.json").write_text(json.dumps(values, indent=1) + "\n")
    (out / "index.html").write_text(_page(pair, comparison, explorer))
    return values


def explorer_link(explorer: str, body: dict[str, Any], versions: Sequence[str] = ()) -> str:
    """An address that opens this request in the page of a running server, by both versions where it holds both: its state, raw
    deflate in base64 (docs/explore.md)."""
    state = {
        "source": "rank", "sides": [body], "versions": list(versions), "side": 0, "open": None, "onePer": False,
        "start": body["impression_ts"],
    }  # fmt: skip
    squeezer = zlib.compressobj(wbits=-15)
    packed = squeezer.compress(json.dumps(state).encode()) + squeezer.flush()
    return f"{explorer}#{urlsafe_b64encode(packed).decode().rstrip('=')}"


def _plain(value: Any) -> Any:
    """Without NaN, which is no JSON."""
    if isinstance(value, dict):
        return {name: _plain(below) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below) for below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _page(pair: tuple[Manifest, Manifest], comparison: Comparison, explorer: str) -> str:
    left, right = (f"{each.name} {each.version}" for each in pair)
    ndcg = comparison.ndcg
    rows = [
        ["correlation of scores (Pearson)", f"{comparison.pearson:.4f}"],
        ["correlation of scores (Spearman)", f"{comparison.spearman:.4f}"],
        ["correlation of scores within a request, mean of requests", f"{comparison.correlation:.4f}"],
        ["Kendall's τ of the order, mean of requests", f"{comparison.kendall:.4f}"],
        *([f"best {k} that both have", f"{share:.1%}"] for k, share in comparison.overlap.items()),
        ["NDCG of the score", f"{ndcg[0]:.4f} → {ndcg[1]:.4f}"],
    ]
    actions = [
        [
            name,
            f"{each.share:.2%}",
            f"{each.correlation:.3f}",
            *(f"{a:.4f} → {b:.4f}" for a, b in (each.means, each.calibration_errors, each.log_losses)),
        ]
        for name, each in comparison.actions.items()
    ]
    versions = [each.version for each in pair]
    changed = "".join(
        f'<tr><td><a href="{escape(explorer_link(explorer, each.body, versions))}">request {each.request_id}</a></td>'
        f"<td>{each.kendall:.3f}</td><td>{each.best[0]} → {each.best[1]}</td></tr>"
        for each in comparison.changed
    )
    title = escape(f"{left} → {right}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{STYLE}</style><h1>{title}</h1><p>{comparison.requests} requests with "
        f"{comparison.impressions} impressions of one log, by the plain path in "
        "float32. Each score has its own checkpoint's weights.</p>"
        f"{_table(['', 'figure'], rows)}<p><img alt='Scores of both' "
        f"src='data:image/png;base64,{_plot(comparison, left, right)}'></p>"
        f"<h2>Actions</h2>{_table(['action', 'share', 'correlation', 'mean', 'calibration error', 'log-loss'], actions)}"
        "<h2>The requests that changed most</h2><p>By Kendall's τ of both orders. Each opens in the page of a "
        "running server, by both checkpoints side by side where it holds them, else ranked by the one that it serves.</p>"
        f"<table><tr><th>request</th><th>τ</th><th>best post</th></tr>{changed}</table></html>\n"
    )


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>{cells}</table>"


def _plot(comparison: Comparison, left: str, right: str) -> str:
    figure, axes = plt.subplots(figsize=(5, 4.5), dpi=90, layout="constrained")
    axes.plot(*comparison.scores, ",", color="#2f6f9f")
    axes.set(xlabel=f"score, {left}", ylabel=f"score, {right}")
    image = BytesIO()
    figure.savefig(image, format="png")
    plt.close(figure)
    return b64encode(image.getvalue()).decode()
