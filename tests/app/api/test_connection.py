"""What our connections add to uvicorn's, shown on real sockets; and what they rely on in uvicorn."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import shutil
import socket
import struct
import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.api import connection
from tests.app.api.live import BODY, Live, head, listening, read_reply, until
from tests.support.bodies import good
from tests.support.fakes import FakeEngine, Gate

pytestmark = pytest.mark.one_process("it is about the HTTP side alone")

UPGRADE = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQCAAAAAAIAAAAA"}
NC, JAVA = shutil.which("nc"), shutil.which("java")


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with listening() as live:
        yield live


def test_uvicorn_still_has_what_the_connection_relies_on() -> None:
    """Each is overridden or read by `Connection`. Where this fails, read uvicorn's changes before pinning another minor version."""
    assert uvicorn.__version__.startswith("0.54.")
    overridden = {
        name for name, value in vars(connection.Connection).items() if inspect.isfunction(value) and name[:2] != "__"
    }
    assert overridden - vars(HttpToolsProtocol).keys() == {
        "decline_upgrade", "probe", "parse", "parse_soon", "is_over", "next_piece", "parse_piece", "close", "linger", "disconnected",
        "has_closed", "has_left", "has_event", "lag_seconds", "end_if_reset"
    }  # fmt: skip
    source = inspect.getsource(inspect.getmodule(HttpToolsProtocol))  # type: ignore[arg-type]
    for name in (
        "self.pipeline", "self.flow", "read_paused", "self.tasks", "self.timeout_keep_alive_task", "response_started",
        "response_complete", "more_body", "keep_alive", "run_asgi(app)", "lenient_data_after_close", "self.headers = []",
    ):  # fmt: skip
        assert name in source or name in inspect.getsource(uvicorn.protocols.http.flow_control), name


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_behind_an_upgrade_to_http2_is_read(live: Live, pieces: int, chunked: bool) -> None:
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    headers = UPGRADE | ({"transfer-encoding": "chunked"} if chunked else {})
    sent = head(headers=headers, length=None if chunked else len(BODY)) + framed
    size = -(-len(sent) // pieces)
    with live.connect() as client:
        for start in range(0, len(sent), size):
            client.sendall(sent[start : start + size])
            time.sleep(0.02 if pieces > 1 else 0)
        assert read_reply(client)[0] == 200
        client.sendall(head() + BODY)  # the connection goes on, without an upgrade
        assert read_reply(client)[0] == 200


def test_a_slow_head_with_an_upgrade_counts_from_its_first_byte(live: Live) -> None:
    line, rest = head(headers=UPGRADE).split(b"\r\n", 1)
    with live.connect() as client:
        client.sendall(line + b"\r\n")
        time.sleep(0.2)
        client.sendall(rest + BODY)
        status, headers, _ = read_reply(client)
    timed = re.search(r"read;dur=([\d.]+)", headers["server-timing"])
    assert (status, timed is not None and float(timed[1]) > 150) == (200, True), headers


def test_a_request_behind_an_upgrade_is_answered_too(live: Live) -> None:
    with live.connect() as client:
        client.sendall(head(headers=UPGRADE) + BODY + head("GET", "/livez", length=None))
        assert read_reply(client)[0] == 200
    with live.connect() as client:
        client.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert read_reply(client)[0] == 400


@pytest.mark.skipif(JAVA is None, reason="needs a JDK: apt-get install default-jdk-headless")
def test_javas_http_client_is_answered(live: Live, tmp_path: Path) -> None:
    """It asks for HTTP/2 in its first request, whatever it sends."""
    source = tmp_path / "Ask.java"
    source.write_text(
        """
        import java.net.URI;
        import java.net.http.*;
        public class Ask {
            public static void main(String[] words) throws Exception {
                var client = HttpClient.newHttpClient();
                for (int i = 0; i < 2; i++) {
                    var request = HttpRequest.newBuilder(URI.create(words[0])).header("Content-Type", "application/json")
                        .POST(HttpRequest.BodyPublishers.ofString(words[1])).build();
                    var reply = client.send(request, HttpResponse.BodyHandlers.ofString());
                    System.out.println(reply.statusCode() + " " + reply.body());
                }
            }
        }
        """
    )
    url = f"http://127.0.0.1:{live.port}/rank"
    assert JAVA is not None
    command = [JAVA, "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", str(source), url, BODY.decode()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=90)
    lines = ran.stdout.splitlines()
    assert [line[:4] for line in lines] == ["200 ", "200 "], ran.stderr
    assert [len(json.loads(line[4:])["candidates"]) for line in lines] == [3, 3]


def test_a_caller_that_closes_its_sending_half_is_answered(live: Live) -> None:
    for _ in range(20):
        with live.connect() as client:
            client.sendall(head() + BODY)
            client.shutdown(socket.SHUT_WR)
            assert read_reply(client)[0] == 200
            assert client.recv(1) == b""  # and the connection ends


@pytest.mark.skipif(NC is None, reason="needs netcat: apt-get install netcat-openbsd")
def test_netcat_that_closes_its_sending_half_is_answered(live: Live) -> None:
    assert NC is not None
    asked = subprocess.run(
        [NC, "-N", "127.0.0.1", str(live.port)], input=b"GET /metrics HTTP/1.0\r\n\r\n", capture_output=True, timeout=20
    )
    assert asked.stdout.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"ranker_ready 1.0" in asked.stdout


def test_a_half_closed_caller_is_answered_however_long_it_takes() -> None:
    gate = Gate()
    with listening(FakeEngine(before=gate)) as live, live.connect() as client:
        client.sendall(head() + BODY)
        client.shutdown(socket.SHUT_WR)
        assert gate.entered.wait(10)
        time.sleep(0.5)  # longer than the probes for a client that has gone for good
        gate.opened.set()
        assert read_reply(client)[0] == 200


@pytest.mark.parametrize("how", ["closed", "reset"])
@pytest.mark.parametrize("stage", ["queue", "forward"])
def test_the_request_of_a_departed_caller_is_dropped_and_counted(how: str, stage: str) -> None:
    gate = Gate()
    engine = FakeEngine(before=gate)
    with listening(engine) as live:
        try:
            if stage == "queue":
                first = live.connect()
                first.sendall(head() + BODY)
                assert gate.entered.wait(10)
            client = live.connect()
            body = json.dumps(good(user_id=77)).encode()
            client.sendall(head(length=len(body)) + body)
            until(lambda: live.figure("ranker_queue_requests") == (2 if stage == "queue" else 1))
            assert stage == "queue" or gate.entered.wait(10)
            if how == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            gone = 'ranker_http_requests_total{code="499",method="POST",route="/rank"}'
            until(lambda: live.figure(gone) == 1)
            assert live.figure(f'ranker_cancelled_total{{stage="{stage}"}}') == 1
            timed = 'ranker_http_request_duration_seconds_count{method="POST",refused="false",route="/rank"}'
            until(lambda: live.figure(timed) == 1)
        finally:
            gate.opened.set()
        if stage == "queue":
            assert read_reply(first)[0] == 200
            first.close()
            assert [77] not in engine.forwards


def test_a_caller_that_goes_away_within_its_body_is_counted(live: Live) -> None:
    before = live.figure('ranker_cancelled_total{stage="body"}')
    with live.connect() as client:
        client.sendall(head() + BODY[:10])
        ask(live)  # by now that has been read
    until(lambda: live.figure('ranker_cancelled_total{stage="body"}') == before + 1)


@pytest.mark.parametrize(
    "sent",
    [
        head(headers={f"x-{number}": "1" for number in range(101)}),
        head(headers={"x-long": 33_000 * "a"}),
        b"POST /rank HTTP/1.1\r\nx-long: " + 600_000 * b"a",  # a header that does not end
        b"POST /rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: "
        + 600_000 * b"a",  # nor a trailer
    ],
    ids=["count", "value", "endless", "trailer"],
)
def test_more_headers_than_anybody_needs_are_refused(live: Live, sent: bytes) -> None:
    with live.connect() as client:
        try:
            client.sendall(sent)
            assert read_reply(client)[0] == 400
        except ConnectionError:  # the rest was still on its way
            pass
        assert is_cut(client)


def test_a_hundred_headers_are_taken(live: Live) -> None:
    with live.connect() as client:
        client.sendall(head(headers={f"x-{number}": "1" for number in range(97)}) + BODY)
        assert read_reply(client)[0] == 200


def test_trailers_are_no_headers(live: Live) -> None:
    chunked = b"%x\r\n%b\r\n0\r\nx-request-id: of-a-trailer\r\n\r\n" % (len(BODY), BODY)
    with live.connect() as client:
        client.sendall(head(headers={"transfer-encoding": "chunked"}, length=None) + chunked)
        status, headers, _ = read_reply(client)
        assert (status, headers["x-request-id"] == "of-a-trailer") == (200, False)


def test_nothing_is_written_before_a_reply_that_is_due() -> None:
    gate = Gate()
    with listening(FakeEngine(before=gate)) as live, live.connect() as client:
        client.sendall(head() + BODY + b"no HTTP\r\n\r\n")
        assert gate.entered.wait(10)
        time.sleep(0.1)
        gate.opened.set()
        assert read_reply(client)[0] == 200
        assert client.recv(1) == b""


def is_cut(client: socket.socket) -> bool:
    """Whether the server ends the connection, within the time that a read may take, without a reply."""
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


class Ahead(uvloop.Loop):
    """An event loop whose clock a test puts forward by so many seconds."""

    seconds = 0.0

    def time(self) -> float:
        return super().time() + self.seconds


WHOLE = b"\r\n" + head() + BODY


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [(0, 5.0), (2, 5.0), (40, 5.0), (len(WHOLE) - len(BODY) + 1, 30.0)],
    ids=["nothing", "an empty line", "headers", "body"],
)
def test_slow_senders_are_cut_off_when_their_time_is_over(sent: int, seconds: float) -> None:
    """From the connect the headers have 5 s, then the body has 30 s."""
    loop = Ahead()
    with listening(loop=lambda: loop) as live, live.connect() as slow, live.connect() as late:
        slow.sendall(WHOLE[:sent])
        late.sendall(WHOLE[:sent])
        ask(live)  # by now the others have been read
        loop.seconds += seconds - 3
        asyncio.run_coroutine_threadsafe(live.server.sweep(), loop).result(10)
        late.sendall(WHOLE[sent:])
        assert read_reply(late)[0] == 200
        loop.seconds += 3
        assert is_cut(slow)


