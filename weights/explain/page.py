"""An explanation in a directory: PNG files, one HTML page that holds them all, and every number as JSON."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from weights.explain.figures import Figures
from weights.explain.panels import Labels, Panel
from weights.explain.retrieval import RetrievalFigures
from weights.format.manifest import Manifest

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "img{max-width:100%;background:#fff}figure{margin:2rem 0}"
)


def write(
    out: Path,
    manifest: Manifest,
    labels: Labels,
    figures: Figures,
    panels: Sequence[Panel],
    found: RetrievalFigures | None = None,
) -> None:
    """Write them into `out`, which may exist; `found`: the figures of retrieval."""
    out.mkdir(parents=True, exist_ok=True)
    for panel in panels:
        (out / f"{panel.name}.png").write_bytes(panel.png)
    names = {
        "model": {"name": manifest.name, "version": manifest.version},
        "tokens": list(labels.tokens),
        "actions": list(labels.actions),
    }
    retrieved = {} if found is None else {"retrieval": found.to_json()}
    (out / "figures.json").write_text(json.dumps(names | figures.to_json() | retrieved) + "\n")
    (out / "index.html").write_text(page(manifest, panels))


def page(manifest: Manifest, panels: Sequence[Panel]) -> str:
    """One HTML document that needs no other file."""
    title = escape(f"Why {manifest.name} {manifest.version} ranks as it does")
    figures = "".join(
        f'<figure><h2>{escape(panel.title)}</h2><img alt="{escape(panel.title)}" src="data:image/png;base64,'
        f'{b64encode(panel.png).decode()}"><figcaption>{escape(panel.caption)}</figcaption></figure>'
        for panel in panels
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style><h1>{title}</h1><p>Attention is not an explanation: it "
        "says where the model looked, not what moved "
        f"the score. Both are here. Every number is in figures.json.</p>{figures}</html>\n"
    )
