"""The public definition of a text id, by the published test vectors of XXH64, and which texts are ids."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weights.text_ids import is_text_id, text_id, text_ids

ROOT = Path(__file__).parents[2]
VECTORS = {
    "a": 0xD24EC4F1A98C6E5B,
    "as": 0x1C330FB2D66BE179,
    "asd": 0x631C37CE72A97393,
    "asdf": 0x415872F599CEA71E,
    "Call me Ishmael. Some years ago--never mind how long precisely-": 0x02A2E85470D6FD96,
}


def test_an_id_is_xxh64_of_its_bytes() -> None:
    assert {text: text_id(text) for text in VECTORS} == VECTORS
    assert text_ids(VECTORS).tolist() == [*VECTORS.values()]


def test_the_page_tells_vectors() -> None:
    rows = re.findall(r"^\| `(.+)` \| (\d{18,20}) \|$", (ROOT / "docs/models.md").read_text(), re.MULTILINE)
    assert {text: int(number) for text, number in rows}.items() <= VECTORS.items()
    assert len(rows) == 3


@pytest.mark.parametrize("value", ["a", "a" * 128, "é" * 64, "\u0000"])
def test_short_texts_are_ids(value: str) -> None:
    assert is_text_id(value)


@pytest.mark.parametrize("value", ["", "a" * 129, "é" * 65, "\ud800", 1])
def test_anything_else_is_none(value: object) -> None:
    assert not is_text_id(value)
