"""The clients, sync and async: connections and methods. What they share is in `call` and `messages`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate

import anyio
import httpx
from tenacity import AsyncRetrying, Retrying

from phoenix_ranker_client.call import AGAIN, Call, T, wait_seconds
from phoenix_ranker_client.calls import Calls, KnownCalls, P, Wire
from phoenix_ranker_client.messages import ContextUnknown, Event, Id, RankerError

DEFAULT_ATTEMPTS = 3
LIMITS = httpx.Limits(max_connections=256, max_keepalive_connections=64)


def _blocking(make: Callable[Concatenate[Any, P], Call[T]]) -> Callable[Concatenate[Any, P], T]:
    """Make a method that builds a call and sends it."""

    @functools.wraps(make)
    def method(self: Any, /, *arguments: P.args, **named: P.kwargs) -> T:
        result: T = self._send(make(self._calls, *arguments, **named))
        return result

    return method


def _awaited(
    make: Callable[Concatenate[Any, P], Call[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The same for asyncio."""

    @functools.wraps(make)
    async def method(self: Any, /, *arguments: P.args, **named: P.kwargs) -> T:
        result: T = await self._send(make(self._calls, *arguments, **named))
        return result

    return method


class RankerClient:
    """Blocking. Safe to share between threads, and to use after a fork unless `http` is given; close it, or use it in `with`.

    `attempts` includes the first one; `routing_secret` keys the hash of user ids that balancers see; `wire` is the format that `rank`
    uses: "binary" carries the same numbers in a fraction of the bytes and the time.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        attempts: int = DEFAULT_ATTEMPTS,
        routing_secret: bytes = b"",
        wire: Wire = "json",
        http: httpx.Client | None = None,
    ) -> None:
        self._calls, self._attempts = Calls(base_url, api_key, routing_secret, wire), attempts
        self._http, self._process = http or httpx.Client(limits=LIMITS), None if http else os.getpid()

    rank = _blocking(Calls.rank)
    rank_batch = _blocking(Calls.rank_batch)
    explain = _blocking(Calls.explain)
    retrieve = _blocking(Calls.retrieve)
    recommend = _blocking(Calls.recommend)

    def context(self, /, user_id: Id, history: Sequence[Event] = (), **options: Any) -> Context:
        """Have the service compute user and history ahead. `options`: `timeout_seconds` and `request_id`. Raises RankerError."""
        return Context(self, self._send(self._calls.context(user_id, history, **options)))

    def _send(self, call: Call[T]) -> T:
        retrying = Retrying(retry=AGAIN, stop=call.stop(self._attempts), wait=wait_seconds, reraise=True)
        try:
            result: T = retrying(self._attempt, call)
        except ContextUnknown:
            if (whole := call.whole()) is None:
                raise
            try:
                return self._send(whole)
            except RankerError as error:
                return call.without_whole(error)
        return result

    def _attempt(self, call: Call[T]) -> T:
        process = os.getpid()
        if self._process not in (None, process):  # on the connections of before the fork, replies go to either
            self._http, self._process = httpx.Client(limits=LIMITS), process
        with call.errors():
            request = call.request(self._http)
            timeouts = request.extensions["timeout"]
            request.extensions["trace"] = lambda event, info: timeouts.update(call.timeouts())  # before each step
            response = self._http.send(request, stream=True)
            try:
                return call.result(response, call.until_deadline(response.iter_bytes()))
            finally:
                response.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> RankerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncRankerClient:
    """For asyncio; close it, or use it in `async with`. Cancelling a call closes its connection, which the service notices."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        attempts: int = DEFAULT_ATTEMPTS,
        routing_secret: bytes = b"",
        wire: Wire = "json",
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._calls, self._attempts = Calls(base_url, api_key, routing_secret, wire), attempts
        self._http = http or httpx.AsyncClient(limits=LIMITS)

    rank = _awaited(Calls.rank)
    rank_batch = _awaited(Calls.rank_batch)
    explain = _awaited(Calls.explain)
    retrieve = _awaited(Calls.retrieve)
    recommend = _awaited(Calls.recommend)

    async def context(self, /, user_id: Id, history: Sequence[Event] = (), **options: Any) -> AsyncContext:
        """As `RankerClient.context`."""
        return AsyncContext(self, await self._send(self._calls.context(user_id, history, **options)))

    async def _send(self, call: Call[T]) -> T:
        retrying = AsyncRetrying(retry=AGAIN, stop=call.stop(self._attempts), wait=wait_seconds, reraise=True)
        try:
            result: T = await retrying(self._attempt, call)
        except ContextUnknown:
            if (whole := call.whole()) is None:
                raise
            try:
                return await self._send(whole)
            except RankerError as error:
                return call.without_whole(error)
        return result

    async def _attempt(self, call: Call[T]) -> T:
        with call.errors():
            request = call.request(self._http)
            with anyio.fail_after(request.extensions["timeout"]["read"]):
                response = await self._http.send(request)
            return call.result(response, response.content)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncRankerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Known:
    """What both kinds of contexts share."""

    def __init__(self, client: RankerClient | AsyncRankerClient, calls: KnownCalls) -> None:
        self._calls, self._send = calls, client._send

    @property
    def handle(self) -> str:
        """The service's name for this context, valid for callers with the same API key; empty if it keeps nothing of this size."""
        return self._calls.handle


class Context(_Known):
    """One user with one history, known to the service by a handle. Has the client's methods without these two arguments, and sends them
    in full when the service no longer knows the handle."""

    rank = _blocking(KnownCalls.rank)
    explain = _blocking(KnownCalls.explain)
    retrieve = _blocking(KnownCalls.retrieve)
    recommend = _blocking(KnownCalls.recommend)


class AsyncContext(_Known):
    """`Context` for asyncio."""

    rank = _awaited(KnownCalls.rank)
    explain = _awaited(KnownCalls.explain)
    retrieve = _awaited(KnownCalls.retrieve)
    recommend = _awaited(KnownCalls.recommend)
