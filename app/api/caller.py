"""Who asks, how long they wait, and the body that they send: what every ranking endpoint takes as its `Caller`."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import structlog
from fastapi import Depends
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.errors import (
    BadRequest,
    InvalidRequest,
    Overloaded,
    TooLarge,
    Unauthorized,
    UnsupportedCoding,
    UnsupportedMediaType,
)
from app.settings import Auth, SettingsProblem
from app.telemetry.exchange import Exchange

T = TypeVar("T")
Headers = Mapping[bytes, bytes]

JSON, BINARY = b"application/json", b"application/octet-stream"
JSON_ALONE = frozenset({JSON})
TENSORS = frozenset({JSON, BINARY, b""})  # clients of the Open Inference Protocol may name no type
GZIP = 16 + zlib.MAX_WBITS
MOST_MEMBERS = 64  # of a gzip body
CANCELS = "ranker.cancels"  # extension of a server that cancels a request's task when its client has gone
LONG_BODY_BYTES = 65_536
"""While a longer body came, others were admitted: asking again whether there is room costs less than decoding it for nothing."""
CUT_OFF = "The drain timed out."  # message of the cancellation where the client still waits

log = structlog.get_logger("app.api.caller")


class CallerGone(Exception):
    """The client has disconnected, so nobody is answered."""


class KeyRing:
    """Knows the SHA-256 of each key, never a key itself. Without keys everybody is let in, without a name."""

    def __init__(self, settings: Auth) -> None:
        self._settings = settings
        self._digests = settings.read()

    def read_again(self) -> None:
        """Take the keys that their file holds now. If it cannot be used, the old keys stay, and the log says why."""
        if self._settings.keys_file is None:
            return
        try:
            self._digests = self._settings.read()
        except SettingsProblem as error:
            log.error("keys_refused", reason=str(error))
        else:
            log.info("keys_read", names=list(self._digests))

    def caller(self, headers: Headers) -> str | None:
        """The name that belongs to the key in `Authorization: Bearer KEY` or `X-API-Key: KEY`, None where no keys are set.

        Raises Unauthorized. Takes the same time whichever key is right, and whether one is.
        """
        if not self._digests:
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        sent = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
        digest, found = hashlib.sha256(sent).digest(), None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        if found is None:
            raise Unauthorized
        return found


class Bodies:
    """How many bytes the bodies of all requests that are being answered may take together. Used in the event loop only."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def hold(self, exchange: Exchange, count: int) -> None:
        """Hold this much for a request, until the middleware gives it back at the request's end. Raises Overloaded."""
        if self.used + count > self.limit:
            raise Overloaded("Too many bytes of request bodies are being read.", retry_after_seconds=1.0)
        self.used += count
        exchange.body_bytes += count


@dataclass(slots=True)
class CallerInfo:
    """`key`: the name of the API key, None where none are set. `deadline` in seconds of the ranker's clock, None where the caller sets
    none. `body`: whole and inflated."""

    key: str | None
    deadline: float | None
    body: bytes
    exchange: Exchange
    headers: Headers


def reader(types: Collection[bytes]) -> Callable[[Request], Awaitable[CallerInfo]]:
    """A dependency that reads bodies of these media types."""

    async def read_caller(request: Request) -> CallerInfo:
        """Raises Unauthorized, then what the ranker is open to (429, 503), then what the headers get (413, 415, 422), then what the body
        gets (400, 413, 429), each before the next is looked at; CallerGone."""
        scope, state = request.scope, request.app.state
        headers: Headers = dict(scope["headers"])
        exchange: Exchange = scope["exchange"]
        key = exchange.key = state.keys.caller(headers)
        state.ranker.check_open(key)
        check_type(headers, types)
        is_gzip = is_compressed(scope["headers"], headers)
        limit: int = state.settings.limits.max_body_bytes
        check_length(headers, limit)
        seconds = timeout_seconds_of(headers)
        deadline = None if seconds is None else state.ranker.clock() + seconds
        body = await read_body(request.receive, exchange, state.bodies, limit)
        if len(body) > LONG_BODY_BYTES:
            state.ranker.check_open(key)
        if is_gzip:
            packed, body = len(body), inflate(body, limit)
            state.bodies.hold(exchange, max(0, len(body) - packed))
        return CallerInfo(key, deadline, body, exchange, headers)

    return read_caller


Caller = Annotated[CallerInfo, Depends(reader(JSON_ALONE), use_cache=False)]
TensorCaller = Annotated[CallerInfo, Depends(reader(TENSORS), use_cache=False)]


