"""The table of settings in docs/training.md is that of the class."""

from __future__ import annotations

from pathlib import Path

import pytest

from weights.training.settings import TrainSettings, settings_table

PAGE = Path(__file__).parents[3] / "docs/training.md"


def test_the_page_lists_every_setting_with_its_default_and_meaning() -> None:
    wanted = [f"| `{name}` | {default} | {meaning} |" for name, default, meaning in settings_table()]
    lines = PAGE.read_text().splitlines()
    first = lines.index("| setting | default | meaning |") + 2
    assert lines[first : first + len(wanted)] == wanted, "\n".join(wanted)


def test_a_device_or_dtype_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="device must be cpu or cuda, got 'tpu'"):
        TrainSettings(device="tpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype must be float32 or bfloat16"):
        TrainSettings(dtype="float16")  # type: ignore[arg-type]
