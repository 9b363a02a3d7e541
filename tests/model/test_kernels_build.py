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
import contextlib, io, json, re, torch, triton, triton.language as tl
from dataclasses import asdict
from triton.compiler import ASTSource
from model.split.kernels import build, launch as launching
from model.split.kernels.build import Compiled, compiled, compiling_for, describe, launches, read_codes
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
    found = [
        each for names, kinds, overrides in cases
        for each in compiled(config_of(overrides), getattr(torch, dtype), capability, kinds, names)
    ]
    starts = [each.kernel.asm["ptx"].count("griddepcontrol.launch_dependents") for each in found]
    return [
        record | {"before": before_waiting(each), "launch_dependents": count}
        for record, each, count in zip(describe(found), found, starts)
    ]

@triton.jit
def misspelt(x, SIZE: tl.constexpr, DEPENDENT: tl.constexpr = False):
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
        describe([binary(misspelt, torch.zeros(16), SIZE=16)])
    except Exception as error:
        return str(error)
    return ""

def raised(work, *given):
    try:
        work(*given)
    except Exception as error:
        return type(error).__name__

def beforehand():
    # a kernel that does not compile is left to its first launch, and the launcher is there again
    kernels, launching.KERNELS = launching.KERNELS, (misspelt,)
    build.driver.set_active(build.Target(90))
    mine = launching.Launching(launch, 0, dependent=False)
    seen = []
    def work():
        mine._launch(misspelt, (1,), (torch.zeros(16),), SIZE=16)
        seen.append(launching.compiled_variants())
    mine.compile_on_threads(work)
    found = [seen, launching.compiled_variants(), mine._launcher is launch]
    found += [raised(mine.compile_on_threads, lambda: 1 // 0), mine._launcher is launch]
    launching.KERNELS = kernels
    return found

def printed():
    # the report, of kernels that are compiled already
    asked, ready = [], compiled(config_of({"width": 1024, "head_width": 64}), torch.bfloat16, 90, ["64x64"], ("norm_rows",))
    build.compiled = lambda config, dtype, capability, *, names: (
        asked.append([config.width, config.head_width, str(dtype), capability, names and sorted(names)]), ready,
    )[1]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        build.main(["--capability", "90", "--head-width", "64"])
    build.compiled = compiled
    return asked, out.getvalue().splitlines()

def spilling():
    # attention in half of the registers that it takes
    found = []
    def note(kernel, grid, arguments, **constants):
        if kernel.fn.__name__ == "attend_tiles":
            found.append(kernel.warmup(*arguments, grid=grid, **(constants | {"maxnreg": 64})))
    with compiling_for(90):
        build.forward(config_of({"head_width": 64}), torch.bfloat16, 90, note, ["64x64"])
    code = Compiled("attend_tiles", {}, found[0]).kernel.asm
    return asdict(*read_codes([code["cubin"]], 90)) | {"ptx": code["ptx"].count("st.local")}

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
    triton.knobs.runtime.jit_cache_hook = hook
    build.driver.set_active(build.Target(901))  # a device on which nothing is compiled yet
    build.Target.get_current_target = lambda self: build.GPUTarget("cuda", 90, 32)
    kernels.compile(lambda: (trunk.body(step), trunk.tail(step)))
    first, forced = sorted(asked), kernels.choices.forced
    asked.clear()
    for kind in COMPILED:
        kernels.choices.forced = kind
        trunk.body(step)
        trunk.tail(step)
    return [sorted(built), sorted(asked), first, forced]

found = {
    "kernels": {f"{dtype} {capability}": compile_all(dtype, capability, cases) for (dtype, capability), cases in CASES.items()},
    "launches": [launches(random_config(layers=24), kind, 1, 0, 64) for kind in ("64x64", "fused 64x32")],
    "programs": [
        launches(random_config(layers=8, history_length=1022), "fused 128x128", 1, 1023, 512),
        launches(random_config(layers=2, history_length=300), "spread", 3, 5, 70),
    ],
    "readings": build.readings(random_config(history_length=1022, width=2560, head_width=128), 90),
    "hasty": before_waiting(binary(hasty, torch.zeros(16), torch.zeros(16), SIZE=16)),
    "spilling": spilling(),
    "broken": broken(),
    "beforehand": beforehand(),
    "printed": printed(),
    "raised": [raised(read_codes, [b"nothing"], 90)],
    "key": launching.source_key().split(),
}
some = compiled(config_of({"width": 1024, "head_width": 64}), torch.bfloat16, 90, ["64x64"], ("norm_rows",))
output, build._output = build._output, lambda tool, *options, of: "" if tool == silent else output(tool, *options, of=of)
for silent in ("cuobjdump", "nvdisasm"):
    found["raised"].append(raised(describe, some))
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
STACK_BYTES = {("attend_tiles", 128, "float32", 90): 96}
ALL = {"attend_tiles", "gate_rows", "gather_rows", "multiply_tiles", "norm_rows", "project_tiles", "rotate_rows"}
FUSED = {"multiply_gate_tiles", "multiply_rotate_tiles"}
PRODUCTS = {"attend_tiles", "multiply_tiles", "project_tiles"} | FUSED
# what no kernel of a forward writes
CONSTANT = {"counts", "scale", "bias", "post_scale", "post_bias", "rope"}


@pytest.mark.parametrize(
    ("dtype", "capability", "names"),
    [
        ("bfloat16", 90, ALL | FUSED | {"add_chunks"}),
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
        allowed = STACK_BYTES.get((kernel["kernel"], width, dtype, capability), 0)
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
    built, asked, beforehand, forced = compiled["hashes"]
    assert built == asked == beforehand
    assert forced is None
    assert len(built) > 24
    by_name = {name for *_, name in built}
    assert {"attend_tiles", "multiply_tiles", "multiply_gate_tiles"} < by_name


def test_a_forward_is_so_many_launches(compiled: dict[str, Any]) -> None:
    assert compiled["launches"] == [[9 * 24 + 6, 8516, 6882], [7 * 24 + 5, 5524, 3890]], "separate and fused"
    assert compiled["programs"] == [[61, 34454, 33117], [26, 4490, 3605]]


def test_a_cold_start_compiles_no_more_than_is_counted(compiled: dict[str, Any]) -> None:
    """docs/gpu.md multiplies this by what one takes; it was 66 when sizes were constants of the binaries."""
    assert len(compiled["hashes"][1]) <= 30
    assert compiled["readings"] == 254


def test_numbers_that_leave_the_registers_are_seen(compiled: dict[str, Any]) -> None:
    """PTX knows nothing of it: registers are given out later."""
    code = compiled["spilling"]
    assert code["stack_bytes"] > 500
    assert code["spills"] > 100
    assert code["ptx"] == 0


def test_a_kernel_that_does_not_compile_is_caught(compiled: dict[str, Any]) -> None:
    assert "softmix" in compiled["broken"]


def test_what_is_compiled_beforehand_may_fail_and_is_left_to_its_first_launch(compiled: dict[str, Any]) -> None:
    assert compiled["beforehand"] == [[1], 0, True, "ZeroDivisionError", True]
    assert len(set(compiled["key"])) == 11, "a key of its own for each kernel"


def test_a_tool_that_fails_or_says_nothing_is_no_reading(compiled: dict[str, Any]) -> None:
    assert compiled["raised"] == ["CalledProcessError", "ValueError", "ValueError"]


def test_the_report_names_each_kernel_once_and_what_forwards_launch(compiled: dict[str, Any]) -> None:
    asked, lines = compiled["printed"]
    norms = [[width, 32, ["gate_rows", "norm_rows"]] for width in (1024, 2048, 2560, 8192)]
    for dtype in ("bfloat16", "float32"):
        found = [[width, head, names] for width, head, of, _, names in asked if of == f"torch.{dtype}"]
        assert found == [[256, 64, None], *norms]
    head, *rows, count = lines[:-9]
    assert len({len(line) for line in (head, *rows)}) == 1
    assert [line.split()[:4] for line in rows] == [["norm_rows", "90", "bf16", "1024"]] * 3
    assert count == "sm_90: 3 binaries"
    assert lines[-9] == "separate 64x64, 8 layers, 1 x (0 + 64): 78 launches, 6185 of 8985 programs (69%)"
    assert lines[-1] == "fused fused 128x128, 8 layers, 1 x (1023 + 512): 61 launches, 57752 of 64392 programs (90%)"
    assert [line.split(": ")[1].split()[4] for line in lines[-8:-1]] == (
        ["46470", "144088", "7673", "38598", "115352", "5705", "24822"]
    )
