"""Kinds of products and of attention, in Triton's interpreter: they give the bits of the reference, and who is chosen."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.layers import rotate
from model.split import graphs
from model.split.buckets import row_sizes
from model.split.engine import SplitEngine
from model.split.graphs import PlainRecorder
from model.tolerances import PARITY
from tests.model import naive
from tests.model.builders import interpret_quickly, random_config, random_ranker
from tests.model.test_kernels import Watched

fused = pytest.importorskip("model.split.kernels.fused", reason="triton is not installed here")
products = pytest.importorskip("model.split.kernels.products")

interpret_quickly()
ROWS = 64
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def one_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal bits for each kind: the others are the same on other numbers."""
    monkeypatch.setattr(products, "PROOFS", 1)


def fractions(x: Tensor, generator: torch.Generator) -> None:
    """Binary fractions: sums are exact, in whatever order numpy's library adds."""
    x.copy_(torch.randint(-8, 9, x.shape, generator=generator) / 16)


def make(rows: int = ROWS, **overrides: Any) -> tuple[Any, dict[str, Any], Any]:
    """Kernels, parts and trunk; nothing is a multiple of a tile."""
    shape = {"width": 40, "layers": 2, "query_heads": 3, "kv_heads": 1, "head_width": 24, "history_length": 30}
    config = random_config(**(shape | overrides))
    engine = SplitEngine(
        random_ranker(config), "cpu", BF16, kernels="fused", capacity=max(rows, 320), recorder=PlainRecorder()
    )
    trunk, runner = engine._trunk, engine._runner
    for buffer in (*runner._staging, runner._arrived):  # type: ignore[union-attr]
        buffer.fill_(77)  # what a step does not write may be anything
    for layer in trunk.weights.layers:
        for name in ("qkv", "query", "key_value", "output", "gate_value", "ffn_output"):
            if (weight := getattr(layer, name)) is not None:
                fractions(weight, torch.Generator().manual_seed(2))
    tokens = trunk.weights.tokens
    for each in (trunk.tables.post, trunk.tables.author, trunk.tables.user, tokens.projection):
        fractions(each, torch.Generator().manual_seed(3))
    tokens.dwell_input.zero_()
    step = runner._written(engine._trial(rows))  # type: ignore[union-attr, attr-defined]
    kernels: Any = engine._kernels
    kernels.choices._fill, kernels.choices._capability = fractions, 90
    kernels._launcher = Watched([trunk.tables.author, trunk.tables.user, *(state.keys_values for state in step.states)])
    return kernels, {part.name: part for part in trunk.parts(step.at(rows))}, (trunk, step)


KINDS = [
    *(("gate_value", f"fused {kind}") for kind in products.PRODUCT_TILES),
    *(("qkv", f"fused {kind}") for kind in ("64x64", "64x32", "128x128")), ("query", "fused 64x64"),
    ("key_value", "fused 64x64"), *(("40x120", kind) for kind in ("64x32", "128x128")), ("embed", "64x32"), ("embed", "128x128"),
]  # fmt: skip


def test_every_kind_has_the_bits_of_the_reference() -> None:
    kernels, parts, (trunk, _) = make()
    assert not [pair for pair in KINDS if not kernels.choices.is_equal(parts[pair[0]], pair[1])]
    for part in parts.values():  # NaN until something is written
        assert kernels.choices._outputs(part, products.REFERENCE, 0)[0].isfinite().all(), part.name
    norm = parts["norm"]
    residual, layer = norm.inputs[1].clone(), trunk.weights.layers[1]
    norm.run(1)
    expected = naive.add_norm(norm.inputs[0], layer.attention_post_norm, residual, layer.ffn_norm, 1e-5)
    used = slice(len(norm.outputs[0]))
    torch.testing.assert_close(norm.inputs[1][used], expected[0][used])
    torch.testing.assert_close(norm.outputs[0], expected[1][used].bfloat16())


@pytest.mark.parametrize("layers", [1, 2])
def test_where_a_layer_is_the_last_candidates_alone_attend(layers: int) -> None:
    _, parts, (_, step) = make(layers=layers)
    used = {name: len(parts[name].outputs[0]) for name in ("attend", "norm", "query")}
    candidates, rows = step.at(ROWS, tail=True).used, step.used
    assert candidates < rows
    assert used == {"attend": candidates if layers == 1 else rows, "norm": rows, "query": candidates}


