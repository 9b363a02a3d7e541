"""The interface of a set of kernels for the split trunk. Two implementations: `portable` (torch, any device) and `fused` (Triton)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from torch import Tensor

from model.config import ModelConfig
from model.engine import EngineError
from model.split.step import CANDIDATES, ROWS, ContextState, StepArrays
from model.split.weights import Norm, TokenWeights

Projected = Literal["qkv", "query", "key_value"]  # which of queries, keys and values a product makes
FUSABLE = ("gate_value", "qkv", "query", "key_value")  # weights whose product can be fused with the gate or RoPE
SAFE_EXPONENT = 80.0  # exp of ± this is a normal fp32 number and leaves room for a sum over a context


def softmax_shift(cap: float | None) -> float:
    """The shift that a softmax over logits within ± cap subtracts instead of their maximum; 0 without a cap, where a maximum is kept.
    Raises EngineError for a cap too large."""
    if cap is None:
        return 0.0
    if cap > SAFE_EXPONENT:
        raise EngineError(
            f"attention_cap {cap} is above {SAFE_EXPONENT}, the most that fp32 can hold without a maximum"
        )
    return min(cap, SAFE_EXPONENT - cap)


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """Embedding tables `[rows, D]`, fp32 or bf16, all of one dtype and on the engine's device. Row 0 reads as zero.

    `numbers` int32 `[R, E]`: which rows of the tables each of a step's rows embeds; None if the kernels hash the ids.
    """

    user: Tensor
    post: Tensor
    author: Tensor
    numbers: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step on the device. `arrays` are tensors there; `host` the same as numpy; `states` in the order of their numbers.

    `anchor` is the tensor, of the engine's dtype, from which `arrays.offsets` count. `host` and `states` are for
    implementations that loop on the host; inside a CUDA graph only `arrays` may be read. `rows` is how many to run, at least as
    many as the step has; `tail` restricts what is run to candidates, which come first.
    """

    anchor: Tensor
    arrays: StepArrays
    host: StepArrays
    states: Sequence[ContextState]
    rows: int = 0
    tail: bool = False

    def at(self, rows: int, *, tail: bool = False) -> Step:
        """The same step, to be run on `rows` rows."""
        return replace(self, rows=rows, tail=tail)

    @property
    def counted(self) -> int:
        """The index in the counts of the number of rows in use."""
        return CANDIDATES if self.tail else ROWS

    @property
    def used(self) -> int:
        """The number of rows in use; the others hold garbage."""
        return int(self.host.counts[self.counted])


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One operation of a forward, to be run by itself on a step's `rows`: `run` takes the number of one of `layers`.

    `name` is one of `FUSABLE` for a product fused with what follows, `embed`, `attend`, `norm`, or the shape of a product's weight.
    inputs: the activations and states it reads; outputs: the rows in use of what it writes; weights: one per layer.
    """

    name: str
    rows: int
    layers: int
    run: Callable[[int], None]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    weights: Sequence[Tensor] = field(default=())


class Kernels(Protocol):
    """Operations on the rows of a step; rows past its own hold garbage before and after. No row ever influences another
    except through `attend`, and a row's bits depend neither on `Step.rows`, nor on its place, nor on its neighbours. States have
    room for a multiple of `key_tile` tokens.
    """

    key_tile: int
    config: ModelConfig

    def embed(self, step: Step, tables: Tables, tokens: TokenWeights, residual: Tensor) -> None:
        """residual fp32 `[rows, D]` = the tokens."""

    def norm(
        self, step: Step, mixed: Tensor | None, post: Norm | None, residual: Tensor, norm: Norm, out: Tensor
    ) -> None:
        """`residual += post(mixed)`, or `mixed` itself without a `post`, unless `mixed` is None; then `out = norm(residual)`."""

    def multiply(self, step: Step, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """`out = x @ weight`."""

    def rotate(self, step: Step, query: Tensor | None, key_value: Tensor | None, layer: int) -> None:
        """RoPE in place on query `[rows, N·K]` and on the keys of key_value `[rows, 2·G·K]`; context rows' keys and values
        are copied to their state.
        """

    def attend(self, step: Step, query: Tensor, key_value: Tensor, layer: int, out: Tensor) -> None:
        """out `[rows, N·K]`: context rows over their state's past (or all of it), candidates over all of it and themselves."""

    def gate(self, step: Step, gate_value: Tensor, out: Tensor) -> None:
        """gate_value `[rows, 2·F]`; out `[rows, F]` = `activation(gate) ⊙ value`. Without a gate `[rows, F]`, and no product."""

    def multiply_gate(self, step: Step, x: Tensor, weight: Tensor, gate_value: Tensor, out: Tensor) -> None:
        """`multiply` and `gate`, or what gives the same bits; gate_value may be left as it was."""
        self.multiply(step, x, weight, gate_value)
        self.gate(step, gate_value, out)

    def multiply_rotate(self, step: Step, x: Tensor, weight: Tensor, out: Tensor, part: Projected, layer: int) -> None:
        """`multiply` to out, which then holds `part`, and `rotate`, or what gives the same bits."""
        self.multiply(step, x, weight, out)
        self.rotate(step, *split_part(self.config, part, out), layer)

    def compile(self, forward: Callable[[], object]) -> None:
        """Compile what `forward` launches, with kernels of every kind, if this set compiles beforehand. Nothing is computed."""
        return

    def choose(
        self, weights: Sequence[Tensor], parts: Callable[[int], Sequence[Part]], sizes: Sequence[int]
    ) -> dict[str, Any]:
        """Find the fastest ways that give the bits of the reference, for products with weights of these shapes, or for the `parts`
        of a forward with each of `sizes` rows, and use them from now on. Returns what was found. Raises EngineError when the
        reference itself fails.
        """

    def keep_choices(self) -> None:
        """Keep the choices for the next start: they have been checked in whole forwards."""
        return

    def use_reference(self) -> None:
        """Use the reference everywhere."""

    def compiled(self) -> int:
        """How many kernels have been compiled or loaded so far."""
        return 0


def split_part(config: ModelConfig, part: Projected, out: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The queries, and the keys with values, among the columns of `part`, as views; None for what it lacks."""
    queries = 0 if part == "key_value" else config.query_heads * config.head_width
    return (out[:, :queries] if queries else None), (None if part == "query" else out[:, queries:])


def shape_name(weight: Tensor) -> str:
    """`in x out`, for people."""
    return "x".join(map(str, weight.shape))
