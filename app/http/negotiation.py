"""Content-Type and Accept, each on its own: which wire a body is, and whether the caller takes the reply's media type."""

from __future__ import annotations

from collections.abc import Mapping

from app.errors import NotAcceptable, UnsupportedMediaType
from app.http.asgi import Headers
from app.request.coding import check_coding
from app.request.wires import BINARY, JSON, OBJECTS, TENSORS, Wire

Wires = Mapping[bytes, Wire]

JSON_TYPES = (JSON, JSON + b";charset=utf-8")
BATCH: Wires = dict.fromkeys(JSON_TYPES, OBJECTS)
RANK: Wires = {**BATCH, BINARY: TENSORS}
INFER: Wires = dict.fromkeys((b"", BINARY, *JSON_TYPES), TENSORS)  # clients of that protocol name no type


def wire_of(headers: Headers, wires: Wires) -> Wire:
    """The wire of a body. Raises UnsupportedMediaType."""
    sent = headers.get(b"content-type", b"")
    found = wires.get(sent) or wires.get(sent.lower().replace(b" ", b"").replace(b'"', b"").rstrip(b";"))
    if found is None or (not sent and b"origin" in headers):  # a page elsewhere may send a body without a type unasked
        raise UnsupportedMediaType
    return found


def is_compressed(headers: Headers) -> bool:
    """Whether the body is to be inflated. Raises UnsupportedCoding for any coding but gzip."""
    return b"content-encoding" in headers and check_coding(headers[b"content-encoding"])


def check_accept(headers: Headers, media_type: bytes) -> None:
    """Raise NotAcceptable where the Accept header rules out this type: the most specific of its ranges that match decides."""
    accept = headers.get(b"accept", b"")
    if accept in (b"", b"*/*", media_type):
        return
    ranges = {media_type: 2, media_type.partition(b"/")[0] + b"/*": 1, b"*/*": 0}
    best, is_taken = -1, False
    for entry in accept.lower().replace(b" ", b"").replace(b"\t", b"").split(b","):
        name, *parameters = entry.split(b";")
        if (rank := ranges.get(name, -1)) >= best and rank >= 0:
            quality = next((text[2:] for text in parameters if text.startswith(b"q=")), b"1")
            best, is_taken = rank, bool(quality.strip(b"0."))
    if not is_taken:
        raise NotAcceptable
