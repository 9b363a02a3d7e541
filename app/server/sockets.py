"""What the kernel is asked about a connection's socket."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios


def set_write_deadline(transport: asyncio.Transport, seconds: float) -> None:
    """On Linux: end the connection when its client takes nothing for so long, of what only the kernel still holds too."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        milliseconds = round(seconds * 1000)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


def has_unread(transport: asyncio.Transport) -> bool:
    """Whether bytes have arrived that the loop has not read yet."""
    try:
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
    except OSError:
        return False
    return bool(struct.unpack("i", found)[0])
