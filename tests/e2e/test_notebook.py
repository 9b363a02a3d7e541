"""The notebook of docs/ runs from its first cell to its last, in a kernel of its own, and its pictures are there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
pytest.importorskip("ipykernel")
NOTEBOOK: Any = nbformat.read(ROOT / "docs/first-ranking.ipynb", 4)


def run(notebook: Any, folder: Path) -> Any:
    return nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()


def scores(printed: str) -> dict[str, float]:
    """The score of each name, in the order in which they were printed: place, score, name."""
    return {name: float(score) for _, score, name in (line.split(maxsplit=2) for line in printed.splitlines())}


def test_it_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    done = run(copy.deepcopy(NOTEBOOK), tmp_path)
    shown = [set(output.get("data", {})) for cell in done.cells for output in cell.get("outputs", [])]
    assert any("image/png" in each for each in shown)
    told = [output["text"] for cell in done.cells for output in cell.get("outputs", []) if "text" in output]
    kept = [output["text"] for cell in NOTEBOOK.cells for output in cell.get("outputs", []) if "text" in output]
    said, printed = scores(told[0]), scores(kept[0])
    assert said == pytest.approx(printed, abs=0.03), (
        "the ranking that is printed in the file, but for bf16 of another processor"
    )
    assert list(said.values()) == sorted(said.values(), reverse=True)
    assert (next(iter(said)), list(said)[-1]) == (next(iter(printed)), list(printed)[-1])
    assert "is valid" in told[-1]


def test_a_cell_that_is_wrong_is_seen(tmp_path: Path) -> None:
    wrong = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert (6, 1) == (7, 1)")])
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        run(wrong, tmp_path)
