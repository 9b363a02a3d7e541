"""The split engine's operations as Triton launches: for CUDA, and for Triton's interpreter in tests. The maths is in the kernels."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from model.config import DWELL_HIDDEN_WIDTH, CapForm, ModelConfig
from model.hashing import hash_functions
from model.split.kernels.attention import attend_tiles, rotate_rows
from model.split.kernels.contract import Step, Tables, softmax_shift
from model.split.kernels.matmul import multiply_tiles
from model.split.kernels.rows import gate_rows, norm_head_rows, norm_rows
from model.split.kernels.tokens import gather_rows, project_tiles
from model.split.row_check import rows_are_independent, shape_name
from model.split.step import (
    CANDIDATE,
    CANDIDATE_TILES,
    CANDIDATES,
    HISTORY,
    ROWS,
    TILE_ROWS,
    TILES,
    USER,
    embeddings_per_token,
    tile_slots,
)
from model.split.weights import Norm, SplitWeights, TokenWeights

ProductKind = Literal["narrow", "wide", "library"]

KERNELS = (
    attend_tiles,
    gate_rows,
    gather_rows,
    multiply_tiles,
    norm_head_rows,
    norm_rows,
    project_tiles,
    rotate_rows,
)
EXACT = "tf32x3"  # three products in TF32 are as exact as one in fp32, and leave the numbers in the matrix units
NARROW: ProductKind = "narrow"
LOG2_E = math.log2(math.e)
INTERPRETED = not isinstance(multiply_tiles, JITFunction)  # TRITON_INTERPRET=1 was set before the kernels were imported
TILE_KEYS = 64


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Tile of a matrix product: rows, columns and inner step, and how Triton is to schedule it."""

    rows: int
    out: int
    inner: int
    num_warps: int
    num_stages: int


# Every kind adds along the inner axis from its first element on. `narrow` is the reference that the others must equal.
PRODUCT_TILES: Mapping[ProductKind, ProductTile] = {
    "narrow": ProductTile(64, 64, 64, num_warps=4, num_stages=4),
    "wide": ProductTile(128, 256, 64, num_warps=8, num_stages=3),
}


