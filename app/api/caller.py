"""Who asks, how long they wait, and the body that they send: what every ranking endpoint takes as its `Caller`."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import time
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import structlog
from fastapi import Depends
from msgspec import UnsetType
from starlette.requests import Request
from starlette.types import Receive, Scope

from app.api.state import AppState, state_of
from app.errors import (
    BadRequest,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    TooLarge,
    Unauthorized,
    UnsupportedCoding,
    UnsupportedMediaType,
)
from app.features import CheckedRequest
from app.interface import PlaceRequest, Ranked
from app.replies import Placement
from app.settings import Auth, SettingsProblem
from app.shares import Shares
from app.telemetry.exchange import Exchange
from model.config import ModelConfig

Headers = Mapping[bytes, bytes]

JSON, BINARY = b"application/json", b"application/octet-stream"
JSON_ALONE = frozenset({JSON})
TENSORS = frozenset({JSON, BINARY, b""})  # clients of the Open Inference Protocol may name no type
GZIP = 16 + zlib.MAX_WBITS
MOST_MEMBERS = 64  # of a gzip body
MOST_TYPE_BYTES = 256  # of Content-Type, and of Content-Encoding: no caller needs more, and each parameter costs time
BEGAN_AT = "ranker.began_at"  # in the scope by our server: when the first bytes came, in seconds of `time.perf_counter`
CANCELS = "ranker.cancels"  # extension of a server that cancels a request's task when its client has gone
LONG_BODY_BYTES = 65_536
"""While a longer body came, others were admitted: asking again whether there is room costs less than decoding it for nothing."""
COSTLY_BODY_BYTES = 32_768
"""A longer body waits for its turn to be read, and is not read if nobody waits for the reply any more. A shorter one takes less time
than these steps save."""
PROBE_WAIT_SECONDS = 0.02
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

    def catch_up(self) -> None:
        """Read the keys again if their file has changed: a SIGHUP that came before this process listened for it is lost."""
        with suppress(SettingsProblem):
            if self._settings.read() != self._digests:
                self.read_again()

    def caller(self, headers: Headers) -> str | None:
        """The name that belongs to the key in `X-API-Key: KEY` or `Authorization: Bearer KEY`, None where no keys are set. If both are
        valid, the first counts: the second may be a gateway's own token.

        Raises Unauthorized. Takes the same time whichever key is right, and whether one is.
        """
        if not self._digests:
            return None
        names = [self._name_of(key) for key in (headers.get(b"x-api-key", b"").strip(), bearer_of(headers) or b"")]
        name = names[0] or names[1]
        if name is None:
            raise Unauthorized
        return name

    def _name_of(self, key: bytes) -> str | None:
        digest, name = hashlib.sha256(key).digest(), None
        for other, key_digest in self._digests.items():
            if hmac.compare_digest(digest, key_digest):
                name = other
        return name


def bearer_of(headers: Headers) -> bytes | None:
    """What follows `Bearer` in `Authorization`, None where that has another scheme or is not there."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


class Bodies:
    """How many bytes the bodies of all requests that are being answered may take together. Used in the event loop only.

    Long bodies leave an eighth of the room to short ones, and those that are still on their way leave another to those that are whole.
    So uploads that stall, however many, never keep a short request out.
    """

    def __init__(self, limit: int, share: float) -> None:
        self._shares = Shares(limit, share)

    def hold(self, exchange: Exchange, count: int, size: int, *, is_whole: bool) -> None:
        """Hold this much for a request, whose body has this size, until it is released. Raises Overloaded."""
        eighths = 6 if size > LONG_BODY_BYTES else 8 if is_whole else 7
        room = self._shares.limit * eighths // 8
        if not self._shares.has_room(exchange.key, count, exchange.body_bytes, room):
            raise Overloaded("Too many bytes of request bodies are being read.", retry_after_seconds=1.0)
        self._shares.take(exchange.key, count)
        exchange.body_bytes += count

    def release(self, exchange: Exchange) -> None:
        """Give back what a request holds."""
        self._shares.take(exchange.key, -exchange.body_bytes)
        exchange.body_bytes = 0


