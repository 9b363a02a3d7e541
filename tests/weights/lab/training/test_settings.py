"""The table of settings in docs/training.md is that of the class."""

from __future__ import annotations

from pathlib import Path

from weights.lab.training.settings import settings_table

PAGE = Path(__file__).parents[4] / "docs/training.md"


def test_the_page_lists_every_setting_with_default_and_meaning() -> None:
    wanted = [f"| `{name}` | {default} | {values} | {meaning} |" for name, default, values, meaning in settings_table()]
    lines = PAGE.read_text().splitlines()
    first = lines.index("| setting | default | what it may be | meaning |") + 2
    assert lines[first : first + len(wanted)] == wanted, "\n".join(wanted)
