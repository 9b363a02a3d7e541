"""Every kernel that an engine launches compiles for Ampere, Hopper and Blackwell, without a card; the engine runs in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.timeout(600),  # the fixture compiles for all tests
    # looked for, not imported: it would be imported without its interpreter, which other files of this process need
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here"),
]

COMPILE = """
import json, re, torch, triton, triton.language as tl
from dataclasses import asdict, replace
from triton.backends.compiler import GPUTarget
from model.split.kernels.build import Collector, collect, compile_launch, describe, distinct, launches_a_forward, read_code
from model.presets import with_preset
from tests.model.builders import random_config
attention = ("attend_tiles",)
fused = ("multiply_gate_tiles", "multiply_rotate_tiles")
products = [(("attend_tiles", "multiply_tiles", "project_tiles", *fused), {"head_width": 128})]
CASES = {
    ("bfloat16", 90): [
        (None, {"head_width": 128, "layers": 2}),
        (attention, {"head_width": 16, "context_attention": "bidirectional"}),
        (attention, {"head_width": 32}),
        (attention, {"head_width": 64}),
        (("attend_tiles", "norm_head_rows", "gate_rows"), {"preset": "phoenix-2026"}),
        (("attend_tiles", "norm_rows", "gate_rows"), {"preset": "vanilla"}),
    ],
    ("float32", 90): [
        (None, {"head_width": 64, "layers": 2, "has_dwell": False, "has_post_age": False}),
        (attention, {"head_width": 32}),
        (attention, {"head_width": 128}),
    ],
    ("bfloat16", 80): products,
    ("bfloat16", 100): products,
}
def is_held(launch, capability):
    # of fused products those with the most in registers, and on Hopper those with the least; `make kernels` has them all
    name, constants = launch.kernel.fn.__name__, dict(launch.constants)
    if name == "multiply_gate_tiles":
        return constants["TILE_OUT"] in {80: (64,), 90: (16, 128), 100: (128,)}[capability]
    stores = constants.get("KV_HEADS") and not constants.get("QUERY_HEADS")
    return name != "multiply_rotate_tiles" or (stores and constants["TILE_OUT"] in {80: (64,), 90: (16, 64), 100: (64,)}[capability])

def first_of(ptx):
    # waiting for the kernel before, starting the next, or a look at memory that others write
    seen = re.findall(r"griddepcontrol\\.\\w+|(?:ld|st|atom|red|cp)\\.\\w+", ptx)
    return [each for each in seen if each not in ("ld.param", "ld.shared", "st.shared")][:3]

def compile_all(dtype, capability, cases):
    for kernels, overrides in cases:
        shape = {"width": 128, "layers": 1, "query_heads": 2, "kv_heads": 1} | overrides
        config = with_preset(random_config(**{name: shape[name] for name in shape if name != "preset"}), shape.get("preset", "grok"))
        for launch in distinct(collect(config, getattr(torch, dtype), dependent=capability >= 90)):
            if (kernels is None or launch.kernel.fn.__name__ in kernels) and is_held(launch, capability):
                compiled = compile_launch(launch, GPUTarget("cuda", capability, 32))
                yield describe(launch, compiled) | {"first": first_of(compiled.asm["ptx"])}

def spilling():
    # the fp32 attention as it was
    config = random_config(head_width=64, query_heads=2, kv_heads=1, layers=1, width=128)
    launches = distinct(collect(config, torch.float32))
    launch = next(launch for launch in launches if launch.kernel.fn.__name__ == "attend_tiles")
    launch = replace(launch, constants=tuple(sorted((dict(launch.constants) | {"PRECISION": "ieee", "TILE_KEYS": 64}).items())))
    compiled = compile_launch(launch)
    return asdict(read_code(compiled.asm["cubin"])) | {"ptx": compiled.asm["ptx"].count("st.local")}

@triton.jit
def misspelt(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), tl.softmix(tl.load(x + tl.arange(0, SIZE))))

def broken():
    collector = Collector()
    collector(misspelt, (1,), (torch.zeros(16),), SIZE=16)
    try:
        compile_launch(next(iter(collector.launches)))
    except Exception as error:
        return str(error)
    return ""

print(json.dumps({
    "kernels": {f"{dtype} {capability}": list(compile_all(dtype, capability, cases)) for (dtype, capability), cases in CASES.items()},
    "launches": [launches_a_forward(random_config(layers=24), kind) for kind in ("64x64", "fused 64x32")],
    "spilling": spilling(),
    "broken": broken(),
}))
"""


def run(source: str, directory: Path, **environment: str) -> str:
    """The last line that it prints."""
    script = directory / "script.py"  # a file: Triton reads the source of its kernels
    script.write_text(source)
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, str(script)]
    finished = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=580)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process compiles: to import torch and triton takes as long as some kernels."""
    found: dict[str, Any] = json.loads(run(COMPILE, tmp_path_factory.mktemp("triton")))
    return found