def test_a_late_loop_cuts_off_no_request_that_came_in_time() -> None:
    """As after the process was stopped, or got no processor: the sweep may come before what has arrived is read."""
    loop = Ahead()
    with listening(loop=lambda: loop) as live, live.connect() as client, live.connect() as slow:
        ask(live)  # by now the others have been accepted

        async def late() -> None:
            client.sendall(head() + BODY)
            loop.seconds += 6
            await live.server.sweep()

        asyncio.run_coroutine_threadsafe(late(), loop).result(10)
        assert read_reply(client)[0] == 200
        assert is_cut(slow)


def test_an_empty_line_after_a_reply_keeps_no_connection_open() -> None:
    loop = Ahead()
    with listening(loop=lambda: loop) as live, live.connect() as client:
        client.sendall(head() + BODY)
        assert read_reply(client)[0] == 200
        client.sendall(b"\r\n")
        ask(live)
        loop.seconds += 5
        assert is_cut(client)


def ask(live: Live) -> None:
    """A request on a connection of its own."""
    with live.connect() as client:
        client.sendall(head() + BODY)
        assert read_reply(client)[0] == 200


def test_a_caller_that_writes_all_before_it_reads_gets_its_413(live: Live) -> None:
    size = 20 * 2**20
    for headers in ({}, {"connection": "close"}):
        with live.connect(30) as client:
            client.sendall(head(headers=headers, length=size))
            for _ in range(20):
                client.sendall(2**20 * b" ")
            status, _, body = read_reply(client)
            assert (status, json.loads(body)["code"]) == (413, "too_large")


