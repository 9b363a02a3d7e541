"""Tensors of a request as `tritonclient` sends them over gRPC."""

from __future__ import annotations

import tritonclient.grpc as triton

from loadtest.generate.tensors import Inference, datatype


def inputs(asked: Inference) -> list[triton.InferInput]:
    """One input a tensor, its bytes raw."""
    made = []
    for name, array in asked.inputs.items():
        tensor = triton.InferInput(name, list(array.shape), datatype(array))
        made.append(tensor.set_data_from_numpy(array))
    return made
