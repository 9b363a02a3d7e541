"""Bytes around the HTTP parser: replies that no application makes, a request line made anew, a look into a socket."""

from __future__ import annotations

import asyncio
import os
import socket
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
