"""Bodies of the Open Inference Protocol over HTTP: JSON, then binary data (its binary tensor extension) ↔ named tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from app.errors import InvalidRequest
from app.request.body import read, sized
from app.request.reply import ReplyFormat
from app.request.rules import check, struct_rule
from app.request.tensor_schema import InferRequest
from app.request.tensors import DATATYPES, Tensor, Tensors, outputs_of, raw_of, wanted_outputs
from app.request.validate import Request
from app.settings import Limits
from model.inputs import Scores

LENGTH_HEADER = "Inference-Header-Content-Length"
NO_DATA = "must have either data or the parameter binary_data_size"
NO_FIT = "must describe, in their order, exactly the binary data that follows the JSON"
RULE = struct_rule(InferRequest)


def decode(body: bytes | bytearray, limits: Limits, json_bytes: bytes | None) -> Tensors:
    """The tensors of a body, with no more candidates and history than the limits allow; their content is not checked.

    `json_bytes` is the value of LENGTH_HEADER: where the JSON ends and binary data begins. Raises MalformedJson, TooLarge or
    InvalidRequest.
    """
    text = body if json_bytes is None else body[: _length(json_bytes, len(body))]
    header = read(text, limits.max_values)
    check(header, RULE)
    parameters = header.get("parameters", {})
    named = [
        (output["name"], output.get("parameters", {}).get("binary_data", False)) for output in header.get("outputs", ())
    ]
    wanted = wanted_outputs(named, parameters.get("binary_data_output", False))
    inputs = _with_data(header["inputs"], memoryview(body)[len(text) :])
    return sized(Tensors(inputs, parameters, wanted, header.get("id") or None), limits)


def _length(json_bytes: bytes, most: int) -> int:
    if not (json_bytes.isdigit() and len(json_bytes) <= 12 and int(json_bytes) <= most):
        raise InvalidRequest([(LENGTH_HEADER, "must be the length in bytes of the JSON that the body begins with")])
    return int(json_bytes)


def _with_data(inputs: Sequence[dict[str, Any]], rest: memoryview) -> list[Tensor]:
    """Each input with its own data: from the JSON, or the next piece of the rest."""
    found, place = [], 0
    for number, given in enumerate(inputs):
        if ("data" in given) == ("parameters" in given):
            raise InvalidRequest([(f"inputs[{number}]", NO_DATA)])
        data: Any = given.get("data")
        if data is None:
            size = given["parameters"]["binary_data_size"]
            data = rest[place : place + size]
            place += size
        found.append(Tensor(given["name"], given["datatype"], given["shape"], data))
    if place != len(rest):
        raise InvalidRequest([("inputs", NO_FIT)])
    return found


def render(
    request: Request, scores: Scores, form: ReplyFormat, *, history_used: int, timings_ms: dict[str, float]
) -> Iterator[bytes]:
    """The JSON of the reply, then the binary data of each output that is to have it."""
    parameters, arrays = outputs_of(request, scores, form, history_used, timings_ms)
    binary: list[bytes] = []
    outputs: list[dict[str, Any]] = []
    for name, is_binary, array in arrays:
        output: dict[str, Any] = {"name": name, "datatype": DATATYPES[array.dtype], "shape": array.shape}
        if is_binary:
            binary.append(raw_of(array))
            output["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            output["data"] = array.tolist() if array.dtype.kind == "O" else array.ravel()
        outputs.append(output)
    header: dict[str, Any] = {
        "model_name": form.model["name"],
        "model_version": form.model["version"],
        "parameters": parameters,
        "outputs": outputs,
    }
    if request.request_id is not None:
        header["id"] = request.request_id
    yield orjson.dumps(header, option=orjson.OPT_SERIALIZE_NUMPY)
    yield from binary