class Launcher(Protocol):
    """Starts a Triton kernel over a grid; the arguments are the kernel's, its constants by keyword."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None: ...


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
    """Start the kernel on the current stream."""
    kernel[grid](*arguments, **constants)


def compiled_variants() -> int:
    """How many variants of the kernels this process has compiled or loaded, on all devices."""
    caches = [cache for kernel in KERNELS for cache in getattr(kernel, "device_caches", {}).values()]
    return sum(len(cache[0]) for cache in caches)


def softmax_constants(multiplier: float, cap: float | None, form: CapForm, dtype: torch.dtype) -> dict[str, Any]:
    """FORM, SCALE, RISE and FALL of `bounded_weight`; without a cap SCALE alone matters."""
    shift = softmax_shift(cap)
    if cap is None:
        return {"FORM": "none", "SCALE": LOG2_E * multiplier, "RISE": 0.0, "FALL": 0.0}
    if form == "softsign":
        return {"FORM": form, "SCALE": LOG2_E * multiplier, "RISE": -shift * LOG2_E, "FALL": 1 / (cap * LOG2_E)}
    if dtype == torch.bfloat16:
        return {"FORM": "fast_tanh", "SCALE": multiplier / cap, "RISE": -shift * LOG2_E, "FALL": cap * LOG2_E}
    return {
        "FORM": form,
        "SCALE": 2 * LOG2_E * multiplier / cap,
        "RISE": (cap - shift) * LOG2_E,
        "FALL": 2 * cap * LOG2_E,
    }


class FusedKernels:
    """Implements `Kernels`. `products` says, by weight shape and row count, which kind of matrix product may be used; what is
    not named runs `narrow`. `launcher` is replaced where launches are to be collected instead of run.
    """

    key_tile = 1  # the kernels mask

    def __init__(
        self,
        config: ModelConfig,
        weights: SplitWeights,
        dtype: torch.dtype,
        launcher: Launcher = launch,
        *,
        library: bool = True,
    ) -> None:
        self.config = config
        self._library = library
        if weights.heads.is_cuda:
            settle_library()
        self.products: dict[tuple[tuple[int, ...], int], ProductKind] = {}
        self._rope = weights.rope
        self._launch = launcher
        self._slots: Tensor | None = None
        self._inputs: Tensor  # of tokens, for the rows of a step; made with the slots
        self._softmax = softmax_constants(config.attention_multiplier, config.attention_cap, config.cap_form, dtype)

    def embed(self, step: Step, tables: Tables, tokens: TokenWeights, residual: Tensor, rows: int) -> None:
        """See `Kernels.embed`."""
        config, counts = self.config, step.arrays.counts
        if self._slots is None:
            self._slots = embedding_slots(config, tables)
            widest = max(tokens.inputs)
            self._inputs = torch.zeros(len(residual), widest, dtype=tokens.projection.dtype, device=residual.device)
        inputs, entity, row_slots = (
            self._inputs,
            config.post_hashes.count + config.author_hashes.count,
            embeddings_per_token(config),
        )
        small = tokens.inputs[HISTORY] - tokens.inputs[CANDIDATE]
        self._launch(
            gather_rows,
            (rows, row_slots + 1),
            (
                tables.post, self._slots, counts if tables.numbers is None else tables.numbers, tokens.dwell_input,
                inputs, inputs.stride(0), counts, step.arrays.history,
            ),
            NUMBERED=tables.numbers is not None,
            POST_SLOTS=config.post_hashes.count,
            ENTITY_SLOTS=entity,
            USER_SLOTS=config.user_hashes.count,
            ROW_SLOTS=row_slots,
            WIDTH=config.width,
            WIDTH_BLOCK=_power_of_two(config.width),
            ACTIONS=config.actions,
            DWELL_WIDTH=DWELL_HIDDEN_WIDTH if config.has_dwell else 0,
            SMALL=small,
            SMALL_BLOCK=_power_of_two(small),
            num_warps=1 if config.width <= 512 else 4,
        )  # fmt: skip
        narrow = config.width <= 512 or inputs.dtype == torch.float32
        self._launch(
            project_tiles,
            (_cdiv(config.width, 64 if narrow else 128), rows // TILE_ROWS + 3),
            (inputs, inputs.stride(0), tokens.projection, tokens.surfaces, tokens.ages, residual, counts),
            CANDIDATE_IN=tokens.inputs[CANDIDATE],
            HISTORY_IN=tokens.inputs[HISTORY],
            USER_IN=tokens.inputs[USER],
            OUT=config.width,
            SURFACES=config.product_surfaces,
            HAS_AGES=config.has_post_age,
            PRECISION=EXACT,
            WIDEN=INTERPRETED,
            TILE_ROWS=TILE_ROWS,
            TILE_OUT=64 if narrow else 128,
            TILE_IN=64 if inputs.dtype == torch.bfloat16 else 32,
            num_warps=4,
            num_stages=4,
        )

    def norm(
        self,
        step: Step,
        mixed: Tensor | None,
        post: Norm | None,
        residual: Tensor,
        norm: Norm,
        out: Tensor,
        rows: int,
        *,
        tail: bool = False,
    ) -> None:
        """See `Kernels.norm`."""
        width = self.config.width
        self._launch(
            norm_rows,
            (rows,),
            (
                out if mixed is None else mixed,
                *_scale_and_bias(post or norm),
                residual,
                *_scale_and_bias(norm),
                out,
                step.arrays.counts,
                self.config.norm_epsilon,
            ),
            ROW_COUNT=CANDIDATES if tail else ROWS,
            HAS_MIXED=mixed is not None,
            HAS_POST=post is not None,
            CENTRED=norm.bias is not None,
            WIDTH=width,
            WIDTH_BLOCK=_power_of_two(width),
            num_warps=4 if width <= 1024 else 8,
        )

    def norm_heads(
        self, step: Step, heads: Tensor, count: int, scale: Tensor, rows: int, *, tail: bool = False
    ) -> None:
        """See `Kernels.norm_heads`."""
        self._launch(
            norm_head_rows,
            (rows, count),
            (heads, heads.stride(0), scale, step.arrays.counts, self.config.norm_epsilon),
            ROW_COUNT=CANDIDATES if tail else ROWS,
            HEAD_WIDTH=len(scale),
            HEAD_BLOCK=_power_of_two(len(scale)),
            num_warps=1,
        )

    def multiply(self, step: Step, x: Tensor, weight: Tensor, out: Tensor, rows: int, *, tail: bool = False) -> None:
        """See `Kernels.multiply`."""
        kind = self.products.get((tuple(weight.shape), rows), "narrow")
        self.multiply_as(kind, step.arrays.counts, CANDIDATES if tail else ROWS, x, weight, out, rows)

    def multiply_as(
        self, kind: ProductKind, counts: Tensor, row_count: int, x: Tensor, weight: Tensor, out: Tensor, rows: int
    ) -> None:
        """The product of a given kind; the library's takes all `rows`, the others `counts[row_count]` of them."""
        if kind == "library":
            torch.mm(x[:rows], weight, out=out[:rows])
            return
        tile = PRODUCT_TILES[kind]
        inner, columns = weight.shape
        self._launch(
            multiply_tiles,
            (_cdiv(columns, tile.out), _cdiv(rows, tile.rows)),
            (x, weight, out, counts, x.stride(0), out.stride(0)),
            ROW_COUNT=row_count,
            IN=inner,
            OUT=columns,
            PRECISION=EXACT,
            WIDEN=INTERPRETED,
            TILE_ROWS=tile.rows,
            TILE_OUT=min(tile.out, _power_of_two(columns)),
            TILE_IN=tile.inner,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def rotate(
        self, step: Step, query: Tensor | None, key_value: Tensor | None, layer: int, rows: int, *, tail: bool = False
    ) -> None:
        """See `Kernels.rotate`."""
        config = self.config
        some = query if query is not None else key_value
        assert some is not None
        q, kv = (some if tensor is None else tensor for tensor in (query, key_value))
        self._launch(
            rotate_rows,
            (rows,),
            (
                q, q.stride(0), kv, kv.stride(0), step.anchor, self._rope, self._rope.shape[1], step.arrays.counts, layer,
            ),
            ROW_COUNT=CANDIDATES if tail else ROWS,
            QUERY_HEADS=config.query_heads if query is not None else 0,
            KV_HEADS=config.kv_heads if key_value is not None else 0,
            HEAD_WIDTH=config.head_width,
            QUERY_BLOCK=_power_of_two(config.query_heads),
            KV_BLOCK=_power_of_two(config.kv_heads),
            HALF_BLOCK=_power_of_two(config.head_width // 2),
            num_warps=4,
        )  # fmt: skip

    def attend(
        self, step: Step, query: Tensor, key_value: Tensor, layer: int, out: Tensor, rows: int, *, tail: bool = False
    ) -> None:
        """See `Kernels.attend`."""
        config = self.config
        self._launch(
            attend_tiles,
            (config.query_heads, tile_slots(rows)),
            (query, query.stride(0), key_value, key_value.stride(0), step.anchor, out, step.arrays.counts, layer),
            TILE_COUNT=CANDIDATE_TILES if tail else TILES,
            CAUSAL=config.context_attention == "causal",
            QUERY_HEADS=config.query_heads,
            KV_HEADS=config.kv_heads,
            HEAD_WIDTH=config.head_width,
            HEAD_BLOCK=max(16, _power_of_two(config.head_width)),
            PRECISION=EXACT,
            WIDEN=INTERPRETED,
            TILE_ROWS=TILE_ROWS,
            TILE_KEYS=TILE_KEYS if query.dtype == torch.bfloat16 else TILE_KEYS // 2,
            num_warps=4,
            num_stages=2,
            **self._softmax,
        )  # fmt: skip

    def gate(self, step: Step, gate_value: Tensor, out: Tensor, rows: int, *, tail: bool = False) -> None:
        """See `Kernels.gate`."""
        width = out.shape[1]
        block = min(1024, _power_of_two(width))
        self._launch(
            gate_rows,
            (rows, _cdiv(width, block)),
            (gate_value, out, step.arrays.counts),
            ROW_COUNT=CANDIDATES if tail else ROWS,
            WIDTH=width,
            ACTIVATION=self.config.activation,
            GATED=self.config.gated,
            BLOCK=block,
            num_warps=4,
        )

    def choose_products(self, weights: Sequence[Tensor], sizes: Sequence[int]) -> dict[str, Any]:
        """See `Kernels.choose_products`: of the kinds that equal `narrow`, itself included, the fastest here and now."""
        chosen: dict[str, dict[str, str]] = {}
        for weight in weights:
            for size in sizes:
                wanted = _preferred(size, weight.dtype, library=self._library)
                equal = [NARROW, *(kind for kind in wanted if self._equals_narrow(kind, weight, size))]
                kind = min(equal, key=lambda kind: self._seconds(kind, weight, size)) if len(equal) > 1 else NARROW
                self.products[tuple(weight.shape), size] = kind
                chosen.setdefault(shape_name(weight), {})[str(size)] = kind
        return chosen

    def _seconds(self, kind: ProductKind, weight: Tensor, rows: int) -> float:
        """The least that one product takes in a queue of several, of a few readings."""
        counts = torch.full((8,), rows, dtype=torch.int32, device=weight.device)
        x = torch.randn(rows, weight.shape[0], device=weight.device).to(weight.dtype)
        out = torch.empty(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
        wait = torch.cuda.current_stream(weight.device).synchronize if weight.is_cuda else lambda: None
        queued, readings = (20, 5) if weight.is_cuda else (1, 3)
        seen = []
        for _ in range(readings):
            wait()
            start = time.perf_counter()
            for _ in range(queued):
                self.multiply_as(kind, counts, ROWS, x, weight, out, rows)
            wait()
            seen.append((time.perf_counter() - start) / queued)
        return min(seen)

    def _equals_narrow(self, kind: ProductKind, weight: Tensor, rows: int) -> bool:
        counts = torch.full((8,), rows, dtype=torch.int32, device=weight.device)

        def product(kind: ProductKind) -> Callable[[Tensor], Tensor]:
            def run(x: Tensor) -> Tensor:
                out = torch.full((len(x), weight.shape[1]), torch.nan, dtype=weight.dtype, device=weight.device)
                self.multiply_as(kind, counts, ROWS, x, weight, out, len(x))
                return out

            return run

        return rows_are_independent(product(kind), product("narrow"), rows, weight.shape[0], weight)

    def use_reference(self) -> None:
        """See `Kernels.use_reference`."""
        self.products.clear()

    def compiled(self) -> int:
        """See `Kernels.compiled`; on all devices, for all engines of the process."""
        return compiled_variants()


def _preferred(rows: int, dtype: torch.dtype, *, library: bool) -> tuple[ProductKind, ...]:
    """Kinds to try beside `narrow`: the library from where it fills the device, big tiles for bf16 only."""
    if rows < 256:
        return ()
    kinds: tuple[ProductKind, ...] = ("library", "wide") if dtype == torch.bfloat16 else ("library",)
    return kinds if library else kinds[1:]


def settle_library() -> None:
    """Have cuBLAS keep one order of additions where it can: no split of the inner axis, no reduction in bf16, one workspace.

    What is set already stays. Effective in a process that has multiplied nothing yet.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    if torch.backends.cuda.is_built():
        torch.backends.cuda.preferred_blas_library("cublaslt")


def embedding_slots(config: ModelConfig, tables: Tables) -> Tensor:
    """int64 `[E + U, 5]` for each embedding of a post, its author and a user: where its table starts, in elements from the post
    table, and its hash function: scale, bias, modulus, rows − 1."""
    base, size = tables.post.data_ptr(), tables.post.element_size()
    slots: list[tuple[int, ...]] = []
    for table, spec in (
        (tables.post, config.post_hashes),
        (tables.author, config.author_hashes),
        (tables.user, config.user_hashes),
    ):
        start = (table.data_ptr() - base) // size
        scales, biases = (values.tolist() for values in hash_functions(spec))
        slots += [(start, *pair, spec.modulus, spec.vocab_size - 1) for pair in zip(scales, biases, strict=True)]
    return torch.tensor(slots, dtype=torch.int64, device=tables.post.device)


def _scale_and_bias(norm: Norm) -> tuple[Tensor, Tensor]:
    """The bias is not read where there is none."""
    return norm.scale, norm.scale if norm.bias is None else norm.bias


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(n: int) -> int:
    return 1 << max(0, (n - 1).bit_length())
