"""The real server with the demo checkpoint, over sockets: what a new user does, and what a hostile client does."""

from __future__ import annotations

import copy
import gzip
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.servers import launch
from tests.e2e.process import DEMO, Server, serving
from tests.reliability.live import connect, read_all, wait_until
from tests.reliability.live import exchange as wire
from tests.zygote import Forked, zygote

STARTED_ANEW = True  # by an interpreter of its own, as operators do
LIMIT = 65_536
MIB = 2**20
HEAD = b"POST /rank HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(DEMO, threads=1, limits__max_body_bytes=LIMIT) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    body: dict[str, Any] = json.loads((DEMO / "example.json").read_text())
    return body


def numbers(rows: list[dict[str, Any]]) -> dict[Any, Any]:
    """What belongs to each candidate alone: everything but its rank."""
    return {row["post_id"]: {key: row[key] for key in row if key != "rank"} for row in rows}


def test_the_example_is_ranked(client: httpx.Client, example: dict[str, Any]) -> None:
    reply = client.post("/rank", json=example)
    rows = reply.json()["candidates"]
    assert reply.status_code == 200
    assert len(rows) == len(example["candidates"])
    assert sorted(row["rank"] for row in rows) == list(range(1, len(rows) + 1))
    assert len({row["score"] for row in rows}) > 1  # a checkpoint of zeros would rank nothing
    assert reply.headers["x-model-version"] == client.get("/info").json()["model"]["version"]


def test_a_candidates_bits_do_not_depend_on_the_batch(client: httpx.Client, example: dict[str, Any]) -> None:
    whole = numbers(client.post("/rank", json=example).json()["candidates"])
    for change in (
        lambda items: items[::-1],
        lambda items: items[:1],
        lambda items: items[3:5],
        lambda items: items + [{"post_id": n, "author_id": n} for n in range(1, 100)],
    ):
        body = copy.deepcopy(example) | {"candidates": change(example["candidates"])}
        part = numbers(client.post("/rank", json=body).json()["candidates"])
        assert all(part[post] == whole[post] for post in part if post in whole)
    other = copy.deepcopy(example) | {"user_id": 5}
    assert numbers(client.post("/rank", json=other).json()["candidates"]) != whole


def test_a_head_is_followed_by_the_next_reply(server: Server) -> None:
    replies = wire(
        server.port,
        b"HEAD /readyz HTTP/1.1\r\nhost: localhost\r\n\r\nGET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
    )
    assert replies.count(b"HTTP/1.1 200 OK") == 2
    assert replies.count(b'{"status":"ready"}') == 1  # a body after HEAD would be read as the next reply
    assert replies.endswith(b'{"status":"ready"}')


def test_every_request_has_one_line_without_its_history(
    server: Server, client: httpx.Client, example: dict[str, Any]
) -> None:
    name = "line-for-line"
    marked = copy.deepcopy(example) | {"user_id": 424242424242, "weights": {"no\r\nsuch\x1b[31m": 1}}
    assert client.post("/rank", json=marked, headers={"x-request-id": name}).status_code == 422
    assert client.get("/livez", headers={"x-request-id": "x" * 200}).status_code == 200
    wait_until(lambda: name in server.raw)
    lines = [line for line in server.lines if line.get("request_id") == name]
    assert [line["status"] for line in lines] == [422]
    text = "".join(server.raw)
    assert "424242424242" not in text
    assert str(example["history"][0]["post_id"]) not in text
    assert "x" * 200 not in text
    assert "\x1b" not in text


# bodies over raw sockets


def memory_bytes(server: Server) -> int:
    """The process's highest resident size so far."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def exchange(server: Server, head: bytes, pieces: Iterator[bytes]) -> bytes:
    """Send all of it as far as the server reads; what came back until it closed."""
    with connect(server.port, 20) as connection:
        connection.sendall(HEAD + head + b"\r\n\r\n")
        with suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                connection.sendall(piece)
        return read_all(connection)


def chunks(count: int, size: int) -> Iterator[bytes]:
    one = b"%x\r\n" % size + b" " * size + b"\r\n"
    per_write = max(1, 60_000 // len(one))
    for _ in range(count // per_write):
        yield one * per_write
    yield b"0\r\n\r\n"


@pytest.mark.parametrize(("count", "size", "most"), [(1_000_000, 1, 5 * MIB), (2_000, 65_536, 2 * MIB)])
def test_a_long_chunked_body_costs_no_memory(
    server: Server, client: httpx.Client, count: int, size: int, most: int
) -> None:
    """But for the chunks of one read, tens of thousands if each holds a byte."""
    client.get("/livez")
    before = memory_bytes(server)
    reply = exchange(server, b"transfer-encoding: chunked", chunks(count, size))
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert reply.count(b"HTTP/1.1 ") == 1
    assert memory_bytes(server) - before <= most
    assert client.get("/livez").status_code == 200


def test_memory_would_be_seen_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "start_process", zygote.start)
    zygote.prepare()
    with serving(DEMO, threads=1, limits__max_body_bytes=64 * MIB) as server:
        before = memory_bytes(server)
        reply = exchange(server, b"transfer-encoding: chunked", chunks(300, 65_536))
        assert reply.startswith(b"HTTP/1.1 400 ")
        assert memory_bytes(server) - before > 2 * MIB


def test_a_declared_length_over_the_limit_is_not_read(server: Server) -> None:
    reply = exchange(server, b"content-length: 1000000000", iter([b"{"]))
    assert reply.startswith(b"HTTP/1.1 413 ")


def test_a_compressed_body_is_unpacked_up_to_the_limit(server: Server) -> None:
    for plain, status in ((bytes(LIMIT + 1), b"413"), (b"{}", b"422")):
        body = gzip.compress(plain)
        reply = exchange(server, b"content-encoding: gzip\r\ncontent-length: %d" % len(body), iter([body]))
        assert reply.startswith(b"HTTP/1.1 %b " % status)
    assert exchange(server, b"content-encoding: br\r\ncontent-length: 2", iter([b"{}"])).startswith(b"HTTP/1.1 415 ")


# start and end


def test_servers_of_other_files_are_forked_whatever_is_set_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """None was in a run of all tests, where an import sets TRITON_INTERPRET before, and these are set by what runs in this process."""
    monkeypatch.setattr(launch, "start_process", zygote.start)
    zygote.prepare()
    meanwhile = (
        "KMP_INIT_AT_FORK",
        "CUBLAS_WORKSPACE_CONFIG",
        "GRPC_VERBOSITY",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
    )
    for names, is_forked in ((meanwhile, True), (["OMP_WAIT_POLICY"], False)):
        for name in names:
            monkeypatch.setenv(name, "passive")
        with serving(DEMO, threads=1, ready_path=None) as server:
            assert isinstance(server.process, Forked) is is_forked, names


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--prot", "1"], "--prot"), (["--port", "x"], "RANKER_PORT"), (["--admin.port", "1"], "token")],
)
def test_a_slip_on_the_command_line_is_told(arguments: list[str], said: str) -> None:
    assert_refused(arguments, 2, said)


def assert_refused(arguments: list[str], code: int, said: str) -> None:
    command = [sys.executable, "-m", "app", *arguments]
    ended = zygote.run(command)
    assert ended.returncode == code
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_signal_ends_it_well(server: Server) -> None:
    assert server.stop() == 0
    assert server.lines[-1]["event"] == "stopped"
    assert server.lines[0]["event"] == "settings"


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert_refused(["--port", str(taken.getsockname()[1])], 3, "Address already in use")