@pytest.mark.parametrize("name", ["gate_value", "qkv", "query", "key_value"])
def test_a_fused_product_is_the_definition_of_what_it_goes_on_with(name: str) -> None:
    kernels, parts, (trunk, step) = make()
    part = parts[name]
    found = kernels.choices._outputs(part, "fused 64x64", 1)
    used = len(found[0])
    product = naive.multiply(part.inputs[0][:used], part.weights[0]).bfloat16()
    tolerance = PARITY[BF16].operation
    if name == "gate_value":
        torch.testing.assert_close(found[0].float(), naive.gate(product), atol=tolerance, rtol=tolerance)
        return
    turned = product.float().view(used, -1, 24)
    keys = turned.shape[1] - (name != "query")  # the value alone is not turned
    cos, sin = trunk.weights.rope[:, step.arrays.positions[:used].long()]
    expected = rotate(turned[:, :keys], torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    expected = torch.cat((expected, turned[:, keys:]), 1).flatten(1)
    torch.testing.assert_close(found[0].float(), expected, atol=tolerance, rtol=tolerance)
    kept = sum(int((~state.isnan()).sum()) for state in found[1:])
    assert kept == (0 if name == "query" else 21 * 48), "a context's key and value, and nothing else"


def test_one_bit_of_one_row_is_seen_and_such_a_kind_is_not_used() -> None:
    kernels, parts, _ = make()
    choices, part = kernels.choices, parts["gate_value"]
    honest = kernels._launch_product

    def off(kernel: Any, *given: Any, **named: Any) -> None:
        honest(kernel, *given, **named)
        if kernel is fused.multiply_gate_tiles:
            out = given[6]
            out[7] = torch.nextafter(out[7], out[7] + 1)

    assert choices.is_equal(part, "fused 64x32")
    kernels._launch_product = off
    assert not choices.is_equal(part, "fused 64x32")
    choices.seconds = lambda part, kind: float(kind == products.REFERENCE)  # the slowest
    found = choices.choose(lambda size: [part], [ROWS], "")
    assert found == {"how": "timed", "gate_value": {"64": products.REFERENCE}}


def test_a_kind_that_does_not_run_is_left_out_and_a_lost_device_is_not_forgiven() -> None:
    kernels, parts, _ = make()

    def fails(error: Exception) -> Callable[..., None]:
        def launch_product(kernel: Any, tile: Any, *given: Any, **named: Any) -> None:
            if tile.num_stages == 8:
                raise error

        return launch_product

    kernels._launch_product = fails(RuntimeError("out of resource: shared memory"))
    assert not kernels.choices.is_equal(parts["40x120"], "64x32")
    kernels._launch_product = fails(torch.AcceleratorError("an illegal memory access was encountered"))
    with pytest.raises(torch.AcceleratorError):
        kernels.choices.is_equal(parts["40x120"], "64x32")


class Device:
    """Stands in for CUDA's graphs and events. `launch` and `run` take the seconds of a call on the host and on the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.device = 0.0
        self.captured: list[float] | None = None
        self.waited, self.replays = False, 0
        outer = self

        class Graph:
            def capture_begin(self, **options: Any) -> None:
                assert options == {"capture_error_mode": "thread_local"}
                assert outer.waited, "for what was queued before"
                outer.captured = []

            def capture_end(self) -> None:
                self.calls, outer.captured = outer.captured or [], None

            def replay(self) -> None:
                outer.replays += 1
                outer.device += sum(self.calls) * (
                    1 + outer.replays % 3
                )  # others use the device, too, most of the time

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                self.at, self.reached = 0.0, False

            def record(self) -> None:
                self.at = outer.device

            def synchronize(self) -> None:
                self.reached = True

            def elapsed_time(self, other: Event) -> float:
                assert other.reached
                return 1e3 * (other.at - self.at)

        stream = type("Stream", (), {"synchronize": lambda self: setattr(outer, "waited", True)})()
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        monkeypatch.setattr(time, "perf_counter", lambda: self.host)

    def call(self, launch: float, run: float) -> None:
        self.host += launch
        if self.captured is not None:
            self.captured.append(run)


def test_a_kernel_that_is_slow_to_launch_and_fast_to_run_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the host's clock the library would win: a Triton launch takes 25 microseconds of Python, its product here 4."""
    kernels, parts, _ = make()
    device, choices = Device(monkeypatch), kernels.choices
    costs = {"library": (6e-6, 9e-6), "64x32": (25e-6, 4e-6), "64x64": (25e-6, 8e-6)}
    layers: list[int] = []
    name = "40x120"
    part = parts[name]

    def run(layer: int) -> None:
        layers.append(layer)
        device.call(*costs[choices.kind(name, ROWS)])

    object.__setattr__(part, "run", run)
    monkeypatch.setattr(products, "device_seconds", lambda run, layers, where: graphs.device_seconds(run, 3, CUDA))
    choices.is_equal, choices.kinds = (lambda part, kind: True), (lambda part: ["64x32", "library"])
    assert choices.choose(lambda size: [part], [ROWS], "")[name] == {"64": "64x32"}
    assert choices.seconds(part, "library") == pytest.approx(9e-6)
    assert layers[-graphs.CALLS :] == [call % 3 for call in range(graphs.CALLS)], (
        "the weights of several layers in turn"
    )
    costs["64x32"] = (1e-6, 10e-6)
    choices.chosen.clear()
    assert choices.choose(lambda size: [part], [ROWS], "again")[name] == {"64": "64x64"}


CUDA = torch.device("cuda", 0)


def test_sizes_between_those_that_are_timed_go_by_the_nearest_and_the_library_must_prove_each() -> None:
    kernels, parts, _ = make()
    choices, part, proved = kernels.choices, parts["40x120"], []

    def at(size: int) -> list[Any]:
        return [fused.Part(part.name, size, 1, part.run, part.inputs, part.outputs, part.weights)]

    def is_equal(part: Any, kind: str) -> bool:
        proved.append((part.rows, kind))
        return (part.rows, kind) != (640, "library")

    choices.is_equal = is_equal
    choices.seconds = lambda part, kind: {"library": 1, "128x128": 2}.get(kind, 3)
    found = choices.choose(at, [64, 512, 576, 640, 1024], "sizes")[part.name]
    assert found == {"64": "64x64", "512": "library", "576": "library", "640": "128x128", "1024": "library"}
    assert {(576, "library"), (640, "library")} < set(proved)


def test_a_trial_multiplies_random_numbers() -> None:
    one, other = torch.zeros(2, 100)
    for x in (one, other):
        products.Choices._fill(x, torch.Generator().manual_seed(1))
    assert 0.5 < one.std() < 2
    assert torch.equal(one, other), "both kinds multiply the same"


def test_what_was_chosen_is_kept_for_the_same_build_until_it_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(products.triton.knobs.cache, "dir", str(tmp_path / "not" / "yet"))
    kernels, parts, _ = make()
    choices, part, timed = kernels.choices, parts["gate_value"], []
    choices.seconds = lambda part, kind: timed.append(kind) or float(kind == products.REFERENCE)
    first = choices.choose(lambda size: [part], [ROWS], "a card")
    choices.keep()
    count = len(timed)
    assert first["how"] == "timed"
    assert count == 3

    def again(build: str) -> Any:
        choices.chosen = {}
        return choices.choose(lambda size: [part], [ROWS], build)

    assert again("a card") == first | {"how": "kept"}
    assert len(timed) == count
    assert again("a card")["how"] == "timed", "it was not kept: whole forwards had not passed"
    choices.keep()
    assert again("a card")["how"] == "kept", "in a folder that is there by now"
    assert again("another card")["how"] == "timed"
    choices.choose = lambda parts, sizes, build: build
    for word in ("none", torch.__version__, str(kernels.config)):
        assert word in kernels.choose([part.weights[0]], None, [])
    kernels._plain = True
    assert kernels.choose([], None, []) == {"how": "64x64"}
    choices.chosen = {("gate_value", ROWS): "128x128"}
    kernels.use_reference()
    assert choices.kind("gate_value", ROWS) == products.REFERENCE


def test_which_kinds_are_tried() -> None:
    kernels, parts, _ = make(width=320, history_length=300)
    choices = kernels.choices

    def kinds(name: str, rows: int) -> list[str]:
        part = parts[name]
        return choices.kinds(fused.Part(name, rows, 1, part.run, [], [], part.weights))

    few, many = ["64x64", "64x32"], ["128x128", "128x256"]
    assert kinds("gate_value", 64) == [f"fused {kind}" for kind in few]
    assert kinds("gate_value", 1024) == [f"fused {kind}" for kind in many]
    assert kinds("qkv", 256) == [f"fused {kind}" for kind in [*few, "128x128"]]
    assert kinds("embed", 64) == ["64x32"]
    assert kinds("embed", 256) == ["64x32", "128x128"]
    assert kinds("attend", 256) == ["spread"]
    assert kinds("attend", 512) == []
    assert kinds("72x320", 256) == ["64x32", "128x128", "128x256", "library"]
    assert kinds("320x120", 1024) == ["128x128", "library"], "none wider than the weight"
    choices._capability = 80
    assert kinds("gate_value", 1024) == ["fused 128x128"]
    choices._narrow = False
    assert kinds("gate_value", 64) == []
    narrow = products.PRODUCT_TILES["64x32"]
    assert [narrow.stages(room * 1024) for room in (99, 163, 227)] == [3, 6, 8]
    assert narrow.stages(2**12 + 3 * 96 * 128 * 4, 4) == 3 == 1 + narrow.stages(2**12 + 3 * 96 * 128 * 4 - 1, 4)
    sizes = row_sizes(2**14)
    assert products.timed_sizes(sizes) == [64, 128, 256, 512, 1024, 1536, 2048, 4096, 8192, 16384]
    assert products.timed_sizes([64, 192, 320]) == [64, 320]
