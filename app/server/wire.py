"""What lies below HTTP: replies that no application makes, a request head made anew, sockets. Not for what a request means."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Sequence

REFUSALS = {  # status, code, title, sentence
    "bad_request": (400, b"bad_request", b"Bad Request", b"The request breaks the rules of HTTP/1.1."),
    "slow": (408, b"request_timeout", b"Request Timeout", b"The request did not arrive in time."),
    "headers": (
        431,
        b"headers_too_large",
        b"Request Header Fields Too Large",
        b"The headers are longer than the limit.",
    ),
    "version": (505, b"http_version", b"HTTP Version Not Supported", b"This server speaks HTTP/1.1 and HTTP/1.0."),
}


def refusal_reply(refusal: str) -> bytes:
    status, code, title, sentence = REFUSALS[refusal]
    body = b'{"type":"about:blank","title":"%b","status":%d,"code":"%b","detail":"%b"}' % (
        title,
        status,
        code,
        sentence,
    )
    return (
        b"HTTP/1.1 %d %b\r\ncontent-type: application/problem+json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
        % (status, title, len(body), body)
    )


def without_upgrade(method: bytes, url: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The head of the same request, asking for no other protocol."""
    head = [b"%b %b HTTP/%b" % (method, url, version.encode())]
    for name, value in headers:
        if name == b"connection":
            tokens = [token.strip().lower() for token in value.split(b",")]
            value = b"close" if b"close" in tokens else b"keep-alive"
        if name != b"upgrade":
            head.append(b"%b: %b" % (name, value))
    return b"\r\n".join([*head, b"", b""])


def has_unread(transport: asyncio.Transport) -> bool:
    """Whether bytes have arrived that the loop has not read yet."""
    try:
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as same:
            return bool(same.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False


SO_ATTACH_FILTER = 26  # Linux; the socket module has no name for it
DROP_SYN = (  # classic BPF over the TCP header: drop a segment with SYN and without ACK, pass all others
    (0x30, 0, 0, 13),  # load the byte with the flags
    (0x54, 0, 0, 0x12),  # keep ACK and SYN
    (0x15, 0, 1, 0x02),  # SYN alone?
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # pass
)


def refuse_handshakes(fileno: int) -> None:
    """Let a listening socket begin no more connections while those begun are accepted: its close would reset them.

    Who comes later is not answered, tries again, and then finds the port closed. Does nothing where that is not possible.
    """
    if sys.platform != "linux":
        return
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in DROP_SYN)
    program = ctypes.create_string_buffer(code, len(code))
    packed = struct.pack("HL", len(DROP_SYN), ctypes.addressof(program))
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fileno)) as same:
        same.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, packed)
