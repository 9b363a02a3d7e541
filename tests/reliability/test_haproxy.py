"""Debian's HAProxy with the file of docker/. Two servers behind it are killed or restarted under load, and no request is lost; two small
fakes behind it freeze, drain, and are found by their names."""

from __future__ import annotations

import csv
import http.client
import io
import json
import re
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loadtest.machine import ROOT
from loadtest.server import Server, example, free_port, running, serving, wait_until
from tests.support.clients import Replies, callers

pytestmark = pytest.mark.timeout(0)
KILLS, RESTARTS = 4, 2
"""In the short form; `make soak` goes on for its seconds."""
CALLERS_OF_A_KIND = 2
RESTART_SECONDS = 60.0
BODIES = [json.dumps(example(16) | {"user_id": user}).encode() for user in range(40)]
KINDS: list[dict[str, str]] = [
    {},
    {"connection": "close"},
    {"x-routing-key": "a user"},
    {"x-routing-key": "another user", "connection": "close"},
    {"x-corpus-at-least": "0"},
]
"""Headers of the kinds of callers: kept and new connections, without and with a routing key, and one that reads its own write."""


@dataclass
class Proxied:
    """HAProxy and its administration socket."""

    proxy: Server
    socket_path: Path

    def statuses(self, prefix: str = "ranker-") -> dict[str, str]:
        """What HAProxy says of each server whose name begins so: UP, DOWN, NOLB (takes nothing new), or one of these with a count of
        checks; `no check`; `MAINT (resolution)` if it has no address. Empty until HAProxy can be asked."""
        with socket.socket(socket.AF_UNIX) as asked:
            try:
                asked.connect(str(self.socket_path))
            except OSError:
                return {}
            asked.sendall(b"show stat\n")
            table = asked.makefile().read().removeprefix("# ")
        rows = csv.DictReader(io.StringIO(table))
        return {row["svname"]: row["status"] for row in rows if row["svname"].startswith(prefix)}

    def status(self, number: int) -> str:
        return self.statuses()[f"ranker-{number}"]


def shipped(folder: Path) -> str:
    """The file of docker/ with free ports of its own, `{port}` for callers, and an administration socket."""
    text = (ROOT / "docker/haproxy.cfg").read_text()
    text = text.replace("global\n", f"global\n    stats socket {folder}/admin level admin\n", 1)
    text = text.replace("local0 warning", "local0 info")
    text = text.replace("    log global\n", "    log global\n    option httplog\n", 1)
    text = text.replace("bind :8404", f"bind 127.0.0.1:{free_port()}").replace("bind :8000", "bind 127.0.0.1:{port}")
    return re.sub(r"^ *server \w+-[34] .*\n", "", text, flags=re.M)


@contextmanager
def started(folder: Path, text: str) -> Iterator[Proxied]:
    """The proxy with this text as its file; not before it takes callers, which is no word on its servers."""
    port = free_port()
    file = folder / "haproxy.cfg"
    file.write_text(text.replace("{port}", str(port)))
    with running(["haproxy", "-db", "-f", str(file)], {}, port=port, ready="") as proxy:
        found = Proxied(proxy, folder / "admin")
        wait_until(found.statuses, server=proxy)
        yield found


@contextmanager
def proxied(folder: Path, ports: list[int], change: Callable[[str], str] = str) -> Iterator[Proxied]:
    """The proxy in front of two servers at these ports of 127.0.0.1, once it has found both to be ready."""
    text = change(shipped(folder))
    for number, port in enumerate(ports, 1):
        text = text.replace(f"ranker-{number}:8000", f"127.0.0.1:{port}")
    with started(folder, text) as found:
        wait_until(lambda: [found.status(1), found.status(2)] == ["UP", "UP"], server=found.proxy)
        yield found


