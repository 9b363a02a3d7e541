"""Compares every operation of a forward with its plain form on the same inputs; names the first difference: layer, tile, row."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from model.split.kernels.contract import Kernels
from model.split.step import TILE_ROWS
from model.tolerances import PARITY

WRITTEN = {
    "embed": (3,),
    "norm": (3, 5),
    "multiply": (3,),
    "rotate": (1, 2),
    "attend": (4,),
    "gate": (2,),
}
OVERWRITTEN = {"embed": (3,), "norm": (5,), "multiply": (3,), "attend": (4,), "gate": (2,)}  # old content is not read
HARDWARE = 2e-4  # fp32 attention: error of `ex2.approx` and fast division, times the cap, that is no fault of a kernel


@dataclass(frozen=True, slots=True)
class Difference:
    """The first row in which an operation's output differs from its plain form's, or from that of a second call."""

    operation: str
    layer: int
    tail: bool
    tile: int
    row: int
    difference: float
    repeatable: bool

    def __str__(self) -> str:
        """A sentence about the difference."""
        what = "differs from its definition" if self.repeatable else "gives other bits every time"
        half = "tail" if self.tail else "body"
        return f"{self.operation} in layer {self.layer} ({half}), tile {self.tile}, row {self.row} {what}, by {self.difference:.3g}"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


class WatchedKernels:
    """Implements `Kernels` with `tested`, and checks each call against `reference`. Outputs are poisoned first. Goes on with the
    reference's numbers, so that one fault is not found again in all later operations.
    """

    def __init__(self, tested: Kernels, reference: Kernels, layers: int) -> None:
        self.differences: list[Difference] = []
        self.calls = 0
        self.key_tile = max(tested.key_tile, reference.key_tile)
        self._tested, self._reference, self._layers = tested, reference, layers
        self._gates = 0

    def __getattr__(self, name: str) -> Any:
        if name not in WRITTEN:
            return getattr(self._tested, name)
        return lambda *arguments: self._both(name, arguments)

    def _both(self, name: str, arguments: tuple[Any, ...]) -> None:
        step, tail = arguments[0], arguments[0].tail
        layer = self._layers - 1 if tail else min(self._gates, self._layers - 1)
        if name == "embed":
            layer = self._gates = 0
        outputs = [arguments[place] for place in WRITTEN[name] if arguments[place] is not None]
        poisoned = [arguments[place] for place in OVERWRITTEN.get(name, ())]
        before = [tensor.clone() for tensor in outputs]
        outputs_of_runs = []
        for kernels in (self._tested, self._tested, self._reference):
            for tensor, old in zip(outputs, before, strict=True):
                tensor.copy_(old)
            for tensor in poisoned:
                tensor.fill_(torch.nan)
            try:
                getattr(kernels, name)(*arguments)
            except RuntimeError as error:
                raise RuntimeError(f"{name} in layer {layer}: {error}") from error
            outputs_of_runs.append([tensor[: step.used].clone() for tensor in outputs])
            if name == "rotate":  # it also writes the states, with one row per token of the context
                states = [state.keys_values[arguments[3], :, : state.length] for state in step.states]
                outputs_of_runs[-1] += [state.transpose(0, 1).flatten(1).clone() for state in states]
        self.calls += 1
        self._gates += name == "gate" and not tail
        # tokens are fp32, but come from products in the engine's dtype
        dtypes = [step.anchor.dtype if name == "embed" else tensor.dtype for tensor in outputs_of_runs[0]]
        least = HARDWARE if name == "attend" else 0.0
        if difference := _first(*outputs_of_runs, dtypes=dtypes, least=least):
            row, worst, repeatable = difference
            self.differences.append(Difference(name, layer, tail, row // TILE_ROWS, row, worst, repeatable))


def _first(
    tested: list[Tensor], again: list[Tensor], expected: list[Tensor], *, dtypes: list[torch.dtype], least: float
) -> tuple[int, float, bool] | None:
    """The first wrong or unsteady row, its largest difference, and whether a second call gave the same bits there; None if all is right."""
    for one, other, right, dtype in zip(tested, again, expected, dtypes, strict=True):
        tolerance = max(least, 2 * PARITY[dtype].operation)
        wrong = ~torch.isclose(one.float(), right.float(), rtol=tolerance, atol=tolerance)  # NaN is close to nothing
        unsteady = (one != other) & ~(one.isnan() & other.isnan())
        rows = (wrong | unsteady).any(-1).nonzero()
        if len(rows):
            row = int(rows[0])
            worst = (one[row].float() - right[row].float()).abs().max()
            return row, float(worst), not bool(unsteady[row].any())
    return None
