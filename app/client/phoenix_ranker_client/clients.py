"""The clients, sync and async: connections and methods. What they share is in `call` and `messages`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, TypeVar

import anyio
import httpx
from tenacity import AsyncRetrying, Retrying

from phoenix_ranker_client.call import AGAIN, Call, Calls, Kept, P, T, Wire, wait_seconds
from phoenix_ranker_client.messages import Candidate, ContextUnknown, Event, Explanation, Id, Ranking
from phoenix_ranker_client.retrieval import Recommendation, Retrieval

DEFAULT_ATTEMPTS = 3
LIMITS = httpx.Limits(max_connections=256, max_keepalive_connections=64)
S = TypeVar("S", Ranking, Explanation, Recommendation)


def _blocking(make: Callable[Concatenate[Calls, P], Call[T]]) -> Callable[Concatenate[RankerClient, P], T]:
    """Makes a call and sends it."""

    @functools.wraps(make)
    def method(self: RankerClient, /, *arguments: P.args, **named: P.kwargs) -> T:
        return self._send(make(self._calls, *arguments, **named))

    return method


def _awaited(
    make: Callable[Concatenate[Calls, P], Call[T]],
) -> Callable[Concatenate[AsyncRankerClient, P], Coroutine[Any, Any, T]]:
    """The same for asyncio."""

    @functools.wraps(make)
    async def method(self: AsyncRankerClient, /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._send(make(self._calls, *arguments, **named))

    return method


class RankerClient:
    """Blocking. Safe to share between threads; close it, or use it in `with`.

    `attempts` counts the first one too; `routing_secret` keys the hash of user ids that balancers see; `wire` is what `rank` speaks:
    the same numbers, in binary with a fraction of the bytes and the time.
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
        self._http = http or httpx.Client(limits=LIMITS)

    rank = _blocking(Calls.rank)
    rank_batch = _blocking(Calls.rank_batch)
    explain = _blocking(Calls.explain)
    retrieve = _blocking(Calls.retrieve)
    recommend = _blocking(Calls.recommend)

    def context(self, /, user_id: Id, history: Sequence[Event] = (), **options: Any) -> Context:
        """Have user and history computed ahead, for the calls to come; `options` as of `rank`. Raises RankerError."""
        return Context(self, user_id, history, self._send(self._calls.context(user_id, history, **options)))

    def _send(self, call: Call[T]) -> T:
        retrying = Retrying(retry=AGAIN, stop=call.stop(self._attempts), wait=wait_seconds, reraise=True)
        try:
            result: T = retrying(self._attempt, call)
        except ContextUnknown:
            if call.whole is None:
                raise
            return self._send(call.whole(call.seconds_left()))
        return result

    def _attempt(self, call: Call[T]) -> T:
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
        return AsyncContext(self, user_id, history, await self._send(self._calls.context(user_id, history, **options)))

    async def _send(self, call: Call[T]) -> T:
        retrying = AsyncRetrying(retry=AGAIN, stop=call.stop(self._attempts), wait=wait_seconds, reraise=True)
        try:
            result: T = await retrying(self._attempt, call)
        except ContextUnknown:
            if call.whole is None:
                raise
            return await self._send(call.whole(call.seconds_left()))
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
    """One user with one history. `handle` names them as long as the service keeps them, and follows its replies."""

    def __init__(self, user_id: Id, history: Sequence[Event], kept: Kept) -> None:
        self.user_id, self.history = user_id, history
        self.handle = kept.context
        self.history_used, self.history_dropped = kept.history_used, kept.history_dropped

    def _named(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"context": self.handle or None, **options}

    def _noted(self, reply: S) -> S:
        self.handle = reply.context or self.handle
        return reply


class Context(_Known):
    """What `RankerClient.context` gives: calls of the client for this user and history, which are sent only where the service does not
    know them any more. Arguments, results and errors are the client's."""

    def __init__(self, client: RankerClient, user_id: Id, history: Sequence[Event], kept: Kept) -> None:
        super().__init__(user_id, history, kept)
        self._client = client

    def rank(self, candidates: Sequence[Candidate], **options: Any) -> Ranking:
        """As `RankerClient.rank`."""
        return self._noted(self._client.rank(self.user_id, candidates, self.history, **self._named(options)))

    def explain(self, candidates: Sequence[Candidate], explain: Sequence[Id], **options: Any) -> Explanation:
        """As `RankerClient.explain`."""
        options = self._named(options)
        return self._noted(self._client.explain(self.user_id, candidates, explain, self.history, **options))

    def retrieve(self, **options: Any) -> Retrieval:
        """As `RankerClient.retrieve`."""
        return self._client.retrieve(self.user_id, self.history, **self._named(options))

    def recommend(self, **options: Any) -> Recommendation:
        """As `RankerClient.recommend`."""
        return self._noted(self._client.recommend(self.user_id, self.history, **self._named(options)))


class AsyncContext(_Known):
    """`Context` for asyncio."""

    def __init__(self, client: AsyncRankerClient, user_id: Id, history: Sequence[Event], kept: Kept) -> None:
        super().__init__(user_id, history, kept)
        self._client = client

    async def rank(self, candidates: Sequence[Candidate], **options: Any) -> Ranking:
        """As `RankerClient.rank`."""
        return self._noted(await self._client.rank(self.user_id, candidates, self.history, **self._named(options)))

    async def explain(self, candidates: Sequence[Candidate], explain: Sequence[Id], **options: Any) -> Explanation:
        """As `RankerClient.explain`."""
        options = self._named(options)
        return self._noted(await self._client.explain(self.user_id, candidates, explain, self.history, **options))

    async def retrieve(self, **options: Any) -> Retrieval:
        """As `RankerClient.retrieve`."""
        return await self._client.retrieve(self.user_id, self.history, **self._named(options))

    async def recommend(self, **options: Any) -> Recommendation:
        """As `RankerClient.recommend`."""
        return self._noted(await self._client.recommend(self.user_id, self.history, **self._named(options)))
