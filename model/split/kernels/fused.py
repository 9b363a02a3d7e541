"""The split engine's operations as Triton launches: for CUDA, and for Triton's interpreter in tests. The maths is in the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from model.batch import hash_functions
from model.config import DWELL_HIDDEN_WIDTH, ModelConfig
from model.split.kernels.attention import add_chunks, attend_tiles
from model.split.kernels.contract import Kernels, Part, Projected, Step, Tables, shape_name
from model.split.kernels.launch import (
    EXACT,
    INTERPRETED,
    Launcher,
    Launching,
    compiled_variants,
    launch,
    paired,
    softmax_constants,
    source_key,
)
from model.split.kernels.matmul import multiply_gate_tiles, multiply_rotate_tiles, multiply_tiles
from model.split.kernels.products import (
    COMPILED,
    FEW_ROWS,
    LIBRARY,
    PRODUCT_TILES,
    REFERENCE,
    SPREAD,
    Choices,
    cdiv,
    power_of_two,
    settle_library,
)
from model.split.kernels.rows import gate_rows, norm_rows, rotate_rows
from model.split.kernels.tokens import gather_rows, project_tiles
from model.split.step import CANDIDATE, CANDIDATE_TILES, HISTORY, TILE_ROWS, TILES, embeddings_per_token, tile_slots
from model.split.weights import Norm, SplitWeights, TokenWeights

TILE_KEYS, CHUNK_KEYS = 64, 256


class FusedKernels(Launching, Kernels):
    """Implements `Kernels`. `plain`: only the reference, and each kernel starts after the previous one has ended; else kinds are
    chosen, and kernels overlap on Hopper and later, see `order`. `launcher` and `capability` are replaced to collect launches or
    to compile for another device.
    """

    key_tile = 1  # the kernels mask

    def __init__(
        self,
        config: ModelConfig,
        weights: SplitWeights,
        dtype: torch.dtype,
        launcher: Launcher = launch,
        *,
        plain: bool = False,
        capability: int = 0,
    ) -> None:
        self.config = config
        device, shared_bytes = weights.heads.device, (163 if capability < 90 else 227) * 1024
        if weights.heads.is_cuda:
            settle_library()
            properties = torch.cuda.get_device_properties(device)
            capability = 10 * properties.major + properties.minor
            shared_bytes = int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
        super().__init__(launcher, shared_bytes, dependent=capability >= 90 and not plain)
        self._plain = plain
        self._rope = weights.rope
        self._slots: Tensor | None = None
        self._inputs: Tensor  # of tokens, for the rows of a step; made with the slots
        self._softmax = softmax_constants(config.attention_multiplier, config.attention_cap, dtype)
        self._chunks = cdiv(1 + config.history_length, CHUNK_KEYS) if dtype == torch.bfloat16 else 1
        self.choices = Choices(capability, narrow=dtype == torch.bfloat16, spread=self._chunks > 1)
        # sums stored by programs for single chunks; rows beyond those of a step are never written
        shape = (self._chunks if self._chunks > 1 else 0, FEW_ROWS + TILE_ROWS, config.query_heads)
        self._partial = torch.empty(*shape, config.head_width, device=device)
        self._totals = torch.empty(*shape, 2, device=device)

    def embed(self, step: Step, tables: Tables, tokens: TokenWeights, residual: Tensor) -> None:
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
            (step.rows, row_slots + 1),
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
        tile = self.choices.tile("embed", step.rows, config.width)
        self._launch_product(
            project_tiles, tile, cdiv(step.rows, tile.rows) + 2, tokens.inputs, config.width,
            inputs, inputs.stride(0), tokens.projection, tokens.surfaces, tokens.ages, residual, counts, *tokens.inputs,
            config.width, config.product_surfaces, HAS_AGES=config.has_post_age,
        )  # fmt: skip

    def norm(
        self, step: Step, mixed: Tensor | None, post: Norm | None, residual: Tensor, norm: Norm, out: Tensor
    ) -> None:
        """See `Kernels.norm`."""
        width = self.config.width
        self._launch(
            norm_rows,
            (step.rows,),
            (
                out if mixed is None else mixed,
                *_scale_and_bias(post or norm),
                residual,
                *_scale_and_bias(norm),
                out,
                step.arrays.counts,
                step.counted,
                self.config.norm_epsilon,
            ),
            HAS_MIXED=mixed is not None,
            HAS_POST=post is not None,
            CENTRED=norm.bias is not None,
            WIDTH=width,
            WIDTH_BLOCK=power_of_two(width),
            num_warps=min(
                32, max(1, power_of_two(width) // 128)
            ),  # with more numbers per thread some leave the registers
        )

    def multiply(self, step: Step, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """See `Kernels.multiply`."""
        name = shape_name(weight)
        if self.choices.kind(name, step.rows) == LIBRARY:
            torch.mm(x[: step.rows], weight, out=out[: step.rows])
            return
        is_chosen = weight.dtype == torch.bfloat16  # the heads' is fp32
        tile = self.choices.tile(name, step.rows, weight.shape[1]) if is_chosen else PRODUCT_TILES[REFERENCE]
        self._launch_product(
            multiply_tiles, tile, cdiv(step.rows, tile.rows), weight.shape[:1], weight.shape[1],
            x, weight, out, step.arrays.counts, step.counted, *weight.shape, x.stride(0), out.stride(0),
        )  # fmt: skip

    def rotate(self, step: Step, query: Tensor | None, key_value: Tensor | None, layer: int) -> None:
        """See `Kernels.rotate`."""
        config = self.config
        some = query if query is not None else key_value
        assert some is not None
        q, kv = (some if tensor is None else tensor for tensor in (query, key_value))
        self._launch(
            rotate_rows,
            (step.rows,),
            (
                q, q.stride(0), kv, kv.stride(0), step.anchor, self._rope, self._rope.shape[1], step.arrays.counts,
                step.counted, layer,
            ),
            QUERY_HEADS=config.query_heads if query is not None else 0,
            KV_HEADS=config.kv_heads if key_value is not None else 0,
            HEAD_WIDTH=config.head_width,
            QUERY_BLOCK=power_of_two(config.query_heads),
            KV_BLOCK=power_of_two(config.kv_heads),
            HALF_BLOCK=power_of_two(config.head_width // 2),
            num_warps=4,
        )  # fmt: skip

    def attend(self, step: Step, query: Tensor, key_value: Tensor, layer: int, out: Tensor) -> None:
        """See `Kernels.attend`."""
        config, counts = self.config, (step.arrays.counts, CANDIDATE_TILES if step.tail else TILES)
        partial = (self._partial, self._totals)
        is_spread = self._chunks > 1 and step.rows <= FEW_ROWS and self.choices.kind("attend", step.rows) == SPREAD
        chunks = self._chunks if is_spread else 1
        constants: dict[str, Any] = {
            "CAUSAL": config.context_attention == "causal", "QUERY_HEADS": config.query_heads, "HEAD_WIDTH": config.head_width,
            "HEAD_BLOCK": max(16, power_of_two(config.head_width)), "FORM": self._softmax["FORM"], "TILE_ROWS": TILE_ROWS,
        }  # fmt: skip
        is_narrow = query.dtype == torch.bfloat16
        self._launch(
            attend_tiles,
            (config.query_heads, tile_slots(step.rows), chunks),
            (
                query, query.stride(0), key_value, key_value.stride(0), step.anchor, out, *partial, *counts, layer,
                self._partial.shape[1],
            ),
            KV_HEADS=config.kv_heads,
            PRECISION=EXACT,
            WIDEN=INTERPRETED,
            TILE_KEYS=TILE_KEYS if is_narrow else TILE_KEYS // 2,
            CHUNK_KEYS=CHUNK_KEYS if is_narrow else 2**30,  # two sets of sums would not fit into the registers
            CHUNKED=is_narrow,
            SPREAD=is_spread,
            num_warps=8 if is_narrow and config.head_width > 64 else 4,
            num_stages=2,
            **(constants | self._softmax),
        )  # fmt: skip
        if is_spread:
            self._launch(
                add_chunks,
                (config.query_heads, tile_slots(step.rows)),
                (out, *partial, *counts, self._partial.shape[1]),
                CHUNK_KEYS=CHUNK_KEYS,
                num_warps=4,
                **constants,
            )

    def gate(self, step: Step, gate_value: Tensor, out: Tensor) -> None:
        """See `Kernels.gate`."""
        width = out.shape[1]
        block = min(1024, power_of_two(width))
        self._launch(
            gate_rows,
            (step.rows, cdiv(width, block)),
            (gate_value, out, step.arrays.counts, step.counted),
            WIDTH=width,
            ACTIVATION=self.config.activation,
            GATED=self.config.gated,
            BLOCK=block,
            num_warps=4,
        )

    def multiply_gate(self, step: Step, x: Tensor, weight: Tensor, gate_value: Tensor, out: Tensor) -> None:
        """See `Kernels.multiply_gate`."""
        tile = self.choices.fused("gate_value", step.rows)
        if tile is None:
            super().multiply_gate(step, x, weight, gate_value, out)
            return
        inner, columns = weight.shape
        self._launch_product(
            multiply_gate_tiles, paired(tile), cdiv(step.rows, tile.rows), (inner,), columns // 2,
            x, weight, out, step.arrays.counts, step.counted, inner, columns // 2, x.stride(0),
            ACTIVATION=self.config.activation,
        )  # fmt: skip

    def multiply_rotate(self, step: Step, x: Tensor, weight: Tensor, out: Tensor, part: Projected, layer: int) -> None:
        """See `Kernels.multiply_rotate`."""
        tile = self.choices.fused(part, step.rows)
        if tile is None:
            super().multiply_rotate(step, x, weight, out, part, layer)
            return
        config, (inner, columns) = self.config, weight.shape
        self._launch_product(
            multiply_rotate_tiles, paired(tile), cdiv(step.rows, tile.rows), (inner,), columns // 2,
            x, weight, out, step.anchor, self._rope, self._rope.shape[1], step.arrays.counts, layer, step.counted,
            inner, columns, x.stride(0), out.stride(0),
            0 if part == "key_value" else config.query_heads, 0 if part == "query" else config.kv_heads,
            HEAD_WIDTH=config.head_width,
        )  # fmt: skip

    def compile(self, forward: Callable[[], object]) -> None:
        """See `Kernels.compile`."""

        def kinds() -> None:
            for kind in (REFERENCE,) if self._plain else COMPILED:
                self.choices.forced = kind
                forward()

        try:
            self.compile_on_threads(kinds)
        finally:
            self.choices.forced = None

    def choose(
        self, weights: Sequence[Tensor], parts: Callable[[int], Sequence[Part]], sizes: Sequence[int]
    ) -> dict[str, Any]:
        """See `Kernels.choose`."""
        if self._plain:
            return {"how": REFERENCE}
        device = weights[0].device
        card = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
        return self.choices.choose(parts, sizes, f"{card} {torch.__version__} {self.config} {source_key()}")

    def keep_choices(self) -> None:
        """See `Kernels.keep_choices`."""
        self.choices.keep()

    def use_reference(self) -> None:
        """See `Kernels.use_reference`."""
        self.choices.chosen.clear()

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
    """Scale and bias; without a bias the scale takes its place and is not read as one."""
    return norm.scale, norm.scale if norm.bias is None else norm.bias
