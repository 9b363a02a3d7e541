"""Clients of the soak tests: a set of requests and their replies, or callers that run in a thread during a test."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from typing import Any, Self

import numpy as np

from loadtest.generate.http_client import Client, Reply
from loadtest.generate.payload import rank_request
from loadtest.servers.launch import HOST

PAUSE_SECONDS = 0.02  # before a client tries again


def ask_all(port: int, payloads: Sequence[bytes], together: int = 1, **options: Any) -> list[Reply]:
    """Send the payloads with `together` in flight; return replies in the same order. `options` go to `Client`."""

    async def main() -> list[Reply]:
        async with Client(HOST, port, max_connections=together, **options) as client:
            return await asyncio.gather(*(client.ask(payload) for payload in payloads))

    return asyncio.run(main())


def any_size(draw: random.Random) -> bytes:
    """A request of some user with few or many candidates."""
    return rank_request(draw.randrange(1, 10**6), draw.choice((1, 16, 64)))


def percentile(replies: Sequence[Reply], percent: float = 99) -> float:
    """A percentile of the seconds from asking to the last byte; 0 if there are no replies."""
    return float(np.percentile([reply.done_at - reply.asked_at for reply in replies], percent)) if replies else 0.0


@contextmanager
def apart(run: Callable[..., None], *arguments: object) -> Iterator[ForkServerProcess]:
    """Run a function in another process until the block ends, so that its work does not disturb what is measured in this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run.__module__])  # what the first one imports, no later one has to
    process = context.Process(target=run, args=arguments, daemon=True)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


async def vanish(port: int, request: bytes, after_seconds: float) -> None:
    """Send a request and abort the connection after `after_seconds` without reading."""
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return
    writer.write(request)
    await asyncio.sleep(after_seconds)
    writer.transport.abort()


class Callers:
    """Closed-loop clients in a separate thread for the length of a `with` block. `replies` holds all their attempts.

    A client makes up to `tries` attempts until it gets 200; `given_up` counts requests whose attempts all failed. With
    `until_gone`, a client ends with the server: at the first request that gets no reply or cannot be sent. For the share
    `vanishing` of requests, it disconnects without waiting for the reply. `pause_seconds`: least and most between two requests.
    """

    def __init__(
        self,
        port: int,
        clients: int,
        payload: Callable[[random.Random], bytes] = any_size,
        *,
        tries: int = 1,
        until_gone: bool = False,
        vanishing: float = 0.0,
        pause_seconds: tuple[float, float] = (0.0, 0.0),
        **options: Any,
    ) -> None:
        self.port, self.clients, self.payload = port, clients, payload
        self.tries, self.until_gone, self.vanishing = tries, until_gone, vanishing
        self.pause_seconds, self.options = pause_seconds, options
        self.replies: list[Reply] = []
        self.given_up = self.vanished = 0
        self.stop = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop = not self.until_gone
        self._thread.join()

    def ended(self, seconds: float) -> bool:
        """Whether all clients ended within `seconds`; the others are told to stop."""
        self._thread.join(seconds)
        is_over = not self._thread.is_alive()
        self.until_gone, self.stop = False, True
        return is_over

    def ends(self) -> Counter[str]:
        """Counts of each status or kind of loss."""
        sent = (reply for reply in self.replies if reply.status or reply.sent_at)
        return Counter(str(reply.status or f"lost: {reply.failure}") for reply in sent)

    def note(self, payload: bytes, reply: Reply) -> None:
        """Record a finished attempt."""
        self.replies.append(reply)

    async def _run(self) -> None:
        async with Client(HOST, self.port, max_connections=8 * self.clients, **self.options) as client:
            await asyncio.gather(*(self._client(client, random.Random(seed)) for seed in range(self.clients)))

    async def _client(self, client: Client, draw: random.Random) -> None:
        while not self.stop:
            payload = self.payload(draw)
            if draw.random() < self.vanishing:
                await vanish(self.port, payload, draw.random() * 0.01)
                self.vanished += 1
            elif not await self._ask(client, payload):
                return
            elif self.pause_seconds[1]:
                await asyncio.sleep(draw.uniform(*self.pause_seconds))

    async def _ask(self, client: Client, payload: bytes) -> bool:
        """Send a payload with retries; return whether the client goes on."""
        for attempt in range(self.tries):
            reply = await client.ask(payload)
            self.note(payload, reply)
            if self.until_gone and reply.failure:
                return False
            if reply.status == 200 or self.stop:
                break
            self.given_up += attempt == self.tries - 1
            if self.tries > 1:
                await asyncio.sleep(PAUSE_SECONDS)
        return True
