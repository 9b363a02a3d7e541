"""One call with all its attempts: deadline, retries, errors."""

from __future__ import annotations

import math
import random
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Generic, Protocol, TypeVar

import httpx
import orjson
from tenacity import (
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from phoenix_ranker_client.messages import (
    ContextUnknown,
    DeadlineExceeded,
    RankerError,
    RequestRefused,
    ServerFault,
    Unavailable,
    error_from,
)

T = TypeVar("T")
VERSION = "x-model-version"
LONGEST_SECONDS = 1e6  # more fits neither the service's header nor, in milliseconds, the 32 bits that poll(2) takes
GRACE_SECONDS = 0.05  # wait this much longer: the server's own 504 says more than a closed connection
AGAIN = retry_if_exception_type(Unavailable)
BACKOFF = wait_random_exponential(multiplier=0.1, max=1.0)
JITTER_SHARE = 0.25  # clients refused at the same moment should not retry at the same moment


class Known(Protocol):
    """Holds the latest handle of a context and the version of the model that keeps it, which each reply updates."""

    handle: str
    version: str


class Call(Generic[T]):
    """Sends the same body and request id in each attempt, under one deadline, which an infinite `timeout_seconds` puts days away.

    `parse` makes the result of a 200. Raises ValueError for a timeout of NaN.
    """

    def __init__(
        self,
        url: str,
        body: bytes,
        parse: Callable[[httpx.Headers, bytes], T],
        timeout_seconds: float,
        request_id: str | None,
        headers: dict[str, str],
    ) -> None:
        self.url, self.body, self.parse = url, body, parse
        if math.isnan(timeout_seconds):
            raise ValueError("timeout_seconds must be a number of seconds, and not NaN")
        self.deadline = time.monotonic() + min(timeout_seconds, LONGEST_SECONDS)
        self.request_id = request_id or uuid.uuid4().hex
        self.headers = headers | {"x-request-id": self.request_id}
        self.make_whole: Callable[[float], Call[T]] | None = None  # the same call without a handle, in these seconds
        self.rest: Callable[[RankerError], T] | None = (
            None  # the result where that fails; else its error is this call's
        )
        self.known: Known | None = None  # gets the handle from the reply

    def seconds_left(self) -> float:
        """Seconds until the deadline, negative after it."""
        return self.deadline - time.monotonic()

    def whole(self) -> Call[T] | None:
        """The same call without a handle, or None if it has none."""
        if self.make_whole is None:
            return None
        call = self.make_whole(self.seconds_left())
        call.known = self.known
        return call

    def without_whole(self, error: RankerError) -> T:
        """The result where the call without a handle failed: of a batch, the others' rankings. Raises the error where there is none."""
        if self.rest is None:
            raise error
        return self.rest(error)

    def stop(self, attempts: int) -> stop_base:
        """When to stop retrying: after this many attempts, or when the next one could not begin before the deadline."""
        return stop_after_attempt(attempts) | stop_before_delay(max(0.0, self.seconds_left()))

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The next attempt, which tells the service how much time is left. Raises DeadlineExceeded if none is left."""
        left = self.seconds_left()
        if left <= 0:
            raise self._too_late("The deadline passed before this attempt.")
        headers = self.headers | {"x-request-timeout-ms": str(max(1, int(left * 1000)))}
        return http.build_request(
            "POST", self.url, content=self.body, headers=headers, extensions={"timeout": self.timeouts()}
        )

    def timeouts(self) -> dict[str, float]:
        """The seconds left, for each step of an attempt, as httpx's extension `timeout`."""
        return dict.fromkeys(("connect", "read", "write", "pool"), max(0.001, self.seconds_left() + GRACE_SECONDS))

    def until_deadline(self, chunks: Iterable[bytes]) -> bytes:
        """Read a reply's body until the deadline: a timeout of httpx bounds each read, not their sum. Raises DeadlineExceeded."""
        body = bytearray()
        for chunk in chunks:
            body += chunk
            if self.seconds_left() + GRACE_SECONDS <= 0:
                raise self._too_late("The reply was not complete in time.")
        return bytes(body)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn httpx errors into RankerErrors. A reply that was cut off is retried too: ranking changes nothing."""
        try:
            yield
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
            raise Unavailable(0, "no_connection", str(error) or type(error).__name__, self.request_id) from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise self._too_late("No reply came in time.") from error
        except (httpx.LocalProtocolError, UnicodeEncodeError) as error:
            raise RequestRefused(0, "invalid_request", f"A header cannot be sent: {error}", self.request_id) from error
        except httpx.HTTPError as error:
            raise ServerFault(0, "transport", str(error), self.request_id) from error

    def result(self, response: httpx.Response, content: bytes) -> T:
        """The parsed result of a 200. Raises the matching RankerError for any other reply."""
        request_id = response.headers.get("x-request-id", self.request_id)
        try:
            if response.status_code == httpx.codes.OK:
                if self.known is not None:
                    self.known.handle = response.headers.get("x-context", "")
                    self.known.version = response.headers.get(VERSION, "")
                return self.parse(response.headers, content)
            body = orjson.loads(content)
        except (ValueError, LookupError, TypeError, AttributeError):  # not from this service: a proxy's page, say
            body = {}
        error = error_from(response.status_code, body, request_id, _seconds(response.headers.get("retry-after", "")))
        if error.status == httpx.codes.NOT_FOUND and VERSION in self.headers:  # who lacks the model lacks its contexts
            raise ContextUnknown(error.status, error.code, error.detail, request_id)
        raise error

    def _too_late(self, detail: str) -> DeadlineExceeded:
        return DeadlineExceeded(0, "deadline_exceeded", detail, self.request_id)


def _seconds(asked: str) -> float | None:
    """The seconds that a Retry-After asks for: it is a number, or, from some proxies, a date. None if it is neither."""
    if asked.isdecimal():
        return float(asked)
    try:
        return max(0.0, parsedate_to_datetime(asked).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def wait_seconds(state: RetryCallState) -> float:
    """Seconds to wait: the service's Retry-After plus a random 0 to 25 %; without one, a random exponential backoff."""
    error = state.outcome.exception() if state.outcome is not None else None
    asked = error.retry_after_seconds if isinstance(error, Unavailable) else None
    return BACKOFF(state) if asked is None else asked * (1 + random.uniform(0, JITTER_SHARE))
