"""The clients themselves, sync and async: connections and methods. What they share is in `call` and `messages`."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from app.client.call import Call
from app.client.messages import Candidate, Event, Id, RankerError, Ranking, RankingRequest, batch_results

DEFAULT_TIMEOUT_SECONDS = 2.0
DEFAULT_ATTEMPTS = 3
LIMITS = httpx.Limits(max_connections=256, max_keepalive_connections=64)


class RankerClient:
    """Blocking. Safe to share between threads; close it, or use it in `with`."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        attempts: int = DEFAULT_ATTEMPTS,
        http: httpx.Client | None = None,
    ) -> None:
        self._http = http or httpx.Client(limits=LIMITS)
        self._base_url, self._api_key, self._attempts = base_url, api_key, attempts

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
        return Ranking.from_json(self._post("/rank", request.to_json(), timeout_seconds, request_id))

    def rank_batch(
        self,
        requests: Sequence[RankingRequest],
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
    ) -> list[Ranking | RankerError]:
        """Rank several requests in one call; one that failed is its error. Raises RankerError when the whole call failed."""
        body = {"requests": [request.to_json() for request in requests]}
        reply = self._post("/rank/batch", body, timeout_seconds, request_id)
        return batch_results(reply)

    def _post(self, path: str, body: dict[str, Any], timeout_seconds: float, request_id: str | None) -> Any:
        call = Call(self._base_url + path, body, timeout_seconds, request_id, self._api_key)
        for attempt in call.attempts(self._attempts):
            with attempt, call.errors():
                return call.result(self._http.send(call.request(self._http)))
        raise AssertionError  # stamina raises the last error instead of coming here

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncRankerClient:
    """For asyncio; close it, or use it in `async with`. Cancelling a call closes its connection, which the service notices."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        attempts: int = DEFAULT_ATTEMPTS,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._http = http or httpx.AsyncClient(limits=LIMITS)
        self._base_url, self._api_key, self._attempts = base_url, api_key, attempts

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
        return Ranking.from_json(await self._post("/rank", request.to_json(), timeout_seconds, request_id))

    async def rank_batch(
        self,
        requests: Sequence[RankingRequest],
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
    ) -> list[Ranking | RankerError]:
        """As `RankerClient.rank_batch`."""
        body = {"requests": [request.to_json() for request in requests]}
        reply = await self._post("/rank/batch", body, timeout_seconds, request_id)
        return batch_results(reply)

    async def _post(self, path: str, body: dict[str, Any], timeout_seconds: float, request_id: str | None) -> Any:
        call = Call(self._base_url + path, body, timeout_seconds, request_id, self._api_key)
        async for attempt in call.attempts(self._attempts):
            with attempt, call.errors():
                return call.result(await self._http.send(call.request(self._http)))
        raise AssertionError  # stamina raises the last error instead of coming here

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
