"""The client for asyncio. Its connections are aiohttp's, which takes a quarter of the processor time that httpx's would."""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from tenacity import AsyncRetrying

from phoenix_ranker_client.call import AGAIN, Call, T, wait_seconds
from phoenix_ranker_client.calls import MAX_CONNECTIONS, Calls
from phoenix_ranker_client.messages import ContextUnknown

P = ParamSpec("P")


def _awaited(
    build: Callable[Concatenate[Calls, P], Call[T]],
) -> Callable[Concatenate[AsyncRankerClient, P], Coroutine[Any, Any, T]]:
    """A method that builds a call and sends it."""

    @functools.wraps(build)
    async def method(self: AsyncRankerClient, /, *arguments: P.args, **named: P.kwargs) -> T:
        return await self._send(build(self._calls, *arguments, **named))

    return method


class Opened(NamedTuple):
    """The connections of one event loop in one process, and the generator that closes them."""

    process: int
    http: aiohttp.ClientSession
    end: AsyncGenerator[None, None]


class AsyncRankerClient:
    """For asyncio. It may be used in several event loops, one after the other or at once: each has connections of its own, which end with
    it. To close them earlier, call `close` in that loop, or use it in `async with`. Cancelling a call closes its connection, which the
    service notices. `http` is a session of your own. The other arguments mean what they mean for RankerClient.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        attempts: int = 3,
        routing_secret: bytes = b"",
        trust_env: bool = False,
        http: aiohttp.ClientSession | None = None,
    ) -> None:
        self._calls, self._attempts = Calls(base_url, api_key, routing_secret), attempts
        self._own, self._trust_env = http, trust_env
        self._finds_proxies = trust_env and http is None and api_key is not None
        """aiohttp's `trust_env` reads `.netrc` too, and refuses a call that has a key beside what it finds there."""
        self._opened: dict[asyncio.AbstractEventLoop, Opened] = {}

    context = _awaited(Calls.context)
    rank = _awaited(Calls.rank)
    rank_batch = _awaited(Calls.rank_batch)
    explain = _awaited(Calls.explain)
    retrieve = _awaited(Calls.retrieve)
    recommend = _awaited(Calls.recommend)

    async def _http(self) -> aiohttp.ClientSession:
        if self._own is not None:
            return self._own
        loop = asyncio.get_running_loop()
        opened = self._opened.get(loop)
        if opened is None or opened.process != os.getpid():
            for other in [*self._opened]:
                if other.is_closed():  # without an orderly end
                    self._opened.pop(other, None)
            http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
                cookie_jar=aiohttp.DummyCookieJar(),  # a cookie would send every user to the server of one
                trust_env=self._trust_env and not self._finds_proxies,
            )
            opened = self._opened[loop] = Opened(os.getpid(), http, self._close_at_the_end_of(loop, http))
            await anext(opened.end)
        return opened.http

    async def _close_at_the_end_of(
        self, loop: asyncio.AbstractEventLoop, http: aiohttp.ClientSession
    ) -> AsyncGenerator[None, None]:
        """Once it has begun, an event loop that ends finishes it, as every asynchronous generator that is left."""
        try:
            yield
        finally:
            self._opened.pop(loop, None)
            await http.close()

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
        headers = call.headers()
        timeout = aiohttp.ClientTimeout(total=call.seconds_to_wait(), ceil_threshold=math.inf)
        with _errors_of(call, trust_env=self._trust_env):
            http = await self._http()
            async with http.post(
                call.url,
                data=call.body,
                headers=headers,
                proxy=_proxy(call.url) if self._finds_proxies else None,
                timeout=timeout,
                allow_redirects=False,
                raise_for_status=False,  # a session of your own may raise errors of its own
            ) as response:
                content = await response.read()
        return call.result(response.status, response.headers, content)

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        if (opened := self._opened.get(asyncio.get_running_loop())) is not None:
            await opened.end.aclose()

    async def __aenter__(self) -> AsyncRankerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._own is not None:
            raise TypeError("an AsyncRankerClient with a session of your own cannot be pickled or copied")
        return self.__dict__ | {"_opened": {}}


def _proxy(url: str) -> str | None:
    """The proxy that the environment names for this address, if any."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)


@contextmanager
def _errors_of(call: Call[Any], *, trust_env: bool) -> Iterator[None]:
    """Turn aiohttp's errors into RankerErrors that name the ranker."""
    try:
        yield
    except TimeoutError as error:  # aiohttp's own among them
        raise call.no_reply() from error
    except (aiohttp.ClientProxyConnectionError, aiohttp.ClientHttpProxyError) as error:
        raise call.not_reached(error, " by the proxy of the environment or of the session") from error
    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, aiohttp.ClientResponseError, OSError) as error:
        by = ", perhaps because of a proxy that the environment names" if trust_env else ""
        raise call.not_reached(error, by) from error
    except ValueError as error:  # aiohttp.InvalidURL among them; it may quote a piece of a password
        raise call.unusable_address(trust_env=trust_env) from error
    except aiohttp.ClientError as error:
        raise call.failed(error) from error
