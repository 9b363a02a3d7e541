"""Corrupts requests on the other wires: tensors in JSON and binary, gzip, gRPC. Uses `mutate` for JSON and bytes."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from typing import Any

import grpc
import orjson

from app.http.grpc_server import ROUTES
from app.request import protobuf
from loadtest.fuzz.calls import JSON_TYPE, MARK, REQUEST_ID, Answer, Call
from loadtest.fuzz.mutate import Mutator
from loadtest.generate.tensors import LENGTH, Inference, datatype, inference_of, masked

BINARY_TYPE = (b"content-type", b"application/octet-stream")
GZIP = (b"content-encoding", b"gzip")
LENGTHS = (b"0", b"1", b"-1", b"", b"9" * 12, b"9" * 400, MARK.encode())
ACCEPTS = (b"application/json", b"application/octet-stream", b"text/html", b"*/*;q=0", b";,q=" + MARK.encode())
PARAMETERS: tuple[Any, ...] = (0, 1, -1, 2**62, True, "", MARK, "favorite", "0,0", "favorite,reply", 0.5)


class WireMutator:
    """An endless, repeatable source of corrupted calls for one model."""

    def __init__(self, seed: int, corpus: Sequence[bytes], model: str, action_names: Sequence[str]) -> None:
        self.mutator = Mutator(seed, corpus)
        self.random = self.mutator.random
        self.corpus = [inference_of(orjson.loads(body), action_names) for body in corpus]
        self.corpus += [masked(each) for each in self.corpus if "history.actions" in each.inputs]
        self.bodies = corpus
        self.path = f"/v2/models/{model}/infer"

    def call(self) -> Call:
        """The next call."""
        choice, random = self.random.random(), self.random
        asked = random.choice(self.corpus)
        if choice < 0.45:
            return self._binary(asked)
        if choice < 0.65:
            text = orjson.dumps(self.mutator.corrupted(asked.header(binary=False)))
            return Call(text, path=self.path, headers=(JSON_TYPE,) if random.random() < 0.5 else ())
        if choice < 0.8:
            packed = gzip.compress(random.choice(self.bodies), mtime=0)
            return Call(self.mutator.cut(packed) if random.random() < 0.7 else packed, headers=(JSON_TYPE, GZIP))
        return Call(self._message(asked), path=random.choice((*ROUTES, *ROUTES[-1:] * 20)), headers=())

    def _binary(self, asked: Inference) -> Call:
        """A binary request whose JSON and data may not match, or match with odd numbers in the data."""
        random = self.random
        header, data = asked.header(binary=True), asked.data()
        if random.random() < 0.4:
            header = self.mutator.corrupted(header)
        if random.random() < 0.4:
            size = len(data)
            data = self.mutator.cut(data)
            data = (data + bytes(size))[:size] if random.random() < 0.7 else data
        text = orjson.dumps(header)
        length = b"%d" % len(text) if random.random() < 0.9 else random.choice(LENGTHS)
        headers = [BINARY_TYPE, (LENGTH.encode(), length)]
        if random.random() < 0.1:
            headers.append((b"accept", random.choice(ACCEPTS)))
        return Call(text + data, path=self.path if random.random() < 0.5 else "/rank", headers=tuple(headers))

    def _message(self, asked: Inference) -> bytes:
        random = self.random
        made = protobuf.CLASSES["ModelInferRequest"](model_name=self.path.split("/")[3], id=asked.request_id or "")
        for name, array in asked.inputs.items():
            made.inputs.add(name=name, datatype=datatype(array), shape=array.shape)
            made.raw_input_contents.append(array.tobytes())
        if random.random() < 0.5:
            value, added = (
                random.choice(PARAMETERS),
                made.parameters.add(key=random.choice(("top_k", "actions", "timeout", MARK))),
            )
            kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
            setattr(added.value, kind, value)
        if random.random() < 0.3:
            tensor = random.choice(made.inputs)
            tensor.shape[:] = random.choice(([], [0], [-1], [2**62, 2**62], [1], [1, 1, 1]))
        data: bytes = made.SerializeToString()
        return data if random.random() < 0.3 else self.mutator.cut(data)


async def ask_grpc(channel: grpc.aio.Channel, call: Call) -> Answer:
    """Send a call over a real channel. Return the answer in HTTP form, so that one judge can check all wires."""
    named = tuple((name.decode(), value.decode()) for name, value in call.headers if name == REQUEST_ID)
    try:
        asked = channel.unary_unary(call.path)(call.body, timeout=60, metadata=named)
        reply, status = await asked, 200
        sort = b"application/grpc" if call.path == ROUTES[-1] else b"application/protobuf"
        fields = dict(await asked.trailing_metadata())
    except grpc.aio.AioRpcError as error:
        fields = dict(error.trailing_metadata())
        reply = fields.get("problem-bin", (error.details() or "").encode())
        status = orjson.loads(reply)["status"] if "problem-bin" in fields else 500
        sort = b"application/problem+json"
    return Answer(status, {b"content-type": sort, REQUEST_ID: str(fields.get("x-request-id", "")).encode()}, reply)
