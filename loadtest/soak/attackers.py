"""The attackers of B15: for each HTTP path and gRPC method, a client that sends again right after each reply."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import orjson

from app.request import protobuf
from loadtest.generate.payload import post, rank_body
from loadtest.machine import DEMO
from loadtest.servers.launch import HOST
from loadtest.soak.hostile import DEAR
from loadtest.soak.oracle import TOKEN

LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)

Ports = Mapping[str, int]
Act = Callable[[Ports, "Counter[int]"], Awaitable[None]]
"""One client, which runs until it is cancelled or cut off and counts the statuses of its replies."""


@dataclass(frozen=True, slots=True)
class Attacker:
    """A kind of client. `route`: the server's name of the path. `expected`: a status that must occur, or the attack had no effect."""

    route: str
    act: Act
    expected: int = 200


def asks(request: bytes, port: str = "main") -> Act:
    """A client that repeats one request on one connection, each time right after the reply."""

    async def act(ports: Ports, seen: Counter[int]) -> None:
        reader, writer = await asyncio.open_connection(HOST, ports[port], limit=2**22)
        with contextlib.closing(writer):
            while True:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                length = LENGTH.search(head)
                if length is not None and not request.startswith(b"HEAD"):
                    await reader.readexactly(int(length[1]))
                seen[int(head[9:12])] += 1

    return act


def once(request: bytes) -> Act:
    """A client that repeats one request, each time on a new connection."""

    async def act(ports: Ports, seen: Counter[int]) -> None:
        while True:
            reader, writer = await asyncio.open_connection(HOST, ports["main"])
            with contextlib.closing(writer):
                writer.write(request.replace(b"Host", b"Connection: close\r\nHost"))
                seen[int((await reader.read())[9:12])] += 1

    return act


