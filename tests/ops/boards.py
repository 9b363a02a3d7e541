"""The committed dashboards as data: panels, expressions, and what is wrong with one. Not a test itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.ops.prometheus import ROOT

Board = dict[str, Any]
PLACES = sorted((ROOT / "docker/grafana/dashboards").glob("*.json"))
VARIABLES = {"$__rate_interval": "15s", "$job": ".*", "$instance": ".*"}
PANEL_TYPES = {"stat", "timeseries", "heatmap", "table"}
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def boards() -> dict[str, Board]:
    """Every committed dashboard by its file's name."""
    return {place.stem: json.loads(place.read_text()) for place in PLACES}


def panels(board: Board) -> Iterator[Board]:
    """The panels that show data."""
    return (panel for panel in board["panels"] if panel["type"] != "row")


def concrete(expression: str) -> str:
    """The expression as Grafana would send it, with every variable filled in."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def expressions(board: Board) -> Iterator[tuple[str, str]]:
    """Title of the panel, and each of its expressions with variables filled in."""
    for panel in panels(board):
        for target in panel["targets"]:
            yield panel["title"], concrete(target["expr"])


def faults(board: Board) -> Iterator[str]:
    """What Grafana would stumble over, or a reader."""
    variables = {variable["name"] for variable in board["templating"]["list"]}
    known = variables | {"__rate_interval"}
    sources = [board["annotations"]["list"], *(panel["targets"] for panel in panels(board)), list(panels(board))]
    sources.append([variable for variable in board["templating"]["list"] if variable["type"] == "query"])
    for part in (part for group in sources for part in group):
        if part.get("datasource") != DATA_SOURCE:
            yield f"{part.get('title') or part.get('refId') or part.get('name')}: dangling data source {part.get('datasource')}"
    if "datasource" not in variables:
        yield "no variable named datasource, which every panel uses"
    identifiers = [panel["id"] for panel in board["panels"]]
    if len(set(identifiers)) != len(identifiers):
        yield "two panels share an id"
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        if cells & taken or place["x"] + place["w"] > 24:
            yield f"{panel['title']}: overlaps another panel or the edge"
        taken |= cells
    for panel in panels(board):
        if panel["type"] not in PANEL_TYPES or not panel.get("description") or not panel["targets"]:
            yield f"{panel['title']}: unknown type, no description or nothing to show"
        if not panel["fieldConfig"]["defaults"].get("unit") and panel["type"] in {"stat", "timeseries"}:
            yield f"{panel['title']}: no unit"
        for target in panel["targets"]:
            for name in re.findall(r"\$\{?(\w+)", target["expr"]):
                if name not in known:
                    yield f"{panel['title']}: unknown variable {name}"