@dataclass(slots=True)
class CallerInfo:
    """Who calls a ranking endpoint, and with what.

    `key`: the name of the API key, None where none are set. `deadline`: when the call must have ended, in seconds of the ranker's clock.
    `leaves_at`: when the caller will likely have left, in seconds of that clock. `body`: whole and inflated. `exchange`: notes of the call
    for its log line and the metrics. `state`: what the endpoints of the port share. `route`: the path as it is declared, such as
    `/rank/{name}`.
    """

    key: str | None
    deadline: float
    leaves_at: float
    body: bytes
    exchange: Exchange
    headers: Headers
    state: AppState
    route: str

    def place_request(self, *, candidates: int, history: int, rated: int | None = None) -> PlaceRequest:
        """Return this caller's request for a place in the queue, for so many candidates and history events. `rated` as there."""
        return PlaceRequest(candidates, history, self.deadline, self.key, self.leaves_at, rated)

    def note(
        self, request_id: str | UnsetType | None, config: ModelConfig, *, candidates: int = 0, history: int = 0
    ) -> None:
        """Note the name and the sizes of a decoded request, and count a history that is longer than what a model of this configuration
        reads."""
        exchange = self.exchange
        exchange.candidates += candidates
        exchange.history += history
        if isinstance(request_id, str) and not exchange.is_named_by_caller:
            exchange.request_id = request_id
        if history > config.history_length:
            self.state.ranker.metrics.history_truncated.inc()

    def note_served(
        self, checked: CheckedRequest, ranked: Ranked, placement: Placement, served_us: int | None = None
    ) -> None:
        """Note the probabilities that the reply holds, for the metrics, and have the log of what was served take the ranking. `served_us`:
        when it was ranked, Unix microseconds; None: now."""
        self.exchange.scored.append((checked.vocabulary.action_names, ranked.scores.probabilities))
        if self.state.served_log is not None and len(checked.candidates):
            self.state.served_log.record(checked, ranked, placement, self.route, self.key, served_us)


def reader(types: Collection[bytes]) -> Callable[[Request], Awaitable[CallerInfo]]:
    """A dependency that reads bodies of these media types."""

    async def read_caller(request: Request) -> CallerInfo:
        """Raises Unauthorized, then what the ranker is open to (429, 503), then what the headers get (413, 415, 422), then what the body
        gets (400, 413, 429, 504), each before the next is looked at; CallerGone."""
        scope, state = request.scope, state_of(request)
        headers: Headers = dict(scope["headers"])
        exchange: Exchange = scope["exchange"]
        key = exchange.key = state.keys.caller(headers)
        length = _length_of(headers)
        deadline = deadline_of(state, exchange, timeout_seconds_of(headers))
        exchange.says_deadline = b"x-request-timeout-ms" in headers
        check_room(request, state, exchange, length or 0, deadline)
        check_type(headers, types)
        is_gzip = is_compressed(scope["headers"], headers)
        limit = state.settings.limits.max_body_bytes
        check_length(headers, limit)
        check_timeout(headers)
        body = await read_body(request.receive, exchange, state.bodies, limit, length)
        packed = b""
        if is_gzip:
            packed, body = body, inflate_short(body, limit)
        size = len(body) or inflated_size(packed, limit)
        has_waited = False
        if size > COSTLY_BODY_BYTES:
            if size > (length or 0):
                check_room(request, state, exchange, size, deadline)
            has_waited = await state.read_queue.take(size, key, deadline - state.ranker.clock())
            await check_waits(scope)
        exchange.note_turn()
        if has_waited or size > LONG_BODY_BYTES:
            state.ranker.check_open(key, leaves_at(request, state, exchange))
        if is_gzip:
            with exchange.measured("parse"):
                body = body or inflate(packed, limit)
            state.bodies.hold(exchange, max(0, len(body) - len(packed)), len(body), is_whole=True)
            if len(body) > size:  # its end did not say so
                state.read_queue.add(len(body) - size)
                check_room(request, state, exchange, len(body), deadline)
                with exchange.measured("read"):
                    await state.read_queue.take(len(body), key, deadline - state.ranker.clock())
        leaves = leaves_at(request, state, exchange)
        return CallerInfo(key, deadline, leaves, body, exchange, headers, state, scope["route"].path)

    return read_caller


Caller = Annotated[CallerInfo, Depends(reader(JSON_ALONE), use_cache=False)]
TensorCaller = Annotated[CallerInfo, Depends(reader(TENSORS), use_cache=False)]


def deadline_of(state: AppState, exchange: Exchange, seconds: float | None) -> float:
    """When a call must have ended, in seconds of the ranker's clock. It may take so many from its first byte; None: the default."""
    limits = state.settings.deadline
    seconds = min(limits.default_seconds if seconds is None else seconds, limits.max_seconds)
    return state.ranker.clock() + seconds - (time.perf_counter() - exchange.started)


def leaves_at(request: Request, state: AppState, exchange: Exchange) -> float:
    """When the caller will likely have left, in seconds of the ranker's clock; infinite where that is not known, or where its header says
    its deadline, which then counts alone."""
    if exchange.says_deadline:
        return math.inf
    now = time.perf_counter()
    patience_seconds = state.leavers.of(exchange.key, request.scope["route"].path).seconds(now)
    if patience_seconds == math.inf:
        return math.inf
    return state.ranker.clock() - (now - exchange.came) + patience_seconds


