"""Converts a JSON request to one of the Open Inference Protocol, with tensors in JSON or binary. Shared with tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

DTYPES = {"u": "UINT64", "i": "INT64", "f4": "FP32", "f8": "FP64"}
KINDS = {"post_id": "u8", "author_id": "u8", "product_surface": "i8", "created_at": "i8", "dwell_time": "f4"}
LENGTH = "inference-header-content-length"


@dataclass(frozen=True, slots=True)
class Inference:
    """A request of the Open Inference Protocol: named arrays and parameters."""

    inputs: dict[str, NDArray[Any]]
    parameters: dict[str, Any]
    request_id: str | None = None

    def header(self, *, binary: bool) -> dict[str, Any]:
        """The JSON part of a request for all outputs. `binary` applies to both request and reply data."""
        inputs = []
        for name, array in self.inputs.items():
            described: dict[str, Any] = {"name": name, "datatype": datatype(array), "shape": array.shape}
            described |= {"parameters": {"binary_data_size": array.nbytes}} if binary else {"data": array.tolist()}
            inputs.append(described)
        named = {} if self.request_id is None else {"id": self.request_id}
        parameters = self.parameters | ({"binary_data_output": True} if binary else {})
        return {"inputs": inputs, "parameters": parameters, **named}

    def data(self) -> bytes:
        """The binary data of all inputs, in order."""
        return b"".join(array.tobytes() for array in self.inputs.values())

    def body(self, *, binary: bool) -> tuple[bytes, dict[str, str]]:
        """The whole body and the headers that it needs."""
        text = orjson.dumps(self.header(binary=binary))
        return (text + self.data(), {LENGTH: str(len(text))}) if binary else (text, {})


def masked(request: Inference) -> Inference:
    """The same request with the actions of each event as a bit mask instead of floats; at most 64 actions."""
    actions = request.inputs["history.actions"]
    bits = np.uint64(1) << np.arange(actions.shape[1], dtype=np.uint64)
    return replace(request, inputs=request.inputs | {"history.actions": (actions != 0) @ bits})


def datatype(array: NDArray[Any]) -> str:
    """The protocol's name of an array's dtype."""
    kind = array.dtype.kind
    return DTYPES[kind if kind in "ui" else f"f{array.dtype.itemsize}"]


def in_arrays(items: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """The array form of a list of objects. Missing fields get their defaults."""
    defaults = {"actions": [], "product_surface": 0, "dwell_time": 0, "created_at": 0}
    names = dict.fromkeys(name for item in items for name in item)
    return {name: [item.get(name, defaults.get(name)) for item in items] for name in names}


def inference_of(body: Mapping[str, Any], action_names: Sequence[str]) -> Inference:
    """A valid JSON body, in objects or arrays, as tensors."""
    index = {str(place): place for place in range(len(action_names))} | {n: i for i, n in enumerate(action_names)}
    inputs: dict[str, NDArray[Any]] = {}
    if "user_id" in body:
        inputs["user_id"] = np.array([int(body["user_id"])], "u8")
    for part in ("candidates", "history"):
        items = body.get(part) or []
        columns: dict[str, Any] = in_arrays(items) if isinstance(items, list) else items
        for name, values in columns.items():
            if name == "actions":
                matrix = np.zeros((len(values), len(action_names)), "f4")
                for row, actions in zip(matrix, values, strict=True):
                    if isinstance(actions, int):
                        row[:] = [actions >> bit & 1 for bit in range(len(row))]
                        continue
                    for action in actions:
                        row[index[action]] = actions[action] if isinstance(actions, dict) else 1
                inputs["history.actions"] = matrix
            else:
                numbers = map(int, values) if name.endswith("_id") else (min(value, 1e30) for value in values)
                inputs[f"{part}.{name}"] = np.array(list(numbers), KINDS[name])
    parameters = {name: body[name] for name in ("top_k", "impression_ts", "context", "score") if name in body}
    if isinstance(body.get("weights"), str):
        parameters["weights"] = body["weights"]
    elif "weights" in body:
        inputs["weights"] = np.zeros(len(action_names))
        for action, weight in body["weights"].items():
            inputs["weights"][index[action]] = weight
    if "actions_wanted" in body:
        parameters["actions_wanted"] = ",".join(body["actions_wanted"])
    return Inference(inputs, parameters, body.get("request_id"))