@contextmanager
def load(proxy: Server) -> Iterator[list[Replies]]:
    """Callers of every kind, until the block ends."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                callers(
                    proxy,
                    lambda turn: BODIES[turn % 40],
                    CALLERS_OF_A_KIND,
                    pause=0.04,
                    impatient=True,
                    headers=headers,
                )
            )
            for headers in KINDS
        ]


def restart_in_turn(
    folder: Path, turns: int, seconds: float, end: Callable[[Server], object]
) -> tuple[list[Replies], int, int]:
    """End the two servers in turn under load and start them again, at least `turns` times and for at least `seconds`. Returns the replies
    of each kind of caller, how many servers were ended, and how often HAProxy sent the same request again at most."""
    ports = [free_port(), free_port()]
    ended = 0
    with ExitStack() as stack:
        servers = [stack.enter_context(ranker(port)) for port in ports]
        with proxied(folder, ports) as found, load(found.proxy) as replies:
            until = time.monotonic() + seconds
            while ended < turns or time.monotonic() < until:
                number = ended % 2
                end(servers[number])
                servers[number].wait()
                servers[number] = stack.enter_context(ranker(ports[number]))
                wait_until(lambda number=number: found.status(number + 1) == "UP", RESTART_SECONDS, found.proxy)
                time.sleep(0.5)
                ended += 1
            retries = [int(each) for each in re.findall(r'/\+?(\d+) \d+/\d+ "POST ', found.proxy.log_text)]
            print("What HAProxy logged, but for replies of 200:")
            print("\n".join(line for line in found.proxy.log_text.splitlines() if " 200 " not in line))
    return replies, ended, max(retries)


def ranker(port: int) -> object:
    return serving(port=port, threads=1, drain__delay_seconds=2, logs__success_sample=0)


def lost(replies: list[Replies]) -> list[str]:
    """What callers got instead of a ranking, by kind of caller."""
    return [
        f"{headers}: {answers.broken} without a reply, {[(each.status, each.content[:80]) for each in answers.all if each.status != 200]}"
        for headers, answers in zip(KINDS, replies, strict=True)
        if answers.broken or answers.statuses != {200}
    ]


@pytest.fixture(autouse=True)
def haproxy() -> None:
    if shutil.which("haproxy") is None:
        pytest.skip("haproxy is not installed; make test installs it on Debian")


@pytest.mark.slow
def test_kills_behind_haproxy_lose_no_request(tmp_path: Path, duration: float) -> None:
    replies, kills, retries = restart_in_turn(tmp_path, KILLS, duration, lambda server: server.signal(signal.SIGKILL))
    print(f"{kills} kills, {sum(len(each.all) for each in replies)} requests, sent again {retries} times at most")
    assert lost(replies) == []
    assert retries <= 2, "five are allowed, and the second of two servers should do"


@pytest.mark.slow
def test_rolling_restarts_behind_haproxy_lose_no_request(tmp_path: Path, duration: float) -> None:
    replies, restarts, retries = restart_in_turn(
        tmp_path, RESTARTS, duration, lambda server: server.signal(signal.SIGTERM)
    )
    print(f"{restarts} restarts, {sum(len(each.all) for each in replies)} requests, sent again {retries} times at most")
    assert lost(replies) == []


class Fake(ThreadingHTTPServer):
    """Stands for a ranker: 200 to everything. It can be made to drain, to hold what it is asked, and to answer rankings otherwise."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: str = "127.0.0.1", port: int = 0) -> None:
        self.is_ready, self.asked, self.status = True, 0, 200
        self.rankings_go_on = threading.Event()
        self.rankings_go_on.set()
        super().__init__((address, port), FakeHandler)


class FakeHandler(BaseHTTPRequestHandler):
    server: Fake
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(200 if self.server.is_ready or self.path != "/readyz" else 503)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked += 1
        self.server.rankings_go_on.wait()
        self.answer(self.server.status)

    def answer(self, status: int) -> None:
        with suppress(OSError):  # HAProxy has given up
            self.send_response(status)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fakes(*addresses: str, port: int = 0) -> Iterator[list[Fake]]:
    servers = [Fake(address, port) for address in addresses]
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
    try:
        yield servers
    finally:
        for server in servers:
            server.rankings_go_on.set()
            server.shutdown()
            server.server_close()


@contextmanager
def held(found: Proxied, servers: list[Fake], body: bytes = BODIES[0]) -> Iterator[tuple[Fake, Callable[[], int]]]:
    """A request that one of the servers holds. Gives that server and a call that waits for the reply's status, at most 30 s."""
    for server in servers:
        server.rankings_go_on.clear()
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(lambda: found.proxy.post("/rank", body).status_code)
        try:
            wait_until(lambda: any(server.asked for server in servers))
            (holder,) = (server for server in servers if server.asked)
            for server in servers:
                if server is not holder:
                    server.rankings_go_on.set()
            yield holder, lambda: reply.result(30)
        finally:
            for server in servers:
                server.rankings_go_on.set()


