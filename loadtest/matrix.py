"""One measured row of the reliability matrix: attempts, failures, a figure and its limit."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """`tried` attempts of which `failed` broke the promise; `figure` is what was measured, in `unit`, and `limit` what may be.

    A figure must not exceed its limit, or must reach it where `at_least`.
    """

    row: str
    what: str
    tried: int
    failed: int
    figure: float
    limit: float
    unit: str
    at_least: bool = False

    @property
    def ok(self) -> bool:
        """Whether the promise held."""
        within = self.figure >= self.limit if self.at_least else self.figure <= self.limit
        return self.tried > 0 and not self.failed and within

    def to_json(self) -> str:
        """One line."""
        return json.dumps({**asdict(self), "figure": round(self.figure, 4), "ok": self.ok}, ensure_ascii=False)


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| row | what | tried | failed | figure | limit | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        sign = "≥" if row.at_least else "≤"
        figure, limit = f"{row.figure:.4g} {row.unit}", f"{sign} {row.limit:.4g} {row.unit}"
        lines.append(
            f"| {row.row} | {row.what} | {row.tried} | {row.failed} | {figure} | {limit} | {'ok' if row.ok else '**failed**'} |"
        )
    return "\n".join(lines)
