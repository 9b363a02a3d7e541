"""One call with all its attempts: its deadline, what each attempt sends, and what a reply means. It opens no connection itself."""

from __future__ import annotations

import random
import re
import time
import uuid
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any, Generic, TypeVar

import orjson
from tenacity import (
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from phoenix_ranker_client.encoding import Unsendable, encode
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
HEADER_VALUE = re.compile("[!-~]([ -~]*[!-~])?")
REQUEST_ID = re.compile("[A-Za-z0-9_.:@/+=-]{1,128}")  # another one the service would replace
REQUEST_ID_RULE = "must be 1 to 128 letters, digits or any of _ . : @ / + = -"
OK = 200


class Call(Generic[T]):
    """A POST under one deadline, with one request id.

    `body` makes the JSON body; `whole` makes it without a context handle, for when the service does not know the handle. `parse` makes
    the result of a 200's JSON. Raises ValueError if `timeout_seconds` is no number, RequestRefused for what no JSON or header can hold.
    """

    def __init__(
        self,
        url: str,
        body: Callable[[], Mapping[str, Any]],
        parse: Callable[[Any], T],
        timeout_seconds: float,
        request_id: str | None,
        headers: Mapping[str, str],
        whole: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self.deadline = time.monotonic() + min(_number_of_seconds(timeout_seconds), LONGEST_SECONDS)
        self.request_id = uuid.uuid4().hex
        self.url, self.parse = url, parse
        self.shown = re.sub("//.*@", "//", url)  # what errors name: without a user and password
        if request_id is not None:
            self.request_id = self._own_id(request_id)
        self._headers = {"content-type": "application/json", "x-request-id": self.request_id, **headers}
        for name, value in self._headers.items():
            if not HEADER_VALUE.fullmatch(value):
                raise self.refused(f"{name} must be printable ASCII without white space around it.")
        try:
            self.body, self._whole = encode(body()), None if whole is None else encode(whole())
        except Unsendable as error:
            raise self.refused(str(error), error.field, error.message) from error

    def _own_id(self, given: Any) -> str:
        """The name that the caller gives the call. Raises RequestRefused if the service would replace it."""
        name = given.value if isinstance(given, Enum) else given
        text = str(name) if isinstance(name, str | uuid.UUID) else ""
        if not REQUEST_ID.fullmatch(text):
            raise self.refused(f"request_id: {REQUEST_ID_RULE}", "request_id", REQUEST_ID_RULE)
        return text

    def send_whole(self) -> bool:
        """Send user and history from now on, in place of the handle. False if there are none to send."""
        if self._whole is None:
            return False
        self.body, self._whole = self._whole, None
        return True

    def seconds_left(self) -> float:
        """Seconds until the deadline, negative after it."""
        return self.deadline - time.monotonic()

    def seconds_to_wait(self) -> float:
        """Seconds that an attempt may still wait for the service's reply."""
        return max(0.001, self.seconds_left() + GRACE_SECONDS)

    def stop(self, attempts: int) -> stop_base:
        """When to stop retrying: after this many attempts, or when the next one could not begin before the deadline."""
        return stop_after_attempt(attempts) | stop_before_delay(max(0.0, self.seconds_left()))

    def headers(self) -> dict[str, str]:
        """The headers of the next attempt, which tell the service how much time is left. Raises DeadlineExceeded if none is left."""
        left = self.seconds_left()
        if left <= 0:
            raise self.too_late("The deadline passed before this attempt.")
        return self._headers | {"x-request-timeout-ms": str(max(1, int(left * 1000)))}

    def result(self, status: int, headers: Mapping[str, str], content: bytes) -> T:
        """The parsed result of a 200. Raises the matching RankerError for any other reply."""
        request_id = headers.get("x-request-id", self.request_id)
        try:
            body = orjson.loads(content)
            if status == OK:
                return self.parse({"request_id": request_id} | body)
        except (ValueError, LookupError, TypeError, AttributeError):  # not from this service: a proxy's page, say
            body = {}
        retry_after = _seconds(headers.get("retry-after", ""))
        raise error_from(status, body, request_id, retry_after, self._unexpected(status, headers))

    # errors

    def not_reached(self, error: Exception, by: str = "") -> Unavailable:
        """No reply came. It is retried, also when a reply was cut off: ranking changes nothing."""
        detail = f"{self.shown} was not reached{by}: {error or type(error).__name__}"
        return Unavailable(0, "no_connection", detail, self.request_id)

    def no_reply(self) -> DeadlineExceeded:
        """The deadline passed before the reply was complete."""
        return self.too_late(f"{self.shown} gave no reply in time.")

    def too_late(self, detail: str) -> DeadlineExceeded:
        """The deadline passed in the client."""
        return DeadlineExceeded(0, "deadline_exceeded", detail, self.request_id)

    def refused(self, detail: str, field: str = "", message: str = "") -> RequestRefused:
        """The request cannot be sent. `field` and `message` become its `errors`."""
        errors = [(field, message)] if field else []
        return RequestRefused(0, "invalid_request", detail, self.request_id, errors=errors)

    def unusable_address(self, *, trust_env: bool) -> RequestRefused:
        """The HTTP library cannot use the address or, with `trust_env`, the proxy that the environment names. Nothing of it is shown."""
        also = ", or HTTP_PROXY, ALL_PROXY or NO_PROXY in the environment," if trust_env else ""
        return self.refused(f"{self.shown}{also} is not an address that can be used.")

    def failed(self, error: Exception) -> RankerError:
        """Another failure of the HTTP library."""
        return ServerFault(0, "transport", f"{self.shown}: {error or type(error).__name__}", self.request_id)

    def _unexpected(self, status: int, headers: Mapping[str, str]) -> str:
        """A sentence about a reply that this service does not send. It repeats nothing of the reply's body."""
        kind = headers.get("content-type", "").partition(";")[0] or "no content type"
        answer = f"{self.shown} answered {status} ({kind}), which the ranking server does not"
        if status in (301, 302, 303, 307, 308):
            where = re.sub("//.*@", "//", headers.get("location", "another address"))
            return f"{answer}: it redirects to {where}, and redirects are not followed. Give that address as base_url."
        return f"{answer}: perhaps a proxy answered, or base_url is another service's."


def wait_seconds(state: RetryCallState) -> float:
    """Seconds to wait: the service's Retry-After plus a random 0 to 25 %; without one, a random exponential backoff."""
    error = state.outcome.exception() if state.outcome is not None else None
    retry_after = error.retry_after_seconds if isinstance(error, Unavailable) else None
    return BACKOFF(state) if retry_after is None else retry_after * (1 + random.uniform(0, JITTER_SHARE))


def _number_of_seconds(timeout_seconds: float) -> float:
    try:
        seconds = float(timeout_seconds)
        if seconds == seconds:  # not NaN
            return seconds
    except (TypeError, ValueError):
        pass
    raise ValueError("timeout_seconds must be a number of seconds; math.inf waits without a limit")


def _seconds(retry_after: str) -> float | None:
    """The seconds that a Retry-After asks for: a number or, from some proxies, a date. None if it is neither."""
    if retry_after.isdecimal():
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