@contextmanager
def name_server(names: Mapping[str, list[str]]) -> Iterator[int]:
    """A name server on a port of 127.0.0.1 that, as that of a cluster, knows the IPv4 addresses of these names and no others."""

    def answer() -> None:
        while True:
            with suppress(TimeoutError):
                query, client = asked.recvfrom(4096)
                if not query:
                    return
                end = query.index(0, 12) + 1
                labels, place = [], 12
                while query[place]:
                    labels.append(query[place + 1 : place + 1 + query[place]].decode())
                    place += 1 + query[place]
                name, kind = ".".join(labels).lower(), struct.unpack_from(">H", query, end)[0]
                addresses = names.get(name, []) if kind == 1 else []
                flags = 0x8180 if name in names else 0x8183
                reply = query[:2] + struct.pack(">5H", flags, 1, len(addresses), 0, 0) + query[12 : end + 4]
                for address in addresses:
                    reply += struct.pack(">3HIH", 0xC00C, 1, 1, 5, 4) + socket.inet_aton(address)
                asked.sendto(reply, client)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield asked.getsockname()[1]
        finally:
            asked.sendto(b"", asked.getsockname())
            thread.join()


def for_kubernetes(text: str) -> str:
    """The shipped file with the lines for Kubernetes, in the namespace `feeds`, in place of those with names of servers."""
    text = re.sub(r"^ *server .*\n", "", text, flags=re.M)
    return re.sub(r"^( *)# (server-template )", r"\1\2", text, flags=re.M).replace("NAMESPACE", "feeds")


