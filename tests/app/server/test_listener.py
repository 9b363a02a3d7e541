"""New connections do not wait for a busy loop: all that knock are taken in one turn."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from app.server import listener as module
from app.server.listener import Listener

WAITING = 50
LOOPS = [asyncio.new_event_loop]
try:
    import uvloop
except ImportError:  # a platform that uvicorn[standard] installs none on
    uvloop = None
else:
    LOOPS.append(uvloop.new_event_loop)


class Counting(asyncio.Protocol):
    """How many connections have begun."""

    begun = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        type(self).begun += 1


@pytest.fixture(autouse=True)
def nobody_yet() -> None:
    Counting.begun = 0


def run(work: Coroutine[Any, Any, None], make_loop: Callable[[], asyncio.AbstractEventLoop] = LOOPS[-1]) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(work)


@contextmanager
def knocking(address: Any, count: int = WAITING) -> Iterator[None]:
    """That many clients connect; the kernel lets them, whoever accepts."""
    clients = [socket.create_connection(address[:2], timeout=5) for _ in range(count)]
    try:
        yield
    finally:
        for client in clients:
            client.close()


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("make_loop", LOOPS, ids=lambda make: make.__module__)
def test_all_who_wait_are_taken_in_a_few_turns(make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def go() -> None:
        listener = Listener("127.0.0.1", 0, backlog=128, protocol=Counting)
        listener.start()
        with knocking(listener.socket.getsockname()):
            await turns(8)
            assert Counting.begun == WAITING
        await listener.close()

    run(go(), make_loop)


@pytest.mark.skipif(uvloop is None, reason="needs uvloop")
def test_the_loops_own_server_takes_one_a_turn() -> None:
    """The control, and the reason for all this. When it fails, libuv has changed and the module may go."""

    async def go() -> None:
        server = await asyncio.get_running_loop().create_server(Counting, "127.0.0.1", 0, backlog=128)
        with knocking(server.sockets[0].getsockname()):
            await turns(8)
            assert 0 < Counting.begun < WAITING / 2
        server.close()

    run(go())


@pytest.mark.parametrize("in_a_turn", [module.MOST_IN_A_TURN, WAITING // 4])
def test_all_that_wait_at_the_close_are_taken(in_a_turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_IN_A_TURN", in_a_turn)

    async def go() -> None:
        listener = Listener("127.0.0.1", 0, backlog=128, protocol=Counting)
        listener.start()
        with knocking(listener.socket.getsockname()):
            await listener.close()
            assert Counting.begun == WAITING

    run(go())


class Greeting(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(b"!")  # type: ignore[attr-defined]
        transport.close()


def connect_until_refused(address: Any, ends: Counter[str]) -> None:
    """A client every millisecond; how each of them ended."""
    clients = []
    try:
        while True:
            clients.append(socket.create_connection(address, timeout=5))
            time.sleep(0.001)
    except ConnectionRefusedError:
        ends["refused"] += 1
    except OSError:
        ends["reset"] += 1
    for client in clients:
        with client:
            try:
                ends["greeted" if client.recv(1) else "closed"] += 1
            except OSError:
                ends["reset"] += 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs SO_ATTACH_FILTER")
@pytest.mark.parametrize("attach", [module.SO_ATTACH_FILTER, 0x7FFF], ids=["as it is", "control"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_connects_between_the_last_accept_and_the_end_is_not_reset(
    host: str, attach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SO_ATTACH_FILTER", attach)

    async def go() -> None:
        listener = Listener(host, 0, backlog=1024, protocol=Greeting)
        listener.start()
        address, ends = listener.socket.getsockname()[:2], Counter[str]()
        clients = threading.Thread(target=connect_until_refused, args=(address, ends))
        clients.start()
        await asyncio.sleep(0.1)
        accept = listener._accept
        monkeypatch.setattr(listener, "_accept", lambda: accept() or time.sleep(0.02))  # the process has to wait here
        await listener.close()
        await asyncio.to_thread(clients.join)
        assert ends["greeted"] > 8
        assert (ends["reset"] + ends["closed"] > 0) == (attach != 26), ends

    run(go())


def test_a_front_accepts_on_the_socket_that_another_one_has_left() -> None:
    async def go() -> None:
        first = Listener("127.0.0.1", 0, backlog=128, protocol=Greeting)
        left = first.socket.dup()
        first.start()
        await first.close()
        second = Listener("127.0.0.1", 0, backlog=128, protocol=Counting, given=left)
        second.start()
        with knocking(second.socket.getsockname(), 1):
            await turns(8)
            assert Counting.begun == 1
        await second.close()

    run(go())


def test_without_descriptors_it_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """A socket that no descriptor can be had for."""

        def __init__(self, real: socket.socket) -> None:
            self.fileno, self.tried = real.fileno, 0

        def accept(self) -> None:
            self.tried += 1
            raise OSError(errno.EMFILE, "Too many open files")

    async def go() -> None:
        monkeypatch.setattr(module, "PAUSE_SECONDS", 0.05)
        listener = Listener("127.0.0.1", 0, backlog=128, protocol=Counting)
        real, full = listener.socket, Full(listener.socket)
        monkeypatch.setattr(listener, "socket", full)
        listener.start()
        with knocking(real.getsockname(), 3):
            await asyncio.sleep(0.02)
            assert full.tried == 1  # not again and again
            monkeypatch.setattr(listener, "socket", real)
            async with asyncio.timeout(5):
                while Counting.begun < 3:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        await listener.close()

    run(go())


def test_an_address_in_use_is_an_error() -> None:
    async def go() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
            Listener("127.0.0.1", taken.getsockname()[1], backlog=8, protocol=Counting)

    run(go())
