"""What the server refuses by itself, without an endpoint, and how it says so."""

from __future__ import annotations

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


def refusal_reply(refusal: str) -> bytes:
    """A whole reply that ends its connection, in the form of the service's own problems."""
    status, code, title, detail = REFUSALS[refusal]
    body = f'{{"type":"about:blank","title":"{title}","status":{status},"code":"{code}","detail":"{detail}"}}'
    head = f"HTTP/1.1 {status} {title}\r\ncontent-type: application/problem+json\r\ncontent-length: {len(body)}"
    return f"{head}\r\nconnection: close\r\n\r\n{body}".encode()
