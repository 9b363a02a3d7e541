"""The interface of a set of kernels for the split trunk. Two implementations: `portable` (torch, any device) and `launch` (Triton)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from torch import Tensor

from model.engine import EngineError
from model.split.step import ContextState, DeviceArrays, HostArrays
from model.split.weights import NormWeights, TokenWeights

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
    """Embedding tables `[rows, D]`, fp32 or bf16, all of one dtype and on the engine's device. Row 0 reads as zero."""

    user: Tensor
    post: Tensor
    author: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step on the device. `arrays` are tensors there; `host` the same as numpy; `states` in the order of their numbers.

    `anchor` is the tensor, of the engine's dtype, from which the starts of states count. `host` and `states` are for
    implementations that loop on the host; inside a CUDA graph only `arrays` may be read. `rows` is how many to run, at least as
    many as the step has; `tail` restricts what is run to candidates, which come first.
    """

    anchor: Tensor
    arrays: DeviceArrays
    host: HostArrays
    states: Sequence[ContextState]
    rows: int = 0
    tail: bool = False

    def at(self, rows: int, *, tail: bool = False) -> Step:
        """The same step, to be run on `rows` rows."""
        return replace(self, rows=rows, tail=tail)

    @property
    def counted(self) -> Literal["rows", "candidates"]:
        """The name of the count of rows in use."""
        return "candidates" if self.tail else "rows"

    @property
    def counted_tiles(self) -> Literal["tiles", "candidate_tiles"]:
        """The name of the count of tiles in use."""
        return "candidate_tiles" if self.tail else "tiles"

    @property
    def used(self) -> int:
        """The number of rows in use; the others hold garbage."""
        return self.host.count(self.counted)


class Kernels(Protocol):
    """Operations on the rows of a step; rows past its own hold garbage before and after. No row ever influences another
    except through `attend`, and a row's bits depend neither on `Step.rows`, nor on its place, nor on its neighbours. States have
    room for a multiple of `key_tile` tokens.
    """

    key_tile: int

    def embed(self, step: Step, tables: Tables, tokens: TokenWeights, residual: Tensor) -> None:
        """residual fp32 `[rows, D]` = the tokens."""

    def norm(
        self,
        step: Step,
        mixed: Tensor | None,
        post: NormWeights | None,
        residual: Tensor,
        norm: NormWeights,
        out: Tensor,
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

    def compile(self, forward: Callable[[], object]) -> None:
        """Compile what `forward` launches, if this set compiles anything. Nothing is computed."""

    def check_products(self, weights: Sequence[Tensor], sizes: Sequence[int]) -> dict[str, Any]:
        """Find faster products that give the same bits, for weights of these shapes and steps of these sizes, and use them from now
        on. Returns what was found. Raises EngineError when the products themselves fail."""

    def compiled(self) -> int:
        """How many kernels have been compiled or loaded so far."""


def shape_name(weight: Tensor) -> str:
    """`in x out`, for people."""
    return "x".join(map(str, weight.shape))
