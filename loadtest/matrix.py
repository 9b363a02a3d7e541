"""`Row`: a figure with its limit, from the reliability matrix or a benchmark. Writes rows as tables, JSON and history lines."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.machine import RESULTS, machine
from loadtest.timing import Figure

HISTORY = RESULTS / "history.csv"
HISTORY_COLUMNS = (
    "at", "commit", "cpu", "torch", "dtype", "name", "ours_ms", "reference_ms", "figure", "low", "high", "target", "met",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One figure and its limit, both in `unit`. Of `tried` attempts, `failed` broke the promise.

    The figure must not exceed the limit, or must reach it if `at_least`. An infinite limit means none.
    `spread`: the 10th and 90th percentile of several readings. `sides`: for a ratio, the two
    values that were divided, in milliseconds.
    """

    row: str
    what: str
    tried: int
    failed: int
    figure: float
    limit: float
    unit: str
    at_least: bool = False
    spread: tuple[float, float] | None = None
    sides: tuple[float, float] | None = None

    @classmethod
    def of(
        cls,
        what: str,
        figure: Figure,
        unit: str,
        limit: float = math.inf,
        *,
        at_least: bool = False,
        sides: Sequence[Figure] = (),
    ) -> Row:
        """A row of a benchmark: a median with its spread. `sides` are in seconds."""
        pair = (1e3 * sides[0].median, 1e3 * sides[1].median) if sides else None
        return cls("bench", what, 1, 0, figure.median, limit, unit, at_least, (figure.low, figure.high), pair)

    @property
    def ok(self) -> bool:
        """Whether something was tried, nothing failed, and the figure is within its limit."""
        within = self.figure >= self.limit if self.at_least else self.figure <= self.limit
        return self.tried > 0 and not self.failed and (within or math.isinf(self.limit))

    @property
    def target(self) -> str:
        """The limit as text, with ≤ or ≥ and the unit; empty if there is none."""
        if math.isinf(self.limit):
            return ""
        return f"{'≥' if self.at_least else '≤'} {self.limit:g} {self.unit}".strip()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        known = {name: value for name, value in asdict(self).items() if value not in (None, math.inf)}
        return {**known, "figure": round(self.figure, 4), "ok": self.ok}

    def to_json(self) -> str:
        """One line."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @property
    def cells(self) -> list[str]:
        """The end of a line of a table: the figure, its limit, and whether it held."""
        return [f"{self.figure:.4g} {self.unit}".strip(), self.target, "ok" if self.ok else "**missed**"]


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """A Markdown table. The first `words` columns hold words, the others numbers."""
    kinds = ["---"] * words + ["--:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, kinds, *rows))


def table(rows: Sequence[Row]) -> str:
    """The rows of the matrix as Markdown."""
    head = ("row", "what", "tried", "failed", "figure", "limit", "")
    return markdown(head, ([row.row, row.what, row.tried, row.failed, *row.cells] for row in rows), len(head))


def targets(rows: Sequence[Row]) -> str:
    """The rows of a benchmark as Markdown, with their spread and sides."""
    found = []
    for row in rows:
        spread = " … ".join(f"{edge:.3g}" for edge in row.spread or ())
        found.append([row.what, *row.cells, spread, ", ".join(f"{side:.3g}" for side in row.sides or ())])
    return markdown(("what", "figure", "target", "", "10 % … 90 %", "ours, reference, ms"), found)


def publish(rows: Sequence[Row], run: Mapping[str, Any], *, history: Path | None = None, **further: Any) -> None:
    """Print the table, append each row to the history, and print one JSON line with the machine. `run`: further facts to record."""
    facts = {**machine(), **run}
    print(targets(rows))
    if history is not None:
        append_history(history, rows, facts)
    print(json.dumps({**facts, "rows": [row.to_dict() for row in rows], **further}, ensure_ascii=False))


def append_history(path: Path, rows: Sequence[Row], run: Mapping[str, Any]) -> None:
    """Append one CSV line per row; a new file gets a header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, HISTORY_COLUMNS, extrasaction="ignore")
        if is_new:
            writer.writeheader()
        for row in rows:
            ours, reference = row.sides or ("", "")
            low, high = row.spread or (row.figure, row.figure)
            figures = {"ours_ms": ours, "reference_ms": reference, "figure": row.figure, "low": low, "high": high}
            short = {name: float(f"{value:.4g}") for name, value in figures.items() if not isinstance(value, str)}
            target = row.target.removesuffix(row.unit).strip()
            writer.writerow({**run, **short, "name": row.what, "target": target, "met": row.ok})
