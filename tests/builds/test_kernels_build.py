"""Without a card: every kernel that an engine launches compiles for Ampere, Hopper and Blackwell, and passes the trial that a server
makes before it uses a card, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from model.split.probe import Trial, try_in_child
from tests.model.builders import random_config

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # looked for, not imported: it would be imported without its interpreter, which other files of this process need
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here"),
]

COMPILE = """
import json, torch
from loadtest.gpu.build import compiled
from model.presets import with_preset
from tests.model.builders import random_config

shape = {"width": 128, "layers": 2, "query_heads": 2, "kv_heads": 1, "history_length": 300}
CASES = [
    ("bfloat16", 80, "grok", {"head_width": 128}), ("bfloat16", 90, "grok", {"head_width": 128}),
    ("bfloat16", 100, "grok", {"head_width": 128}), ("bfloat16", 90, "grok", {"head_width": 64, "width": 2560}),
    ("bfloat16", 90, "vanilla", {}), ("float32", 90, "grok", {"head_width": 64}),
]
found = []
for dtype, capability, preset, more in CASES:
    config = with_preset(random_config(**(shape | more)), preset)
    for each in compiled(config, getattr(torch, dtype), capability):
        ptx = each.binary.asm["ptx"]
        matrix = any(word in ptx for word in ("wgmma.mma_async", "mma.sync", "tcgen05.mma"))
        found.append({"case": f"{dtype} {capability} {preset} {more}", "kernel": each.name, "matrix": matrix, **each.usage()})
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What one process compiles."""
    script = tmp_path_factory.mktemp("triton") / "script.py"
    script.write_text(COMPILE)
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=580, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(finished.stdout.splitlines()[-1])
    return found


SEVEN = {"attend_tiles", "gate_rows", "gather_rows", "multiply_tiles", "norm_rows", "project_tiles", "rotate_rows"}
PRODUCTS = {"attend_tiles", "multiply_tiles", "project_tiles"}
SHARED_KIB = {"80": 163, "90": 227, "100": 227}


def test_seven_kernels_compile_and_spill_no_registers(compiled: list[dict[str, Any]]) -> None:
    cases: dict[str, list[str]] = {}
    for each in compiled:
        cases.setdefault(each["case"], []).append(each["kernel"])
        assert each["shared_bytes"] <= SHARED_KIB[each["case"].split()[1]] * 1024, each
        assert each["stack_bytes"] == 0, each
        assert each["matrix"] == (each["kernel"] in PRODUCTS), "products use the matrix units, nothing else does"
    assert len(cases) == 6
    assert all(set(names) == SEVEN for names in cases.values())
    assert max(map(len, cases.values())) <= 22, "a start compiles few binaries"


def test_the_kernels_pass_the_start_trial_in_the_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "interpreted.py"
    script.write_text(
        "import os\nos.environ['TRITON_INTERPRET'] = '1'\n"
        "from model.split import probe\nfrom tests.model.builders import interpret_quickly\n"
        "interpret_quickly()\nprobe.main()\n"
    )
    shape = random_config(layers=1, history_length=5, width=16, query_heads=1, kv_heads=1, actions=2)
    trial = Trial(shape, "cpu", "float32", "shared", "triton")
    assert try_in_child(trial, (sys.executable, str(script)), 240, 240) == ""
