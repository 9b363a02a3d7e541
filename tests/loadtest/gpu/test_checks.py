"""`make bench-gpu` with tiny shapes on a CPU: every part of the script runs, and its checks can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from loadtest.gpu import checks
from loadtest.gpu.__main__ import main
from loadtest.gpu.card import Card
from loadtest.gpu.checks import equal_bits, make_engine, parity, small_config
from loadtest.gpu.peers import FlexRanker, dense_eager
from loadtest.gpu.work import forward_work
from model.engine import Item
from model.split.engine import SplitEngine
from model.split.kernels.portable import PortableKernels
from model.synthetic import random_ranker, random_request

ROOT = Path(__file__).resolve().parents[3]
TINY = Card(torch.device("cpu"), tiny=True)


def test_the_whole_script_runs_with_tiny_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--tiny", "--geometries", "mini", "seed", "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "gpu.json").read_text()) == report
    assert report["tiny"]
    assert report["measured_on"] == "cpu"
    assert not report["left_out"]
    assert not report["peer_errors"]
    rows = {row["name"]: row for row in report["rows"]}
    assert {name for name in rows if "seed" in name and rows[name]["unit"] == "ms"} == {
        "seed C=42 cold",
        "seed C=42 cached",
        "seed C=42: dense definition, eager",
        "seed C=42: FlexAttention, compiled",
        "seed C=42: FlexAttention's block mask, a request",
    }
    assert rows["mini: compiled or recorded after warm-up"]["figure"] == 0
    assert all(row["figure"] > 0 for name, row in rows.items() if "after warm-up" not in name)
    assert report["bits"]["mini"]["different"] == 0


def test_a_geometry_out_of_time_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--tiny", "--geometries", "nano", "--seconds", "0"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left_out"] == ["nano"]


def test_without_a_card_nothing_is_claimed() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card here")
    finished = subprocess.run(
        [sys.executable, "-m", "loadtest.gpu"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert finished.returncode == 2
    assert "nothing was measured" in finished.stderr
    assert not finished.stdout


def test_the_peers_compute_what_the_engine_computes() -> None:
    ranker = random_ranker(small_config(width=64, layers=2, head_width=16))
    item = Item(*random_request(ranker.config, 30, 17))
    dense = dense_eager(ranker, item, TINY, torch.float32)()[0]
    flex = FlexRanker(ranker, item, TINY, torch.float32)
    torch.testing.assert_close(flex.forward(flex.block_mask())[0], dense, atol=2e-4, rtol=0)
    ours = make_engine(ranker, TINY, torch.float32).forward([item])[0].scores.logits
    torch.testing.assert_close(torch.from_numpy(ours), dense, atol=2e-4, rtol=0)


def test_wrong_scores_fail_the_parity_check(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = make_engine

    def biased(ranker: Any, card: Card, dtype: torch.dtype, **options: Any) -> SplitEngine:
        engine = honest(ranker, card, dtype, **options)
        engine._trunk.weights.heads.mul_(1.2)
        return engine

    monkeypatch.setattr(checks, "make_engine", biased)
    with pytest.raises(AssertionError, match="logits differ by"):
        parity(TINY)


class Neighbourly(PortableKernels):
    """Every row takes a little of the one before it."""

    def multiply(self, step: Any, x: Any, weight: Any, out: Any, rows: int, *, tail: bool = False) -> None:
        super().multiply(step, x, weight, out, rows, tail=tail)
        out[1:rows] += 1e-3 * out[: rows - 1]


def test_bits_that_depend_on_neighbours_are_found() -> None:
    engine = make_engine(random_ranker(small_config(width=64, layers=1, head_width=16)), TINY, cache_bytes=2**24)
    assert equal_bits(engine, 3)["different"] == 0
    engine._trunk.kernels = Neighbourly(engine.config, engine._trunk.weights.rope)
    engine._cache.clear()
    with pytest.raises(AssertionError, match="other bits than alone"):
        equal_bits(engine, 3)


def test_cached_work_is_the_candidates_alone() -> None:
    config = small_config()
    cold, cached = (forward_work(config, 97, 64, cached=cached) for cached in (False, True))
    assert forward_work(config, 97, 128, cached=True).flops == pytest.approx(2 * cached.flops)
    assert cold.flops > cached.flops
    assert forward_work(config, 0, 64, cached=False).flops == forward_work(config, 0, 64, cached=True).flops
