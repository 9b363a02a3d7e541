"""One call of the client with all its attempts. Not for what is asked, nor for connections."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import orjson
import stamina

from app.client.messages import DeadlineExceeded, ServerFault, Unavailable, error_from

GRACE_SECONDS = 0.05  # the server's own 504 says more than a socket that was closed at the same moment
MAX_BACKOFF_SECONDS = 1.0
JITTER_SHARE = 0.25  # clients that were refused together should not come back together


class Call:
    """One call with all its attempts: same body, same request id, one deadline."""

    def __init__(
        self, url: str, body: dict[str, Any], timeout_seconds: float, request_id: str | None, api_key: str | None
    ) -> None:
        self.url = url
        self.body = orjson.dumps(body)
        self.deadline = time.monotonic() + timeout_seconds
        self.request_id = request_id or uuid.uuid4().hex
        self.headers = {"content-type": "application/json", "x-request-id": self.request_id}
        if api_key is not None:
            self.headers["authorization"] = f"Bearer {api_key}"

    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def attempts(self, most: int) -> Any:
        """stamina's attempts, sync and async alike, as long as the deadline leaves time for another."""
        wait_seconds = min(MAX_BACKOFF_SECONDS, max(0.0, self.left()))
        return stamina.retry_context(
            on=self._backoff, attempts=most, timeout=max(0.001, self.left()),
            wait_initial=min(0.05, wait_seconds), wait_max=wait_seconds, wait_jitter=min(0.05, wait_seconds),
        )  # fmt: skip

    def _backoff(self, error: Exception) -> bool | float:
        """Whether to try again, and after how many seconds where the service said so."""
        if not isinstance(error, Unavailable):
            return False
        asked = error.retry_after_seconds
        if asked is None:
            return self.left() > 0
        wait_seconds = asked * (1 + random.uniform(0, JITTER_SHARE))
        return wait_seconds if wait_seconds < self.left() else False

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """The next attempt, which tells the service how much time is left."""
        left = self.left()
        if left <= 0:
            raise DeadlineExceeded(0, "deadline_exceeded", "The time was over before this attempt.", self.request_id)
        headers = self.headers | {"x-request-timeout-ms": str(max(1, int(left * 1000)))}
        return http.build_request("POST", self.url, content=self.body, headers=headers, timeout=left + GRACE_SECONDS)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What httpx raises, as ours. A reply that was cut off is tried again too: ranking changes nothing."""
        try:
            yield
        except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
            raise Unavailable(0, "no_connection", str(error) or type(error).__name__, self.request_id) from error
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(0, "deadline_exceeded", "No reply came in time.", self.request_id) from error
        except httpx.HTTPError as error:
            raise ServerFault(0, "transport", str(error), self.request_id) from error

    def result(self, response: httpx.Response) -> Any:
        """The body of a reply with scores. Raises the error that any other reply means."""
        try:
            body = orjson.loads(response.content)
        except orjson.JSONDecodeError:
            body = {}
        if response.status_code == httpx.codes.OK and body:
            return body
        retry_after = response.headers.get("retry-after", "")
        raise error_from(
            response.status_code,
            body if isinstance(body, dict) else {},
            response.headers.get("x-request-id", self.request_id),
            float(retry_after) if retry_after.isdecimal() else None,
        )
