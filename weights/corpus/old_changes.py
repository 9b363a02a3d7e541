"""Records of change logs as they were written until November 2026: their lengths are under no checksum. Nothing writes them any more.

A record is the payload's length (uint32, little-endian), 8 bytes of BLAKE2b of the payload, and the payload.
"""

from __future__ import annotations

import hashlib
import re

HEADER_BYTES = 12


def digest_of(data: bytes) -> bytes:
    """8 bytes."""
    return hashlib.blake2b(data, digest_size=8).digest()


def is_old_log(raw: bytes, name: bytes, magic: bytes) -> bool:
    """Whether a log begins with the record `name` of that format, or with so much of it, or of `magic`, as a crash has left."""
    begin = len(name).to_bytes(4, "little") + digest_of(name) + name
    return begin.startswith(raw[: len(begin)].rstrip(b"\0")) or magic.startswith(raw.rstrip(b"\0"))


def old_record(raw: bytes, at: int, magic: bytes) -> tuple[bytes | None, int]:
    """The payload of a record and where it stops; None where a crash left what is there, and 0 where that is damage.

    What follows a length that is wrong cannot be found by it: any whole record behind, one that reaches to the end of the file, or
    `magic`, shows that this one was written to its end.
    """
    if (payload := _whole(raw, at)) is not None:
        return payload, at + HEADER_BYTES + len(payload)
    rest = raw[at:]
    stop = HEADER_BYTES + int.from_bytes(rest[:4], "little")
    is_cut = len(rest.rstrip(b"\0")) < HEADER_BYTES or (
        len(rest) < stop
        and digest_of(rest[HEADER_BYTES:]) != rest[4:HEADER_BYTES]
        and magic[4:] not in rest
        and not any(_whole(rest, found.start() - HEADER_BYTES) for found in re.finditer(rb'\{"delete": ', rest))
    )
    return None, len(raw) if is_cut else 0


def _whole(raw: bytes, at: int) -> bytes | None:
    length = int.from_bytes(raw[max(at, 0) : at + 4], "little")
    payload = raw[at + HEADER_BYTES : at + HEADER_BYTES + length]
    is_whole = at >= 0 and 0 < length == len(payload) and digest_of(payload) == raw[at + 4 : at + HEADER_BYTES]
    return payload if is_whole else None
