"""The blocking client. Its connections are httpx's."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from netrc import NetrcParseError
from typing import Any, Concatenate, ParamSpec

import httpx
from tenacity import Retrying

from phoenix_ranker_client.call import AGAIN, Call, T, wait_seconds
from phoenix_ranker_client.calls import MAX_CONNECTIONS, Calls
from phoenix_ranker_client.messages import ContextUnknown

P = ParamSpec("P")
LIMITS = httpx.Limits(max_connections=MAX_CONNECTIONS, max_keepalive_connections=64)


def _blocking(build: Callable[Concatenate[Calls, P], Call[T]]) -> Callable[Concatenate[RankerClient, P], T]:
    """A method that builds a call and sends it."""

    @functools.wraps(build)
    def method(self: RankerClient, /, *arguments: P.args, **named: P.kwargs) -> T:
        self._open()
        return self._send(build(self._calls, *arguments, **named))

    return method


class RankerClient:
    """Blocking. Safe to share between threads, and to use after a fork; close it, or use it in `with`.

    `attempts` includes the first one. `routing_secret` keys the hash of user ids that proxies see. The environment's proxies, certificates
    and `.netrc` are not used unless `trust_env`; `api_key` goes before a password in `.netrc`. `http` is a client of your own, whose
    connections stay yours. Pickled and copied clients open connections of their own. Raises ValueError for an argument that cannot be
    used.
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
        self._opened: dict[int, httpx.Client] = {}
        """By process: after a fork, replies on a shared connection would go to either."""
        self._open()

    context = _blocking(Calls.context)
    rank = _blocking(Calls.rank)
    rank_batch = _blocking(Calls.rank_batch)
    explain = _blocking(Calls.explain)
    retrieve = _blocking(Calls.retrieve)
    recommend = _blocking(Calls.recommend)

    def _open(self) -> None:
        """Make what holds the connections before a deadline begins: reading the certificates takes tenths of a second."""
        with suppress(httpx.InvalidURL, ValueError, ImportError):  # the call says so, with its name
            self._http()

    def _http(self) -> httpx.Client:
        if self._own is not None:
            return self._own
        if (process := os.getpid()) not in self._opened:
            auth = _netrc() if self._trust_env and not self._calls.has_user else None
            self._opened[process] = httpx.Client(limits=LIMITS, trust_env=self._trust_env, auth=auth)
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
        timeouts = _timeouts(call)
        extensions = {"timeout": timeouts, "trace": lambda event, info: timeouts.update(_timeouts(call))}
        headers = call.headers()
        auth = None if "authorization" in headers else httpx.USE_CLIENT_DEFAULT
        with _errors_of(call, trust_env=self._trust_env):
            http = self._http()
            request = http.build_request("POST", call.url, content=call.body, headers=headers, extensions=extensions)
            response = http.send(request, stream=True, auth=auth, follow_redirects=False)
            try:
                content = _until_deadline(call, response.iter_bytes())
            finally:
                response.close()
        return call.result(response.status_code, response.headers, content)

    def close(self) -> None:
        """Close the connections."""
        if (opened := self._opened.pop(os.getpid(), None)) is not None:
            opened.close()

    def __enter__(self) -> RankerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._own is not None:
            raise TypeError("a RankerClient with an HTTP client of your own cannot be pickled or copied")
        return self.__dict__ | {"_opened": {}}


def _netrc() -> httpx.NetRCAuth | None:
    """The users and passwords of the file that NETRC names, else of `~/.netrc`; None where there is none that can be read."""
    try:
        return httpx.NetRCAuth(os.environ.get("NETRC"))
    except OSError:
        return None
    except NetrcParseError as error:  # its text may quote a password
        logging.getLogger(__name__).warning("%s is ignored: line %s cannot be read", error.filename, error.lineno)
        return None


def _timeouts(call: Call[Any]) -> dict[str, float]:
    """The seconds left, for each step of an attempt, as httpx's extension `timeout`."""
    return dict.fromkeys(("connect", "read", "write", "pool"), call.seconds_to_wait())


def _until_deadline(call: Call[Any], chunks: Iterator[bytes]) -> bytes:
    """Read a reply until the deadline: a timeout of httpx bounds each read, not their sum. Raises DeadlineExceeded."""
    body = bytearray()
    for chunk in chunks:
        body += chunk
        if call.seconds_to_wait() <= 0.001:
            raise call.no_reply()
    return bytes(body)


@contextmanager
def _errors_of(call: Call[Any], *, trust_env: bool) -> Iterator[None]:
    """Turn httpx's errors into RankerErrors that name the ranker."""
    try:
        yield
    except httpx.ProxyError as error:
        raise call.not_reached(error, " by the proxy of the HTTP client") from error
    except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
        by = ", perhaps because of a proxy that the environment names" if trust_env else ""
        raise call.not_reached(error, by) from error
    except httpx.TimeoutException as error:
        raise call.no_reply() from error
    except (httpx.InvalidURL, ValueError, ImportError) as error:  # it may quote a piece of a password
        raise call.unusable_address(trust_env=trust_env) from error
    except httpx.HTTPError as error:
        raise call.failed(error) from error
