"""The clients, sync and async: connections and methods. What they share is in `call` and `messages`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import httpx
from tenacity import AsyncRetrying, Retrying

from phoenix_ranker_client.call import AGAIN, Call, Calls, T, Wire, wait_seconds
from phoenix_ranker_client.messages import Candidate, Event, Explanation, Id, RankerError, Ranking, RankingRequest
from phoenix_ranker_client.retrieval import Recommendation, Retrieval, RetrievalRequest

DEFAULT_TIMEOUT_SECONDS = 2.0
EXPLAIN_TIMEOUT_SECONDS = 10.0
DEFAULT_ATTEMPTS = 3
LIMITS = httpx.Limits(max_connections=256, max_keepalive_connections=64)


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

    def rank(
        self,
        user_id: Id,
        candidates: Sequence[Candidate],
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
        **options: Any,
    ) -> Ranking:
        """Rank one user's candidates; `options` are the other fields of RankingRequest. Raises RankerError."""
        request = RankingRequest(user_id, candidates, history, **options)
        return self._send(self._calls.rank(request, timeout_seconds, request_id))

    def rank_batch(
        self,
        requests: Sequence[RankingRequest],
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
    ) -> list[Ranking | RankerError]:
        """Rank several requests in one call; one that failed is its error. Raises RankerError when the whole call failed.

        The call goes where the first request's user is cached: put one user's requests together.
        """
        return self._send(self._calls.rank_batch(requests, timeout_seconds, request_id))

    def explain(
        self,
        user_id: Id,
        candidates: Sequence[Candidate],
        explain: Sequence[Id],
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = EXPLAIN_TIMEOUT_SECONDS,
        request_id: str | None = None,
        **options: Any,
    ) -> Explanation:
        """Why candidates stand where they stand: `explain` has post ids of some of them. As `rank` besides. Raises RankerError."""
        request = RankingRequest(user_id, candidates, history, **options)
        return self._send(self._calls.explain(request, explain, timeout_seconds, request_id))

    def retrieve(
        self,
        user_id: Id,
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
        **options: Any,
    ) -> Retrieval:
        """The best posts of the service's corpus; `options` are the other fields of RetrievalRequest. Raises RankerError."""
        request = RetrievalRequest(user_id, history, **options)
        return self._send(self._calls.retrieve(request, timeout_seconds, request_id))

    def recommend(
        self,
        user_id: Id,
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
        **options: Any,
    ) -> Recommendation:
        """The best posts of the service's corpus, ranked; as `retrieve`."""
        request = RetrievalRequest(user_id, history, **options)
        return self._send(self._calls.recommend(request, timeout_seconds, request_id))

    def _send(self, call: Call[T]) -> T:
        retrying = Retrying(retry=AGAIN, stop=call.stop(self._attempts), wait=wait_seconds, reraise=True)
        result: T = retrying(self._attempt, call)
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

    async def rank(
        self,
        user_id: Id,
        candidates: Sequence[Candidate],
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
        **options: Any,
    ) -> Ranking:
        """As `RankerClient.rank`."""
        request = RankingRequest(user_id, candidates, history, **options)
        return await self._send(self._calls.rank(request, timeout_seconds, request_id))

    async def rank_batch(
        self,
        requests: Sequence[RankingRequest],
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
    ) -> list[Ranking | RankerError]:
        """As `RankerClient.rank_batch`."""
        return await self._send(self._calls.rank_batch(requests, timeout_seconds, request_id))

    async def explain(
        self,
        user_id: Id,
        candidates: Sequence[Candidate],
        explain: Sequence[Id],
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = EXPLAIN_TIMEOUT_SECONDS,
        request_id: str | None = None,
        **options: Any,
    ) -> Explanation:
        """As `RankerClient.explain`."""
        request = RankingRequest(user_id, candidates, history, **options)
        return await self._send(self._calls.explain(request, explain, timeout_seconds, request_id))

    async def retrieve(
        self,
        user_id: Id,
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
        **options: Any,
    ) -> Retrieval:
        """As `RankerClient.retrieve`."""
        request = RetrievalRequest(user_id, history, **options)
        return await self._send(self._calls.retrieve(request, timeout_seconds, request_id))

    async def recommend(
        self,
        user_id: Id,
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
        **options: Any,
    ) -> Recommendation:
        """As `RankerClient.recommend`."""
        request = RetrievalRequest(user_id, history, **options)
        return await self._send(self._calls.recommend(request, timeout_seconds, request_id))

    async def _send(self, call: Call[T]) -> T:
        retrying = AsyncRetrying(retry=AGAIN, stop=call.stop(self._attempts), wait=wait_seconds, reraise=True)
        result: T = await retrying(self._attempt, call)
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
