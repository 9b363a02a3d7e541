"""Reads the bytes of one HTTP/1.1 connection as requests, and refuses what breaks the protocol.

llhttp itself refuses bare line feeds, folded headers, a length beside chunks, and bad chunks.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection
from typing import Protocol

import httptools
import structlog

MAX_HEADERS = 100
CHUNK_FRAME_BYTES = 16  # of a chunk beside its data: its length, line ends, and a little more
NO_TRAILERS = (b"connection", b"proxy-connection")  # llhttp would read nothing after a `close` here
HOST = re.compile(
    rb"(?i)(\[[0-9a-f:.]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9a-f]{2})*)(?::[0-9]*)?"
)  # RFC 3986; \w of bytes is ASCII

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
log = structlog.get_logger("app.server.reader")

Headers = list[tuple[bytes, bytes]]


class Refused(Exception):
    """The request being read is refused. The argument is a key of `REFUSALS`."""


class Hosts:
    """The host names that a port answers to. Guards against DNS rebinding: a foreign page whose name resolves here sends its own name."""

    def __init__(self, names: Collection[str] = ()) -> None:
        """Without names, any host is allowed. A name may be an address such as `[::1]`."""
        self._names = frozenset(name.lower().encode() for name in names)
        self._last: bytes | None = None  # the last host that passed

    def check(self, host: bytes) -> None:
        """Raise Refused unless this Host header is allowed."""
        if host == self._last:
            return
        found = HOST.fullmatch(host)
        if found is None:
            raise Refused("bad_request")
        if self._names and found[1].lower() not in self._names:
            raise Refused("misdirected")
        self._last = host


ANY_HOST = Hosts()


class Hearer(Protocol):
    """What a reader calls for each request. The methods may raise Refused."""

    def on_begin(self) -> None:
        """A request's first byte is read."""
        ...

    def on_head(self, method: bytes, target: bytes, headers: Headers, keep_alive: bool) -> None:
        """The headers are complete, with lower-case names."""
        ...

    def on_body(self, body: bytes, pieces: int) -> None:
        """What one read holds of the body, which came in so many pieces."""
        ...

    def on_end(self) -> None:
        """The body is complete."""
        ...


