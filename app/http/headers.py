"""Reads the headers of a request: API key, formats of body and reply, deadline, request id."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from app.errors import InvalidRequest, NotAcceptable, TooLarge, Unauthorized, UnsupportedMediaType
from app.request.coding import check_coding
from app.request.context import CONTEXTS
from app.request.schema import is_request_id
from app.request.wires import BINARY, JSON, OBJECTS, TENSORS, Wire
from app.settings import Auth
from model.retrieval.inputs import AT_LEAST

Headers = Mapping[bytes, bytes]
Wires = Mapping[bytes, Wire]

SCHEME = b"bearer "
MAX_RANGES, MAX_PARAMETERS = 64, 8  # of an Accept header: several times what clients send
LISTS = {b"accept", b"content-encoding"}
JSON_TYPES = (JSON, JSON + b";charset=utf-8")
BATCH: Wires = dict.fromkeys(JSON_TYPES, OBJECTS)
CONTEXT: Wires = dict.fromkeys(JSON_TYPES, CONTEXTS)
RANK: Wires = {**BATCH, BINARY: TENSORS}
INFER: Wires = dict.fromkeys((b"", BINARY, *JSON_TYPES), TENSORS)  # clients of that protocol name no type


def by_name(fields: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Fields by their names, the last one of a name; a list that comes in several fields is one list."""
    found = dict(fields)
    if len(found) < len(fields):
        for name in LISTS & found.keys():
            found[name] = b", ".join([value for other, value in fields if other == name])
    return found


class KeyRing:
    """Knows the SHA-256 of each key, never a key itself. Without keys everybody is let in, without a name."""

    def __init__(self, settings: Auth) -> None:
        self._digests = {
            name: bytes.fromhex(digest.get_secret_value()) for name, digest in sorted(settings.keys.items())
        }

    def caller(self, headers: Headers) -> str | None:
        """The name that belongs to the key in `Authorization: Bearer KEY` or `X-API-Key: KEY`, None where no keys are set.

        Raises Unauthorized. Takes the same time whichever key is right, and whether one is.
        """
        if not self._digests:
            return None
        sent = headers.get(b"authorization", b"")
        key = sent[len(SCHEME) :].strip() if sent[: len(SCHEME)].lower() == SCHEME else headers.get(b"x-api-key", b"")
        digest = hashlib.sha256(key).digest()
        found = None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        if found is None:
            raise Unauthorized
        return found


def wire_of(headers: Headers, wires: Wires) -> Wire:
    """The wire of a body. Raises UnsupportedMediaType."""
    sent = headers.get(b"content-type", b"")
    found = wires.get(sent) or wires.get(sent.lower().translate(None, b' \t"').rstrip(b";"))
    if found is None or (not sent and b"origin" in headers):  # a foreign page may send a body without a type, unasked
        raise UnsupportedMediaType
    return found


def is_compressed(headers: Headers) -> bool:
    """Whether the body is to be inflated. Raises UnsupportedCoding for any coding but gzip."""
    return b"content-encoding" in headers and check_coding(headers[b"content-encoding"])


def check_accept(headers: Headers, media_type: bytes) -> None:
    """Raise NotAcceptable where the Accept header rules out this type: the most specific of its first `MAX_RANGES` ranges that match
    decides."""
    accept = headers.get(b"accept", b"")
    if accept in (b"", b"*/*", media_type):
        return
    ranges = {media_type: 2, media_type.partition(b"/")[0] + b"/*": 1, b"*/*": 0}
    best, is_taken = -1, False
    for entry in accept.lower().replace(b" ", b"").replace(b"\t", b"").split(b",", MAX_RANGES)[:MAX_RANGES]:
        name, *parameters = entry.split(b";", MAX_PARAMETERS)
        if (rank := ranges.get(name, -1)) >= best and rank >= 0:
            quality = next((text[2:] for text in parameters if text.startswith(b"q=")), b"1")
            best, is_taken = rank, bool(quality.strip(b"0."))
    if not is_taken:
        raise NotAcceptable


def request_id_of(headers: Headers) -> str | None:
    """The caller's X-Request-ID, if it may go into headers and logs."""
    if b"x-request-id" not in headers:
        return None
    sent = headers[b"x-request-id"].decode("latin-1")
    return sent if is_request_id(sent) else None


def timeout_seconds_of(headers: Headers) -> float | None:
    """How long the caller waits, None where it does not say. Raises InvalidRequest for a bad X-Request-Timeout-Ms.

    Envoy's header is a proxy's, so a bad one is no fault of the caller and does not count; 0 means no limit there.
    """
    own, envoy = headers.get(b"x-request-timeout-ms"), headers.get(b"x-envoy-expected-rq-timeout-ms")
    seconds = None
    if own is not None:
        if not is_count(own):
            raise InvalidRequest([("X-Request-Timeout-Ms", "must be whole milliseconds")])
        seconds = int(own) / 1000
    if envoy is not None and is_count(envoy) and int(envoy):
        seconds = int(envoy) / 1000 if seconds is None else min(seconds, int(envoy) / 1000)
    return seconds


def at_least_of(headers: Headers) -> str:
    """Which change the caller wants to see: a sequence or a position of the feed; "" where it does not say. Raises InvalidRequest."""
    sent = headers.get(b"x-corpus-at-least", b"").decode("latin-1")
    if sent and not AT_LEAST.fullmatch(sent):
        raise InvalidRequest(
            [("X-Corpus-At-Least", "must be a sequence or a position of the feed, such as 12 or 1764000000000-0")]
        )
    return sent


def check_length(headers: Headers, limit_bytes: int) -> None:
    """Raise TooLarge for a body that says it is longer than the limit."""
    length = headers.get(b"content-length", b"0")
    if not is_count(length) or int(length) > limit_bytes:
        raise too_long(limit_bytes)


def too_long(limit_bytes: int) -> TooLarge:
    """For a body that is longer than the limit, whether it says so or not."""
    return TooLarge(f"The body is longer than {limit_bytes} bytes.")


def is_count(text: bytes) -> bool:
    """Whether a header holds a whole number that is small enough to be read."""
    return text.isdigit() and len(text) <= 12