HEAD = b"POST /rank HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Wire(asyncio.Transport):
    """A connection's transport that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return False

    def write_eof(self) -> None: ...


async def turns_of(sent: bytes, rest: bytes = b"") -> tuple[int, Wire]:
    """How often others had a turn while one read was parsed, which follows the head of a request; the transport after that."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(
        app, http=connection.Connection, ws="none", lifespan="off", log_config=None, access_log=False
    )
    config.load()
    one, wire = connection.Connection(config=config, server_state=connection.PortState(), app_state={}), Wire()
    one.connection_made(wire)
    one.data_received(sent)
    one.data_received(rest)
    turns = 0
    while wire.is_paused:
        await asyncio.sleep(0)
        turns += 1
    return turns, wire


@pytest.mark.parametrize("size", [8, 16, 100])
def test_others_have_turns_while_tiny_chunks_are_parsed(size: int) -> None:
    chunk = b"%x\r\n%b\r\n" % (size, size * b"a")
    chunks = 250_000 // len(chunk)
    turns, wire = asyncio.run(turns_of(CHUNKED, chunk * chunks + b"0\r\n\r\n"))
    assert turns > chunks / 1000
    assert wire.written.startswith(b"HTTP/1.1 200 OK")


def test_large_pieces_take_few_turns() -> None:
    chunk = b"%x\r\n%b\r\n" % (32_000, 32_000 * b"a")
    for start, body in (
        (CHUNKED, 7 * chunk + b"0\r\n\r\n"),
        (HEAD + b"content-length: 250000\r\n\r\n", 250_000 * b"a"),
    ):
        turns, wire = asyncio.run(turns_of(start, body))
        assert turns < 20
        assert wire.written.startswith(b"HTTP/1.1 200 OK")


