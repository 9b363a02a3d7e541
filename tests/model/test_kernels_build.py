"""Every kernel that an engine launches compiles for Ampere, Hopper and Blackwell, without a card."""

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
import json, os, re, torch, triton, triton.language as tl
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from triton.compiler import ASTSource
from model.split.kernels import build
from model.split.kernels.build import Code, Compiled, compiled, compiling_for, describe, launches, read_code
from model.split.kernels.contract import Step, Tables
from model.split.kernels.fused import FusedKernels, launch
from model.split.kernels.order import wait_for_previous
from model.split.kernels.products import COMPILED
from model.split.step import host_arrays, step_arrays, step_bytes
from model.split.trunk import SplitTrunk
from model.split.weights import split_weights
from model.presets import with_preset
from tests.model.builders import random_config, random_ranker
attention = ("attend_tiles",)
products = ("attend_tiles", "add_chunks", "multiply_tiles", "project_tiles", "multiply_gate_tiles", "multiply_rotate_tiles")
LONG = {"history_length": 300}
norms = [(("norm_rows",), ("64x64",), {"width": width, "head_width": 64}) for width in (1024, 2048, 2560, 8192)]
CASES = {
    ("bfloat16", 90): [
        (None, COMPILED, LONG | {"head_width": 128, "layers": 2}),
        (attention, ("64x64",), {"head_width": 16, "context_attention": "bidirectional"}),
        (attention, ("64x64", "spread"), LONG | {"head_width": 32}),
        (attention, ("64x64",), {"head_width": 64}),
        (("attend_tiles", "norm_head_rows", "gate_rows"), ("64x64",), {"preset": "phoenix-2026"}),
        (("attend_tiles", "norm_rows", "gate_rows"), ("64x64", "spread"), LONG | {"preset": "vanilla"}),
        *norms, (("norm_rows",), ("64x64",), {"preset": "vanilla", "width": 2048, "head_width": 64}),
    ],
    ("float32", 90): [
        (None, ("64x64",), {"head_width": 64, "layers": 2, "has_dwell": False, "has_post_age": False}),
        (attention, ("64x64",), {"head_width": 32}),
        (attention, ("64x64",), {"head_width": 128}),
    ],
    ("bfloat16", 80): [(products, COMPILED, LONG | {"head_width": 128}), *norms],
    ("bfloat16", 100): [(products, COMPILED, LONG | {"head_width": 128}), *norms],
}
def kept(cubin):
    # NVIDIA's disassembler takes a third of a second for each binary: what it reads is kept as Triton keeps what it compiles
    of = sha256(cubin + Path(build.__file__).read_bytes() + triton.__version__.encode())
    file = Path(triton.knobs.cache.dir) / "read" / f"{of.hexdigest()}.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_suffix(f".{os.getpid()}")
        whole.write_text(json.dumps(asdict(read_code(cubin))))
        whole.rename(file)
    return Code(**json.loads(file.read_text()))

build.read_code = kept

def config_of(overrides):
    shape = {"width": 128, "layers": 1, "query_heads": 2, "kv_heads": 1} | overrides
    config = random_config(**{name: shape[name] for name in shape if name != "preset"})
    return with_preset(config, shape.get("preset", "grok"))

def before_waiting(each):
    # the pointers through which a kernel reads before it has waited, and what else it may not do there
    names = [name for name, kind in each.kernel.src.signature.items() if kind != "constexpr"]
    head, waits, _ = each.kernel.asm["ptx"].partition("griddepcontrol.wait")
    body = head[head.index("{", head.index(".entry")) + 1 :]
    known, read = {}, set()
    for line in re.split(r"[;\\n]", body):
        parameter = re.search(r"(%\\w+), \\[\\w+_param_(\\d+)\\]", line)
        found = re.search(r"^\\s*(?:@!?%\\w+ )?\\s*(\\S+)\\s+(.*)", line)
        if parameter:
            known[parameter[1]] = {int(parameter[2])}
        elif found and not found[1].startswith((".", "//")):
            registers = re.findall(r"%\\w+", found[2])
            if re.match(r"(st|atom|red|bra|ret|cp)\\b", found[1]) and "shared" not in found[1] or found[1].endswith(":"):
                read.add(found[1])
            sources = registers[1:] if registers else []
            depends = set().union(*(known.get(register, set()) for register in sources)) if sources else set()
            if found[1].startswith("ld.global"):
                address = re.findall(r"%\\w+", found[2][found[2].rindex("[") :])
                depends = set().union(*(known.get(register, set()) for register in address))
                read |= {names[place] for place in depends if each.kernel.src.signature[names[place]].startswith("*")}
                registers = re.findall(r"%\\w+", found[2][: found[2].rindex("[")])
                for register in registers:
                    known[register] = depends
            elif registers:
                known[registers[0]] = depends
    return sorted(read) if waits else None

