"""A row of a benchmark: a figure with its spread and its target. Prints rows as a table and as one JSON line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loadtest.machine import machine
from loadtest.timing import Figure


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, in `unit`: the median of several readings, with the 10th and 90th percentile.

    It must not exceed the target, or must reach it if `at_least`. An infinite target means none. `sides`: for a ratio, the two medians
    that were divided, in milliseconds.
    """

    what: str
    figure: float
    low: float
    high: float
    unit: str
    target: float = math.inf
    at_least: bool = False
    sides: tuple[float, float] | None = None

    @classmethod
    def of(
        cls,
        what: str,
        figure: Figure,
        unit: str,
        target: float = math.inf,
        *,
        at_least: bool = False,
        sides: Sequence[Figure] = (),
    ) -> Row:
        """From a figure; `sides` are in seconds."""
        pair = (1e3 * sides[0].median, 1e3 * sides[1].median) if sides else None
        return cls(what, figure.median, figure.low, figure.high, unit, target, at_least, pair)

    @property
    def ok(self) -> bool:
        """Whether the figure is within its target."""
        return math.isinf(self.target) or (self.figure >= self.target if self.at_least else self.figure <= self.target)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        fields = {name: value for name, value in asdict(self).items() if value not in (None, math.inf)}
        return fields | {"ok": self.ok}

    def cells(self) -> list[str]:
        """A line of the table."""
        sign = "≥" if self.at_least else "≤"
        target = "" if math.isinf(self.target) else f"{sign} {self.target:g}{'' if self.ok else ', missed'}"
        sides = ", ".join(f"{side:.3g}" for side in self.sides or ())
        return [self.what, f"{self.figure:.3g} {self.unit}".strip(), f"{self.low:.3g} … {self.high:.3g}", target, sides]


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column holds words, the others numbers."""
    kinds = ["---"] + ["--:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (head, kinds, *rows))


def publish(rows: Sequence[Row], **facts: Any) -> None:
    """Print the table, then one JSON line with the machine, these facts and the rows."""
    head = ("what", "median", "10 % … 90 %", "target", "ours, other side, ms")
    print(markdown(head, [row.cells() for row in rows]))
    print(json.dumps({**machine(), **facts, "rows": [row.to_dict() for row in rows]}, ensure_ascii=False))
