"""Frames over a real socket: cut and joined anywhere, nonsense ends the link, strangers get none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog

from app.fronts import link, wire
from app.fronts.link import Link
from app.fronts.wire import MAX_BYTES, Cancel, Hello, encode
from tests.app.fakes import until

pytestmark = pytest.mark.anyio

HELLO, CANCEL = Hello(1, 2), Cancel(3)


class End:
    """One end of a link, and what it was given."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.made = self.lost = 0
        self.link = Link(wire.from_front, self.take, self._made, self._lost)

    def take(self, link: Link, frame: Any) -> None:
        self.taken.append(frame)
        if frame == Cancel(13):
            raise ValueError("planted")

    def _made(self, link: Link) -> None:
        self.made += 1

    def _lost(self, link: Link) -> None:
        self.lost += 1


@asynccontextmanager
async def joined() -> AsyncIterator[tuple[End, socket.socket]]:
    """One end, and the plain socket at the other."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    end = End()
    await asyncio.get_running_loop().create_unix_connection(lambda: end.link, sock=ours)
    try:
        yield end, theirs
    finally:
        theirs.close()
        end.link.close()


async def test_frames_may_come_in_any_pieces() -> None:
    async with joined() as (end, peer):
        sent = encode(HELLO) + encode(CANCEL) + encode(Cancel(2**40))
        for size in (1, 3, 5, len(sent)):
            end.taken.clear()
            for start in range(0, len(sent), size):
                await asyncio.get_running_loop().sock_sendall(peer, sent[start : start + size])
                await asyncio.sleep(0.001)
            await until(lambda: len(end.taken) == 3)
            assert end.taken == [HELLO, CANCEL, Cancel(2**40)]


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        struct.pack("<I", MAX_BYTES + 1),
        struct.pack("<I", 0),
        struct.pack("<I", 3) + b"\x92\x63\x01",  # a frame of an unknown number
        struct.pack("<I", 3) + b"\x92\x02\xc0",  # of another type
        struct.pack("<I", 2) + b"\x91\x02",  # too short
        encode(Cancel(13)),  # one that the other side refuses
    ],
)
async def test_nonsense_ends_the_link_and_what_came_before_was_taken(nonsense: bytes) -> None:
    async with joined() as (end, peer):
        with structlog.testing.capture_logs() as lines:
            await asyncio.get_running_loop().sock_sendall(peer, encode(HELLO) + nonsense + encode(CANCEL))
            await until(lambda: end.lost == 1)
        assert end.taken[:1] == [HELLO]
        assert CANCEL not in end.taken  # nothing is taken after it
        assert [line["event"] for line in lines] == ["link_broken"]
        end.link.send(CANCEL)  # and nothing is said


async def test_frames_of_one_turn_of_the_loop_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are long, or the link is closed before the turn ends."""
    many = 10
    monkeypatch.setattr(link, "JOINED_BYTES", many * len(encode(CANCEL)))
    async with joined() as (end, peer):
        for _ in range(2):  # what one turn may hold back has a bound
            for _ in range(many):
                end.link.send(CANCEL)
            with pytest.raises(BlockingIOError):
                peer.recv(1)
            end.link.send(CANCEL)
            assert peer.recv(1000) == encode(CANCEL) * (many + 1)
        for frames in ((HELLO, CANCEL), (CANCEL,)):
            for frame in frames:
                end.link.send(frame)
            with pytest.raises(BlockingIOError):
                peer.recv(1)
            await asyncio.sleep(0)
            assert peer.recv(1000) == b"".join(map(encode, frames))
        end.link.send(CANCEL)
        end.link.close()
        assert peer.recv(1000) == encode(CANCEL)
        await until(lambda: end.lost == 1)
        assert peer.recv(1) == b"", "the socket is closed"


async def test_frames_of_a_link_that_is_lost_in_the_same_turn_are_dropped() -> None:
    failed: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
    async with joined() as (end, _):
        end.link.send(CANCEL)
        end.link._end("planted")
        end.link.send(CANCEL)
        await until(lambda: end.lost == 1)
        assert (end.link._unwritten, end.link._unwritten_bytes) == ([], 0)
    assert failed == []


async def test_a_beginning_of_a_frame_holds_no_more_than_came() -> None:
    async with joined() as (end, peer):
        await asyncio.get_running_loop().sock_sendall(peer, struct.pack("<I", MAX_BYTES) + b"x" * 1000)
        await asyncio.sleep(0.02)
        assert end.lost == 0
        assert len(end.link._rest) == 1004


async def test_a_peer_that_reads_nothing_is_known_as_congested() -> None:
    async with joined() as (end, peer):
        while not end.link.congested:
            end.link.send(wire.Failed(1, "x", "x" * 100_000))
        loop = asyncio.get_running_loop()
        while end.link.congested:
            await loop.sock_recv(peer, 2**20)


async def test_a_peer_that_never_reads_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_BYTES", 2**20)
    async with joined() as (end, _):
        for _ in range(100):
            end.link.send(wire.Failed(1, "x", "x" * 100_000))
        await until(lambda: end.lost == 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
@pytest.mark.parametrize("user", [65534, 0])
async def test_another_user_gets_no_link(user: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)  # noqa: S103
        path = f"{directory}/engine"
        end, loop = End(), asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: end.link, path)
        os.chmod(path, 0o777)  # noqa: S103  # the mode of its directory is the first guard: here it is open
        with socket.socket(socket.AF_UNIX) as peer:
            os.seteuid(user)  # the system notes who connects
            try:
                peer.connect(path)
            finally:
                os.seteuid(0)
            peer.setblocking(False)
            with structlog.testing.capture_logs() as lines:
                await loop.sock_sendall(peer, encode(HELLO))
                if user:
                    with contextlib.suppress(ConnectionResetError):
                        assert await loop.sock_recv(peer, 1) == b""
                    assert (end.made, end.taken, end.lost) == (0, [], 0)
                    assert lines == [{"event": "stranger", "user": user, "log_level": "error"}]
                else:  # the negative control: the same caller as ourselves
                    await until(lambda: end.taken == [HELLO])
                    end.link.close()
        server.close()


async def test_frames_of_one_turn_are_one_write_however_much_was_written_before() -> None:
    async with joined() as (end, theirs):
        writes: list[int] = []

        class Counting:
            def __init__(self, transport: Any) -> None:
                self.transport = transport

            def write(self, data: bytes) -> None:
                writes.append(len(data))
                self.transport.write(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.transport, name)

        end.link._transport = Counting(end.link._transport)  # type: ignore[assignment]
        one, loop, sent = len(encode(CANCEL)), asyncio.get_running_loop(), 0
        while sent <= 2 * link.JOINED_BYTES:
            for _ in range(1000):
                end.link.send(CANCEL)
            sent += 1000 * one
            await asyncio.sleep(0)
            left = 1000 * one
            while left:
                left -= len(await loop.sock_recv(theirs, left))
        assert writes == [1000 * one] * (sent // (1000 * one))
