"""The split engine's operations as Triton launches: for CUDA, and for Triton's interpreter in tests. The maths is in the kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from model.config import DWELL_HIDDEN_WIDTH, CapForm, ModelConfig
from model.hashing import hash_functions
from model.split.kernels.attention import attend_tiles, rotate_rows
from model.split.kernels.contract import Part, Step, Tables, Unfused, softmax_shift
from model.split.kernels.epilogues import multiply_gate_tiles, multiply_rotate_tiles
from model.split.kernels.fusion import FUSED_TILES, GATE, SEPARATE, Fusion
from model.split.kernels.matmul import multiply_tiles
from model.split.kernels.products import EXACT, INTERPRETED, Launcher, Products, cdiv, power_of_two, settle_library
from model.split.kernels.rows import gate_rows, norm_head_rows, norm_rows
from model.split.kernels.tokens import gather_rows, project_tiles
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

KERNELS = (
    attend_tiles,
    gate_rows,
    gather_rows,
    multiply_gate_tiles,
    multiply_rotate_tiles,
    multiply_tiles,
    norm_head_rows,
    norm_rows,
    project_tiles,
    rotate_rows,
)
LOG2_E = math.log2(math.e)
TILE_KEYS = 64


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
    """Start the kernel on the current stream."""
    kernel[grid](*arguments, **constants)


def can_be_dependent(device: torch.device) -> bool:
    """Whether the device starts a kernel while the one before it ends: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


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


class FusedKernels(Unfused):
    """Implements `Kernels`. Without `library` no product of cuBLAS is used. With `dependent` a kernel is started while the one
    before it ends, see `order`; without `fuse` none does two operations. `launcher` is replaced where launches are to be
    collected instead of run.
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
        dependent: bool = False,
        fuse: bool = True,
    ) -> None:
        self.config = config
        if weights.heads.is_cuda:
            settle_library()
        self.products = Products(self._launch, library=library)
        self._dependent = dependent
        self._fuse = fuse
        self._launcher = launcher
        self._rope = weights.rope
        self.fusion = Fusion(config, weights.rope, self._launch)
        self._slots: Tensor | None = None
        self._inputs: Tensor  # of tokens, for the rows of a step; made with the slots
        self._softmax = softmax_constants(config.attention_multiplier, config.attention_cap, config.cap_form, dtype)

    def _launch(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
        scheduling = {"launch_pdl": True} if self._dependent else {}
        self._launcher(kernel, grid, arguments, DEPENDENT=self._dependent, **constants, **scheduling)

    def embed(self, step: Step, tables: Tables, tokens: TokenWeights, residual: Tensor, rows: int) -> None:
        """See `Kernels.embed`."""
        config, counts = self.config, step.arrays.counts
        if self._slots is None:
            self._slots = embedding_slots(config, tables)
            widest = max(tokens.inputs)
            self._inputs = torch.zeros(len(residual), widest, dtype=tokens.projection.dtype, device=residual.device)
        inputs, row_slots = self._inputs, embeddings_per_token(config)
        small = tokens.inputs[HISTORY] - tokens.inputs[CANDIDATE]
        self._launch(
            gather_rows,
            (rows, row_slots + 1),
            (
                tables.post, self._slots, counts if tables.numbers is None else tables.numbers, tokens.dwell_input,
                inputs, inputs.stride(0), counts, step.arrays.actions,
            ),
            NUMBERED=tables.numbers is not None,
            POST_SLOTS=config.post_hashes.count,
            ENTITY_SLOTS=config.post_hashes.count + config.author_hashes.count,
            USER_SLOTS=config.user_hashes.count,
            ROW_SLOTS=row_slots,
            WIDTH=config.width,
            WIDTH_BLOCK=power_of_two(config.width),
            ACTIONS=config.actions,
            DWELL_WIDTH=DWELL_HIDDEN_WIDTH if config.has_dwell else 0,
            SMALL=small,
            SMALL_BLOCK=power_of_two(small),
            num_warps=1 if config.width <= 512 else 4,
        )  # fmt: skip
        narrow = config.width <= 512 or inputs.dtype == torch.float32
        self._launch(
            project_tiles,
            (cdiv(config.width, 64 if narrow else 128), rows // TILE_ROWS + 3),
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
            WIDTH_BLOCK=power_of_two(width),
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
            HEAD_BLOCK=power_of_two(len(scale)),
            num_warps=1,
        )

    def multiply(self, step: Step, x: Tensor, weight: Tensor, out: Tensor, rows: int, *, tail: bool = False) -> None:
        """See `Kernels.multiply`."""
        self.products.multiply(step.arrays.counts, CANDIDATES if tail else ROWS, x, weight, out, rows)

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
            QUERY_BLOCK=power_of_two(config.query_heads),
            KV_BLOCK=power_of_two(config.kv_heads),
            HALF_BLOCK=power_of_two(config.head_width // 2),
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
            HEAD_BLOCK=max(16, power_of_two(config.head_width)),
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
        block = min(1024, power_of_two(width))
        self._launch(
            gate_rows,
            (rows, cdiv(width, block)),
            (gate_value, out, step.arrays.counts),
            ROW_COUNT=CANDIDATES if tail else ROWS,
            WIDTH=width,
            ACTIVATION=self.config.activation,
            GATED=self.config.gated,
            BLOCK=block,
            num_warps=4,
        )

    def multiply_gate(
        self, step: Step, x: Tensor, weight: Tensor, gate_value: Tensor, out: Tensor, rows: int, *, tail: bool
    ) -> None:
        """See `Kernels.multiply_gate`."""
        tile = FUSED_TILES.get(self.fusion.chosen.get((GATE, rows), SEPARATE))
        if tile is None:
            super().multiply_gate(step, x, weight, gate_value, out, rows, tail=tail)
        else:
            self.fusion.gate(tile, step.arrays.counts, CANDIDATES if tail else ROWS, x, weight, out, rows)

    def multiply_rotate(
        self,
        step: Step,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        part: Part,
        layer: int,
        rows: int,
        *,
        tail: bool,
    ) -> None:
        """See `Kernels.multiply_rotate`."""
        tile = FUSED_TILES.get(self.fusion.chosen.get((part, rows), SEPARATE))
        if tile is None:
            super().multiply_rotate(step, x, weight, out, part, layer, rows, tail=tail)
        else:
            self.fusion.rotate(tile, step, CANDIDATES if tail else ROWS, x, weight, out, part, layer, rows)

    def choose_products(
        self, weights: Sequence[Tensor], fusable: Mapping[str, Tensor], sizes: Sequence[int]
    ) -> dict[str, Any]:
        """See `Kernels.choose_products`."""
        found = self.products.choose(weights, sizes)
        return found | (self.fusion.choose(self, fusable, sizes) if self._fuse else {})

    def use_reference(self) -> None:
        """See `Kernels.use_reference`."""
        self.products.chosen.clear()
        self.fusion.chosen.clear()

    def compiled(self) -> int:
        """See `Kernels.compiled`; on all devices, for all engines of the process."""
        return compiled_variants()


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
