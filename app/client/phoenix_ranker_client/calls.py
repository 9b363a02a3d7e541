"""Builds the calls that both clients send, blocking and for asyncio: one method for each endpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from phoenix_ranker_client.call import HEADER_VALUE, Call
from phoenix_ranker_client.encoding import Unsendable
from phoenix_ranker_client.messages import (
    Candidate,
    ContextRequest,
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

C = TypeVar("C")
TIMEOUT_SECONDS = 2.0
EXPLAIN_TIMEOUT_SECONDS = 10.0
MAX_CONNECTIONS = 256


def routing_key(user_id: Id, secret: bytes = b"") -> str:
    """The value of X-Routing-Key: BLAKE2b of the decimal id, 16 hex digits, keyed by the secret (at most 64 bytes) where there is one.

    7 and "7" are one user, and so are a member of an enumeration and its value. All clients of one deployment must use the same secret.
    """
    plain = user_id.value if isinstance(user_id, Enum) else user_id
    sent = str(plain).encode(errors="surrogatepass")  # what is no id is for the service to refuse
    return hashlib.blake2b(sent, digest_size=8, key=secret).hexdigest()


class Calls:
    """Builds the calls of one client. `options` of a method are the further fields of its request."""

    def __init__(self, base_url: str, api_key: str | None, routing_secret: bytes) -> None:
        """Raises ValueError, which names the argument and does not show it."""
        if api_key is not None and not HEADER_VALUE.fullmatch(api_key):
            raise ValueError("api_key must be printable ASCII without white space around it, such as a line's end")
        try:
            routing_key(0, routing_secret)
        except (TypeError, ValueError):
            raise ValueError("routing_secret must be at most 64 bytes, as a bytes object") from None
        self._base_url, self._secret = _address(base_url), routing_secret
        self.has_user = "@" in urlsplit(self._base_url).netloc
        """Whether the address has a user, and perhaps a password."""
        if self.has_user and api_key is not None:
            raise ValueError("base_url must have no user and password beside api_key: a call can show only one of them")
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
        return self._call("context", request, _handle, timeout_seconds, request_id)

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
        listed = list(requests) if isinstance(requests, Iterable) else []

        def body() -> dict[str, Any]:
            if not isinstance(requests, Iterable):
                raise Unsendable("requests", f"must be a sequence of RankingRequest, not a {type(requests).__name__}")
            for place, request in enumerate(listed):
                if not isinstance(request, RankingRequest):
                    raise Unsendable(f"requests[{place}]", f"must be a RankingRequest, not a {type(request).__name__}")
            return {"requests": [request.to_json(whole=request.history is not None) for request in listed]}

        def parse(reply: Any) -> list[Ranking | RankerError]:
            return [
                error_from(result["error"]["status"], result["error"], f"{reply['request_id']}/{place}")
                if "error" in result
                else Ranking.from_json(result)
                for place, result in enumerate(reply["results"])
            ]

        headers = self._headers
        if listed and isinstance(listed[0], RankingRequest):
            headers = headers | {"x-routing-key": routing_key(listed[0].user_id, self._secret)}
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
        at_least: int | str | bytes | None = None,
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
        at_least: int | str | bytes | None = None,
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
        at_least: int | str | bytes | None = None,
    ) -> Call[C]:
        headers = self._headers | {"x-routing-key": routing_key(request.user_id, self._secret)}
        if at_least is not None:
            position = at_least.decode() if isinstance(at_least, bytes) else at_least  # redis-py's xadd returns bytes
            headers["x-corpus-at-least"] = str(position)
        whole = partial(request.to_json, whole=True) if request.context and request.history is not None else None
        return Call(f"{self._base_url}/{path}", request.to_json, parse, timeout_seconds, request_id, headers, whole)


def _handle(body: Mapping[str, Any]) -> str:
    """The handle of a reply to /context, empty if the service keeps nothing. Raises LookupError for the reply of another service."""
    if not {"model", "history_used"} <= set(body):
        raise LookupError
    return str(body.get("context", ""))


def _address(base_url: str) -> str:
    """The address without a slash at its end. Raises ValueError, which does not show it: it may hold a password."""
    address = str(base_url).strip().rstrip("/")
    if not address.lower().startswith(("http://", "https://")):
        raise ValueError("base_url must begin with http:// or https://, as in http://ranker:8000")
    try:
        parts = urlsplit(address)
        is_usable = (
            bool(parts.hostname) and parts.port != 0 and not (parts.query or parts.fragment or "@" in parts.path)
        )
    except ValueError:  # a port that is no number, brackets that are not closed
        is_usable = False
    if not is_usable:
        raise ValueError("base_url must be a host, perhaps with a port and a path, as in http://ranker:8000")
    return address
