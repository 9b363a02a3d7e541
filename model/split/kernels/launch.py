"""The split engine's operations as launches of seven Triton kernels: for CUDA, and for Triton's interpreter in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from model.batch import hash_functions
from model.config import DWELL_HIDDEN_WIDTH, ModelConfig
from model.split.kernels.attention import attend_tiles, softmax_constants
from model.split.kernels.contract import Kernels, Step, Tables
from model.split.kernels.product import multiply_tiles
from model.split.kernels.rows import gate_rows, norm_rows, rotate_rows
from model.split.kernels.tokens import gather_rows, project_tiles
from model.split.step import CANDIDATE, COUNTS, HISTORY, TILE_ROWS, tile_slots, word
from model.split.weights import NormWeights, SplitWeights, TokenWeights

KERNELS = (attend_tiles, gate_rows, gather_rows, multiply_tiles, norm_rows, project_tiles, rotate_rows)
EXACT = "tf32x3"  # three products in TF32 are as exact as one in fp32, and leave the numbers in the matrix units
INTERPRETED = not isinstance(multiply_tiles, JITFunction)  # TRITON_INTERPRET=1 was set before the kernels were imported
FEW_ROWS = 256  # up to here small tiles fill more of the card
HOPPER = 90

Launcher = Callable[..., None]
"""Called with a kernel, its grid and its arguments, its constants by keyword."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Tile of a matrix product: rows, columns and inner step, and how Triton is to schedule it."""

    rows: int
    out: int
    inner: int
    num_warps: int
    num_stages: int


SMALL = ProductTile(64, 64, 64, num_warps=4, num_stages=4)
LARGE = ProductTile(128, 128, 64, num_warps=8, num_stages=4)


def product_tile(rows: int, columns: int, dtype: torch.dtype) -> ProductTile:
    """Large tiles for many rows and columns in bf16, no wider than the columns. All add along the inner axis from its first element."""
    tile = LARGE if dtype == torch.bfloat16 and rows > FEW_ROWS and columns >= LARGE.out else SMALL
    return replace(tile, out=min(tile.out, power_of_two(columns)))


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Start a kernel on the current stream."""
    kernel[grid](*arguments, **constants)


def compile_only(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Compile a kernel, start nothing."""
    kernel.warmup(*arguments, grid=grid, **constants)


