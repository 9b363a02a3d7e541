"""Compiles every kernel that an engine would launch, as the engine would, and reads what each uses from the machine code; needs no GPU.

`python -m model.split.kernels.build` prints the table: registers, stack, spills, wide copies, matrix and special instructions.
"""

from __future__ import annotations

import argparse
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import sm_arch_from_capability
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.driver import driver

from model.config import HashSpec, ModelConfig
from model.ranker import Ranker
from model.split.buckets import row_sizes
from model.split.engine import default_capacity
from model.split.kernels.contract import Step, Tables
from model.split.kernels.fused import FusedKernels
from model.split.kernels.launch import Launcher, warm_up
from model.split.kernels.products import COMPILED, FUSED, REFERENCE, Kind, cdiv, timed_sizes
from model.split.step import TILE_ROWS, context_tiles, host_arrays, step_arrays, step_bytes, tile_slots
from model.split.trunk import SplitTrunk
from model.split.weights import split_weights


class Target:
    """Stands in for a driver, so that Triton's own dispatcher compiles for an absent device. The device's number is its capability,
    because Triton caches compiled kernels by device."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        """The target to compile for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """See the class."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        """Nothing is launched."""
        return 0


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Inside, Triton compiles for this capability, on threads, whatever device is present."""
    before = driver._active
    driver.set_active(Target(capability))
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            yield
    finally:
        driver._active = before


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel's name, its constants, and what Triton compiled or is compiling."""

    name: str
    constants: dict[str, Any]
    binary: Any

    @property
    def kernel(self) -> Any:
        """Triton's compiled kernel. Raises Triton's errors when it does not compile."""
        return self.binary.result() if hasattr(self.binary, "result") else self.binary


def compiled(
    config: ModelConfig,
    dtype: torch.dtype,
    capability: int,
    kinds: Sequence[Kind] = COMPILED,
    names: Collection[str] | None = None,
) -> list[Compiled]:
    """What an engine of this architecture may launch on such a device, each binary once; of all kernels or only those in `names`."""
    found: dict[int, Compiled] = {}

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
        name = kernel.fn.__name__
        if names is None or name in names:
            binary = kernel.warmup(*arguments, grid=grid, **constants)
            found.setdefault(id(binary), Compiled(name, constants, binary))

    with compiling_for(capability):
        forward(config, dtype, capability, note, kinds)
    return list(found.values())


def weightless(
    config: ModelConfig, dtype: torch.dtype, capability: int, launcher: Launcher, rows: int
) -> tuple[SplitTrunk, Step]:
    """A trunk that holds no weights, for steps of up to `rows` rows on such a device, and a step of `rows` candidates."""
    with torch.device("meta"):
        ranker = Ranker(config)
    weights = split_weights(ranker, torch.device("meta"), dtype, dtype)
    kernels = FusedKernels(config, weights, dtype, launcher, capability=capability)
    table = torch.empty(1, config.width, device="meta")
    trunk = SplitTrunk(config, weights, Tables(table, table, table), kernels, rows, dtype)
    buffer = torch.zeros(step_bytes(config, rows), dtype=torch.uint8)
    host = host_arrays(buffer, config, rows)
    host.counts[:] = rows
    return trunk, Step(trunk.mixed, step_arrays(buffer.to("meta"), config, rows), host, ())


def forward(
    config: ModelConfig, dtype: torch.dtype, capability: int, launcher: Launcher, kinds: Sequence[Kind], rows: int = TILE_ROWS,
    tail: int | None = None, between: Callable[[], object] = lambda: None
) -> None:  # fmt: skip
    """Make every launch of one forward with kernels of each kind, with `rows` rows and with `tail` in the second half. Calls `between`
    before that half."""
    trunk, step = weightless(config, dtype, capability, launcher, rows)
    for kind in kinds:
        trunk.kernels.choices.forced = kind  # type: ignore[attr-defined]
        trunk.body(step.at(rows))
        between()
        trunk.tail(step.at(tail or rows))