def compile_all(dtype, capability, cases):
    for names, kinds, overrides in cases:
        for each in compiled(config_of(overrides), getattr(torch, dtype), capability, kinds, names):
            starts = each.kernel.asm["ptx"].count("griddepcontrol.launch_dependents")
            yield describe(each) | {"before": before_waiting(each), "launch_dependents": starts}

@triton.jit
def misspelt(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), tl.softmix(tl.load(x + tl.arange(0, SIZE))))

@triton.jit
def hasty(x, out, SIZE: tl.constexpr):
    seen = tl.load(x + tl.arange(0, SIZE))
    wait_for_previous(True)
    tl.store(out + tl.arange(0, SIZE), seen)

def binary(kernel, *arguments, **constants):
    before = build.driver._active
    with compiling_for(90):
        made = Compiled(kernel.fn.__name__, constants, kernel.warmup(*arguments, grid=(1,), **constants))
    assert build.driver._active is before
    return made

def broken():
    try:
        describe(binary(misspelt, torch.zeros(16), SIZE=16))
    except Exception as error:
        return str(error)
    return ""

def spilling():
    # fp32 attention as it once was
    found = []
    def note(kernel, grid, arguments, **constants):
        if kernel.fn.__name__ == "attend_tiles":
            found.append(kernel.warmup(*arguments, grid=grid, **(constants | {"PRECISION": "ieee", "TILE_KEYS": 64})))
    with compiling_for(90):
        build.forward(config_of({"head_width": 64}), torch.float32, 90, note, ["64x64"])
    code = Compiled("attend_tiles", {}, found[0]).kernel.asm
    return asdict(kept(code["cubin"])) | {"ptx": code["ptx"].count("st.local")}

def hashes(config):
    # of what the build compiles, and of what an engine's own launches of real tensors would
    made = [(each.name, each.kernel) for each in compiled(config, torch.bfloat16, 90)]
    built = {(one.src.hash(), one.metadata.num_warps, one.metadata.num_stages, name) for name, one in made}
    asked = set()
    def hook(fn, compile, **given):
        source = ASTSource(fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0])
        asked.add((source.hash(), compile["num_warps"], compile["num_stages"], fn.name.rsplit(".")[-1]))
        return True  # nothing is compiled, hence nothing started
    weights = split_weights(random_ranker(config), torch.device("cpu"), torch.bfloat16, torch.bfloat16)
    kernels = FusedKernels(config, weights, torch.bfloat16, launch, capability=90)
    tables = Tables(*(torch.zeros(8, config.width) for _ in range(3)))
    trunk = SplitTrunk(config, weights, tables, kernels, 64, torch.bfloat16)
    buffer = torch.zeros(step_bytes(config, 64), dtype=torch.uint8)
    step = Step(trunk.mixed, step_arrays(buffer, config, 64), host_arrays(buffer, config, 64), (), 64)
    before, triton.knobs.runtime.jit_cache_hook = build.driver._active, hook
    build.driver.set_active(build.Target(901))  # a device on which nothing is compiled yet
    build.Target.get_current_target = lambda self: build.GPUTarget("cuda", 90, 32)
    for kind in COMPILED:
        kernels.choices.forced = kind
        trunk.body(step)
        trunk.tail(step)
    return [sorted(built), sorted(asked)]

