"""Compiles every kernel that an engine would launch, as the engine would, for a card that need not be there; reads what each uses.

`python -m loadtest.gpu.build` prints the table: shared memory, registers and stack of each kernel.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from loadtest.geometries import GEOMETRIES
from model.config import ModelConfig
from model.layers import dtype_name
from model.ranker import Ranker
from model.split.kernels.contract import Step, Tables
from model.split.kernels.launch import FEW_ROWS, TritonKernels
from model.split.step import TILE_ROWS, device_arrays, host_arrays, step_bytes
from model.split.trunk import SplitTrunk
from model.split.weights import split_weights

DTYPES = (torch.bfloat16, torch.float32)
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Target:
    """Stands in for a driver, so that Triton's own dispatcher compiles for an absent device. The device's number is its capability,
    because Triton keeps compiled kernels by device."""

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
    """Inside, Triton compiles for this capability, whatever device is present."""
    before = driver._active
    driver.set_active(Target(capability))
    try:
        yield
    finally:
        driver._active = before


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel's name and constants, and Triton's binary."""

    name: str
    constants: dict[str, Any]
    binary: Any

    def usage(self) -> dict[str, int]:
        """Bytes of shared memory, registers of a thread, bytes of its stack: numbers that did not fit into registers. Raises
        ValueError for what is no kernel."""
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.binary.asm["cubin"])
            file.flush()
            command = [str(TOOL), "--dump-resource-usage", file.name]
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        match = re.search(r"REG:(\d+) STACK:(\d+)", said)
        if match is None:
            raise ValueError(f"no resource usage in {said!r}")
        return {
            "shared_bytes": self.binary.metadata.shared, "registers": int(match[1]), "stack_bytes": int(match[2]),
        }  # fmt: skip


def forward(config: ModelConfig, dtype: torch.dtype, launcher: Any, rows: int = TILE_ROWS) -> None:
    """Make every launch of one forward of `rows` rows with a model that holds no weights. Nothing is computed."""
    meta = torch.device("meta")
    with meta:
        ranker = Ranker(config)
    weights = split_weights(ranker, meta, dtype, dtype)
    table = torch.empty(1, config.width, device=meta)
    trunk = SplitTrunk(
        config, weights, Tables(table, table, table), TritonKernels(config, weights, dtype, launcher), rows, dtype
    )
    buffer = torch.zeros(step_bytes(config, rows), dtype=torch.uint8)
    step = Step(
        trunk.mixed, device_arrays(buffer.to(meta), config, rows), host_arrays(buffer, config, rows), (), rows
    )  # fmt: skip
    trunk.body(step)
    trunk.tail(step)


def compiled(config: ModelConfig, dtype: torch.dtype, capability: int) -> list[Compiled]:
    """What an engine of this architecture launches on such a device, each binary once. Raises Triton's error if one does not compile."""
    by_hash: dict[str, Compiled] = {}

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        binary = kernel.warmup(*arguments, grid=grid, **constants)
        by_hash.setdefault(binary.hash, Compiled(kernel.fn.__name__, constants, binary))

    with compiling_for(capability):
        for rows in (TILE_ROWS, FEW_ROWS + TILE_ROWS):
            forward(config, dtype, note, rows)
    return list(by_hash.values())


def main(argv: list[str] | None = None) -> None:
    """Compile every kernel for the widths of heads that occur, in both dtypes, and print what came out as a table."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.build", description=main.__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=[90], help="80, 90 and 100 are known to work")
    parser.add_argument("--head-width", type=int, nargs="+", default=[32, 64, 128])
    options = parser.parse_args(argv)
    print(f"{'kernel':<16}{'sm':>4} {'dtype':<10}{'head':>5}{'shared':>8}{'registers':>11}{'stack':>7}")
    for capability in options.capability:
        for width in options.head_width:
            for dtype in DTYPES:
                config = replace(GEOMETRIES["nano"], layers=2, head_width=width)
                for kernel in compiled(config, dtype, capability):
                    shared, registers, stack = kernel.usage().values()
                    name = dtype_name(dtype)
                    print(f"{kernel.name:<16}{capability:>4} {name:<10}{width:>5}{shared:>8}{registers:>11}{stack:>7}")


if __name__ == "__main__":
    main()