def readings(config: ModelConfig, capability: int) -> int:
    """The most device times that a bf16 engine reads when it chooses kinds: if all kinds prove equal to the reference."""
    sizes = row_sizes(default_capacity(config))
    trunk, step = weightless(config, torch.bfloat16, capability, warm_up, max(sizes))
    kinds = trunk.kernels.choices.kinds  # type: ignore[attr-defined]
    others = [len(kinds(part)) for size in timed_sizes(sizes) for part in trunk.parts(step.at(size))]
    return sum(count + 1 for count in others if count)


@dataclass(frozen=True, slots=True)
class Code:
    """What one kernel's machine code uses and contains. Instructions are counted once each, even in loops.

    `spills`: loads and stores of the stack; `stack_bytes`: of one thread. `wide_copies`: of 16 bytes at once from global
    memory; `narrow_copies`: of less, into shared memory. `matrix`: on the units of Hopper and later; `matrix_old`: of earlier
    ones. `special`: exponentials, reciprocals, hyperbolic tangents.
    """

    registers: int
    stack_bytes: int
    spills: int
    wide_copies: int
    narrow_copies: int
    matrix: int
    matrix_old: int
    special: int


INSTRUCTION_BYTES = 16
COUNTED = {
    "spills": r"LDL|STL",
    "wide_copies": r"LDGSTS\S*\.128|LDG\S*\.128|UTMALDG|UBLKCP",
    "narrow_copies": r"LDGSTS(?!\S*\.128)",
    "matrix": r"HGMMA|QGMMA|UTC\w*MMA",
    "matrix_old": r"HMMA|IMMA|DMMA",
    "special": r"MUFU",
}


def read_codes(cubins: Sequence[bytes], capability: int) -> list[Code]:
    """Read the machine code of kernels for one capability with NVIDIA's own tools, which come with Triton.

    All are disassembled as one run of instructions: the tool takes half a second to begin. Raises ValueError for what is no kernel.
    """
    usages = [_output("cuobjdump", "--dump-resource-usage", of=cubin) for cubin in cubins]
    bodies = [_instructions(cubin) for cubin in cubins]
    target = sm_arch_from_capability(capability).replace("sm_", "SM")
    assembly = _output("nvdisasm", "--binary", target, "--no-dataflow", of=b"".join(bodies)) if bodies else ""
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+)", assembly, re.M)
    if len(names) * INSTRUCTION_BYTES != sum(map(len, bodies)):
        raise ValueError(f"nvdisasm tells of {len(names)} instructions in {sum(map(len, bodies))} bytes")
    left, codes = iter(names), []
    for usage, body in zip(usages, bodies, strict=True):
        own = list(islice(left, len(body) // INSTRUCTION_BYTES))
        counts = {name: sum(re.match(pattern, each) is not None for each in own) for name, pattern in COUNTED.items()}
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
        if found is None:
            raise ValueError(f"no resource usage in {usage!r}")
        codes.append(Code(int(found[1]), int(found[2]), **counts))
    return codes


def _instructions(cubin: bytes) -> bytes:
    """The section with the instructions of the one kernel in an ELF file."""
    (table,), (count, strings) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3C)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * number) for number in range(count)]
    named = (section for section in sections if cubin.startswith(b".text.", sections[strings][4] + section[0]))
    *_, offset, size = next(named)
    return cubin[offset : offset + size]


