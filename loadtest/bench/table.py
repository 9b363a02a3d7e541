"""The targets table: a row per target, printed and appended to a history. Measures nothing."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.timing import Figure

HISTORY_COLUMNS = (
    "at",
    "commit",
    "cpu",
    "torch",
    "dtype",
    "name",
    "ours_ms",
    "reference_ms",
    "figure",
    "low",
    "high",
    "target",
    "met",
)


@dataclass(frozen=True, slots=True)
class Row:
    """`figure` is what the target speaks of, in `unit`; `at_least` says on which side of `target` it must lie.

    `ours_ms` and `reference_ms` are the two sides of a ratio, where there are two.
    """

    name: str
    figure: Figure
    unit: str
    target: float
    at_least: bool
    ours_ms: float | None = None
    reference_ms: float | None = None

    @property
    def met(self) -> bool:
        """Whether the median keeps the target."""
        return self.figure.median >= self.target if self.at_least else self.figure.median <= self.target

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "figure": _short(self.figure.median),
            "low": _short(self.figure.low),
            "high": _short(self.figure.high),
            "unit": self.unit,
            "target": ("≥ " if self.at_least else "≤ ") + f"{self.target:g}",
            "met": self.met,
            "ours_ms": None if self.ours_ms is None else _short(self.ours_ms),
            "reference_ms": None if self.reference_ms is None else _short(self.reference_ms),
        }


def show(rows: Sequence[Row], console: Console) -> None:
    """The table for people."""
    table = Table("what", "ours, ms", "reference, ms", "figure", "10 % … 90 %", "target", "met", title="Targets")
    for row in rows:
        cells = row.to_dict()
        spread = f"{cells['low']:g} … {cells['high']:g}"
        sides = ["" if cells[side] is None else f"{cells[side]:g}" for side in ("ours_ms", "reference_ms")]
        figure = f"{cells['figure']:g} {row.unit}".strip()
        table.add_row(row.name, *sides, figure, spread, cells["target"], "yes" if row.met else "[bold]no[/bold]")
    console.print(table)


def append_history(path: Path, rows: Sequence[Row], run: dict[str, Any]) -> None:
    """One line a row, under a header that is written once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, HISTORY_COLUMNS, extrasaction="ignore")
        if is_new:
            writer.writeheader()
        writer.writerows({**run, **row.to_dict()} for row in rows)


def _short(value: float) -> float:
    return float(f"{value:.4g}")