def _request(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def _gets(route: str, path: str = "", expected: int = 200) -> Attacker:
    return Attacker(route, asks(_request(path or route)), expected)


def _posts(route: str, content: Any, path: str = "", expected: int = 200) -> Attacker:
    return Attacker(route, asks(post("localhost", path or route, orjson.dumps(content))), expected)


def _admin(route: str, content: Any, expected: int, token: str = TOKEN) -> Attacker:
    request = post("localhost", route, orjson.dumps(content) if content else b"", {"Authorization": f"Bearer {token}"})
    return Attacker(route, asks(request, "admin"), expected)


SMALL = orjson.loads(rank_body(7))
ASKED = orjson.loads(rank_body(8, history=16)) | {"explain": [80_001, 80_002]}
INFER = f"/{protobuf.SERVICE}/ModelInfer"
PAGES = (
    "/docs", "/explore", "/explore/checkpoint.json", "/info", "/livez", "/metrics", "/openapi.json", "/readyz", "/startupz",
    "/v2", "/v2/health/live", "/v2/health/ready",
)  # fmt: skip
MODEL, VERSION = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
EXAMPLE = orjson.loads((DEMO / "example.json").read_bytes())
DEMO_EXPLAINED = "/explain of the demo"
EXPLAINED = EXAMPLE | {"explain": [each["post_id"] for each in EXAMPLE["candidates"]]}
TENSORS = {
    "inputs": [
        {"name": name, "datatype": "UINT64", "shape": [1], "data": [7]}
        for name in ("user_id", "candidates.post_id", "candidates.author_id")
    ]
}


def calls(method: str, message: bytes, at_once: int = 1) -> Act:
    """A client that repeats a gRPC call without a key, `at_once` at a time on one connection. Counts success as 200, else gRPC codes."""

    async def act(ports: Ports, seen: Counter[int]) -> None:
        async def again(ask: Callable[..., Any]) -> None:
            while True:
                try:
                    await ask(message, timeout=20)
                    seen[200] += 1
                except grpc.aio.AioRpcError as error:
                    seen[error.code().value[0]] += 1

        own = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(f"{HOST}:{ports['grpc']}", options=own) as channel:
            ask = channel.unary_unary(f"/{protobuf.SERVICE}/{method}")
            await asyncio.gather(*(again(ask) for _ in range(at_once)))

    return act


def _calls(method: str, message: bytes = b"") -> dict[str, Attacker]:
    route = f"/{protobuf.SERVICE}/{method}"
    return {
        f"{method}{told}": Attacker(route, calls(method, message, number))
        for told, number in (("", 1), (", 16 at once", 16))
    }


def _tensors() -> bytes:
    made = protobuf.CLASSES["ModelInferRequest"](model_name="fake")
    for tensor in TENSORS["inputs"]:
        made.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
        made.raw_input_contents.append((7).to_bytes(8, "little"))
    return bytes(made.SerializeToString())


NAMED = protobuf.CLASSES["ModelReadyRequest"](name="fake", version="v1").SerializeToString()
ATTACKERS: dict[str, Attacker] = {
    **{f"GET {path}": _gets(path) for path in PAGES},
    "GET /": _gets("/", expected=307),
    "GET an asset": _gets("/assets/{name}", "/assets/explore.js"),
    "GET the largest asset": _gets("/assets/{name}", "/assets/swagger-ui-bundle.js"),
    "GET an asset that is not there": _gets("/assets/{name}", "/assets/none.js", 404),
    "GET a model": _gets(MODEL, "/v2/models/fake"),
    "GET a model's state": _gets(f"{MODEL}/ready", "/v2/models/fake/ready"),
    "GET a version": _gets(VERSION, "/v2/models/fake/versions/v1"),
    "GET a version's state": _gets(f"{VERSION}/ready", "/v2/models/fake/versions/v1/ready"),
    "GET /livez, a connection each": Attacker("/livez", once(_request("/livez"))),
    "GET nothing": _gets("unmatched", "/nothing", 404),
    "GET /rank": _gets("/rank", expected=405),
    "POST /info": _posts("/info", {}, expected=405),
    "HEAD /openapi.json": Attacker("/openapi.json", asks(_request("/openapi.json", "HEAD"))),
    "/context": _posts("/context", {"user_id": 7}),
    "/rank": _posts("/rank", SMALL),
    "/rank, refused": _posts("/rank", {}, expected=422),
    "/rank, dear": Attacker("/rank", asks(DEAR), 422),
    "/rank of a model": _posts("/rank/{name}", SMALL, "/rank/fake"),
    "/rank/batch": _posts("/rank/batch", [SMALL] * 3),
    "/explain": _posts("/explain", ASKED),
    "/explain, refused": _posts("/explain", SMALL, expected=422),
    "/retrieve": _posts("/retrieve", {"user_id": 7, "k": 20}),
    "/recommend": _posts("/recommend", {"user_id": 7, "k": 20}),
    "infer": _posts(f"{MODEL}/infer", TENSORS, "/v2/models/fake/infer"),
    "infer by a version": _posts(f"{VERSION}/infer", TENSORS, "/v2/models/fake/versions/v1/infer"),
    "a stranger at /admin/reload": _admin("/admin/reload", {}, 401, "nobody"),
    "a stranger at /admin/posts": _admin("/admin/posts", {}, 401, "nobody"),
    "a stranger at /admin/posts/compact": _admin("/admin/posts/compact", {}, 401, "nobody"),
    "/admin/reload": _admin("/admin/reload", {"checkpoint": "none"}, 404),
    "/admin/posts": _admin("/admin/posts", {"delete": [1]}, 200),
    **_calls("ServerLive"),
    **_calls("ServerReady"),
    **_calls("ServerMetadata"),
    **_calls("ModelReady", NAMED),
    **_calls("ModelMetadata", NAMED),
    # 16 at once would be 16 rankings: fair shares are per key
    "ModelInfer": Attacker(INFER, calls("ModelInfer", _tensors())),
    "ModelInfer, refused": Attacker(INFER, calls("ModelInfer", b""), grpc.StatusCode.INVALID_ARGUMENT.value[0]),
}


BESIDE_THE_DEMO = {DEMO_EXPLAINED: _posts("/explain", EXPLAINED)}
