"""`python -m weights corpus` as an operator uses it: exit codes, result lines, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests import retrieval_goldens as goldens
from tests.goldens import GOLDEN
from tests.weights.call import run

SOURCE = GOLDEN / "retrieval-mean-pool"


@pytest.fixture
def towers(tmp_path: Path) -> Path:
    code, said = run("import", SOURCE / "retrieval", "--out", tmp_path / "towers")
    assert code == 0
    assert "two towers, a mean over the candidate's embeddings" in said
    return tmp_path / "towers"


def test_import_verify_and_inspect(towers: Path, tmp_path: Path) -> None:
    out = tmp_path / "sports corpus"
    code, said = run("corpus", "import", SOURCE / "corpus.npz", "--encoder", towers, "--out", out)
    assert code == 0
    assert "holds sports-corpus" in said
    assert "256 posts of width 48 by towers" in said
    code, said = run("corpus", "verify", out, "--encoder", towers)
    assert (code, "is valid" in said) == (0, True)
    assert json.loads(run("corpus", "inspect", out, "--json")[1])["posts"] == 256
    assert "vectors.safetensors" in run("corpus", "inspect", out)[1]
    code, said = run("corpus", "import", SOURCE / "corpus.npz", "--encoder", towers, "--out", out)
    assert (code, "or ask to replace it (--replace)" in said) == (1, True)


def test_build_needs_no_vectors_and_import_does(towers: Path, tmp_path: Path) -> None:
    arrays = goldens.arrays(SOURCE / "corpus.npz")
    ids = {name: arrays[name] for name in ("post_ids", "author_ids")}
    np.savez(tmp_path / "posts.npz", **ids, views=ids["post_ids"])
    code, said = run("corpus", "import", tmp_path / "posts.npz", "--encoder", towers, "--out", tmp_path / "x")
    assert (code, "`corpus build` encodes the ids" in said) == (1, True)
    assert "Array views is not read." in said
    built, _ = run("corpus", "build", tmp_path / "posts.npz", "--encoder", towers, "--out", tmp_path / "x")
    assert (built, run("corpus", "verify", tmp_path / "x", "--encoder", towers)[0]) == (0, 0)
