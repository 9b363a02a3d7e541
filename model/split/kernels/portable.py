"""The split engine's operations in plain torch, batch-invariant. For CPUs; correct on any device.

Matrix products run on a fixed number of rows per call, attention on fixed tiles of rows and keys. Functions like exp run on
pieces of fixed size, because torch computes the last few elements of a call by another formula than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from model.batch import hash_rows
from model.config import ModelConfig
from model.engine import EngineError
from model.layers import MASKED, activate
from model.ranker import code_embeddings
from model.split.kernels.contract import Kernels, Step, Tables, shape_name, softmax_shift
from model.split.step import CANDIDATE, HISTORY, TILE_ROWS, USER, ContextState
from model.split.weights import NormWeights, TokenWeights

KEY_TILE = 128  # states are allocated in multiples of it, so that every product has the same shape
CARD_BLOCKS = 8  # of KEY_TILE, the most that are one block on a card
WIDE_ROW_SIZES = (1024, 256)  # rows of larger products, used where they give the bits of TILE_ROWS
LEAST_COLUMNS = 16  # narrower products are padded: those of fewer columns depend on the row's place in some libraries
PIECE = 16384  # elements that torch computes without splitting them over threads; only gelu has so low a limit


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` over the elements of a contiguous tensor whose size is a multiple of 64, on a CPU in pieces of `PIECE`."""
    flat = x.reshape(-1)
    if flat.numel() <= PIECE or x.is_cuda:
        return function(flat).view(x.shape)
    return torch.cat([function(piece) for piece in flat.split(PIECE)]).view(x.shape)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight`, computed with at least `LEAST_COLUMNS` columns."""
    columns = weight.shape[1]
    if columns >= LEAST_COLUMNS:
        return x @ weight
    return (x @ functional.pad(weight, (0, LEAST_COLUMNS - columns)))[:, :columns]


class PortableKernels(Kernels):
    """Implements `Kernels`. Matrix products run on TILE_ROWS rows per call, or on more where a check found the same bits:
    `row_sizes` holds the checked counts by weight shape, descending. `key_tile`: keys of one block of attention; on a card a whole
    context takes few blocks, because there each operation costs its launch.
    """

    def __init__(self, config: ModelConfig, rope: Tensor) -> None:
        self.config = config
        self.rope = rope
        self.row_sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
        blocks = -(-(1 + config.history_length) // KEY_TILE) if rope.is_cuda else 1
        self.key_tile = KEY_TILE * min(blocks, CARD_BLOCKS)

    def embed(self, step: Step, tables: Tables, tokens: TokenWeights, residual: Tensor) -> None:
        """See `Kernels.embed`."""
        projections = tokens.projection.split(tokens.inputs)
        for kind, start, stop in step.host.kinds():
            for first in range(start, stop, TILE_ROWS):
                tile = slice(first, min(first + TILE_ROWS, stop))
                inputs = self._embedded(step, tables, tile, kind)
                if kind == HISTORY:
                    inputs = torch.cat((inputs, self._small_inputs(step, tokens, tile)), 1)
                inputs = functional.pad(inputs, (0, tokens.inputs[kind] - inputs.shape[1]))
                out = product(inputs, projections[kind].float())
                if kind != USER:
                    out += tokens.surfaces[kind][_padded(step.arrays.row("surface")[tile]).long()]
                if kind == CANDIDATE and self.config.has_post_age:
                    out += tokens.ages[_padded(step.arrays.row("age")[tile]).long()]
                if kind != USER and self.config.token_levels:
                    out += code_embeddings(_padded(step.arrays.codes[tile]).long(), tokens.codes[kind], self.config)
                residual[tile] = out[: tile.stop - first]

    def _embedded(self, step: Step, tables: Tables, tile: slice, kind: int) -> Tensor:
        """The hash embeddings of a tile's rows, fp32 `[TILE_ROWS, n·D]`; row 0 reads as zero."""
        config, rows = self.config, step.host.rows[tile]
        entities = [
            (tables.post, config.post_hashes, rows["post"]),
            (tables.author, config.author_hashes, rows["author"]),
        ]
        if kind == USER:
            entities = [(tables.user, config.user_hashes, rows["post"])]
        parts = []
        for table, spec, ids in entities:
            numbers = _padded(torch.from_numpy(hash_rows(ids, spec))).to(table.device)
            embedded = functional.embedding(numbers, table).float()
            parts.append(torch.where(numbers[..., None] == 0, 0.0, embedded).flatten(1))
        return torch.cat(parts, 1)

    def _small_inputs(self, step: Step, tokens: TokenWeights, tile: slice) -> Tensor:
        """Inputs of a history item from actions and dwell seconds, see `TokenWeights`: fp32 `[TILE_ROWS, A or A + 64]`."""
        first = step.host.count("candidates")
        history = _padded(step.arrays.history[tile.start - first : tile.stop - first])
        actions = history[:, :-1]
        signs = torch.where((actions != 0).any(-1, keepdim=True), 2 * actions - 1, 0.0)
        if not self.config.has_dwell:
            return signs
        fraction = history[:, -1:].clamp(0, 30) / 30
        return torch.cat((signs, elementwise(lambda x: activate(x, "gelu_tanh"), fraction * tokens.dwell_input)), 1)

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
        wide = residual[: step.rows]
        if mixed is not None:
            wide += self._normed(mixed[: step.rows].float(), post) if post else mixed[: step.rows]
        out[: step.rows] = self._normed(wide, norm)

    def _normed(self, x: Tensor, norm: NormWeights) -> Tensor:
        # the sums run over whole rows only: a mean over one long row would be split between threads
        if norm.bias is not None:
            x = x - x.sum(-1, keepdim=True) / x.shape[1]
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) / x.shape[1] + self.config.norm_epsilon) * norm.scale
        return x if norm.bias is None else x + norm.bias

    def multiply(self, step: Step, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """See `Kernels.multiply`."""
        sizes = self.row_sizes.get(tuple(weight.shape), (TILE_ROWS,))
        row = 0
        while row < step.rows:
            size = next((size for size in sizes if size <= step.rows - row), sizes[-1])
            some = slice(row, row + size)
            if weight.shape[1] < LEAST_COLUMNS:
                out[some] = product(x[some], weight)
            else:
                torch.mm(x[some], weight, out=out[some])
            row += size

    def rotate(self, step: Step, query: Tensor | None, key_value: Tensor | None, layer: int) -> None:
        """See `Kernels.rotate`."""
        config, rows = self.config, step.rows
        cos, sin = self.rope[:, step.arrays.row("position")[:rows].long()].unsqueeze(2)
        if query is not None:
            _rotate(query[:rows].view(rows, config.query_heads, config.head_width), cos, sin)
        if key_value is None:
            return
        pairs = key_value[:rows].view(rows, 2, config.kv_heads, config.head_width)
        _rotate(pairs[:, 0], cos, sin)
        for first, count, request, index in self._tiles(step.at(step.rows)):
            if index >= 0:
                state = step.states[request].keys_values
                state[layer, :, index : index + count] = pairs[first : first + count].transpose(0, 1)

    def attend(self, step: Step, query: Tensor, key_value: Tensor, layer: int, out: Tensor) -> None:
        """See `Kernels.attend`."""
        wide: dict[int, Tensor] = {}
        for first, count, request, index in self._tiles(step):
            state = step.states[request]
            if request not in wide:
                # [2, G, capacity, K or more]: one conversion per request and layer
                keys_values = state.keys_values[layer].float().transpose(1, 2)
                padding = max(0, LEAST_COLUMNS - self.config.head_width)
                wide[request] = functional.pad(keys_values, (0, padding)).contiguous()
            tile = slice(first, first + TILE_ROWS)
            mixed = self._attend_tile(query[tile], key_value[tile], wide[request], state, count, index)
            out[first : first + count] = mixed[:count].to(out.dtype)

    def _attend_tile(
        self, query: Tensor, key_value: Tensor, wide: Tensor, state: ContextState, count: int, index: int
    ) -> Tensor:
        """`TILE_ROWS` rows against one context; those past `count` are garbage. Returns fp32 `[TILE_ROWS, N·K]`."""
        config = self.config
        heads, kv_heads, width = config.query_heads, config.kv_heads, config.head_width
        group = heads // kv_heads
        q = query.float().view(TILE_ROWS, kv_heads, group, width).transpose(0, 1)
        q = q.reshape(kv_heads, TILE_ROWS * group, width)
        limits = torch.full((TILE_ROWS,), state.length)
        if index >= 0 and config.context_attention == "causal":
            limits = torch.arange(index + 1, index + 1 + TILE_ROWS)
        last = min(int(limits[count - 1]), state.length)
        limits = limits.to(q.device)[None, :, None].expand(kv_heads, TILE_ROWS, group).reshape(kv_heads, -1, 1)
        softmax = _Softmax(config, q)
        keys = torch.arange(self.key_tile, device=q.device)
        for start in range(0, last, self.key_tile):
            key, value = wide[:, :, start : start + self.key_tile]
            weights = softmax.weights(torch.bmm(q, key[..., :width].transpose(1, 2)), keys + start < limits)
            softmax.mixed += torch.bmm(weights, value)[..., :width]
        if index < 0:
            own = key_value.float().view(TILE_ROWS, 2, kv_heads, 1, width).expand(-1, -1, -1, group, -1)
            own_key, own_value = own.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, TILE_ROWS * group, width)
            products = (q * own_key).sum(-1, keepdim=True)
            softmax.mixed += softmax.weights(products, torch.ones_like(products, dtype=torch.bool)) * own_value
        mixed = (softmax.mixed / softmax.total).view(kv_heads, TILE_ROWS, group, width).transpose(0, 1)
        return mixed.reshape(TILE_ROWS, heads * width)

    def gate(self, step: Step, gate_value: Tensor, out: Tensor) -> None:
        """See `Kernels.gate`."""
        gates, *values = gate_value[: step.rows].chunk(2 if self.config.gated else 1, -1)
        activated = elementwise(lambda x: activate(x, self.config.activation), gates.float().contiguous())
        out[: step.rows] = activated * values[0] if values else activated

    def compile(self, forward: Callable[[], object]) -> None:
        """See `Kernels.compile`; there is nothing to compile."""

    def compiled(self) -> int:
        """See `Kernels.compiled`."""
        return 0

    def check_products(self, weights: Sequence[Tensor], sizes: Sequence[int]) -> dict[str, Any]:
        """See `Kernels.check_products`; `sizes` do not matter: every number of rows is cut into checked ones."""
        for weight in weights:

            def whole(x: Tensor, weight: Tensor = weight) -> Tensor:
                return product(x, weight)

            def reference(x: Tensor, weight: Tensor = weight) -> Tensor:
                return torch.cat([product(tile, weight) for tile in x.split(TILE_ROWS)])

            width = weight.shape[0]
            if not rows_are_independent(reference, reference, 4 * TILE_ROWS, width, weight):
                raise EngineError(
                    f"torch's products of {TILE_ROWS} rows times {shape_name(weight)} give a row other bits in another place on this "
                    "machine: train the model at another width, or choose backend 'dense', whose last bits depend on the number of "
                    "candidates"
                )
            wide = [size for size in WIDE_ROW_SIZES if rows_are_independent(whole, reference, size, width, weight)]
            self.row_sizes[tuple(weight.shape)] = (*wide, TILE_ROWS)
        return {shape_name(weight): list(self.row_sizes[tuple(weight.shape)]) for weight in weights}

    @staticmethod
    def _tiles(step: Step) -> list[tuple[int, int, int, int]]:
        """Of each tile its first row, rows, request and place."""
        tiles: list[tuple[int, int, int, int]] = step.host.tiles[: step.host.count(step.counted_tiles)].tolist()
        return tiles


def rows_are_independent(
    product: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor], rows: int, width: int, like: Tensor
) -> bool:
    """Whether `product`, on `rows` random rows at once, gives each the bits that `reference` gives it; NaN never passes.

    Not a substitute for the self-test, which runs whole forwards.

    `reference` takes any number of rows. Three compositions: the rows as they are, the rows in another order, and every
    other row replaced. `like` names device and dtype.
    """
    generator = torch.Generator(like.device).manual_seed(rows)

    def random_rows(count: int) -> Tensor:
        return torch.randn(count, width, generator=generator, device=like.device).to(like.dtype)

    x = random_rows(rows)
    expected = reference(x)
    order = torch.randperm(rows, generator=generator, device=like.device)
    others = x.clone()
    others[1::2] = random_rows(rows // 2)
    return (
        torch.equal(product(x), expected)
        and torch.equal(product(x[order]), expected[order])
        and torch.equal(product(others)[::2], expected[::2])
    )


class _Softmax:
    """A softmax over blocks of keys in their order: `total` Σ p and `mixed` Σ p·v so far, `p = exp(logit − shift)`.

    A cap bounds every logit, so one shift is enough for all. Without a cap the shift is the maximum so far, and the sums are scaled
    down whenever it rises, which depends only on a row and the keys that it sees.
    """

    def __init__(self, config: ModelConfig, query: Tensor) -> None:
        self.total = query.new_zeros(*query.shape[:-1], 1)
        self.mixed = torch.zeros_like(query)
        self._config = config
        self._maximum = None if config.attention_cap else torch.full_like(self.total, MASKED)
        self._shift = softmax_shift(config.attention_cap)

    def weights(self, products: Tensor, visible: Tensor) -> Tensor:
        """The weights of a block of keys from raw products `q·k`; they are added to `total`, and the caller adds them to `mixed`."""
        config, cap = self._config, self._config.attention_cap
        if self._maximum is None:
            assert cap is not None
            scale, shift = config.attention_multiplier / cap, self._shift
            weights = elementwise(lambda x: torch.exp(torch.tanh(x * scale) * cap - shift), products)
        else:
            logits = torch.where(visible, products * config.attention_multiplier, MASKED)
            before, self._maximum = self._maximum, torch.maximum(self._maximum, logits.amax(-1, keepdim=True))
            fade = elementwise(torch.exp, before - self._maximum)
            self.total *= fade
            self.mixed *= fade
            weights = elementwise(torch.exp, logits - self._maximum)
        weights = torch.where(visible, weights, 0.0)
        self.total += weights.sum(-1, keepdim=True)
        return weights


def _padded(x: Tensor) -> Tensor:
    """Append zero rows, up to a whole tile."""
    return torch.cat((x, x.new_zeros(TILE_ROWS - len(x), *x.shape[1:]))) if len(x) < TILE_ROWS else x


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """RoPE in place: x `[rows, heads, K]`, tables `[rows, 1, K/2]`."""
    first, second = x.float().chunk(2, -1)
    x.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
