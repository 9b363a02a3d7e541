"""Content codings of a body: gzip, inflated to no more than a limit."""

from __future__ import annotations

import zlib

from app.errors import BadRequest, TooLarge, UnsupportedCoding

GZIP = 16 + zlib.MAX_WBITS
CODINGS = (b"gzip", b"x-gzip")


def check_coding(coding: bytes) -> bool:
    """Whether a Content-Encoding means that the body is to be inflated. Raises UnsupportedCoding for any but gzip."""
    coding = coding.strip().lower()
    if coding in CODINGS:
        return True
    if coding not in (b"", b"identity"):
        raise UnsupportedCoding
    return False


def inflate(body: bytes | bytearray, limit_bytes: int) -> bytes:
    """Inflate a gzip body. Raises TooLarge as soon as the result is longer than the limit, and BadRequest for anything but one whole
    gzip member."""
    inflater = zlib.decompressobj(GZIP)
    try:
        plain = inflater.decompress(body, limit_bytes + 1)
    except zlib.error:
        raise BadRequest("The body is not valid gzip.") from None
    if len(plain) > limit_bytes:
        raise TooLarge(f"The inflated body is longer than {limit_bytes} bytes.")
    if not inflater.eof or inflater.unused_data:
        raise BadRequest("The body is not one whole gzip member.")
    return plain
