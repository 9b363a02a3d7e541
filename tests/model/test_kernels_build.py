"""Every kernel that an engine launches compiles for Ampere, Hopper and Blackwell, without a card; the engine runs in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# looked for, not imported: it would be imported without its interpreter, which other files of this process need
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")

ROOT = Path(__file__).resolve().parents[2]

COMPILE = """
import json, re, sys, torch
from triton.backends.compiler import GPUTarget
from model.split.kernels.build import collect, compile_launch, describe, distinct, launches_a_forward
from model.presets import with_preset
from tests.model.builders import random_config
dtype, capability = getattr(torch, sys.argv[1]), int(sys.argv[2])
attention = ("attend_tiles",)
if capability != 90:
    products = ("multiply_tiles", "project_tiles", "multiply_gate_tiles", "multiply_rotate_tiles")
    cases = [(("attend_tiles", *products), {"head_width": 128})]
elif dtype == torch.bfloat16:
    cases = [
        (None, {"head_width": 128, "layers": 2}),
        (attention, {"head_width": 16, "context_attention": "bidirectional"}),
        (attention, {"head_width": 32}),
        (attention, {"head_width": 64}),
        (("attend_tiles", "norm_head_rows", "gate_rows"), {"preset": "phoenix-2026"}),
        (("attend_tiles", "norm_rows", "gate_rows"), {"preset": "vanilla"}),
    ]
else:
    cases = [
        (None, {"head_width": 64, "layers": 2, "has_dwell": False, "has_post_age": False}),
        (attention, {"head_width": 32}),
        (attention, {"head_width": 128}),
    ]
def is_held(launch):
    # of fused products those with the most in registers, and on Hopper those with the least; `make kernels` has them all
    name, constants = launch.kernel.fn.__name__, dict(launch.constants)
    if name == "multiply_gate_tiles":
        return constants["TILE_OUT"] in ((16, 128) if capability == 90 else (128 if capability > 90 else 64,))
    stores = constants.get("KV_HEADS") and not constants.get("QUERY_HEADS")
    return name != "multiply_rotate_tiles" or stores and constants["TILE_OUT"] in ((16, 64) if capability == 90 else (64,))

def first_of(ptx):
    # waiting for the kernel before, starting the next, or a look at memory that others write
    seen = re.findall(r"griddepcontrol\\.\\w+|(?:ld|st|atom|red|cp)\\.\\w+", ptx)
    return [each for each in seen if each not in ("ld.param", "ld.shared", "st.shared")][:3]

found = []
for kernels, overrides in cases:
    preset = overrides.pop("preset", "grok")
    shape = {"width": 128, "layers": 1, "query_heads": 2, "kv_heads": 1}
    for launch in distinct(collect(with_preset(random_config(**shape | overrides), preset), dtype, dependent=capability >= 90)):
        if (kernels is None or launch.kernel.fn.__name__ in kernels) and is_held(launch):
            compiled = compile_launch(launch, GPUTarget("cuda", capability, 32))
            found.append(describe(launch, compiled) | {"first": first_of(compiled.asm["ptx"])})
counts = [launches_a_forward(random_config(layers=24), kind) for kind in ("64x64", "fused 64x32")]
print(json.dumps({"kernels": found, "launches": counts}))
"""

SPILLING = """
import json, torch
from dataclasses import asdict, replace
from model.split.kernels.build import collect, compile_launch, distinct, read_code
from tests.model.builders import random_config
config = random_config(head_width=64, query_heads=2, kv_heads=1, layers=1, width=128)
launches = distinct(collect(config, torch.float32))
launch = next(launch for launch in launches if launch.kernel.fn.__name__ == "attend_tiles")
launch = replace(launch, constants=tuple(sorted((dict(launch.constants) | {"PRECISION": "ieee", "TILE_KEYS": 64}).items())))
compiled = compile_launch(launch)
print(json.dumps(asdict(read_code(compiled.asm["cubin"])) | {"ptx": compiled.asm["ptx"].count("st.local")}))
"""

BROKEN = """
import torch, triton, triton.language as tl
from model.split.kernels.build import Collector, compile_launch

@triton.jit
def misspelt(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), tl.softmix(tl.load(x + tl.arange(0, SIZE))))

collector = Collector()
collector(misspelt, (1,), (torch.zeros(16),), SIZE=16)
compile_launch(next(iter(collector.launches)))
"""


def run(source: str, directory: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = directory / "script.py"  # a file: Triton reads the source of its kernels
    script.write_text(source)
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, str(script), *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=600
    )


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
    dtype: str, capability: int, names: set[str], tmp_path: Path
) -> None:
    finished = run(COMPILE, tmp_path, dtype, str(capability))
    assert finished.returncode == 0, finished.stderr[-3000:]
    report = json.loads(finished.stdout.splitlines()[-1])
    assert report["launches"] == [9 * 24 + 6, 7 * 24 + 5], "separate and fused"
    found = report["kernels"]
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


def test_numbers_that_leave_the_registers_are_seen(tmp_path: Path) -> None:
    """The fp32 attention as it was. PTX knows nothing of it: registers are given out later."""
    finished = run(SPILLING, tmp_path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    code = json.loads(finished.stdout.splitlines()[-1])
    assert code["stack_bytes"] > 1000
    assert code["spills"] > 100
    assert code["ptx"] == 0


def test_a_kernel_that_does_not_compile_is_caught(tmp_path: Path) -> None:
    finished = run(BROKEN, tmp_path)
    assert finished.returncode != 0
    assert "softmix" in finished.stderr


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
    finished = run(ENGINE, tmp_path, TRITON_INTERPRET="1")
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert finished.stdout.splitlines()[-1] == "equal"
