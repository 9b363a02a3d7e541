"""What the protocol relies on inside uvicorn. What it does with bytes: tests/reliability, rows B3 to B5."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

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
