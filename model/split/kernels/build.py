"""Compiles every kernel that an engine would launch, and reads from the machine code what each takes; needs no GPU.

`python -m model.split.kernels.build` prints the table: registers, stack, spills, wide copies, matrix and special instructions.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.config import HashSpec, ModelConfig
from model.ranker import Ranker
from model.split.kernels.contract import Step, Tables
from model.split.kernels.fused import FusedKernels
from model.split.kernels.fusion import FUSED_TILES, fits
from model.split.kernels.products import PRODUCT_TILES, REFERENCE, ProductKind
from model.split.step import TILE_ROWS, step_arrays, step_bytes
from model.split.trunk import SplitTrunk
from model.split.weights import split_weights

HOPPER = GPUTarget("cuda", 90, 32)
SCHEDULING = ("num_warps", "num_stages", "launch_pdl")


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel with the argument types and constants of a launch. Hashable, so that equal launches compile once."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    aligned: tuple[int, ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, int], ...]


class Collector:
    """A launcher that notes launches instead of starting them."""

    def __init__(self) -> None:
        self.launches: dict[Launch, None] = {}
        self.started = 0

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
        """Note the types as Triton's own dispatcher would see them."""
        self.started += 1
        names = kernel.arg_names[: len(arguments)]
        unspecialized = {
            kernel.arg_names.index(name) if isinstance(name, str) else name for name in kernel.do_not_specialize or ()
        }
        aligned = [
            place
            for place, value in enumerate(arguments)
            if place not in unspecialized
            and (isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0))
        ]
        signature = tuple((name, _type_name(value)) for name, value in zip(names, arguments, strict=True))
        options = tuple((name, constants.pop(name)) for name in SCHEDULING if name in constants)
        key = Launch(kernel, signature, tuple(aligned), tuple(sorted(constants.items())), options)
        self.launches[key] = None


def _type_name(value: Any) -> str:
    if isinstance(value, Tensor):
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64"}
        return "*" + names[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def collect(
    config: ModelConfig,
    dtype: torch.dtype,
    products: Iterable[ProductKind] = (*PRODUCT_TILES, *FUSED_TILES),
    *,
    dependent: bool = True,
) -> list[Launch]:
    """The launches of a whole forward of this architecture, once with each kind of bf16 matrix product; `dependent` as on Hopper
    and later. Holds no weights."""
    collector = Collector()
    products = products if dtype == torch.bfloat16 else (REFERENCE,)
    _forward(config, dtype, collector, products, dependent=dependent)
    return list(collector.launches)


def _forward(
    config: ModelConfig, dtype: torch.dtype, collector: Collector, products: Iterable[ProductKind], *, dependent: bool
) -> None:
    with torch.device("meta"):
        ranker = Ranker(config)
    weights = split_weights(ranker, torch.device("meta"), dtype, dtype)
    kernels = FusedKernels(config, weights, dtype, collector, dependent=dependent)
    table = torch.empty(1, config.width, device="meta")
    trunk = SplitTrunk(config, weights, Tables(table, table, table), kernels, TILE_ROWS, dtype)
    buffer = torch.zeros(step_bytes(config, TILE_ROWS), dtype=torch.uint8, device="meta")
    arrays = step_arrays(buffer, config, TILE_ROWS)
    step = Step(trunk.mixed, arrays, arrays, ())
    for kind in products:
        kernels.use_reference()
        if kind in FUSED_TILES:
            names = [name for name in trunk.fusable_weights() if fits(kind, name, 90 if dependent else 80)]
            kernels.fusion.chosen = {(name, TILE_ROWS): kind for name in names}
        kernels.products.chosen = {
            (tuple(w.shape), TILE_ROWS): kind
            for w in trunk.linear_weights()
            if w.dtype == torch.bfloat16 and kind in PRODUCT_TILES
        }
        trunk.body(step, TILE_ROWS)
        trunk.tail(step, TILE_ROWS)


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """One launch of each kind: matrix sizes count only by whether tiles divide them, and which count is read not at all."""
    kinds: dict[Any, Launch] = {}
    for launch in launches:
        constants = {name: value for name, value in launch.constants if not name.endswith("_COUNT")}
        for size, tile in (("IN", "TILE_IN"), ("OUT", "TILE_OUT")):
            for name in constants.keys() & {size, *(f"{kind}_{size}" for kind in ("CANDIDATE", "HISTORY", "USER"))}:
                constants[name] = constants[name] % constants[tile] == 0
        key = (launch.kernel, launch.signature, launch.aligned, tuple(sorted(constants.items())), launch.options)
        kinds.setdefault(key, launch)
    return list(kinds.values())


def compile_launch(launch: Launch, target: GPUTarget = HOPPER) -> Any:
    """Triton's compiled kernel, with its `asm` by stage. Raises Triton's errors when it does not compile or assemble."""
    names = launch.kernel.arg_names
    signature = dict(launch.signature) | {name: "constexpr" for name, _ in launch.constants}
    constants = {(names.index(name),): value for name, value in launch.constants}
    attributes = {(place,): [["tt.divisibility", 16]] for place in launch.aligned}
    source = ASTSource(launch.kernel, {n: signature[n] for n in names}, constants, attributes)
    return triton.compile(source, target=target, options=dict(launch.options))


@dataclass(frozen=True, slots=True)
class Code:
    """What one kernel's machine code takes and holds. Counts are of instructions, each once, whatever loop it stands in.

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


COUNTED = {
    "spills": r"LDL|STL",
    "wide_copies": r"LDGSTS\S*\.128|LDG\S*\.128|UTMALDG|UBLKCP",
    "narrow_copies": r"LDGSTS(?!\S*\.128)",
    "matrix": r"HGMMA|QGMMA|UTC\w*MMA",
    "matrix_old": r"HMMA|IMMA|DMMA",
    "special": r"MUFU",
}


def read_code(cubin: bytes) -> Code:
    """What stands in the machine code of one kernel, as NVIDIA's own tools, which come with Triton, read it."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", file.name)
        assembly = _output(tools / "nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"no resource usage in {usage!r}")
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+)", assembly, re.M)
    counts = {name: sum(re.match(pattern, each) is not None for each in names) for name, pattern in COUNTED.items()}
    return Code(int(found[1]), int(found[2]), **counts)


def _output(*command: str | Path) -> str:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=True, timeout=60).stdout


