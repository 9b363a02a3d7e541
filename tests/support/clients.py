"""Callers for tests under load: many at once over real sockets, each reply with its times."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtest.server import PLAIN, Server


@dataclass
class Replies:
    """What callers got: statuses, and for each reply its status, seconds and body."""

    all: list[tuple[int, float, bytes]] = field(default_factory=list)
    headers: list[httpx.Headers] = field(default_factory=list)
    broken: int = 0  # connections that ended without a reply

    def count(self, status: int) -> int:
        return sum(each[0] == status for each in self.all)

    def seconds(self, status: int) -> list[float]:
        """Ascending."""
        return sorted(each[1] for each in self.all if each[0] == status)

    def percentile(self, status: int, share: float) -> float:
        seconds = self.seconds(status)
        return seconds[min(len(seconds) - 1, int(share * len(seconds)))]


@contextmanager
def callers(
    server: Server,
    bodies: Callable[[int], bytes],
    count: int,
    *,
    path: str = "/rank",
    impatient: bool = False,
    headers: dict[str, str] | None = None,
) -> Iterator[Replies]:
    """`count` callers in threads that send the next body after each reply, until the block ends. After a refusal each waits as long as
    Retry-After says, unless it is impatient."""
    replies, stop = Replies(), threading.Event()
    given = {"content-type": "application/json"} | (headers or {})

    def call(number: int) -> None:
        with httpx.Client(base_url=server.url, timeout=30, verify=PLAIN) as client:
            turn = 0
            while not stop.is_set():
                began = time.perf_counter()
                try:
                    reply = client.post(path, content=bodies(number + turn * count), headers=given)
                except httpx.TransportError:
                    replies.broken += 1
                    stop.wait(0.05)
                    continue
                replies.all.append((reply.status_code, time.perf_counter() - began, reply.content))
                replies.headers.append(reply.headers)
                turn += 1
                if reply.status_code in (429, 503) and not impatient:
                    stop.wait(min(1.0, float(reply.headers["retry-after"])))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield replies
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)


def at_once(server: Server, bodies: Sequence[bytes], **headers: str) -> list[httpx.Response]:
    """Send all bodies at the same time, each on a connection of its own."""
    given = {"content-type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}

    async def send() -> list[Any]:
        limits = httpx.Limits(max_connections=len(bodies))
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits, verify=PLAIN) as client:
            return await asyncio.gather(*(client.post("/rank", content=body, headers=given) for body in bodies))

    return asyncio.run(send())
