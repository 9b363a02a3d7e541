"""A comparison as one self-contained HTML page and one JSON file. Computes nothing."""

from __future__ import annotations

import json
import zlib
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from weights.format.manifest import Manifest
from weights.report import BLUE, html_image, html_page, html_table, plain, png, write_figures
from weights.training.evaluate.compare import Comparison


def write_comparison(
    out: Path, pair: tuple[Manifest, Manifest], comparison: Comparison, explorer: str
) -> dict[str, Any]:
    """Write `index.html` and `figures.json` into `out`, which may exist; the figures, without the scores themselves, are returned."""
    out.mkdir(parents=True, exist_ok=True)
    values: dict[str, Any] = {"checkpoints": [{"name": each.name, "version": each.version} for each in pair]}
    values |= {name: plain(value) for name, value in asdict(comparison).items() if name != "scores"}
    write_figures(out, values)
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
            escape(name),
            f"{each.share:.2%}",
            f"{each.correlation:.3f}",
            *(f"{a:.4f} → {b:.4f}" for a, b in (each.means, each.calibration_errors, each.log_losses)),
        ]
        for name, each in comparison.actions.items()
    ]
    versions = [each.version for each in pair]
    changed = [
        [
            f'<a href="{escape(explorer_link(explorer, each.body, versions))}">request {each.request_id}</a>',
            f"{each.kendall:.3f}",
            f"{each.best[0]} → {each.best[1]}",
        ]
        for each in comparison.changed
    ]
    return html_page(
        f"{left} → {right}",
        f"<p>{comparison.requests} requests with {comparison.impressions} impressions of one log, by the plain path in "
        f"float32. Each score has its own checkpoint's weights.</p>{html_table(['', 'figure'], rows)}"
        f"<p>{html_image('Scores of both', _plot(comparison, left, right))}</p><h2>Actions</h2>"
        f"{html_table(['action', 'share', 'correlation', 'mean', 'calibration error', 'log-loss'], actions)}"
        "<h2>The requests that changed most</h2><p>By Kendall's τ of both orders. Each opens in the page of a "
        "running server, by both checkpoints side by side where it holds them, else ranked by the one that it serves.</p>"
        + html_table(["request", "τ", "best post"], changed),
    )


def _plot(comparison: Comparison, left: str, right: str) -> bytes:
    figure, axes = plt.subplots(figsize=(5, 4.5), dpi=90, layout="constrained")
    axes.plot(*comparison.scores, ",", color=BLUE)
    axes.set(xlabel=f"score, {left}", ylabel=f"score, {right}")
    return png(figure)
