"""Which names of hosts a port answers to. What else is refused: tests/reliability, row B5."""

from __future__ import annotations

import socket

import pytest

from app.settings import Probes, Settings
from tests.app.serving import listening

NAMES = {
    "localhost": 200, "LocalHost:8000": 200, "127.0.0.1:1": 200, "[::1]:8000": 200, "evil.example": 421, "localhost.evil.example": 421,
    "10.0.0.7:8000": 421, "": 421, "x y": 400, "[::1": 400, "::1": 400, "a/b": 400, "user@localhost": 400, "localhost:port": 400,
    "lo%zzcalhost": 400, "l\u00f6calhost": 400, "localhost \t": 200, " localhost": 200,
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
