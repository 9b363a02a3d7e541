"""One call with all its attempts: its deadline, what each attempt sends, and what a reply means."""

from __future__ import annotations

import math
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar

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
    DeadlineExceeded,
    RankerError,
    RequestRefused,
    ServerFault,
    Unavailable,
    error_from,
)

T = TypeVar("T")
LONGEST_SECONDS = 1e6  # more fits neither the service's header nor, in milliseconds, the 32 bits that poll(2) takes
GRACE_SECONDS = 0.05  # wait this much longer: the server's own 504 says more than a closed connection
JITTER_SHARE = 0.25  # clients refused at the same moment should not retry at the same moment
AGAIN = retry_if_exception_type(Unavailable)
BACKOFF = wait_random_exponential(multiplier=0.1, max=1.0)


class Call(Generic[T]):
    """A POST under one deadline, with one request id. `parse` makes the result of a 200's JSON; `whole`: the body without a context
    handle, for when the service does not know it. Raises ValueError for a timeout of NaN, RequestRefused for what no JSON can hold."""

    def __init__(
        self,
        url: str,
        body: Mapping[str, Any],
        parse: Callable[[Any], T],
        timeout_seconds: float,
        request_id: str | None,
        headers: Mapping[str, str],
        whole: Mapping[str, Any] | None = None,
    ) -> None:
        if math.isnan(timeout_seconds):
            raise ValueError("timeout_seconds must be a number of seconds, and not NaN")
        self.deadline = time.monotonic() + min(timeout_seconds, LONGEST_SECONDS)
        self.request_id = request_id or uuid.uuid4().hex
        self.url, self.parse = url, parse
        self.shown = re.sub("//.*@", "//", url)  # what errors name: without a user and password
        self.headers = {"content-type": "application/json", "x-request-id": self.request_id, **headers}
        try:
            self.body, self.whole = orjson.dumps(body), None if whole is None else orjson.dumps(whole)
        except orjson.JSONEncodeError as error:
            raise RequestRefused(0, "invalid_request", f"The request is not JSON: {error}", self.request_id) from error

    def send_whole(self) -> bool:
        """Send user and history from now on, in place of the handle. False if there are none to send."""
        if self.whole is None:
            return False
        self.body, self.whole = self.whole, None
        return True

    def seconds_left(self) -> float:
        """Seconds until the deadline, negative after it."""
        return self.deadline - time.monotonic()

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
        """Read a reply until the deadline: a timeout of httpx bounds each read, not their sum. Raises DeadlineExceeded."""
        body = bytearray()
        for chunk in chunks:
            body += chunk
            if self.seconds_left() + GRACE_SECONDS <= 0:
                raise self._too_late("The reply was not complete in time.")
        return bytes(body)

    @contextmanager
    def errors(self, *, trust_env: bool = False) -> Iterator[None]:
        """Turn httpx errors into RankerErrors that name the ranker. A reply that was cut off is retried: ranking changes nothing."""
        try:
            yield
        except (
            httpx.ConnectError,
            httpx.RemoteProtocolError,
            httpx.ReadError,
            httpx.WriteError,
            httpx.ProxyError,
        ) as error:
            by = ", perhaps because of a proxy that the environment names" if trust_env else ""
            by = " by the proxy of the HTTP client" if isinstance(error, httpx.ProxyError) else by
            detail = f"{self.shown} was not reached{by}: {error or type(error).__name__}"
            raise Unavailable(0, "no_connection", detail, self.request_id) from error
        except (httpx.TimeoutException, TimeoutError) as error:
            raise self._too_late(f"{self.shown} gave no reply in time.") from error
        except httpx.InvalidURL as error:  # it may quote a piece of a password
            also = ", or HTTP_PROXY or NO_PROXY in the environment" if trust_env else ""
            detail = f"{self.shown}{also} is not a valid address."
            raise RequestRefused(0, "invalid_request", detail, self.request_id) from error
        except (httpx.LocalProtocolError, UnicodeEncodeError) as error:
            raise RequestRefused(
                0, "invalid_request", f"The request cannot be sent to {self.shown}: {error}", self.request_id
            ) from error
        except httpx.HTTPError as error:
            raise ServerFault(0, "transport", f"{self.shown}: {error}", self.request_id) from error

    def result(self, response: httpx.Response, content: bytes) -> T:
        """The parsed result of a 200. Raises the matching RankerError for any other reply."""
        request_id = response.headers.get("x-request-id", self.request_id)
        try:
            body = orjson.loads(content)
            if response.status_code == httpx.codes.OK:
                return self.parse(body)
        except (ValueError, LookupError, TypeError, AttributeError):  # not from this service: a proxy's page, say
            body = {}
        raise error_from(response.status_code, body, request_id, _seconds(response.headers.get("retry-after", "")))

    def _too_late(self, detail: str) -> RankerError:
        return DeadlineExceeded(0, "deadline_exceeded", detail, self.request_id)


def wait_seconds(state: RetryCallState) -> float:
    """Seconds to wait: the service's Retry-After plus a random 0 to 25 %; without one, a random exponential backoff."""
    error = state.outcome.exception() if state.outcome is not None else None
    asked = error.retry_after_seconds if isinstance(error, Unavailable) else None
    return BACKOFF(state) if asked is None else asked * (1 + random.uniform(0, JITTER_SHARE))


def _seconds(asked: str) -> float | None:
    """The seconds that a Retry-After asks for: a number or, from some proxies, a date. None if it is neither."""
    if asked.isdecimal():
        return float(asked)
    try:
        return max(0.0, parsedate_to_datetime(asked).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
