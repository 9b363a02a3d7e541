"""The small random checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weights.checkpoint import load_checkpoint
from weights.synthetic.small_checkpoint import write_small_checkpoint
from weights.text_ids import IdKind
from weights.values import id_problem


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_small_checkpoint(tmp_path / name, 7)
    write_small_checkpoint(tmp_path / "c", 8)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
        assert file.read_bytes() != (tmp_path / "c" / file.name).read_bytes()
    assert sum(file.stat().st_size for file in (tmp_path / "a").iterdir()) <= 4 * 10**6


@pytest.mark.parametrize("ids", ["uint64", "text"])
def test_its_example_has_ids_of_its_kind(tmp_path: Path, ids: IdKind) -> None:
    write_small_checkpoint(tmp_path / "c", 0, ids=ids)
    assert load_checkpoint(tmp_path / "c").manifest.ids == ids
    example = json.loads((tmp_path / "c" / "example.json").read_text())
    posts = example["history"] + example["candidates"]
    assert [id_problem(post[name], ids) for post in posts for name in ("post_id", "author_id")] == [None] * 26
    assert id_problem(example["user_id"], ids) is None