class TritonKernels(Kernels):
    """Implements `Kernels`. cuBLAS multiplies only where `check_products` found its bits equal to the product kernel's, on Hopper and
    later. `launcher` is replaced to collect launches."""

    key_tile = 1  # the kernels mask

    def __init__(
        self, config: ModelConfig, weights: SplitWeights, dtype: torch.dtype, launcher: Launcher = launch
    ) -> None:
        self.config = config
        self._launch = launcher
        self._rope = weights.rope
        self._softmax = softmax_constants(config.attention_multiplier, config.attention_cap, dtype)
        self._slots: Tensor | None = None
        self._inputs: Tensor  # of tokens, for the rows of a step; made with the slots
        self._library: set[tuple[tuple[int, ...], int]] = set()  # shapes of weights and rows that cuBLAS multiplies

    def embed(self, step: Step, tables: Tables, tokens: TokenWeights, residual: Tensor) -> None:
        """See `Kernels.embed`."""
        config, arrays = self.config, step.arrays
        if self._slots is None:
            self._slots = embedding_slots(config, tables)
            widest = max(tokens.inputs)
            self._inputs = torch.zeros(len(residual), widest, dtype=tokens.projection.dtype, device=residual.device)
        inputs, entities = self._inputs, config.post_hashes.count + config.author_hashes.count
        embeddings = max(entities, config.user_hashes.count)  # of any kind of token
        small = tokens.inputs[HISTORY] - tokens.inputs[CANDIDATE]
        self._launch(
            gather_rows, (step.rows, embeddings + 1),
            tables.post, self._slots, tokens.dwell_input, inputs, inputs.stride(0), arrays.counts, arrays.rows, arrays.history,
            POST_SLOTS=config.post_hashes.count, ENTITY_SLOTS=entities, USER_SLOTS=config.user_hashes.count,
            ROW_SLOTS=embeddings, WIDTH=config.width, WIDTH_BLOCK=power_of_two(config.width), ACTIONS=config.actions,
            DWELL_WIDTH=DWELL_HIDDEN_WIDTH if config.has_dwell else 0, SMALL=small, SMALL_BLOCK=power_of_two(small),
            num_warps=1 if config.width <= 512 else 4,
        )  # fmt: skip
        tile = product_tile(step.rows, config.width, inputs.dtype)
        self._launch(
            project_tiles, (cdiv(config.width, tile.out), cdiv(step.rows, tile.rows) + 2),
            inputs, inputs.stride(0), tokens.projection, tokens.surfaces, tokens.ages, tokens.codes, residual, arrays.counts,
            arrays.rows, arrays.codes if config.token_levels else arrays.rows, *tokens.inputs, config.width,
            config.product_surfaces, HAS_AGES=config.has_post_age, CODE_LEVELS=config.token_levels, CODE_VALUES=config.token_values,
            **_tiling(tile, tokens.inputs, config.width),
        )  # fmt: skip

    def norm(
        self,
        step: Step,
        mixed: Tensor | None,
        post: NormWeights | None,
        residual: Tensor,
        norm: NormWeights,
        out: Tensor,
    ) -> None:
        """See `Kernels.norm`."""
        block = power_of_two(self.config.width)
        self._launch(
            norm_rows, (step.rows,),
            out if mixed is None else mixed, *_scale_and_bias(post or norm), residual, *_scale_and_bias(norm), out,
            *_counted(step), self.config.norm_epsilon,
            HAS_MIXED=mixed is not None, HAS_POST=post is not None, CENTRED=norm.bias is not None,
            WIDTH=self.config.width, WIDTH_BLOCK=block,
            num_warps=min(32, max(1, block // 128)),  # with more numbers a thread some leave the registers
        )  # fmt: skip

    def multiply(self, step: Step, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """See `Kernels.multiply`."""
        if (tuple(weight.shape), step.rows) in self._library:
            torch.mm(x[: step.rows], weight, out=out[: step.rows])
        else:
            self._multiply(step.rows, x, weight, out, *_counted(step))

    def _multiply(self, rows: int, x: Tensor, weight: Tensor, out: Tensor, counts: Tensor, counted: int) -> None:
        inner, columns = weight.shape
        tile = product_tile(rows, columns, weight.dtype)
        self._launch(
            multiply_tiles, (cdiv(columns, tile.out), cdiv(rows, tile.rows)),
            x, weight, out, counts, counted, inner, columns, x.stride(0), out.stride(0),
            **_tiling(tile, (inner,), columns),
        )  # fmt: skip

    def rotate(self, step: Step, query: Tensor | None, key_value: Tensor | None, layer: int) -> None:
        """See `Kernels.rotate`."""
        config, some = self.config, query if query is not None else key_value
        assert some is not None
        q, kv = (some if tensor is None else tensor for tensor in (query, key_value))
        self._launch(
            rotate_rows, (step.rows,),
            q, q.stride(0), kv, kv.stride(0), step.anchor, self._rope, self._rope.shape[1], *_counted(step),
            step.arrays.rows, step.arrays.states, layer,
            QUERY_HEADS=config.query_heads if query is not None else 0,
            KV_HEADS=config.kv_heads if key_value is not None else 0,
            HEAD_WIDTH=config.head_width, QUERY_BLOCK=power_of_two(config.query_heads),
            KV_BLOCK=power_of_two(config.kv_heads), HALF_BLOCK=power_of_two(config.head_width // 2), num_warps=4,
        )  # fmt: skip

    def attend(self, step: Step, query: Tensor, key_value: Tensor, layer: int, out: Tensor) -> None:
        """See `Kernels.attend`."""
        config, arrays, is_narrow = self.config, step.arrays, query.dtype == torch.bfloat16
        self._launch(
            attend_tiles, (config.query_heads, tile_slots(step.rows)),
            query, query.stride(0), key_value, key_value.stride(0), step.anchor, out, arrays.counts,
            word(COUNTS, step.counted_tiles), arrays.tiles, arrays.states, layer,
            CAUSAL=config.context_attention == "causal", QUERY_HEADS=config.query_heads, KV_HEADS=config.kv_heads,
            HEAD_WIDTH=config.head_width, HEAD_BLOCK=max(16, power_of_two(config.head_width)), PRECISION=EXACT,
            WIDEN=INTERPRETED, TILE_ROWS=TILE_ROWS, TILE_KEYS=64 if is_narrow else 32,
            num_warps=8 if is_narrow and config.head_width > 64 else 4, num_stages=2, **self._softmax,
        )  # fmt: skip

    def gate(self, step: Step, gate_value: Tensor, out: Tensor) -> None:
        """See `Kernels.gate`."""
        width = out.shape[1]
        block = min(1024, power_of_two(width))
        self._launch(
            gate_rows, (step.rows, cdiv(width, block)), gate_value, out, *_counted(step),
            WIDTH=width, ACTIVATION=self.config.activation, GATED=self.config.gated, BLOCK=block, num_warps=4,
        )  # fmt: skip

    def compile(self, forward: Callable[[], object]) -> None:
        """See `Kernels.compile`."""
        if INTERPRETED:
            return
        launcher, self._launch = self._launch, compile_only
        try:
            forward()
        finally:
            self._launch = launcher

    def check_products(self, weights: Sequence[Tensor], sizes: Sequence[int]) -> dict[str, Any]:
        """See `Kernels.check_products`: one comparison for each shape and size, on random rows."""
        device = weights[0].device
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (HOPPER // 10, HOPPER % 10):
            for weight in weights:
                equal = {size for size in sizes if size > FEW_ROWS and self._library_is_equal(weight, size)}
                self._library |= {(tuple(weight.shape), size) for size in equal}
        return {"cublas": sorted(f"{rows} x {inner} x {columns}" for (inner, columns), rows in self._library)}

    def _library_is_equal(self, weight: Tensor, rows: int) -> bool:
        """Whether cuBLAS gives the product kernel's bits on `rows` random rows; never for the heads, which are fp32."""
        if weight.dtype != torch.bfloat16:
            return False
        generator = torch.Generator(weight.device).manual_seed(rows)
        x = torch.randn(rows, weight.shape[0], generator=generator, device=weight.device).to(weight.dtype)
        ours = torch.empty(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
        self._multiply(rows, x, weight, ours, torch.full((1,), rows, dtype=torch.int32, device=weight.device), 0)
        return torch.equal(ours, x @ weight)

    def compiled(self) -> int:
        """See `Kernels.compiled`; on all devices, for all engines of the process."""
        return sum(len(caches[0]) for kernel in KERNELS for caches in getattr(kernel, "device_caches", {}).values())


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


def _tiling(tile: ProductTile, depths: Sequence[int], columns: int) -> dict[str, Any]:
    """Constants of a kernel of products over these inner axes."""
    return {
        "WHOLE_IN": all(depth % tile.inner == 0 for depth in depths), "WHOLE_OUT": columns % tile.out == 0,
        "PRECISION": EXACT, "WIDEN": INTERPRETED, "TILE_ROWS": tile.rows, "TILE_OUT": tile.out, "TILE_IN": tile.inner,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip


def _counted(step: Step) -> tuple[Tensor, int]:
    """Where a kernel reads how many rows there are."""
    return step.arrays.counts, word(COUNTS, step.counted)


def _scale_and_bias(norm: NormWeights) -> tuple[Tensor, Tensor]:
    """Scale and bias; without a bias the scale takes its place and is not read as one."""
    return norm.scale, norm.scale if norm.bias is None else norm.bias


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(0, (n - 1).bit_length())
