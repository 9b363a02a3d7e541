"""What the protocol refuses, and writes without an application: refusals, and the same request's head where an upgrade is declined."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

REFUSALS = {  # status, code, title, sentence
    "bad_request": (400, "bad_request", "Bad Request", "The request breaks the rules of HTTP/1.1."),
    "slow": (408, "request_timeout", "Request Timeout", "The request did not arrive in time."),
    "headers": (
        431, "headers_too_large", "Request Header Fields Too Large", "The headers are longer than the limit.",
    ),
    "crowded": (429, "overloaded", "Too Many Requests", "There is no room to read this request now."),
    "fault": (500, "internal", "Internal Server Error", "The server failed to answer this request."),
    "misdirected": (421, "misdirected", "Misdirected Request", "This server does not answer to that host name."),
    "version": (505, "http_version", "HTTP Version Not Supported", "This server speaks HTTP/1.1 and HTTP/1.0."),
}  # fmt: skip
MAX_HEADERS = 100
HOST = re.compile(
    rb"(?i)(\[[0-9a-f:.]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9a-f]{2})*)(?::[0-9]*)?"
)  # RFC 3986; \w of bytes is ASCII


class Refused(Exception):
    """Raised inside a parser callback, to stop parsing at once; its argument is the key of a refusal."""


class Hosts:
    """The names that a port answers to: a page of somebody else whose own name leads here, by rebinding, says another one."""

    def __init__(self, names: Collection[str] = ()) -> None:
        """Without names, any; `[::1]` is one."""
        self._names = frozenset(name.lower().encode() for name in names)
        self._last: bytes | None = None  # that was let in

    def check(self, host: bytes) -> None:
        """Raises Refused."""
        if host == self._last:
            return
        found = HOST.fullmatch(host)
        if found is None:
            raise Refused("bad_request")
        if self._names and found[1].lower() not in self._names:
            raise Refused("misdirected")
        self._last = host


ANY_HOST = Hosts()


def check_head(method: bytes, version: str, headers: Sequence[tuple[bytes, bytes]], known: Hosts = ANY_HOST) -> None:
    """What llhttp lets through and a proxy may read otherwise, and names of hosts that are not `known`. Raises Refused."""
    if version not in ("1.1", "1.0"):
        raise Refused("version")
    names = [name for name, _ in headers]
    hosts, codings = names.count(b"host"), []
    if b"transfer-encoding" in names:
        codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if (
        method == b"CONNECT"
        or hosts > 1
        or (version == "1.1" and not hosts)
        or (codings and (version == "1.0" or codings != [b"chunked"]))
    ):
        raise Refused("bad_request")
    if hosts:
        known.check(headers[names.index(b"host")][1])


def refusal_reply(refusal: str) -> bytes:
    """A whole reply that ends its connection, in the form of the service's own problems."""
    status, code, title, detail = REFUSALS[refusal]
    body = f'{{"type":"about:blank","title":"{title}","status":{status},"code":"{code}","detail":"{detail}"}}'
    head = f"HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\ncontent-length: {len(body)}"
    return f"{head}\r\nconnection: close\r\n\r\n{body}".encode()


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
