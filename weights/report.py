"""Output shared by all reports: figures as JSON, pictures as PNG, tables, and self-contained HTML. Computes nothing."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Iterable
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{padding:.15rem .7rem;text-align:right;border-bottom:1px solid #ccc}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%;background:#fff}figure{margin:2rem 0}"
)
GREY, BLUE, YELLOW, DARK = "#b8b8b8", "#2f6f9f", "#e0a458", "#333333"
"""The colours of every report; the model is blue."""


def plain(value: Any, digits: int | None = None) -> Any:
    """Convert a value for JSON: arrays become lists, and numbers that are not finite become null. `digits`: round to so many."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: plain(below, digits) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [plain(below, digits) for below in value]
    if not isinstance(value, float):
        return value
    return (value if digits is None else round(value, digits)) if math.isfinite(value) else None


def write_figures(directory: Path, values: dict[str, Any], indent: int | None = 1) -> None:
    """Write `figures.json` into a directory."""
    (directory / "figures.json").write_text(json.dumps(values, indent=indent) + "\n")


def png(figure: Figure) -> bytes:
    """Render the figure as a PNG without date or version, and close it."""
    image = BytesIO()
    figure.savefig(image, format="png", metadata={"Software": ""})
    plt.close(figure)
    return image.getvalue()


def html_page(title: str, body: str) -> str:
    """A whole document; `title` is text, `body` HTML."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>{body}</html>\n"
    )


def html_image(alt: str, image: bytes) -> str:
    """A PNG embedded in the document."""
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{b64encode(image).decode()}">'


def html_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Head and cells are HTML."""
    lines = [_cells("th", head), *(_cells("td", row) for row in rows)]
    return f"<table>{''.join(lines)}</table>"


def _cells(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for cell in cells)}</tr>"


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Head and cells are Markdown, without newlines."""
    head = list(head)
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
