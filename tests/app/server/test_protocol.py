"""What the protocol relies on inside uvicorn, and which names it answers to. The rest: tests/reliability, rows B3 to B5."""

from __future__ import annotations

import inspect
import socket
from collections.abc import Iterable

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

from app.settings import Probes, Settings
from tests.app.serving import listening

PINNED = "0.54."  # as in pyproject.toml: look at what moved before it changes there
METHODS: dict[type, str] = {
    HttpToolsProtocol: (
        "connection_made connection_lost data_received on_message_begin on_url on_header on_headers_complete on_message_complete"
        " on_response_complete shutdown _start_asgi_task"
    ),
    RequestResponseCycle: "run_asgi receive send",
    FlowControl: "resume_reading",
    Server: "run serve startup shutdown main_loop capture_signals handle_exit",
}
ATTRIBUTES: dict[type, str] = {
    HttpToolsProtocol: "loop parser transport flow headers cycle pipeline server_state",
    RequestResponseCycle: (
        "transport message_event disconnected keep_alive response_started response_complete"
        " default_headers flow on_response scope waiting_for_100_continue"
    ),
    ServerState: "connections tasks",
    Server: "config server_state started should_exit",
}


async def app(scope: object, receive: object, send: object) -> None: ...


def stock() -> dict[type, object]:
    """One of each, as uvicorn makes them."""
    config = uvicorn.Config(app, http="httptools", loop="asyncio", lifespan="off")
    server = Server(config)
    protocol = HttpToolsProtocol(config, server.server_state, {}, object())  # type: ignore[arg-type]
    cycle = RequestResponseCycle(**dict.fromkeys(inspect.signature(RequestResponseCycle).parameters))  # type: ignore[arg-type]
    return {HttpToolsProtocol: protocol, RequestResponseCycle: cycle, Server: server, ServerState: server.server_state}


def missing(where: object, names: Iterable[str]) -> list[str]:
    return [name for name in names if not hasattr(where, name)]


def test_what_the_protocol_and_the_process_use_of_uvicorn_has_not_moved() -> None:
    made = stock()
    moved = {kind.__name__: missing(kind, names.split()) for kind, names in METHODS.items()}
    for kind, names in ATTRIBUTES.items():
        moved.setdefault(kind.__name__, []).extend(missing(made[kind], names.split()))
    assert {kind: names for kind, names in moved.items() if names} == {}
    assert uvicorn.__version__.startswith(PINNED)


def test_a_name_that_moved_is_named() -> None:
    assert missing(ServerState(), ["tasks", "requests"]) == ["requests"]


NAMES = {
    "localhost": 200, "LocalHost:8000": 200, "127.0.0.1:1": 200, "[::1]:8000": 200, "evil.example": 421, "localhost.evil.example": 421,
    "10.0.0.7:8000": 421, "": 421, "x y": 400, "[::1": 400, "::1": 400, "a/b": 400, "user@localhost": 400, "localhost:port": 400,
    "lo%zzcalhost": 400, "l\u00f6calhost": 400,
}  # fmt: skip


def status_of(port: int, name: str, path: str = "/livez") -> int:
    """Of a GET with this Host."""
    with socket.create_connection(("127.0.0.1", port), 10) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
        return int(sock.recv(65536).split(b" ", 2)[1])


def test_on_loopback_only_its_own_names_are_answered() -> None:
    probes = Probes(port=0)
    with listening(settings=Settings(port=0, probes=probes)) as server:
        ports = [listener.socket.getsockname()[1] for listener in server.listeners]
        for port in ports:
            assert {name: status_of(port, name) for name in NAMES} == NAMES
        with socket.create_connection(("127.0.0.1", ports[0]), 10) as sock:  # as a page whose name leads here now would
            for name, status in ((b"localhost", b"200"), (b"evil.example:8000", b"421")):
                sock.sendall(b"GET /livez HTTP/1.1\r\nHost: %b\r\n\r\n" % name)
                came = sock.recv(65536)
                assert came.split(b" ", 2)[1] == status
        assert b'"code":"misdirected"' in came


@pytest.mark.parametrize(
    ("hosts", "host", "answered"),
    [
        ("", "0.0.0.0", {"10.0.0.7:8000": 200, "rank.example": 200, "x y": 400}),  # noqa: S104  # as a probe of Kubernetes asks
        (
            "rank.example,[fd00::7]",
            "0.0.0.0",  # noqa: S104
            {"rank.example": 200, "[FD00::7]:8000": 200, "localhost": 421, "x y": 400},
        ),
        ("rank.example,localhost", "127.0.0.1", {"rank.example": 200, "localhost:1": 200, "127.0.0.1": 421}),
        ("*", "127.0.0.1", {"evil.example": 200, "[::1": 400}),
    ],
)
def test_names_are_those_that_are_set(hosts: str, host: str, answered: dict[str, int]) -> None:
    with listening(settings=Settings(port=0, host=host, hosts=hosts)) as server:
        port = server.listeners[0].socket.getsockname()[1]
        assert {name: status_of(port, name) for name in answered} == answered


def test_other_ports_on_loopback_answer_to_its_names_too() -> None:
    settings = Settings(host="0.0.0.0", hosts="rank.example", probes=Probes(port=0))  # noqa: S104
    assert settings.names_of("0.0.0.0") == ["rank.example"]  # noqa: S104
    assert {"rank.example", "localhost"} <= set(settings.names_of("127.0.0.1", is_main=False))
    assert settings.names_of("0.0.0.0", is_main=False) == []  # noqa: S104  # where probes ask by a pod's address
