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


def test_it_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    done = run(copy.deepcopy(NOTEBOOK), tmp_path)
    shown = [set(output.get("data", {})) for cell in done.cells for output in cell.get("outputs", [])]
    assert any("image/png" in each for each in shown)
    told = [output["text"] for cell in done.cells for output in cell.get("outputs", []) if "text" in output]
    kept = [output["text"] for cell in NOTEBOOK.cells for output in cell.get("outputs", []) if "text" in output]
    assert told[0] == kept[0], "the ranking that is printed in the file"
    assert "is valid" in told[-1]


def test_a_cell_that_is_wrong_is_seen(tmp_path: Path) -> None:
    wrong = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert (6, 1) == (7, 1)")])
    with pytest.raises(nbclient.exceptions.CellExecutionError):
        run(wrong, tmp_path)
