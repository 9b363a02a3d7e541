"""A listening port that takes every waiting connection in one turn of the event loop. Not for what is said on a connection.

libuv, hence uvloop, takes one connection a turn. In a loop with little to do nobody notices; under load a turn lasts tens of
milliseconds, and new clients wait for seconds behind those already connected, unseen by any queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from array import array
from collections.abc import Callable

import structlog

MOST_IN_A_TURN = 1024  # a flood of connections must not hold the loop
WRITE_SECONDS = 8.0  # a client that takes nothing of what was written for this long is cut off
PAUSE_SECONDS = 1.0  # when accepting fails, say for want of descriptors, retrying at once would fail again
HANDSHAKE_SECONDS = 0.01  # a client whose SYN was answered has completed its connection by then
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27  # Linux; `socket` does not name them
# a program of the classic BPF over the TCP header: drop a segment with SYN and without ACK, pass every other one
NO_SYN = array(
    "B", struct.pack("HBBI" * 5, 0x30, 0, 0, 13, 0x54, 0, 0, 0x12, 0x15, 0, 1, 0x02, 6, 0, 0, 0, 6, 0, 0, 0xFFFFFFFF)
)

log = structlog.get_logger("app.server.listener")


class Listener:
    """Listens once it is made, accepts from `start` to `close`. Raises OSError if the address is not available.

    `given` is a socket that already listens there; the listener owns it from then on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        backlog: int,
        protocol: Callable[[], asyncio.Protocol],
        given: socket.socket | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = given or socket.create_server((host, port), family=family, backlog=backlog)
        self.socket.setblocking(False)
        if given is not None:
            with contextlib.suppress(OSError):  # remove the filter that a previous front attached when it closed
                self.socket.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
        self._protocol = protocol
        self._beginning: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Accept from now on."""
        self._pause = None
        self._loop.add_reader(self.socket.fileno(), self._accept)

    async def close(self) -> None:
        """Accept all waiting connections, then free the port. Returns when those connections have begun.

        The kernel resets clients that connect between the last `accept` and the close. So a filter drops each SYN first: the client
        sends it again after a second, and is then refused, or accepted by the port's next owner.
        """
        with contextlib.suppress(OSError):  # not Linux
            self.socket.setsockopt(
                socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(NO_SYN) // 8, NO_SYN.buffer_info()[0])
            )
            await asyncio.sleep(HANDSHAKE_SECONDS)
        self._loop.remove_reader(self.socket.fileno())
        while self._accept():
            pass
        self.socket.close()
        if self._pause is not None:
            self._pause.cancel()
        if self._beginning:
            await asyncio.wait(self._beginning)

    def _accept(self) -> bool:
        """Accept up to `MOST_IN_A_TURN` connections; return whether more may be waiting."""
        for _ in range(MOST_IN_A_TURN):
            try:
                connection, _address = self.socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError as error:
                self._loop.remove_reader(self.socket.fileno())
                self._pause = self._loop.call_later(PAUSE_SECONDS, self.start)
                log.error("accept_failed", error=error.strerror)
                return False
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: also covers bytes that only the kernel still holds
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * WRITE_SECONDS))
            task = self._loop.create_task(self._begin(connection))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)
        return True

    async def _begin(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:
            connection.close()  # gone before it began