found = {
    "kernels": {f"{dtype} {capability}": list(compile_all(dtype, capability, cases)) for (dtype, capability), cases in CASES.items()},
    "launches": [launches(random_config(layers=24), kind, 1, 0, 64)[0] for kind in ("64x64", "fused 64x32")],
    "programs": launches(random_config(layers=8, history_length=1022), "fused 128x128", 1, 1023, 512),
    "readings": build.readings(random_config(history_length=1022, width=2560, head_width=128), 90),
    "hasty": before_waiting(binary(hasty, torch.zeros(16), torch.zeros(16), SIZE=16)),
    "spilling": spilling(),
    "broken": broken(),
}
found["hashes"] = hashes(config_of(LONG | {"head_width": 128, "layers": 2}))
print(json.dumps(found))
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
STACK_BYTES = {("attend_tiles", 128, "fp32", 90): 96}
ALL = {"attend_tiles", "gate_rows", "gather_rows", "multiply_tiles", "norm_rows", "project_tiles", "rotate_rows"}
FUSED = {"multiply_gate_tiles", "multiply_rotate_tiles"}
PRODUCTS = {"attend_tiles", "multiply_tiles", "project_tiles"} | FUSED
# what no kernel of a forward writes
CONSTANT = {"counts", "scale", "bias", "post_scale", "post_bias", "rope"}


@pytest.mark.parametrize(
    ("dtype", "capability", "names"),
    [
        ("bfloat16", 90, ALL | FUSED | {"norm_head_rows", "add_chunks"}),
        ("float32", 90, ALL),
        ("bfloat16", 80, PRODUCTS | {"add_chunks", "norm_rows"}),
        ("bfloat16", 100, PRODUCTS | {"add_chunks", "norm_rows"}),
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
        if capability < 90:
            assert kernel["before"] is None
        else:
            assert set(kernel["before"]) <= CONSTANT, (
                "nothing that a kernel writes may be read, and nothing written, before"
            )
            assert kernel["launch_dependents"] == 1
        if kernel["kernel"] in PRODUCTS:
            assert kernel["matrix_old" if capability == 80 else "matrix"] > 0, "products must use the matrix units"
            assert kernel["wide_copies"] > 0, "operands must be loaded 16 bytes at a time"
            assert kernel["narrow_copies"] == 0, kernel


def test_what_may_be_read_before_waiting_is_and_nothing_else_passes(compiled: dict[str, Any]) -> None:
    early = {kernel["kernel"]: set(kernel["before"]) for kernel in compiled["kernels"]["bfloat16 90"]}
    assert {"counts", "rope"} <= early["rotate_rows"]
    assert {"counts", "scale"} <= early["norm_rows"]
    assert all("counts" in read for read in early.values())
    assert compiled["hasty"] == ["x"]


def test_what_the_build_compiles_is_what_an_engine_launches(compiled: dict[str, Any]) -> None:
    """By Triton's own hash, on which its cache goes: of every launch, strings among the constants included."""
    built, asked = compiled["hashes"]
    assert built == asked
    assert len(built) > 24
    by_name = {name for *_, name in built}
    assert {"attend_tiles", "multiply_tiles", "multiply_gate_tiles"} < by_name


def test_a_forward_is_so_many_launches(compiled: dict[str, Any]) -> None:
    assert compiled["launches"] == [9 * 24 + 6, 7 * 24 + 5], "separate and fused"
    _, programs, working = compiled["programs"]
    assert 0.7 < working / programs < 1


def test_a_cold_start_compiles_no_more_than_is_counted(compiled: dict[str, Any]) -> None:
    """docs/gpu.md multiplies this by what one takes; it was 66 when sizes were constants of the binaries."""
    assert len(compiled["hashes"][1]) <= 30
    assert 200 < compiled["readings"] < 300


def test_numbers_that_leave_the_registers_are_seen(compiled: dict[str, Any]) -> None:
    """PTX knows nothing of it: registers are given out later."""
    code = compiled["spilling"]
    assert code["stack_bytes"] > 1000
    assert code["spills"] > 100
    assert code["ptx"] == 0


def test_a_kernel_that_does_not_compile_is_caught(compiled: dict[str, Any]) -> None:
    assert "softmix" in compiled["broken"]
