"""The clients, blocking and for asyncio. Both take their methods from `Calls`, which builds what is sent."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import httpx
from tenacity import AsyncRetrying, Retrying

from phoenix_ranker_client.call import AGAIN, Call, T, wait_seconds
from phoenix_ranker_client.messages import (
    Candidate,
    ContextRequest,
    ContextUnknown,
    Event,
    Explanation,
    Id,
    RankerError,
    Ranking,
    RankingRequest,
    Recommendation,
    Request,
    Retrieval,
    RetrievalRequest,
    error_from,
)

P = ParamSpec("P")
C = TypeVar("C")
LIMITS = httpx.Limits(max_connections=256, max_keepalive_connections=64)
TIMEOUT_SECONDS = 2.0
EXPLAIN_TIMEOUT_SECONDS = 10.0


def routing_key(user_id: Id, secret: bytes = b"") -> str:
    """The value of X-Routing-Key: BLAKE2b of the decimal id, 16 hex digits, keyed by the secret (at most 64 bytes) where there is one.

    7 and "7" are one user. All clients of one deployment must use the same secret.
    """
    sent = str(user_id).encode(errors="surrogatepass")  # what is no id is for the service to refuse
    return hashlib.blake2b(sent, digest_size=8, key=secret).hexdigest()


class Calls:
    """Builds the calls of one client. `options` of a method are the further fields of its request."""

    def __init__(self, base_url: str, api_key: str | None, routing_secret: bytes) -> None:
        if api_key is not None and not re.fullmatch("[!-~]([ -~]*[!-~])?", api_key):
            raise ValueError("api_key must be printable ASCII without white space around it, such as a line's end")
        self._base_url, self._secret = base_url.rstrip("/"), routing_secret
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}

    def context(
        self,
        /,
        user_id: Id,
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        request_id: str | None = None,
    ) -> Call[str]:
        """Have the service compute user and history ahead; returns their handle, empty if it keeps nothing of this size."""
        request = ContextRequest(user_id, history)
        return self._call("context", request, lambda body: str(body.get("context", "")), timeout_seconds, request_id)

    def rank(
        self,
        /,
        user_id: Id,
        candidates: Sequence[Candidate],
        history: Sequence[Event] | None = None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        request_id: str | None = None,
        **options: Any,
    ) -> Call[Ranking]:
        """Rank one user's candidates. Raises RankerError."""
        request = RankingRequest(user_id, candidates, history, **options)
        return self._call("rank", request, Ranking.from_json, timeout_seconds, request_id)

    def rank_batch(
        self,
        /,
        requests: Sequence[RankingRequest],
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        request_id: str | None = None,
    ) -> Call[list[Ranking | RankerError]]:
        """Rank several requests in one call; a failed request gives its error. Raises RankerError when the whole call failed.

        Requests that have a history are sent whole. A proxy routes the call by its first user: put one user's requests together.
        """
        body = {"requests": [request.to_json(whole=request.history is not None) for request in requests]}

        def parse(reply: Any) -> list[Ranking | RankerError]:
            results = reply["results"]
            return [
                error_from(each["error"]["status"], each["error"], "") if "error" in each else Ranking.from_json(each)
                for each in results
            ]

        headers = self._headers | (
            {"x-routing-key": routing_key(requests[0].user_id, self._secret)} if requests else {}
        )
        return Call(f"{self._base_url}/rank/batch", body, parse, timeout_seconds, request_id, headers)

    def explain(
        self,
        /,
        user_id: Id,
        candidates: Sequence[Candidate],
        explain: Sequence[Id],
        history: Sequence[Event] | None = None,
        *,
        timeout_seconds: float = EXPLAIN_TIMEOUT_SECONDS,
        request_id: str | None = None,
        **options: Any,
    ) -> Call[Explanation]:
        """Explain the ranks of some candidates: `explain` lists their post ids. Raises RankerError."""
        request = RankingRequest(user_id, candidates, history, explain=explain, **options)
        return self._call("explain", request, Explanation.from_json, timeout_seconds, request_id)

    def retrieve(
        self,
        /,
        user_id: Id,
        history: Sequence[Event] | None = None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        request_id: str | None = None,
        at_least: int | str | None = None,
        **options: Any,
    ) -> Call[Retrieval]:
        """The best posts of the service's corpus. `at_least`: a sequence of the corpus, or a position of its feed, that the reply must
        include; a replica that is behind is asked again. Raises RankerError."""
        request = RetrievalRequest(user_id, history, **options)
        return self._call("retrieve", request, Retrieval.from_json, timeout_seconds, request_id, at_least)

    def recommend(
        self,
        /,
        user_id: Id,
        history: Sequence[Event] | None = None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        request_id: str | None = None,
        at_least: int | str | None = None,
        **options: Any,
    ) -> Call[Recommendation]:
        """The best posts of the service's corpus, ranked. Raises RankerError."""
        request = RetrievalRequest(user_id, history, **options)
        return self._call("recommend", request, Recommendation.from_json, timeout_seconds, request_id, at_least)

    def _call(
        self,
        path: str,
        request: Request,
        parse: Callable[[Any], C],
        timeout_seconds: float,
        request_id: str | None,
        at_least: int | str | None = None,
    ) -> Call[C]:
        headers = self._headers | {"x-routing-key": routing_key(request.user_id, self._secret)}
        if at_least is not None:
            headers["x-corpus-at-least"] = str(at_least)
        whole = request.to_json(whole=True) if request.context and request.history is not None else None
        return Call(f"{self._base_url}/{path}", request.to_json(), parse, timeout_seconds, request_id, headers, whole)


