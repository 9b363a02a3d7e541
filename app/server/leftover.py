"""What still arrives on a connection whose last reply is out. Closing with unread input would be a reset that destroys the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from app.server.deadline import Deadline

MOST_BYTES = 64 * 2**20  # several times what honest clients send by mistake
TURN_SECONDS = 2.0  # in each such span the client has to send LEAST_BYTES, or it is done
LEAST_BYTES = 64 * 2**10
MOST_SECONDS = 30.0
DRAIN_SECONDS = 5.0  # the same while the process drains, which waits for lingering connections


class Leftover:
    """Input that nobody reads: thrown away, up to a bound of bytes and of time. Belongs to the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        deadline: Deadline,
        cut: Callable[[str], None],
    ) -> None:
        """`deadline` is the connection's; `cut` ends it, with the reason."""
        self.bytes = 0  # thrown away since the request was begun
        self._loop = loop
        self._transport = transport
        self._deadline = deadline
        self._cut = cut
        self._until = 0.0

    def drop(self, count: int) -> None:
        """So many bytes have come."""
        self.bytes += count
        if self.bytes > MOST_BYTES:
            self._cut("endless_body")

    def linger(self, *, draining: bool) -> None:
        """Close our half of the connection, and the rest once the client has read, or sends no more."""
        self._until = self._loop.time() + (DRAIN_SECONDS if draining else MOST_SECONDS)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._wait()

    def hurry(self) -> None:
        """The process drains."""
        self._until = min(self._until, self._loop.time() + DRAIN_SECONDS)

    def close(self) -> None:
        """The connection is lost: nothing is kept of it."""
        self._cut = _nothing

    def _wait(self) -> None:
        left = self._until - self._loop.time()
        self._deadline.set(min(left, TURN_SECONDS) if left > 0 else TURN_SECONDS, self._look, self.bytes)

    def _look(self, bytes_before: int) -> None:
        is_sending = self.bytes - bytes_before >= LEAST_BYTES
        is_over = self._loop.time() >= self._until
        if self._transport.get_write_buffer_size() or (is_sending and not is_over):
            self._wait()
        elif is_sending:
            self._cut("endless_body")
        else:
            self._transport.close()


def _nothing(_reason: str) -> None: ...
