"""Watches what a client sends: a request, which must arrive in time, or input after the last reply, which is thrown away."""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable

from app.settings import Connections

LEAST_BODY_SECONDS = 1.0  # after slow headers, a body still gets this long
LEAST_BODY_BYTES = 4096  # in each `stall_seconds`
MOST_BYTES = 64 * 2**20  # several times what honest clients send by mistake
TURN_SECONDS = 2.0  # a client that sends less than LEAST_BYTES in this time has finished
LEAST_BYTES = 64 * 2**10
MOST_SECONDS = 30.0
DRAIN_SECONDS = 5.0  # instead of MOST_SECONDS while the process drains, which waits for lingering connections

Wait = Callable[..., None]
"""Sets the one deadline of a connection: seconds, what to call then, and its arguments. Replaces the previous deadline."""


class Arrival:
    """Calls `refuse("slow")` if a request arrives too slowly: its headers, or its body, which must not stall."""

    __slots__ = ("_limits", "_loop", "_refuse", "_until", "_wait", "begun", "bytes")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, limits: Connections, wait: Wait, refuse: Callable[[str], None]
    ) -> None:
        self.begun = loop.time()
        self.bytes = 0  # of the present body, received so far
        self._loop = loop
        self._limits = limits
        self._wait = wait
        self._refuse = refuse
        self._until = 0.0

    def watch_head(self) -> None:
        """Set the deadline for the rest of the headers."""
        self._wait(self.begun + self._limits.header_seconds - self._loop.time(), self._refuse, "slow")

    def watch_body(self) -> None:
        """Set the deadlines for the rest of the body."""
        self._until = max(self.begun + self._limits.body_seconds, self._loop.time() + LEAST_BODY_SECONDS)
        self._watch()

    def _watch(self) -> None:
        left = self._until - self._loop.time()
        self._wait(min(left, self._limits.stall_seconds), self._check, self.bytes)

    def _check(self, bytes_before: int) -> None:
        if self._loop.time() < self._until and self.bytes - bytes_before >= LEAST_BODY_BYTES:
            self._watch()
        else:
            self._refuse("slow")


class Leftover:
    """Throws away input that is not needed, up to a limit of bytes and of time. Closing with unread input would send a reset, which
    destroys the last reply."""

    __slots__ = ("_cut", "_loop", "_transport", "_until", "_wait", "bytes")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, wait: Wait, cut: Callable[[str], None]
    ) -> None:
        """`cut` aborts the connection; its argument is the reason."""
        self.bytes = 0  # thrown away since the request was begun
        self._loop = loop
        self._transport = transport
        self._wait = wait
        self._cut = cut
        self._until = 0.0

    def drop(self, count: int) -> None:
        """Count bytes that were thrown away; cut the connection beyond the limit."""
        self.bytes += count
        if self.bytes > MOST_BYTES:
            self._cut("endless_body")

    def linger(self, *, draining: bool) -> None:
        """Close our half; close the rest once the client has taken the reply and stopped sending, or cut it when time is up."""
        self._until = self._loop.time() + (DRAIN_SECONDS if draining else MOST_SECONDS)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._watch()

    def hurry(self) -> None:
        """Shorten the wait: the process drains."""
        self._until = min(self._until, self._loop.time() + DRAIN_SECONDS)

    def _watch(self) -> None:
        left = self._until - self._loop.time()
        self._wait(min(left, TURN_SECONDS) if left > 0 else TURN_SECONDS, self._check, self.bytes)

    def _check(self, bytes_before: int) -> None:
        is_sending = self.bytes - bytes_before >= LEAST_BYTES
        is_over = self._loop.time() >= self._until
        if self._transport.get_write_buffer_size() or (is_sending and not is_over):
            self._watch()
        elif is_sending:
            self._cut("endless_body")
        else:
            self._transport.close()


def has_unread(transport: asyncio.Transport) -> bool:
    """Whether bytes have arrived that the loop has not read yet."""
    try:
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
    except OSError:
        return False
    return bool(struct.unpack("i", found)[0])
