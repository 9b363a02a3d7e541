"""B5: connections that send broken bytes after good requests, in pieces of any size. No request may get two replies."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from loadtest.generate.broken_requests import BROKEN
from loadtest.generate.payload import rank_request
from loadtest.matrix import Row
from loadtest.servers.launch import HOST
from loadtest.soak.servers import fake

CONNECTIONS = 200
PATIENCE_SECONDS = 1.0  # the server's limit for headers and bodies: corrupted bytes may announce more than is sent
CLOSE_SECONDS = 15.0
NAME = b"X-Request-ID: "
PIECES = (
    b"\n", b"\r", b"\r\n", b"\r\n\r\n", b"\x00", b" ", b"\t", b":", b"Content-Length: 0\r\n", b"Content-Length: 7\r\n",
    b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n", b"5\r\n", b"HTTP/1.1", b"GET / HTTP/1.1\r\n\r\n", b"\xff", b"Connection: close\r\n",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exchange:
    """All bytes of one connection. `good`: names of the requests before the break; `hidden`: of those a faulty parser would find."""

    sent: bytes
    good: tuple[bytes, ...]
    hidden: tuple[bytes, ...]
    corrupted: bool = False  # at random places, so that any of the good requests may be broken


@dataclass(frozen=True, slots=True)
class Answer:
    """One reply: its status, and the request id that it carries."""

    status: int
    name: bytes


def protocol(seconds: float, *faults: str) -> Row:
    """Open connections until the time is over. The figure counts connections with a repeated reply or one to a hidden request."""
    tried, broken, two = 0, 0, 0
    patience = {"connections__header_seconds": PATIENCE_SECONDS, "connections__body_seconds": PATIENCE_SECONDS}
    with fake(*faults, queue__max_wait_seconds=10, **patience) as server, asyncio.Runner() as runner:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            exchanges = [exchange(random.Random(tried + number)) for number in range(CONNECTIONS)]
            for asked, found in zip(exchanges, runner.run(_all(server.port, exchanges, tried)), strict=True):
                tried += 1
                broken += bool(complaint(asked, found))
                two += answered_too_often(asked, found or ())
        alive = server.answers()
    what = "connections that break the protocol: replies in order, then 400 and the end"
    return Row("B5", what, tried, broken + (not alive), two, 0, "requests with two replies")


def exchange(draw: random.Random) -> Exchange:
    """Good requests, then a broken one and hidden ones; or good requests with bytes corrupted anywhere."""
    good = tuple(b"good-%016x" % draw.getrandbits(64) for _ in range(draw.randrange(4)))
    whole = b"".join(_named(name, draw) for name in good)
    if good and draw.random() < 0.5:
        return Exchange(_corrupted(whole, draw), good, (), corrupted=True)
    hidden = tuple(b"hidden-%016x" % draw.getrandbits(64) for _ in range(2))
    rest = b"".join(_named(name, draw) for name in hidden)
    return Exchange(whole + draw.choice(list(BROKEN.values())) + rest, good, hidden)


def complaint(asked: Exchange, found: Sequence[Answer] | None) -> str:
    """What is wrong with the replies on a connection. `found` is None if it stayed open or the replies cannot be parsed."""
    if found is None:
        return "left open, or bytes that are no replies"
    names = [answer.name for answer in found if answer.name]
    own = [name for name in asked.good if name in names]
    if not asked.corrupted and names != list(asked.good):
        return "not one reply each to the good requests, in their order"
    if asked.corrupted and [name for name in names if name in asked.good] != own:
        return "a request has two replies, or replies are out of order"
    refusals = [answer for answer in found if not answer.name]
    if len(refusals) > 1 or (refusals and found[-1] is not refusals[0]):
        return "a refusal that is not the last reply"
    if not asked.corrupted and not asked.good and [answer.status for answer in found] != [400]:
        return "a broken request without its 400"
    return ""


def answered_too_often(asked: Exchange, found: Sequence[Answer]) -> bool:
    """Whether a request has two replies, or a request hidden behind the break has one."""
    names = [answer.name for answer in found if answer.name]
    return len(set(names)) < len(names) or not set(names).isdisjoint(asked.hidden)


def _named(name: bytes, draw: random.Random) -> bytes:
    """A good request with this id: a GET, a POST with a length, or a chunked POST."""
    kind = draw.randrange(3)
    if kind == 0:
        return b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + NAME + name + b"\r\n\r\n"
    head, _, body = rank_request(draw.randrange(1, 10**6), 4).partition(b"\r\n\r\n")
    if kind == 2:
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
        head, cut = b"\r\n".join([*lines, b"Transfer-Encoding: chunked"]), draw.randrange(1, len(body))
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (body[:cut], body[cut:], b""))
    return head + b"\r\n" + NAME + name + b"\r\n\r\n" + body


def _corrupted(sent: bytes, draw: random.Random) -> bytes:
    """The bytes with one to three places overwritten, removed, doubled or inserted into."""
    bytes_ = bytearray(sent)
    for _ in range(draw.randint(1, 3)):
        place, length = draw.randrange(len(bytes_) + 1), draw.randint(1, 30)
        piece = (b"", draw.choice(PIECES), bytes([draw.randrange(256)]), bytes(bytes_[place : place + length]) * 2)
        cut = (length, 0, 1, length)
        choice = draw.randrange(4)
        bytes_[place : place + cut[choice]] = piece[choice]
    return bytes(bytes_)


async def _all(port: int, exchanges: Sequence[Exchange], seed: int) -> list[list[Answer] | None]:
    return await asyncio.gather(
        *(_converse(port, asked.sent, random.Random(seed + row)) for row, asked in enumerate(exchanges))
    )


async def _converse(port: int, sent: bytes, draw: random.Random) -> list[Answer] | None:
    """Send in pieces and return the replies. None if the server does not close the connection, or they cannot be parsed."""
    reader, writer = await asyncio.open_connection(HOST, port)
    reading = asyncio.ensure_future(_until_the_end(reader))
    pace = draw.choice((len(sent), 1 + len(sent) // 2, 200, 61))
    with suppress(ConnectionError):
        for start in range(0, len(sent), pace):
            writer.write(sent[start : start + pace])
            await asyncio.sleep(0)
            await writer.drain()
    if not await _ended(reading, 4 * PATIENCE_SECONDS):
        # the server keeps the connection alive: send a request that closes it, and ignore its reply
        with suppress(ConnectionError):
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + NAME + b"last\r\n\r\n")
        if not await _ended(reading, CLOSE_SECONDS):
            reading.cancel()
    writer.transport.abort()
    return None if reading.cancelled() or not reading.done() else replies(reading.result())


async def _ended(reading: asyncio.Future[bytes], seconds: float) -> bool:
    return bool((await asyncio.wait([reading], timeout=seconds))[0])


async def _until_the_end(reader: asyncio.StreamReader) -> bytes:
    found = bytearray()
    with suppress(ConnectionError):
        while chunk := await reader.read(65536):
            found += chunk
    return bytes(found)


def replies(stream: bytes) -> list[Answer] | None:
    """The replies in a stream, split by their lengths. None if bytes are left over or missing."""
    found = []
    while stream:
        head, separator, rest = stream.partition(b"\r\n\r\n")
        status, *lines = head.split(b"\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        if not separator or not status.startswith(b"HTTP/1.1 ") or not fields.get(b"content-length", b"").isdigit():
            return None
        length = int(fields[b"content-length"])
        if len(rest) < length:
            return None
        found.append(Answer(int(status.split()[1]), fields.get(b"x-request-id", b"")))
        stream = rest[length:]
    return found