def test_others_have_turns_between_pipelined_requests() -> None:
    turns, wire = asyncio.run(turns_of(GET * 2000))
    assert turns >= 1999
    assert wire.written.count(b"HTTP/1.1 200 OK") == 2000


@pytest.mark.slow
def test_pipelined_requests_take_little_memory(live: Live) -> None:
    sent = GET * 4000
    tracemalloc.start()
    try:
        with live.connect() as client:
            before = tracemalloc.get_traced_memory()[0]
            client.sendall(sent)
            replies = 0
            while replies < 3000:
                replies += client.recv(2**16).count(b"HTTP/1.1 200 OK")
        peak = tracemalloc.get_traced_memory()[1] - before
        assert peak < 4 * len(sent)
    finally:
        tracemalloc.stop()


def test_every_pipelined_request_is_answered(live: Live) -> None:
    framed = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    requests = [GET, head() + BODY, framed, head(headers=UPGRADE) + BODY] * 20
    for size in (7, 1000, 10**6):
        sent = b"".join(requests)
        with live.connect() as client, client.makefile("rb") as file:
            for start in range(0, len(sent), size):
                client.sendall(sent[start : start + size])
            bodies = []
            for _ in requests:
                assert file.readline() == b"HTTP/1.1 200 OK\r\n"
                headers = dict(line.lower().split(b": ") for line in iter(lambda: file.readline().strip(), b""))
                bodies.append(file.read(int(headers[b"content-length"])))
            assert [b"alive" in body for body in bodies] == [True, False, False, False] * 20