class Reader:
    """Parses the requests of one connection and calls its hearer."""

    def __init__(self, hearer: Hearer, hosts: Hosts, max_header_bytes: int) -> None:
        self._pieces: list[bytes] = []  # of the body, in the present read
        self.on_body = self._pieces.append  # as httptools calls it; a read may hold a chunk for every six bytes
        self._hearer = hearer
        self._hosts = hosts
        self._max_header_bytes = max_header_bytes
        self._is_in_body = False
        self._read = 0, 0  # bytes and pieces of the body in the present read
        self._frame_bytes = 0  # received of the body beyond what its chunks need: extensions and trailers
        self._head_bytes = 0  # received while the headers were not complete
        self._target = b""
        self._headers: Headers = []
        self._field_bytes = 0  # of the request's own header fields; one read may hold its body as well
        self._count = 0  # of them
        self._parser = self._new_parser()

    def feed(self, data: bytes) -> bytes | None:
        """Parse these bytes. After a declined upgrade, returns the bytes to parse again, else None. Raises Refused."""
        before, self._read = self._headers if self._is_in_body else None, (0, 0)
        if not self._is_in_body:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            return self._declined(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            raise Refused(_refusal_of(error)) from None
        if self._pieces:
            self._pass_on()
        if self._is_in_body and self._headers is before:  # of a later request, the read also holds the headers
            size, pieces = self._read
            self._frame_bytes = max(0, self._frame_bytes + len(data) - 2 * size - CHUNK_FRAME_BYTES * pieces)
        if (self._frame_bytes if self._is_in_body else self._head_bytes) > self._max_header_bytes:
            raise Refused("headers")
        return None

    def _pass_on(self) -> None:
        """Give the hearer what this read holds of the body."""
        pieces = len(self._pieces)
        body = self._pieces[0] if pieces == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._read = len(body), pieces
        self._hearer.on_body(body, pieces)

    def close(self) -> None:
        """Stop reading, and break the reference cycle with the parser."""
        del self._parser, self._hearer, self.on_body

    # parser callbacks

    def on_message_begin(self) -> None:
        """As httptools calls it."""
        self._target, self._headers = b"", []
        self._field_bytes, self._count = 0, 1  # the target counts as a header
        self._frame_bytes = 0
        self._hearer.on_begin()

    def on_url(self, url: bytes) -> None:
        """As httptools calls it, for each piece."""
        self._target += url
        self._field_bytes += len(url)
        if self._field_bytes > self._max_header_bytes:
            raise Refused("headers")

    def on_header(self, name: bytes, value: bytes) -> None:
        """As httptools calls it."""
        self._count += 1
        self._field_bytes += len(name) + len(value)
        if self._field_bytes > self._max_header_bytes or self._count > MAX_HEADERS:
            raise Refused("headers")
        if not self._is_in_body:
            self._headers.append((name.lower(), value.rstrip(b" \t")))  # llhttp strips only leading white space
        elif name.lower() in NO_TRAILERS:  # any other is counted and dropped
            raise Refused("bad_request")

    def on_headers_complete(self) -> None:
        """As httptools calls it."""
        parser = self._parser
        method, version = parser.get_method(), parser.get_http_version()
        self._check(method, version)
        if version == "1.0":  # an HTTP/1.0 client would take a 100 for the reply
            self._headers = [field for field in self._headers if field[0] != b"expect"]
        if parser.should_upgrade():
            return  # llhttp would treat the body as another protocol: see `_declined`
        self._is_in_body, self._head_bytes = True, 0
        keep_alive = version != "1.0" and parser.should_keep_alive()
        self._hearer.on_head(method, self._target, self._headers, keep_alive)

    def on_message_complete(self) -> None:
        """As httptools calls it."""
        if not self._parser.should_upgrade():
            if self._pieces:
                self._pass_on()
            self._is_in_body = False
            self._hearer.on_end()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # bytes after the last request are thrown away
        return parser

    def _check(self, method: bytes, version: str) -> None:
        """Raise Refused for what llhttp accepts but a proxy may read differently, and for host names that are not ours."""
        if version not in ("1.1", "1.0"):
            raise Refused("version")
        hosts, codings = [], []
        for name, value in self._headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"transfer-encoding":
                codings.append(value.strip().lower())
        if (
            method == b"CONNECT"
            or len(hosts) > 1
            or (version == "1.1" and not hosts)
            or (codings and (version == "1.0" or codings != [b"chunked"]))
        ):
            raise Refused("bad_request")
        if hosts:
            self._hosts.check(hosts[0])

    def _declined(self, rest: bytes) -> bytes:
        """The same request without its upgrade, then `rest`: a server declines an upgrade by answering in HTTP/1.1."""
        method, version = self._parser.get_method(), self._parser.get_http_version()
        head = [b"%b %b HTTP/%b" % (method, self._target, version.encode())]
        for name, value in self._headers:
            if name == b"connection":
                tokens = [token.strip().lower() for token in value.split(b",")]
                value = b"close" if b"close" in tokens else b"keep-alive"
            if name != b"upgrade":
                head.append(b"%b: %b" % (name, value))
        self._parser, self._head_bytes = self._new_parser(), 0
        return b"\r\n".join([*head, b"", rest])


def refusal_reply(refusal: str) -> bytes:
    """A whole reply that ends its connection, in the form of the service's own problems."""
    status, code, title, detail = REFUSALS[refusal]
    body = f'{{"type":"about:blank","title":"{title}","status":{status},"code":"{code}","detail":"{detail}"}}'
    head = f"HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\ncontent-length: {len(body)}"
    return f"{head}\r\nconnection: close\r\n\r\n{body}".encode()


def _refusal_of(error: httptools.HttpParserError) -> str:
    """The key of `REFUSALS` for a parser error: a callback's own refusal, "fault" if a callback failed, else "bad_request"."""
    cause = error.__context__
    if isinstance(cause, Refused):
        return str(cause.args[0])
    if isinstance(cause, MemoryError):
        return "crowded"
    if cause is None or not isinstance(error, httptools.HttpParserCallbackError):
        return "bad_request"
    frames = traceback.extract_tb(cause.__traceback__)[-12:]  # no message: it may hold what the caller sent
    log.error(
        "fault", error=type(cause).__name__, trace=[f"{each.filename}:{each.lineno} {each.name}" for each in frames]
    )
    return "fault"
