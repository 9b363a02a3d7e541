"""Products that go on with the gate or RoPE, in Triton's interpreter: their definition, the bits of separate kernels, who is chosen."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

from typing import Any

import pytest
import torch
from torch import Tensor

from loadtest.gpu import phases
from loadtest.gpu.card import Card
from model.layers import rotate
from model.split.kernels import naive
from model.split.weights import split_weights
from model.tolerances import PARITY
from tests.model.builders import random_config, random_ranker

fused = pytest.importorskip("model.split.kernels.fused", reason="triton is not installed here")
fusion = pytest.importorskip("model.split.kernels.fusion")

ROWS = 64
BF16 = torch.bfloat16
PARTS = {"gate_value": 2, "qkv": 5, "query": 3, "key_value": 2}  # in heads, or columns of 72


class Planted(fused.FusedKernels):
    """Fused gates and turned products change one bit of one row."""

    wrong = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        gate, turn = self.fusion.gate, self.fusion.rotate

        def off(out: Tensor) -> None:
            out[7] = torch.where(torch.tensor(self.wrong), torch.nextafter(out[7], out[7] + 1), out[7])

        def wrong_gate(*given: Any) -> None:
            gate(*given)
            off(given[5])

        def wrong_turn(*given: Any) -> None:
            turn(*given)
            off(given[5])

        self.fusion.gate, self.fusion.rotate = wrong_gate, wrong_turn


def make(name: str, dtype: torch.dtype, inner: int = 80) -> tuple[Planted, Any, Tensor]:
    """Kernels, trial and weight; nothing is a multiple of a tile."""
    config = random_config(width=32, layers=2, query_heads=3, kv_heads=1, head_width=24)
    kernels = Planted(config, split_weights(random_ranker(config), torch.device("cpu"), dtype), dtype)
    columns = PARTS[name] * (72 if name == "gate_value" else 24)
    # binary fractions: sums are exact, in whatever order numpy's library adds
    weight = (torch.randint(-8, 9, (inner, columns), generator=torch.Generator().manual_seed(2)) / 64).to(dtype)
    trial = fusion.Trial(config, kernels, name, weight, ROWS)
    return kernels, trial, weight


def written(kernels: Any, trial: Any, kind: str, x: Tensor) -> list[Tensor]:
    """What a kind leaves on this input."""
    kernels.fusion.chosen[trial.name, ROWS] = kind
    trial.x = x.to(trial.x.dtype)
    for each in (trial.between, trial.out, trial.states):
        each.fill_(torch.nan)
    trial.run()
    return [each.clone() for each in trial.written()]


def inputs(seed: int, inner: int = 80) -> Tensor:
    return torch.randint(-8, 9, (ROWS, inner), generator=torch.Generator().manual_seed(seed)) / 8


@pytest.mark.parametrize(
    ("kind", "name", "dtype"),
    [
        *(("fused 64x64", name, BF16) for name in PARTS),
        *(("fused 64x64", name, torch.float32) for name in ("gate_value", "qkv")),
        *((kind, name, BF16) for kind in ("fused 64x32", "fused 128x128") for name in ("gate_value", "qkv")),
        ("fused 128x256", "gate_value", BF16),
    ],
)
def test_a_fused_product_has_the_bits_of_separate_kernels_and_their_definition(
    kind: str, name: str, dtype: torch.dtype
) -> None:
    kernels, trial, weight = make(name, dtype)
    x = inputs(1)
    found, separate = written(kernels, trial, kind, x), written(kernels, trial, fusion.SEPARATE, x)
    for one, other in zip(found, separate, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    product = naive.multiply(x.to(dtype), weight).to(dtype)[: trial.used]
    tolerance = PARITY[dtype].operation
    if name == "gate_value":
        torch.testing.assert_close(found[0].float(), naive.gate(product), atol=tolerance, rtol=tolerance)
        return
    turned = product.float().view(trial.used, -1, 24)
    keys = turned.shape[1] - (name != "query")  # the value alone is not turned
    cos, sin = kernels._rope[:, trial.step.arrays.positions[: trial.used].long()]
    expected = rotate(turned[:, :keys], torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    expected = torch.cat((expected, turned[:, keys:]), 1).flatten(1)
    torch.testing.assert_close(found[0].float(), expected, atol=tolerance, rtol=tolerance)
    kept = (~found[1].float().isnan()).sum()
    contexts = trial.used - ROWS // 2
    assert kept == (0 if name == "query" else contexts * 48), "a context's key and value, and nothing else"


@pytest.mark.parametrize("name", ["gate_value", "qkv"])
def test_a_row_of_a_fused_product_does_not_depend_on_its_neighbours(name: str) -> None:
    kernels, trial, _ = make(name, BF16)
    x, others = inputs(3), inputs(4)
    others[::2] = x[::2]
    one, other = (written(kernels, trial, "fused 64x64", each)[0] for each in (x, others))
    assert torch.equal(one[::2], other[::2])
    assert not torch.equal(one[1::2], other[1::2])
    kernels.wrong = True
    assert not kernels.fusion.is_equal(trial, "fused 64x64"), "one bit of one row"


@pytest.mark.parametrize("kind", ["fused 64x32", "fused 64x64", "fused 128x128"])
@pytest.mark.parametrize("name", PARTS)
def test_every_program_of_a_fused_product_has_rows_and_columns(name: str, kind: str) -> None:
    """One without would read beyond the weight where its columns are not masked."""
    kernels, trial, weight = make(name, BF16)
    launches = []
    kernels.fusion._launch = lambda kernel, grid, arguments, **constants: launches.append((grid, constants))
    kernels.fusion.chosen[name, ROWS] = kind
    trial.run()
    (((across, down), tile),) = launches
    assert (across - 1) * tile["TILE_OUT"] < weight.shape[1] // 2 <= across * tile["TILE_OUT"]
    assert (down - 1) * tile["TILE_ROWS"] < ROWS <= down * tile["TILE_ROWS"]


def test_only_fused_products_with_the_bits_of_separate_kernels_are_used() -> None:
    name = "gate_value"
    kernels, trial, weight = make(name, BF16)
    kernels.fusion.seconds = lambda trial, kind: float(kind == fusion.SEPARATE)  # the slowest
    kernels.wrong = True
    assert kernels.fusion.choose(kernels, {name: weight}, [ROWS]) == {name: {str(ROWS): fusion.SEPARATE}}
    kernels.wrong = False
    kernels.fusion.is_equal = lambda trial, kind: kind != "fused 64x32"
    assert kernels.fusion.choose(kernels, {name: weight}, [ROWS]) == {name: {str(ROWS): "fused 64x64"}}
    assert kernels.fusion.chosen == {(name, ROWS): "fused 64x64"}
    kernels.fusion.seconds = lambda trial, kind: float(kind != fusion.SEPARATE)
    kernels.fusion.choose(kernels, {name: weight}, [ROWS])
    assert kernels.fusion.chosen == {(name, ROWS): fusion.SEPARATE}
    kernels.use_reference()
    assert not kernels.fusion.chosen
    del kernels.fusion.seconds
    assert kernels.fusion.seconds(trial, fusion.SEPARATE) > 0


def test_the_bench_sets_fused_products_beside_separate_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, _, weight = make("gate_value", BF16)
    monkeypatch.setattr(phases, "_product_rows", lambda card: (ROWS,))
    kernels.wrong = True
    records = list(phases.fused_records(Card(torch.device("cpu"), tiny=True), kernels, {"gate_value": weight}, "here"))
    assert [(each["kind"], each["equal_bits"]) for each in records] == [
        (fusion.SEPARATE, True), ("fused 64x32", False), ("fused 64x64", False)
    ]  # fmt: skip
    assert all(each["us"] > 0 for each in records)


def test_which_fused_products_are_tried() -> None:
    small, large = ["fused 64x32", "fused 64x64"], ["fused 128x128", "fused 128x256"]
    weight = torch.zeros(8, 8, dtype=BF16)
    assert fusion.fused_kinds("gate_value", 64, weight) == small
    assert fusion.fused_kinds("gate_value", 1024, weight) == large
    assert fusion.fused_kinds("qkv", 256, weight) == [*small, "fused 128x128"]
    assert fusion.fused_kinds("qkv", 256, weight.float()) == []
    assert not fusion.fits("fused 128x256", "gate_value", 80)