def test_a_body_of_one_byte_chunks_is_refused(live: Live) -> None:
    with live.connect() as client:
        client.sendall(CHUNKED + b"1\r\n \r\n" * 2000)
        assert read_reply(client)[0] == 400
        assert is_cut(client)


@pytest.mark.parametrize("body", ["chunks", "a length"])
def test_the_connection_of_a_refused_body_ends_soon(body: str) -> None:
    loop = Ahead()
    with listening(loop=lambda: loop, auth={"keys": {"feed": "ab" * 32}}) as live, live.connect() as client:
        client.sendall(CHUNKED if body == "chunks" else HEAD + b"content-length: 1000000\r\n\r\n")
        piece = b"400\r\n" + 1024 * b" " + b"\r\n"
        client.sendall(piece * 100)
        status, headers, _ = read_reply(client)
        assert (status, headers["connection"]) == (401, "close")
        assert client.recv(1) == b""  # the server writes no more, but takes what is still on its way
        client.sendall(piece * 100)
        loop.seconds += 6
        until(lambda: not live.server.server_state.connections)


def test_a_small_refused_body_leaves_the_connection_open() -> None:
    with listening(auth={"keys": {"feed": "ab" * 32}}) as live, live.connect() as client:
        for _ in range(3):
            client.sendall(head() + BODY)
            assert read_reply(client)[0] == 401


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
    ],
    ids=["two", "none"],
)
def test_a_request_has_one_host(live: Live, sent: bytes) -> None:
    with live.connect() as client:
        client.sendall(sent)
        assert read_reply(client)[0] == 400


@pytest.mark.parametrize("connection", ["close, Upgrade, HTTP2-Settings", "Upgrade, Close"])
def test_close_beside_an_upgrade_closes(live: Live, connection: str) -> None:
    with live.connect() as client:
        client.sendall(head(headers=UPGRADE | {"connection": connection}) + BODY)
        status, headers, _ = read_reply(client)
        assert (status, headers["connection"]) == (200, "close")
        assert client.recv(1) == b""


@pytest.mark.parametrize(
    "target", ["http://localhost", "http://localhost?a", "/livez#a", "/livez#.png"], ids=["bare", "query", "a", "png"]
)
def test_a_target_that_cannot_be_read_gets_400(live: Live, target: str) -> None:
    """A proxy's rules may have looked at what stands behind the sign of a fragment."""
    with live.connect() as client:
        client.sendall(f"GET {target} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        status, headers, _ = read_reply(client)
        assert (status, headers["connection"]) == (400, "close")


@pytest.mark.parametrize("space", [" ", "\t", " \t "])
def test_blanks_behind_the_length_do_not_count(live: Live, space: str) -> None:
    with live.connect() as client:
        client.sendall(head(headers={"content-length": f"{len(BODY)}{space}"}, length=None) + BODY)
        assert read_reply(client)[0] == 200


def test_a_caller_of_http_1_0_gets_no_interim_reply(live: Live) -> None:
    with live.connect() as client:
        client.sendall(head(headers={"expect": "100-continue"}).replace(b"HTTP/1.1", b"HTTP/1.0"))
        time.sleep(0.2)  # in which a client of HTTP/1.1 would be told to go on
        client.sendall(BODY)
        assert client.recv(12) == b"HTTP/1.1 200"


def test_a_caller_that_never_reads_an_error_counts_as_gone(live: Live) -> None:
    """Its replies fill the buffers, so an error waits behind them until it goes away."""
    refused, gone = (
        f'ranker_http_requests_total{{code="{code}",method="GET",route="unmatched"}}' for code in (404, 499)
    )
    before = live.figure(gone)

    def waits() -> bool:
        count = live.figure(refused)
        time.sleep(0.3)
        return count > 0 and live.figure(refused) == count

    with live.connect() as client:
        client.sendall((head("GET", "/openapi.json", length=None) + head("GET", "/nothing", length=None)) * 200)
        until(waits)
    until(lambda: live.figure(gone) == before + 1)
