"""Writes an explanation to a directory: PNG files, one HTML page that holds them all, and every number as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from weights.explain.figures import Figures
from weights.explain.panels import Labels, Panel
from weights.explain.retrieval import RetrievalFigures
from weights.format.manifest import Manifest
from weights.report import html_image, html_page, plain, write_figures

ABOUT = (
    "Attention is not an explanation: it says where the model looked, not what moved the score. Both are here. Every "
    "number is in figures.json."
)


def write(
    out: Path,
    manifest: Manifest,
    labels: Labels,
    figures: Figures,
    panels: Sequence[Panel],
    found: RetrievalFigures | None = None,
) -> None:
    """Write panels, page and figures into `out`, which may exist; `found`: the figures of retrieval."""
    out.mkdir(parents=True, exist_ok=True)
    for panel in panels:
        (out / f"{panel.name}.png").write_bytes(panel.png)
    values = {"model": {"name": manifest.name, "version": manifest.version}, **plain(asdict(labels) | asdict(figures))}
    if found is not None:
        values["retrieval"] = plain(asdict(found))
    write_figures(out, values, indent=None)
    pictures = "".join(
        f"<figure><h2>{escape(panel.title)}</h2>{html_image(panel.title, panel.png)}"
        f"<figcaption>{escape(panel.caption)}</figcaption></figure>"
        for panel in panels
    )
    title = f"Why {manifest.name} {manifest.version} ranks as it does"
    (out / "index.html").write_text(html_page(title, f"<p>{ABOUT}</p>{pictures}"))