class CallerRoute(APIRoute):
    """A route that asks its one dependency, the caller, by itself, without the exit stacks that FastAPI keeps for any number of them: they
    take as long as reading a small body."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        found = self.dependant.dependencies
        if len(found) == 1 and found[0].name == "caller":
            self.app = _answered(found[0].call, endpoint)


def _answered(read: Any, endpoint: Callable[..., Awaitable[Response]]) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        response = await endpoint(request=request, caller=await read(request), **request.path_params)
        await response(scope, receive, send)

    return app


async def read_body(receive: Receive, exchange: Exchange, bodies: Bodies, limit: int) -> bytes:
    """The body as it was sent. Raises TooLarge beyond `limit` bytes, Overloaded, or CallerGone."""
    exchange.is_reading = True
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        if piece := message.get("body", b""):
            if exchange.body_bytes + len(piece) > limit:
                raise too_long(limit)
            bodies.hold(exchange, len(piece))
            pieces.append(piece)
        if not message.get("more_body", False):
            exchange.is_reading, exchange.is_read = False, True
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def cancelled_with(request: Request, work: Awaitable[T]) -> T:
    """What `work` returns; it is cancelled when the client disconnects. The body must have been read. Raises CallerGone."""
    if CANCELS in request.scope.get("extensions", ()):
        return await work
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def check_type(headers: Headers, types: Collection[bytes]) -> None:
    """Raise UnsupportedMediaType for a body of another type, or of a charset that is not UTF-8; other parameters have no effect."""
    sent = headers.get(b"content-type", b"")
    if sent == JSON and JSON in types:
        return
    name, *parameters = (part.strip() for part in sent.lower().split(b";"))
    is_of_page = not name and b"origin" in headers  # a foreign page may send a body without a type, unasked
    if name not in types or is_of_page:
        raise UnsupportedMediaType
    for parameter in parameters:
        what, _, value = parameter.partition(b"=")
        if what.strip() == b"charset" and value.strip(b' \t"') not in (b"utf-8", b"utf8"):
            raise UnsupportedMediaType


def is_compressed(fields: Collection[tuple[bytes, bytes]], headers: Headers) -> bool:
    """Whether the body is to be inflated. Raises UnsupportedCoding for any coding but gzip."""
    if b"content-encoding" not in headers:
        return False
    codings = b",".join([value for name, value in fields if name == b"content-encoding"]).lower().split(b",")
    match [coding.strip() for coding in codings if coding.strip() not in (b"", b"identity")]:
        case []:
            return False
        case [b"gzip" | b"x-gzip"]:
            return True
    raise UnsupportedCoding


def inflate(body: bytes, limit: int) -> bytes:
    """The content of a gzip body of one or more members (RFC 1952). Raises TooLarge as soon as it is longer than `limit` bytes, and
    BadRequest for what is not gzip, whole, and of at most `MOST_MEMBERS` members."""
    plain, members = bytearray(), 0
    while body and members < MOST_MEMBERS:
        inflater = zlib.decompressobj(GZIP)
        try:
            plain += inflater.decompress(body, limit + 1 - len(plain))
        except zlib.error:
            raise BadRequest("The body is not valid gzip.") from None
        if len(plain) > limit:
            raise TooLarge(f"The inflated body is longer than {limit} bytes.")
        if not inflater.eof:
            break
        body, members = inflater.unused_data, members + 1
    if body or not members:
        raise BadRequest(f"The gzip body is incomplete, or has more than {MOST_MEMBERS} members.")
    return bytes(plain)


def timeout_seconds_of(headers: Headers) -> float | None:
    """How long the caller waits, None where it does not say. Raises InvalidRequest for a bad X-Request-Timeout-Ms.

    Envoy's header is a proxy's, so a bad one is no fault of the caller and does not count; 0 means no limit there.
    """
    own, envoy = (
        headers.get(name, b"").strip() for name in (b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms")
    )
    seconds = None
    if b"x-request-timeout-ms" in headers:
        if not _is_count(own):
            raise InvalidRequest("X-Request-Timeout-Ms", "must be whole milliseconds, at most 12 digits")
        seconds = int(own) / 1000
    if _is_count(envoy) and int(envoy):
        seconds = int(envoy) / 1000 if seconds is None else min(seconds, int(envoy) / 1000)
    return seconds


def check_length(headers: Headers, limit: int) -> None:
    """Raise TooLarge for a body that says it is longer than `limit` bytes."""
    length = headers.get(b"content-length", b"0")
    if not _is_count(length) or int(length) > limit:
        raise too_long(limit)


def too_long(limit: int) -> TooLarge:
    """For a body that is longer than the limit, whether it says so or not."""
    return TooLarge(f"The body is longer than {limit} bytes.")


def _is_count(text: bytes) -> bool:
    """Whether a header holds a whole number that is small enough to be read."""
    return text.isdigit() and len(text) <= 12
