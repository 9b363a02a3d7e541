"""One end of the Unix stream between a worker and the engine process: bytes ↔ messages, and questions ↔ answers."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

import msgspec
import structlog

from app.errors import InternalError, service_error_of
from app.processes.messages import LENGTH, MAX_BYTES, METHODS, Answer, Call, Cancel, Failed, decoder, encode, frame
from app.telemetry.logs import of_exception

JOINED_BYTES = 65_536  # unwritten bytes at which a turn's messages are written at once
CREDENTIALS = struct.Struct("3i")  # of the peer: process, user, group

log = structlog.get_logger("app.processes.link")


class Link(asyncio.Protocol):
    """`take` is called with each message but the answers to this end's own questions. If it raises, or if bytes are no message, the link
    ends, which is logged. `on_open` and `on_close` are called once each, unless the peer is another user's process. Used by the event loop
    only.

    What is sent in one turn of the loop is written by one system call: one each would take a fifth of a busy engine process's time.
    """

    def __init__(
        self,
        kinds: Any,
        take: Callable[[Link, Any], None],
        on_open: Callable[[Link], None],
        on_close: Callable[[Link], None],
    ) -> None:
        self._decode = decoder(kinds).decode
        self._take = take
        self._on_open = on_open
        self._on_close = on_close
        self._numbers = itertools.count(1)
        # By id: who waits, and the type of the result.
        self._unanswered: dict[int, tuple[asyncio.Future[Any], Any]] = {}
        self._rest = bytearray()  # the beginning of an incomplete message
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._is_known = False
        self._is_congested = False  # the peer reads more slowly than we write
        self._transport: asyncio.Transport | None = None

    @property
    def is_congested(self) -> bool:
        """Whether the peer reads more slowly than this end writes."""
        return self._is_congested

    @property
    def unread_bytes(self) -> int:
        """How much waits here because the peer does not read it."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def questions(self) -> int:
        """How many of this end's questions have no answer yet."""
        return len(self._unanswered)

    async def ask(self, make: Callable[[int], msgspec.Struct], result: Any) -> Any:
        """Send the question that `make` makes of an id; return its result, of type `result`. Cancelling tells the peer.

        Raises what it was answered with, and ConnectionError where the link ends first.
        """
        number = next(self._numbers)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unanswered[number] = future, result
        try:
            self.send(make(number))
            return await future
        except asyncio.CancelledError:
            self.send(Cancel(number))
            raise
        finally:
            self._unanswered.pop(number, None)

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of `METHODS` at the other end."""
        return await self.ask(
            lambda number: Call(number, method, [encode(argument) for argument in arguments]), METHODS[method][1]
        )

    def send(self, message: msgspec.Struct) -> None:
        """Write a message, unless the link has ended. Raises ValueError for one that is too long.

        A peer that stops reading is cut off once more than `MAX_BYTES` wait for it.
        """
        if self._transport is not None:
            if not self._unwritten:
                asyncio.get_running_loop().call_soon(self._write)
            self._unwritten.append(data := frame(message))
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
            if self._is_congested and self._transport.get_write_buffer_size() > MAX_BYTES:
                self._end("has stopped reading")
        self._unwritten.clear()
        self._unwritten_bytes = 0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A peer of our own user is taken; any other is cut off."""
        transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("socket")
        _, user, _ = CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        if user != os.geteuid():
            log.error("stranger", user=user)
            transport.abort()
            return
        self._transport, self._is_known = transport, True
        self._on_open(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Every question ends with ConnectionError."""
        self._transport = None
        for future, _ in self._unanswered.values():
            if not future.done():
                future.set_exception(ConnectionError("the other process has ended"))
        if self._is_known:
            self._on_close(self)

    def pause_writing(self) -> None:
        """The peer is slow."""
        self._is_congested = True

    def resume_writing(self) -> None:
        """The peer has caught up."""
        self._is_congested = False

    def data_received(self, data: bytes) -> None:
        """Take every whole message."""
        if self._rest:
            self._rest += data
            taken = self._messages(self._rest)
            del self._rest[:taken]
        else:
            taken = self._messages(data)
            self._rest += data[taken:]

    def _messages(self, data: bytes | bytearray) -> int:
        """Take every whole message; return how many bytes they are."""
        start, size = 0, len(data)
        with memoryview(data) as view:
            while self._transport is not None and size - start >= LENGTH.size:
                (length,) = LENGTH.unpack_from(data, start)
                end = start + LENGTH.size + length
                if length > MAX_BYTES:
                    self._end(f"a message of {length} bytes")
                elif end > size:
                    break
                else:
                    try:
                        self._receive(self._decode(view[start + LENGTH.size : end]))
                    except (ValueError, msgspec.MsgspecError) as error:
                        self._end(str(error))
                    except Exception as error:  # a fault of ours: the event loop would end the link without a word
                        self._end("a message could not be taken", **of_exception(error))
                start = end
        return min(start, size)

    def _receive(self, message: Any) -> None:
        if not isinstance(message, Answer | Failed):
            self._take(self, message)
            return
        future, kind = self._unanswered.pop(message.id, (None, None))
        if future is None or future.done():
            return  # its caller has gone
        if isinstance(message, Failed):
            future.set_exception(message.error())
            return
        try:
            result = decoder(kind).decode(message.result)
        except Exception as error:  # such as a lack of memory: the others have their answers
            log.error("fault", **of_exception(error))
            future.set_exception(service_error_of(error) if isinstance(error, MemoryError) else InternalError())
        else:
            future.set_result(result)

    def _end(self, reason: str, **fault: Any) -> None:
        """Cut off a peer that breaks the protocol, so that it does not affect others."""
        log.error("link_broken", reason=reason[:200], **fault)
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
