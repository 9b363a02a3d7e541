"""Callers for tests under load: many at once over real sockets, each reply with its time. http.client takes a fifth of httpx's time."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from loadtest.server import Server
from tests.app.api.live import Live


@dataclass(frozen=True)
class Reply:
    """What a caller got, after this many seconds. The names of `headers` are in lower case."""

    status: int
    seconds: float
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class Replies:
    """The replies to several callers in the order in which they came, and how many connections ended without one. `refused`: those of
    them that were never made."""

    all: list[Reply] = field(default_factory=list)
    broken: int = 0
    refused: int = 0

    @property
    def statuses(self) -> set[int]:
        return {reply.status for reply in self.all}

    def of(self, status: int) -> list[Reply]:
        return [reply for reply in self.all if reply.status == status]


@contextmanager
def callers(
    server: Server | Live,
    bodies: Callable[[int], bytes],
    count: int,
    *,
    path: str = "/rank",
    pause: float = 0.0,
    impatient: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Iterator[Replies]:
    """`count` callers in threads that send the next body `pause` seconds after each reply, until the block ends. After a refusal each
    waits as long as Retry-After says, unless it is impatient."""
    replies, stop = Replies(), threading.Event()

    def call(number: int) -> None:
        turn = 0
        while not stop.is_set():
            with closing(_connection(server)) as connection:
                try:
                    while not stop.is_set():
                        reply = _send(connection, path, bodies(number + turn * count), headers or {})
                        replies.all.append(reply)
                        turn += 1
                        refused = reply.status in (429, 503) and not impatient
                        stop.wait(min(1.0, float(reply.headers["retry-after"])) if refused else pause)
                except (OSError, http.client.HTTPException) as error:
                    print(f"{datetime.now(UTC):%H:%M:%S.%f} without a reply, {headers}: {error!r}")
                    replies.broken += 1
                    replies.refused += isinstance(error, ConnectionRefusedError)
                    stop.wait(0.05)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield replies
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def at_once(server: Server | Live, bodies: Sequence[bytes], **headers: str) -> list[Reply]:
    """Send all bodies at the same time, each on a connection of its own."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}

    def send(body: bytes) -> Reply:
        with closing(_connection(server)) as connection:
            return _send(connection, "/rank", body, given)

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(send, bodies))


def _connection(server: Server | Live) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)


def _send(connection: http.client.HTTPConnection, path: str, body: bytes, headers: Mapping[str, str]) -> Reply:
    began = time.perf_counter()
    if connection.sock is None:
        connection.connect()
    with suppress(BrokenPipeError, ConnectionResetError):  # a refusal may come before the whole body was sent
        connection.request("POST", path, body, {"content-type": "application/json", **headers})
    reply = connection.getresponse()
    content = reply.read()
    received = {name.lower(): value for name, value in reply.getheaders()}
    return Reply(reply.status, time.perf_counter() - began, received, content)
