"""Compiles every kernel that an engine would launch; needs no GPU and runs nothing on one.

`python -m model.split.kernels.build` prints each kernel's registers, shared memory and matrix instructions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from model.config import HashSpec, ModelConfig
from model.ranker import Ranker
from model.split.kernels.contract import Step, Tables
from model.split.kernels.fused import FusedKernels, ProductKind
from model.split.kernels.matmul import multiply_tiles
from model.split.step import TILE_ROWS, step_arrays, step_bytes
from model.split.trunk import SplitTrunk
from model.split.weights import split_weights

HOPPER = GPUTarget("cuda", 90, 32)
SCHEDULING = ("num_warps", "num_stages")


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

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
        """Note the types as Triton's own dispatcher would see them."""
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
    config: ModelConfig, dtype: torch.dtype, products: Iterable[ProductKind] = ("narrow", "wide")
) -> list[Launch]:
    """The launches of a whole forward of this architecture, once with each kind of bf16 matrix product. Holds no weights."""
    collector = Collector()
    with torch.device("meta"):
        ranker = Ranker(config)
    weights = split_weights(ranker, torch.device("meta"), dtype)
    kernels = FusedKernels(config, weights, dtype, collector)
    table = torch.empty(1, config.width, device="meta")
    trunk = SplitTrunk(config, weights, Tables(table, table, table), kernels, TILE_ROWS, dtype)
    buffer = torch.zeros(step_bytes(config, TILE_ROWS, TILE_ROWS), dtype=torch.uint8, device="meta")
    arrays = step_arrays(buffer, config, TILE_ROWS, TILE_ROWS)
    step = Step(trunk.mixed, arrays, arrays, ())
    for kind in products:
        kernels.products = {
            (tuple(w.shape), TILE_ROWS): kind for w in trunk.linear_weights() if w.dtype == torch.bfloat16
        }
        trunk.body(step, TILE_ROWS)
        trunk.tail(step, TILE_ROWS)
    return list(collector.launches)


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """One launch of each kind: matrix sizes count only by whether tiles divide them, and which count is read not at all."""
    kinds: dict[Any, Launch] = {}
    for launch in launches:
        constants = {name: value for name, value in launch.constants if not name.endswith("_COUNT")}
        for size, tile in (("IN", "TILE_IN"), ("OUT", "TILE_OUT")):
            if launch.kernel is multiply_tiles:
                constants[size] = constants[size] % constants[tile] == 0
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


def describe(launch: Launch, compiled: Any) -> dict[str, Any]:
    """Name, types, shared memory in bytes, and which matrix instructions the assembly uses."""
    assembly = compiled.asm["ptx"]
    return {
        "kernel": launch.kernel.fn.__name__,
        "dtype": launch.signature[0][1],
        "constants": dict(launch.constants),
        "shared_bytes": compiled.metadata.shared,
        "wgmma": assembly.count("wgmma.mma_async"),
        "mma": assembly.count("mma.sync"),
        "wide_loads": assembly.count(".v4.b32") + assembly.count("cp.async.cg"),
        "local_memory": assembly.count("st.local"),
    }


def main() -> None:
    """Compile every kernel of a small ranker in both dtypes and print what came out."""
    hashes = HashSpec((1, 3), (5, 7), 2**61 - 1, 1000)
    config = ModelConfig(
        width=128, layers=2, query_heads=4, kv_heads=2, head_width=64, history_length=127, candidate_length=64, actions=19,
        user_hashes=hashes, post_hashes=hashes, author_hashes=hashes, continuous_actions=8, has_dwell=True, has_post_age=True,
    )  # fmt: skip
    for dtype in (torch.bfloat16, torch.float32):
        for launch in distinct(collect(config, dtype)):
            print(describe(launch, compile_launch(launch)))


if __name__ == "__main__":
    main()