NAMES = {
    "names": (str, {"ranker-1": ["127.0.0.2"], "ranker-2": ["127.0.0.3"]}),
    "kubernetes": (for_kubernetes, {"ranker-pods.feeds.svc.cluster.local": ["127.0.0.2", "127.0.0.3"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", NAMES)
def test_servers_are_found_by_name_and_asked_without_a_check(form: str, tmp_path: Path) -> None:
    change, names = NAMES[form]
    port = free_port()
    with fakes("127.0.0.2", "127.0.0.3", port=port) as servers, name_server(names) as name_port:
        text = change(shipped(tmp_path))
        text = text.replace("parse-resolv-conf", f"nameserver test 127.0.0.1:{name_port}")
        text = re.sub(r"^( *server.*):8000", rf"\1:{port}", text, flags=re.M)
        with started(tmp_path, text) as found:
            wait_until(lambda: [*found.statuses().values()].count("UP") == 2, server=found.proxy)
            wait_until(lambda: [*found.statuses("any-").values()].count("no check") == 2, server=found.proxy)
            wait_until(lambda: [*found.statuses("written-").values()].count("UP") == 2, server=found.proxy)
            assert found.proxy.post("/retrieve", BODIES[0], **{"x-corpus-at-least": "0"}).status_code == 200
            for server in servers:
                server.is_ready = False
            wait_until(lambda: [*found.statuses().values()].count("NOLB") == 2, server=found.proxy)
            assert {found.proxy.post("/rank", body).status_code for body in BODIES[:8]} == {200}


def test_a_drain_cuts_no_request_that_is_open(tmp_path: Path) -> None:
    with fakes("127.0.0.1", "127.0.0.1") as servers:
        ports = [server.server_port for server in servers]
        with proxied(tmp_path, ports) as found, held(found, servers) as (drained, status):
            drained.is_ready = False
            wait_until(lambda: found.status(1 + servers.index(drained)) == "NOLB")
            drained.shutdown()
            drained.socket.close()  # as at the end of the drain's delay
            wait_until(lambda: found.status(1 + servers.index(drained)) == "DOWN")
            drained.rankings_go_on.set()
            assert status() == 200
            assert [server.asked for server in servers if server is not drained] == [0]


def test_a_request_that_waits_for_a_change_is_sent_once(tmp_path: Path) -> None:
    with (
        fakes("127.0.0.1", "127.0.0.1") as servers,
        proxied(tmp_path, [server.server_port for server in servers]) as found,
    ):
        for server in servers:
            server.status = 503
        for headers, times in ({"x-corpus-at-least": "7"}, 1), ({}, 6):
            assert found.proxy.post("/retrieve", BODIES[0], **headers).status_code == 503
            assert sum(server.asked for server in servers) == times
            for server in servers:
                server.asked = 0


PUBLIC = [
    *("POST /rank", "POST /rank/phoenix", "POST /rank/batch", "POST /context", "POST /retrieve", "POST /recommend"),
    *("GET /v2", "GET /v2/health/live", "GET /v2/health/ready", "GET /v2/models/phoenix", "GET /v2/models/a/ready"),
    *("POST /v2/models/phoenix/infer", "POST /v2/models/phoenix/versions/1/infer"),
]
INSIDE = [
    *(
        "GET /",
        "GET /metrics",
        "GET /info",
        "GET /docs",
        "GET /openapi.json",
        "GET /version",
        "GET /readyz",
        "GET /livez",
    ),
    *("GET /startupz", "GET /health", "GET /assets/page.js", "GET /explore", "POST /explain", "POST /admin/reload"),
    *(
        "GET /%6detrics",
        "GET //metrics",
        "GET /rank/a/metrics",
        "GET /v2x",
        "GET /ranker/metrics",
    ),
]
BELOW_A_PATH = "^(/ranker)?/"


PAGE = ["GET /explore", "GET /assets/page.js", "GET /info", "GET /openapi.json", "POST /explain"]


def with_the_page(text: str) -> str:
    """The shipped file with the paths that its comment names for the page."""
    names = re.findall(r"such as (\S+) for the page", text)
    return text.replace("|v2(/.*)?)$", f"|v2(/.*)?{names[0]})$")


def answered(found: Proxied, line: str) -> int:
    """The status of the reply to this request, whose path is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", found.proxy.port, timeout=30)
    connection.request(*line.split(), b"{}" if line.startswith("POST") else None)
    return connection.getresponse().status


def test_only_what_is_for_callers_passes(tmp_path: Path) -> None:
    def below_a_path(text: str) -> str:
        return text.replace("path_reg ^/", f"path_reg {BELOW_A_PATH}")

    with fakes("127.0.0.1", "127.0.0.1") as servers:
        ports = [server.server_port for server in servers]
        with proxied(tmp_path, ports) as found:
            assert {line: answered(found, line) for line in PUBLIC} == dict.fromkeys(PUBLIC, 200)
            assert {line: answered(found, line) for line in INSIDE} == dict.fromkeys(INSIDE, 404)
            assert answered(found, "POST /ranker/rank") == 404
        with proxied(tmp_path, ports, below_a_path) as found:
            assert [answered(found, f"POST {path}") for path in ("/ranker/rank", "/rank")] == [200, 200]
            assert answered(found, "GET /ranker/metrics") == 404
        with proxied(tmp_path, ports, with_the_page) as found:
            assert {line: answered(found, line) for line in PAGE} == dict.fromkeys(PAGE, 200)
            assert answered(found, "GET /metrics") == 404


def test_a_body_may_take_longer_than_a_header(tmp_path: Path) -> None:
    def hasty(text: str) -> str:
        assert "timeout http-request 10s" in text
        return text.replace("timeout http-request 10s", "timeout http-request 1s")

    body = BODIES[0]
    head = f"POST /rank HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
    with fakes("127.0.0.1", "127.0.0.1") as servers:
        ports = [server.server_port for server in servers]
        with proxied(tmp_path, ports, hasty) as found:
            with found.proxy.connect() as slow:
                slow.sendall(f"{head}\r\n".encode() + body[:10])
                time.sleep(2)
                assert [server.asked for server in servers] == [0, 0], "only a whole request can be sent again"
                slow.sendall(body[10:])
                assert slow.recv(4096).startswith(b"HTTP/1.1 200 ")
            with found.proxy.connect() as asking:
                asking.sendall(f"{head}expect: 100-continue\r\n\r\n".encode())
                assert asking.recv(4096).startswith(b"HTTP/1.1 100 ")
                asking.sendall(body)
                assert asking.recv(4096).startswith(b"HTTP/1.1 200 ")
            with found.proxy.connect() as silent:
                silent.sendall(head.encode())
                assert silent.recv(4096).startswith(b"HTTP/1.1 408 ")