# Bytes of stack a thread, where it cannot be none: the fp32 engine at the widest head is there to be compared with.
STACK_BYTES = {("attend_tiles", 128, "fp32", 90): 256, ("attend_tiles", 128, "bf16", 80): 16}
ALL = {"attend_tiles", "gate_rows", "gather_rows", "multiply_tiles", "norm_rows", "project_tiles", "rotate_rows"}
FUSED = {"multiply_gate_tiles", "multiply_rotate_tiles"}
PRODUCTS = {"attend_tiles", "multiply_tiles", "project_tiles"} | FUSED


@pytest.mark.parametrize(
    ("dtype", "capability", "names"),
    [
        ("bfloat16", 90, ALL | FUSED | {"norm_head_rows"}),
        ("float32", 90, ALL),
        ("bfloat16", 80, PRODUCTS),
        ("bfloat16", 100, PRODUCTS),
    ],
)
def test_every_kernel_compiles_and_keeps_its_numbers_in_registers(
    dtype: str, capability: int, names: set[str], compiled: dict[str, Any]
) -> None:
    found = compiled["kernels"][f"{dtype} {capability}"]
    assert {kernel["kernel"] for kernel in found} == names
    for kernel in found:
        assert kernel["shared_bytes"] <= {80: 163, 90: 227, 100: 227}[capability] * 1024, kernel
        width = kernel["constants"].get("HEAD_WIDTH", 0) if kernel["kernel"] == "attend_tiles" else 0
        allowed = STACK_BYTES.get((kernel["kernel"], width, kernel["dtype"], capability), 0)
        assert kernel["stack_bytes"] <= allowed, kernel
        assert allowed or kernel["spills"] == 0, kernel
        assert 8 < kernel["registers"] <= 255
        order = ["griddepcontrol.wait", "griddepcontrol.launch_dependents"] if capability >= 90 else []
        assert [each for each in kernel["first"] if each.startswith("griddepcontrol")] == order, kernel
        assert kernel["first"][: len(order)] == order, "nothing may be read before the kernel before has ended"
        if kernel["kernel"] in PRODUCTS:
            assert kernel["matrix_old" if capability == 80 else "matrix"] > 0, "products must use the matrix units"
            assert kernel["wide_copies"] > 0, "operands must be loaded 16 bytes at a time"
            assert kernel["narrow_copies"] == 0, kernel


def test_a_forward_is_so_many_launches(compiled: dict[str, Any]) -> None:
    assert compiled["launches"] == [9 * 24 + 6, 7 * 24 + 5], "separate and fused"


def test_numbers_that_leave_the_registers_are_seen(compiled: dict[str, Any]) -> None:
    """PTX knows nothing of it: registers are given out later."""
    code = compiled["spilling"]
    assert code["stack_bytes"] > 1000
    assert code["spills"] > 100
    assert code["ptx"] == 0


def test_a_kernel_that_does_not_compile_is_caught(compiled: dict[str, Any]) -> None:
    assert "softmix" in compiled["broken"]


ENGINE = """
import sys, numpy as np, torch
from model.dense import DenseEngine
from model.engine import Item
from model.split.graphs import PlainRecorder
from model.selftest import same_bits
from model.split.engine import SplitEngine
from model.presets import with_preset
from tests.model.builders import random_candidates, random_config, random_context, random_ranker
from model.tolerances import PARITY
for dtype, layers, preset in (
    (torch.float32, 2, "grok"), (torch.bfloat16, 1, "grok"), (torch.float32, 1, "vanilla"),
    (torch.float32, 1, "phoenix-2026"), (torch.bfloat16, 1, "gemma"),
):
    shape = random_config(width=32, layers=layers, history_length=9, query_heads=2, kv_heads=1)
    config = with_preset(shape, preset)
    ranker = random_ranker(config)
    engine = SplitEngine(ranker, "cpu", dtype, cache_bytes=2**20, kernels="fused", capacity=64)
    if (dtype, preset) == (torch.bfloat16, "grok"):
        engine._kernels.fusion.chosen = {(name, 64): "fused 64x64" for name in engine._trunk.fusable_weights()}
        engine._kernels.gate = engine._kernels.rotate = None  # would be called by none
    items = [
        Item(random_context(config, history, seed), random_candidates(config, count, seed))
        for seed, (history, count) in enumerate([(9, 3), (0, 1), (4, 62)])
    ]
    items[0].context.post_ids[2] = 0
    outcomes = engine.forward(items)
    for ours, theirs in zip(outcomes, DenseEngine(ranker, torch.float32).forward(items)):
        assert np.abs(ours.scores.logits - theirs.scores.logits).max() < PARITY[dtype].logits
        assert np.abs(ours.scores.continuous - theirs.scores.continuous).max() < PARITY[dtype].probabilities
    alone = engine.forward([Item(items[0].context, items[0].candidates.chunk(1, 2))])[0]
    assert alone.cache == "hit"
    assert np.array_equal(alone.scores.logits, outcomes[0].scores.logits[1:2])
print("equal")
"""


def test_the_engine_runs_on_its_kernels_in_the_interpreter(tmp_path: Path) -> None:
    assert run(ENGINE, tmp_path, TRITON_INTERPRET="1") == "equal"