def describe(launch: Launch, compiled: Any) -> dict[str, Any]:
    """Name, types, constants, shared memory in bytes, and `Code`."""
    return {
        "kernel": launch.kernel.fn.__name__,
        "dtype": _activations(launch),
        "constants": dict(launch.constants),
        "shared_bytes": compiled.metadata.shared,
        **asdict(read_code(compiled.asm["cubin"])),
    }


def _activations(launch: Launch) -> str:
    """The narrowest floating type among the pointers: what the engine computes in."""
    types = {name.removeprefix("*") for _, name in launch.signature}
    return "bf16" if "bf16" in types else "fp32"


def launches_a_forward(config: ModelConfig, kind: ProductKind = REFERENCE) -> int:
    """How many kernels one forward starts with products of this kind; those of the library count as one each."""
    collector = Collector()
    _forward(config, torch.bfloat16, collector, (kind,), dependent=False)
    return collector.started


def main(given: list[str] | None = None) -> None:
    """Compile every kernel for the widths of heads that occur, in both dtypes, and print what came out as a table."""
    parser = argparse.ArgumentParser(prog="python -m model.split.kernels.build", description=main.__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=[90], help="80, 90 and 100 are known to work")
    parser.add_argument("--head-width", type=int, nargs="+", default=[32, 64, 128])
    options = parser.parse_args(given)
    hashes = HashSpec((1, 3), (5, 7), 2**61 - 1, 1000)
    configs = [
        ModelConfig(
            width=256, layers=2, query_heads=4, kv_heads=2, head_width=width, history_length=127, candidate_length=64,
            actions=19, user_hashes=hashes, post_hashes=hashes, author_hashes=hashes, continuous_actions=8, has_dwell=True,
            has_post_age=True,
        ) for width in options.head_width
    ]  # fmt: skip
    numbers = [field.name for field in fields(Code)]
    print(
        f"{'kernel':<16}{'sm':>4} {'dtype':<5} {'tile':<12}{'shared':>8}" + "".join(f"{name:>14}" for name in numbers)
    )
    for capability in options.capability:
        for launch in distinct(
            each
            for dtype in (torch.bfloat16, torch.float32)
            for config in configs
            for each in collect(config, dtype, dependent=capability >= 90)
        ):
            row = describe(launch, compile_launch(launch, GPUTarget("cuda", capability, 32)))
            constants = row["constants"]
            tile = "x".join(
                str(constants[key]) for key in ("TILE_ROWS", "TILE_OUT", "TILE_KEYS", "HEAD_WIDTH") if key in constants
            )
            head = f"{row['kernel']:<16}{capability:>4} {row['dtype']:<5} {tile:<12}{row['shared_bytes']:>8}"
            print(head + "".join(f"{row[name]:>14}" for name in numbers), flush=True)
    for name, kind in (("separate", REFERENCE), ("fused", next(iter(FUSED_TILES)))):
        counts = ", ".join(
            f"{n} layers {launches_a_forward(replace(configs[0], layers=n), kind)}" for n in (2, 4, 8, 24)
        )
        print(f"launches a forward, gate and RoPE {name}: {counts}")


if __name__ == "__main__":
    main()
