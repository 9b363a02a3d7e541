"""A real process with the demo checkpoint: one request on every wire, the same bits; over gRPC too it logs, limits and drains."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from phoenix_ranker_client import Candidate, Event, RankerClient

from app.http.grpc_server import ROUTES
from loadtest.generate.tensors import datatype, inference_of
from loadtest.servers.launch import free_port
from tests.e2e.process import DEMO, Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(DEMO, threads=1, grpc__port=free_port()) as server:
        yield server


def grpc_address(server: Server) -> str:
    (port,) = {line["port"] for line in server.lines if line["event"] == "listening"} - {server.port}
    return f"127.0.0.1:{port}"


def ranked(triton: Any, address: str, body: dict[str, Any], names: list[str]) -> Any:
    """What the protocol's client gets for a body of `/rank`."""
    asked = inference_of(body, names)
    inputs = [triton.InferInput(name, list(array.shape), datatype(array)) for name, array in asked.inputs.items()]
    for tensor, array in zip(inputs, asked.inputs.values(), strict=True):
        tensor.set_data_from_numpy(array)
    with triton.InferenceServerClient(address) as client:
        return client.infer("demo", inputs, parameters=asked.parameters)


def test_every_wire_gives_the_same_bits(server: Server) -> None:
    body = json.loads((DEMO / "example.json").read_text())
    names = httpx.get(f"{server.url}/info").json()["actions"]
    rows = httpx.post(f"{server.url}/rank", json=body).json()["candidates"]
    columns = httpx.post(f"{server.url}/rank", json=body | {"reply": "columns"}).json()["candidates"]
    bits = np.array([row["probabilities"] for row in rows], np.float32).tobytes()
    assert np.array(columns["probabilities"], np.float32).tobytes() == bits
    replies = [
        ranked(tritonclient.http, server.url.removeprefix("http://"), body, names),
        ranked(tritonclient.grpc, grpc_address(server), body, names),
    ]
    for reply in replies:
        assert reply.as_numpy("probabilities").tobytes() == bits
        assert reply.as_numpy("score").tolist() == columns["score"] == [row["score"] for row in rows]
    with RankerClient(server.url, wire="binary") as client, RankerClient(server.url) as plain:
        asked = 7, [Candidate(90, 7), Candidate(91, 5)], [Event(17, 5, {"favorite": 0.5})]
        binary, text = client.rank(*asked), plain.rank(*asked)
        mixed = plain.rank(7, [Candidate(90, 5), Candidate("91", 6)], timeout_seconds=10)
        assert {row.post_id for row in mixed.candidates} == {90, "91"}
    assert [row.score for row in binary.candidates] == [row.score for row in text.candidates]


def test_mistakes_of_grpc_callers_leave_nothing_but_lines_of_ours(server: Server) -> None:
    with grpc.insecure_channel(grpc_address(server)) as channel:
        for data, options in (
            (b"\xff", {}),
            (bytes(3 * 2**20), {"compression": grpc.Compression.Gzip}),
            (bytes(3 * 2**20), {}),
        ):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(ROUTES[-1])(data, timeout=10, **options)
    for _ in range(500):  # the last line comes after its answer
        refused = [line for line in server.lines if line.get("route") == ROUTES[-1] and line["status"] == 400]
        if len(refused) == 3:
            break
        time.sleep(0.02)
    assert [(line["event"], line["code"]) for line in refused] == [("request", "bad_request")] * 3
    assert all(line.startswith("{") for line in server.raw.splitlines())


def peak_mib(server: Server) -> float:
    """The most memory that the process has had."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) / 1024  # type: ignore[index]


def test_a_bomb_over_grpc_costs_no_memory(server: Server) -> None:
    before = peak_mib(server)
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(grpc_address(server), options) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(ROUTES[-1])(bytes(200 * 2**20), timeout=60, compression=grpc.Compression.Gzip)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peak_mib(server) - before < 50


def test_a_drain_ends_with_0_and_the_port_is_closed(server: Server) -> None:
    address = grpc_address(server)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 0
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(ROUTES[0])(b"", timeout=2)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
