"""Faults to plant into a measured engine, to show that the bench finds and names them. Never part of a figure."""

from __future__ import annotations

import os
import time
from typing import Any, cast

from model.split.engine import MakeKernels
from model.split.kernels.contract import Kernels

FAULTS = ("kernel", "product", "access", "hang")
WRONG_ROW = 70  # in the second tile
HANGING_PHASE = "bits"


class PlantedKernels:
    """`kernels` with one fault. `kernel`: a gate that is wrong in one tile. `product`: a product that differs from call to call.
    `access`: a gate that loses the device, which shows only at the next product unless launches block.
    """

    def __init__(self, kernels: Kernels, fault: str) -> None:
        self._kernels, self._fault = kernels, fault
        self._calls, self._lost = 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def gate(self, step: Any, gate_value: Any, out: Any) -> None:
        """See `Kernels.gate`."""
        self._kernels.gate(step, gate_value, out)
        if self._fault == "kernel" and step.rows > WRONG_ROW:
            out[WRONG_ROW] += 0.5
        self._lost = self._fault == "access"
        if self._lost and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            self._fail()

    def multiply(self, step: Any, x: Any, weight: Any, out: Any) -> None:
        """See `Kernels.multiply`."""
        if self._lost:
            self._fail()
        self._kernels.multiply(step, x, weight, out)
        if self._fault == "product":
            self._calls += 1
            out[5] += 0.1 * self._calls

    def _fail(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered (planted)")


def planted(make: MakeKernels, fault: str) -> MakeKernels:
    """Kernels with a fault, if it is a fault of kernels."""
    if fault not in ("kernel", "product", "access"):
        return make
    return lambda *arguments: cast("Kernels", PlantedKernels(make(*arguments), fault))


def hang(fault: str, phase: str) -> None:
    """Hang forever if the fault is `hang` and this is its phase."""
    while fault == "hang" and phase == HANGING_PHASE:
        time.sleep(1)