def _blocking(build: Callable[Concatenate[Calls, P], Call[T]]) -> Callable[Concatenate[RankerClient, P], T]:
    """A method that builds a call and sends it."""

    @functools.wraps(build)
    def method(self: RankerClient, /, *arguments: P.args, **named: P.kwargs) -> T:
        return self._send(build(self._calls, *arguments, **named))

    return method


def _awaited(
    build: Callable[Concatenate[Calls, P], Call[T]],
) -> Callable[Concatenate[AsyncRankerClient, P], Coroutine[Any, Any, T]]:
    """The same for asyncio."""

    @functools.wraps(build)
    async def method(self: AsyncRankerClient, /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._send(build(self._calls, *arguments, **named))

    return method


class RankerClient:
    """Blocking. Safe to share between threads, and to use after a fork; close it, or use it in `with`.

    `attempts` includes the first one. `routing_secret` keys the hash of user ids that proxies see. The environment's proxies and
    certificates are not used unless `trust_env`; `http` is a client of your own, whose connections stay yours.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        attempts: int = 3,
        routing_secret: bytes = b"",
        trust_env: bool = False,
        http: httpx.Client | None = None,
    ) -> None:
        self._calls, self._attempts = Calls(base_url, api_key, routing_secret), attempts
        self._own, self._trust_env = http, trust_env
        self._opened: dict[
            int, httpx.Client
        ] = {}  # by process: after a fork, replies on a shared connection would go to either

    context = _blocking(Calls.context)
    rank = _blocking(Calls.rank)
    rank_batch = _blocking(Calls.rank_batch)
    explain = _blocking(Calls.explain)
    retrieve = _blocking(Calls.retrieve)
    recommend = _blocking(Calls.recommend)

    def _http(self) -> httpx.Client:
        if self._own is not None:
            return self._own
        if (process := os.getpid()) not in self._opened:
            self._opened[process] = httpx.Client(limits=LIMITS, trust_env=self._trust_env)
        return self._opened[process]

    def _send(self, call: Call[T]) -> T:
        retrying = Retrying(retry=AGAIN, stop=call.stop(self._attempts), wait=wait_seconds, reraise=True)
        try:
            result: T = retrying(self._attempt, call)
            return result
        except ContextUnknown:
            if not call.send_whole():
                raise
        return self._send(call)

    def _attempt(self, call: Call[T]) -> T:
        with call.errors(trust_env=self._trust_env):
            http = self._http()
            request = call.request(http)
            timeouts = request.extensions["timeout"]
            request.extensions["trace"] = lambda event, info: timeouts.update(call.timeouts())  # before each step
            response = http.send(request, stream=True)
            try:
                return call.result(response, call.until_deadline(response.iter_bytes()))
            finally:
                response.close()

    def close(self) -> None:
        """Close the connections."""
        if (opened := self._opened.pop(os.getpid(), None)) is not None:
            opened.close()

    def __enter__(self) -> RankerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Opened(NamedTuple):
    """The connections of one event loop in one process, and the generator that closes them."""

    process: int
    http: httpx.AsyncClient
    end: AsyncGenerator[None, None]


class AsyncRankerClient:
    """For asyncio. It may be used in several event loops, one after the other or at once: each has connections of its own, which end with
    it. To close them earlier, call `close` in that loop, or use it in `async with`. Cancelling a call closes its connection, which the
    service notices. Its arguments mean what they mean for RankerClient.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        attempts: int = 3,
        routing_secret: bytes = b"",
        trust_env: bool = False,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._calls, self._attempts = Calls(base_url, api_key, routing_secret), attempts
        self._own, self._trust_env = http, trust_env
        self._opened: dict[asyncio.AbstractEventLoop, Opened] = {}

    context = _awaited(Calls.context)
    rank = _awaited(Calls.rank)
    rank_batch = _awaited(Calls.rank_batch)
    explain = _awaited(Calls.explain)
    retrieve = _awaited(Calls.retrieve)
    recommend = _awaited(Calls.recommend)

    async def _http(self) -> httpx.AsyncClient:
        if self._own is not None:
            return self._own
        loop = asyncio.get_running_loop()
        opened = self._opened.get(loop)
        if opened is None or opened.process != os.getpid():
            for other in [*self._opened]:
                if other.is_closed():  # without an orderly end
                    self._opened.pop(other, None)
            http = httpx.AsyncClient(limits=LIMITS, trust_env=self._trust_env)
            opened = self._opened[loop] = Opened(os.getpid(), http, self._close_at_the_end_of(loop, http))
            await anext(opened.end)
        return opened.http

    async def _close_at_the_end_of(
        self, loop: asyncio.AbstractEventLoop, http: httpx.AsyncClient
    ) -> AsyncGenerator[None, None]:
        """Once it has begun, an event loop that ends finishes it, as every asynchronous generator that is left."""
        try:
            yield
        finally:
            self._opened.pop(loop, None)
            await http.aclose()

    async def _send(self, call: Call[T]) -> T:
        retrying = AsyncRetrying(retry=AGAIN, stop=call.stop(self._attempts), wait=wait_seconds, reraise=True)
        try:
            result: T = await retrying(self._attempt, call)
            return result
        except ContextUnknown:
            if not call.send_whole():
                raise
        return await self._send(call)

    async def _attempt(self, call: Call[T]) -> T:
        with call.errors(trust_env=self._trust_env):
            http = await self._http()
            request = call.request(http)
            async with asyncio.timeout(request.extensions["timeout"]["read"]):
                response = await http.send(request)
            return call.result(response, response.content)

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        if (opened := self._opened.get(asyncio.get_running_loop())) is not None:
            await opened.end.aclose()

    async def __aenter__(self) -> AsyncRankerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