def check_room(request: Request, state: AppState, exchange: Exchange, size: int, deadline: float) -> None:
    """Raise what `RankingService.check_open` does, and Overloaded or DeadlineExceeded where a body of so many bytes would wait too long to
    be read."""
    leaves = leaves_at(request, state, exchange)
    if size <= COSTLY_BODY_BYTES:
        state.ranker.check_open(exchange.key, leaves)
        return
    state.ranker.check_open(exchange.key, leaves - state.read_queue.wait_seconds(size, exchange.key))
    reply_seconds = state.leavers.of(exchange.key, request.scope["route"].path).reply_seconds
    now = state.ranker.clock() + reply_seconds
    try:
        state.read_queue.check(size, exchange.key, leaves - now, deadline - now)
    except (Overloaded, DeadlineExceeded) as error:
        reason = "loop_overrun" if isinstance(error, Overloaded) else "deadline"
        state.ranker.metrics.rejected.labels(reason).inc()
        raise


async def read_body(receive: Receive, exchange: Exchange, bodies: Bodies, limit: int, length: int | None) -> bytes:
    """The body as it was sent; `length` is what its header says, None where it says none. Raises TooLarge beyond `limit` bytes,
    Overloaded, or CallerGone."""
    exchange.is_reading = True
    body = bytearray()  # a list of tiny pieces would take ten times their bytes
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        piece: bytes = message.get("body", b"")
        if piece:
            if exchange.body_bytes + len(piece) > limit:
                raise too_long(limit)
            is_whole = not message.get("more_body", False)
            size = len(body) + len(piece) if is_whole else limit if length is None else length
            bodies.hold(exchange, len(piece), size, is_whole=is_whole)
            if is_whole and not body:
                exchange.is_reading, exchange.is_read = False, True
                return piece
            body += piece
        if not message.get("more_body", False):
            exchange.is_reading, exchange.is_read = False, True
            exchange.came = time.perf_counter()
            return bytes(body)


async def check_waits(scope: Scope) -> None:
    """Give a server that knows that the client has closed its sending half the time to find out whether it is gone; then it cancels the
    request. Under load a request may have waited so long for the event loop that nobody waits for it any more."""
    about = scope.get("extensions", {}).get(CANCELS, {})
    if about and about["has_closed"]():
        about["probe"]()
        await asyncio.sleep(PROBE_WAIT_SECONDS)


def check_type(headers: Headers, types: Collection[bytes]) -> None:
    """Raise UnsupportedMediaType for a body of another type, or of a charset that is not UTF-8; other parameters have no effect."""
    sent = headers.get(b"content-type", b"")
    if sent == JSON and JSON in types:
        return
    if len(sent) > MOST_TYPE_BYTES:
        raise UnsupportedMediaType
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
    sent = b",".join([value for name, value in fields if name == b"content-encoding"])
    if len(sent) > MOST_TYPE_BYTES:
        raise UnsupportedCoding
    codings = [coding.strip() for coding in sent.lower().split(b",")]
    match [coding for coding in codings if coding not in (b"", b"identity")]:
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


def inflate_short(body: bytes, limit: int) -> bytes:
    """The content of a gzip body that takes little time to inflate, empty where it is longer. Raises what `inflate` does."""
    try:
        return inflate(body, min(limit, COSTLY_BODY_BYTES))
    except TooLarge:
        if limit <= COSTLY_BODY_BYTES:
            raise
        return b""


def inflated_size(body: bytes, limit: int) -> int:
    """How many bytes a long gzip body says that it holds: in its last four bytes, which count its last member alone (RFC 1952)."""
    return min(limit, max(len(body), COSTLY_BODY_BYTES + 1, int.from_bytes(body[-4:], "little")))


def timeout_seconds_of(headers: Headers) -> float | None:
    """How long the caller waits, None where it does not say. Envoy's header is a proxy's; there 0 means no limit. A header that is no count
    has no effect here."""
    own, envoy = (
        headers.get(name, b"").strip() for name in (b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms")
    )
    said = [int(own)] if _is_count(own) else []
    if _is_count(envoy) and int(envoy):
        said.append(int(envoy))
    return min(said) / 1000 if said else None


def check_timeout(headers: Headers) -> None:
    """Raise InvalidRequest for a bad X-Request-Timeout-Ms. A bad header of Envoy's is no fault of the caller."""
    if not _is_count(headers.get(b"x-request-timeout-ms", b"0").strip()):
        raise InvalidRequest("X-Request-Timeout-Ms", "must be whole milliseconds, at most 12 digits")


def _length_of(headers: Headers) -> int | None:
    """The length that a header says, None where there is none: the body comes in chunks. 0 for what `check_length` refuses."""
    length = headers.get(b"content-length")
    return None if length is None else int(length) if _is_count(length) else 0


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
