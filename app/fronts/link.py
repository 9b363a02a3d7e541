"""One end of the socket between a front and the engine process: bytes ↔ frames.

Frames sent in one loop iteration are written by one system call: one call each would take a fifth of a busy engine process's time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec
import structlog

from app.fronts.wire import LENGTH, MAX_BYTES, Message, encode

JOINED_BYTES = 65_536  # unwritten bytes at which a turn's messages are written at once
CREDENTIALS = struct.Struct("3i")  # of the peer: process, user, group

log = structlog.get_logger("app.fronts.link")


class Link(asyncio.Protocol):
    """`take` is called with each frame. If it raises ValueError, or if bytes are not a frame, the link ends.

    `lost` is called once at the end, unless the peer was a stranger. Used by the event loop only.
    """

    def __init__(
        self,
        decoder: msgspec.msgpack.Decoder[Any],
        take: Callable[[Link, Any], None],
        made: Callable[[Link], None],
        lost: Callable[[Link], None],
    ) -> None:
        self.congested = False  # the peer reads more slowly than we write
        self._decode = decoder.decode
        self._take = take
        self._made = made
        self._lost = lost
        self._known = False
        self._rest = bytearray()  # the beginning of an incomplete frame
        self._unwritten: list[bytes] = []  # frames of this loop iteration
        self._unwritten_bytes = 0
        self._transport: asyncio.Transport | None = None

    def send(self, message: Message) -> None:
        """Write a frame, unless the link has ended. Raises ValueError for one that is too long.

        A peer that stops reading is cut off once more than `MAX_BYTES` wait for it.
        """
        if self._transport is not None:
            if not self._unwritten:
                self._loop.call_soon(self._write)
            self._unwritten.append(data := encode(message))
            self._unwritten_bytes += len(data)
            if self._unwritten_bytes > JOINED_BYTES:
                self._write()

    def close(self) -> None:
        """End the link when everything is written."""
        self._write()
        if self._transport is not None:
            self._transport.close()

    def _write(self) -> None:
        if self._transport is not None and self._unwritten:
            self._transport.write(b"".join(self._unwritten))
            if self.congested and self._transport.get_write_buffer_size() > MAX_BYTES:
                self._end("has stopped reading")
        self._unwritten.clear()
        self._unwritten_bytes = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("socket")
        _, user, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        if user != os.geteuid():
            log.error("stranger", user=user)
            transport.abort()
            return
        self._transport, self._known = transport, True
        self._loop = asyncio.get_running_loop()
        self._made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._known:
            self._lost(self)

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
            taken = self._frames(self._rest)
            del self._rest[:taken]
        else:
            taken = self._frames(data)
            self._rest += data[taken:]

    def _frames(self, data: bytes | bytearray) -> int:
        """Take every whole frame; return how many bytes they are."""
        start, size = 0, len(data)
        with memoryview(data) as view:
            while self._transport is not None and size - start >= LENGTH.size:
                (length,) = LENGTH.unpack_from(data, start)
                end = start + LENGTH.size + length
                if length > MAX_BYTES:
                    self._end(f"a frame of {length} bytes")
                elif end > size:
                    break
                else:
                    try:
                        self._take(self, self._decode(view[start + LENGTH.size : end]))
                    except (ValueError, msgspec.MsgspecError) as error:
                        self._end(str(error))
                start = end
        return min(start, size)

    def _end(self, reason: str) -> None:
        """Cut off a misbehaving peer, so that it does not affect others."""
        log.error("link_broken", reason=reason[:200])
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