def _output(tool: str, *options: str, of: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(of)
        file.flush()
        command: list[str | Path] = [Path(triton.__file__).parent / "backends/nvidia/bin" / tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def describe(found: Sequence[Compiled]) -> list[dict[str, Any]]:
    """Of each binary for one capability its name, constants, what it computes in, shared memory in bytes, and `Code`."""
    ready = [each.kernel for each in found]
    codes = read_codes([one.asm["cubin"] for one in ready], ready[0].metadata.target.arch) if ready else []
    return [
        {
            "kernel": each.name,
            "dtype": "bf16" if "*bf16" in one.src.signature.values() else "fp32",
            "constants": each.constants,
            "shared_bytes": one.metadata.shared,
            **asdict(code),
        }
        for each, one, code in zip(found, ready, codes, strict=True)
    ]


def launches(config: ModelConfig, kind: Kind, requests: int, context: int, candidates: int) -> tuple[int, int, int]:
    """Launches, programs and programs with work of one bf16 forward on Hopper, for `requests` requests, each with `context` new tokens
    and `candidates` candidates."""
    kinds = [candidates * requests, max(0, context - 1) * requests, min(context, 1) * requests]
    each = [candidates, max(0, context - 1), min(context, 1)]
    totals = [0, 0, 0]

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
        across, down, deep = (*grid, 1, 1)[:3]
        name, tile = kernel.fn.__name__, constants.get("TILE_ROWS", 1)
        if name in ("attend_tiles", "add_chunks"):
            working = across * requests * sum(cdiv(part, tile) for part in each) * deep
        elif name == "project_tiles":
            working = across * sum(cdiv(part, tile) for part in kinds)
        elif name.startswith("multiply"):
            working = across * cdiv(sum(kinds), tile)
        else:
            working = sum(kinds) * down
        for place, more in enumerate((1, across * down * deep, working)):
            totals[place] += more

    def to_tail() -> None:
        kinds[1:] = each[1:] = [0, 0]

    def size(used: int, tiles: int) -> int:
        return next(size for size in row_sizes(2**14) if size >= used and tile_slots(size) >= tiles)

    tiles = requests * cdiv(candidates, TILE_ROWS)
    rows = size(sum(kinds), tiles + requests * (context_tiles(context) if context else 0))
    forward(config, torch.bfloat16, 90, note, [kind], rows, size(kinds[0], tiles), to_tail)
    return totals[0], totals[1], totals[2]


def main(given: list[str] | None = None) -> None:
    """Compile every kernel for the widths of heads that occur, in both dtypes, and print what came out as a table."""
    parser = argparse.ArgumentParser(prog="python -m model.split.kernels.build", description=main.__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=[90], help="80, 90 and 100 are known to work")
    parser.add_argument("--head-width", type=int, nargs="+", default=[32, 64, 128])
    options = parser.parse_args(given)
    hashes = HashSpec((1, 3), (5, 7), 2**61 - 1, 1000)
    config = ModelConfig(
        width=256, layers=2, query_heads=4, kv_heads=2, head_width=32, history_length=1022, candidate_length=64,
        actions=19, user_hashes=hashes, post_hashes=hashes, author_hashes=hashes, continuous_actions=8, has_dwell=True,
        has_post_age=True,
    )  # fmt: skip
    cases: list[tuple[ModelConfig, Sequence[str] | None]]
    cases = [(replace(config, head_width=width), None) for width in options.head_width]
    cases += [(replace(config, width=width), ("norm_rows", "gate_rows")) for width in (1024, 2048, 2560, 8192)]
    numbers = [field.name for field in fields(Code)]
    print(
        f"{'kernel':<21}{'sm':>4} {'dtype':<5} {'tile':<14}{'shared':>8}" + "".join(f"{name:>14}" for name in numbers)
    )
    for capability in options.capability:
        each_once = {
            each.kernel.hash: each
            for dtype in (torch.bfloat16, torch.float32)
            for case, names in cases
            for each in compiled(case, dtype, capability, names=names)
        }
        for row in describe(list(each_once.values())):
            constants = row["constants"]
            tile = "x".join(
                str(constants[key])
                for key in ("WIDTH", "TILE_ROWS", "TILE_OUT", "TILE_KEYS", "HEAD_WIDTH")
                if key in constants
            )
            head = f"{row['kernel']:<21}{capability:>4} {row['dtype']:<5} {tile:<14}{row['shared_bytes']:>8}"
            print(head + "".join(f"{row[name]:>14}" for name in numbers), flush=True)
        print(f"sm_{capability}: {len(each_once)} binaries")
    for name, layers, kind in (
        ("separate", 8, REFERENCE),
        ("fused", 8, FUSED + "64x32"),
        ("fused", 8, FUSED + "128x128"),
    ):
        config = replace(config, layers=layers, width=2560, query_heads=20, kv_heads=4, head_width=128)
        for requests, context, candidates in ((1, 0, 64), (64, 0, 1), (1, 1023, 512)):
            started, programs, working = launches(config, kind, requests, context, candidates)
            asked = f"{name} {kind}, {layers} layers, {requests} x ({context} + {candidates})"
            print(f"{asked}: {started} launches, {working} of {programs} programs ({working / programs:.0%})")


if __name__ == "__main__":
    main()
