"""One call of a fuzzer, and the rules for every reply."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from app.http.asgi import Routes
from app.request import protobuf
from loadtest.generate.tensors import LENGTH

JSON_TYPE = (b"content-type", b"application/json")
REQUEST_ID = b"x-request-id"
MARK = "zq9marker"  # part of many bad values; no error reply may show it
ALLOWED = {200, 400, 401, 404, 405, 406, 409, 412, 413, 415, 422, 429, 504}
CLOSING = {400, 408, 431}  # refusals by the connection itself, which carry no request id
MAX_PROBLEM_BYTES = 4096
OUTPUT_DTYPES = {"UINT64": "<u8", "INT64": "<i8", "FP32": "<f4", "FP64": "<f8"}


@dataclass(frozen=True, slots=True)
class Call:
    """A request without its connection."""

    body: bytes
    path: str = "/rank"
    method: str = "POST"
    headers: tuple[tuple[bytes, bytes], ...] = (JSON_TYPE,)


@dataclass(slots=True)
class Answer:
    """A reply. `fault`: what the endpoint raised, or no reply. `is_last`: the connection ended with it."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    fault: str = ""
    is_last: bool = False


async def send(routes: Routes, call: Call) -> Answer:
    """Call the endpoint of this method and path, as our HTTP connection does; return its answer."""
    found: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    try:
        handler = routes[call.method.encode(), call.path.encode()].begin(
            call.headers, lambda status, fields, body, may_wait: found.set_result(Answer(status, dict(fields), body))
        )
        if not found.done():
            handler.finish(call.body) if len(call.body) <= handler.max_body_bytes else handler.too_long()
    except Exception as error:
        return Answer(fault=type(error).__name__)
    return await found


def complaint(answer: Answer) -> str:
    """What is wrong with an answer to any call; empty if nothing is."""
    if answer.fault:
        return f"raised {answer.fault}"
    if answer.status not in ALLOWED:
        return f"status {answer.status}"
    if REQUEST_ID not in answer.headers and not (answer.is_last and answer.status in CLOSING):
        return "no request id"
    if answer.status == 200:
        return COMPLAINTS.get(answer.headers.get(b"content-type", b""), _complaint_about_scores)(answer)
    if answer.headers.get(b"content-type") != b"application/problem+json":
        return "an error that is no problem object"
    if len(answer.body) > MAX_PROBLEM_BYTES:
        return "a long error"
    if MARK.encode() in answer.body:
        return "an error that shows the input"
    problem = orjson.loads(answer.body)
    if problem["status"] != answer.status or not problem["code"]:
        return "an error without its code"
    return ""


def _complaint_about_scores(answer: Answer) -> str:
    try:
        content = orjson.loads(answer.body)
    except ValueError:
        return "scores that are no JSON"
    return "scores that are null" if b"null" in answer.body and _holds_null(content) else ""


def _complaint_about_tensors(answer: Answer) -> str:
    try:
        length = int(answer.headers[LENGTH.encode()])
        header, data = orjson.loads(answer.body[:length]), answer.body[length:]
        for output in header["outputs"]:
            values, size = output.get("data"), output.get("parameters", {}).get("binary_data_size", 0)
            if values is None:
                values, data = np.frombuffer(data[:size], OUTPUT_DTYPES[output["datatype"]]), data[size:]
            if len(values) != math.prod(output["shape"]) or not np.isfinite(np.asarray(values, float)).all():
                return "tensors of other numbers than their shapes say"
    except (KeyError, ValueError, TypeError):
        return "scores that are no tensors"
    return "data that no tensor has" if data else ""


def _complaint_about_message(answer: Answer) -> str:
    reply = protobuf.CLASSES["ModelInferResponse"].FromString(answer.body)
    for output, data in zip(reply.outputs, reply.raw_output_contents, strict=True):
        values = np.frombuffer(data, OUTPUT_DTYPES[output.datatype])
        if len(values) != math.prod(output.shape) or not np.isfinite(values.astype(float)).all():
            return "tensors of other numbers than their shapes say"
    return ""


COMPLAINTS: dict[bytes, Callable[[Answer], str]] = {
    b"application/octet-stream": _complaint_about_tensors,
    b"application/grpc": _complaint_about_message,
    b"application/protobuf": lambda answer: "",
}


def _holds_null(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_holds_null, value.values() if isinstance(value, dict) else value))
    return value is None
