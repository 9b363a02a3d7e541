"""The calls of a client: path, body, headers, and what the reply means."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import httpx
import orjson

from phoenix_ranker_client import tensors
from phoenix_ranker_client.call import VERSION, Call
from phoenix_ranker_client.messages import (
    Candidate,
    ContextUnknown,
    Event,
    Explanation,
    Id,
    RankerError,
    Ranking,
    RankingRequest,
    RequestRefused,
    batch_results,
    user_of,
)
from phoenix_ranker_client.retrieval import Recommendation, Retrieval, RetrievalRequest

T = TypeVar("T")
P = ParamSpec("P")
Wire = Literal["json", "binary"]
Requests = Sequence[RankingRequest | RetrievalRequest]
DEFAULT_TIMEOUT_SECONDS = 2.0
EXPLAIN_TIMEOUT_SECONDS = 10.0
JSON = {"content-type": "application/json"}


def routing_key(user_id: Id, secret: bytes = b"") -> str:
    """The value of X-Routing-Key: BLAKE2b of the decimal id, 16 hex digits, keyed by the secret (at most 64 bytes) where there is one.

    7 and "7" are one user. All clients of one deployment must use the same secret.
    """
    sent = str(user_id).encode(errors="surrogatepass")  # what is no id is for the service to refuse
    return hashlib.blake2b(sent, digest_size=8, key=secret).hexdigest()


def _whole_where_unknown(make: Callable[Concatenate[Calls, P], Call[T]]) -> Callable[Concatenate[Calls, P], Call[T]]:
    """Let a call that sends a context handle also make the whole request, for when the service does not know the handle. A call that was
    given no history cannot: it fails with ContextUnknown."""
    place = list(inspect.signature(make).parameters).index("history")

    @functools.wraps(make)
    def method(self: Calls, /, *arguments: P.args, **named: P.kwargs) -> Call[T]:
        has_whole = "history" in named or len(arguments) >= place
        if has_whole and named.get("context") == "":  # of a reply whose context is not kept
            named["context"] = None
        call = make(self, *arguments, **named)
        if has_whole and named.get("context") is not None:
            rest = {"context": None, "request_id": call.request_id}
            call.make_whole = lambda seconds: make(self, *arguments, **{**named, **rest, "timeout_seconds": seconds})  # type: ignore[arg-type]
        return call

    return method


@dataclass(frozen=True)
class Calls:
    """Makes the calls of one client. Both clients, sync and async, take their methods from here."""

    base_url: str
    api_key: str | None = field(repr=False)
    routing_secret: bytes = field(repr=False)
    wire: Wire = "json"

    def __post_init__(self) -> None:
        if self.api_key is not None and not re.fullmatch("[!-~]([ -~]*[!-~])?", self.api_key):
            raise ValueError("api_key must be printable ASCII without white space around it, such as a line's end")

    def context(
        self,
        /,
        user_id: Id,
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
    ) -> Call[KnownCalls]:
        """Have the service compute user and history ahead. Raises RankerError."""
        request, known = RankingRequest(user_id, (), history), KnownCalls(self, user_id, history)
        call = self._json("context", user_of(request), [request], lambda body: known, timeout_seconds, request_id)
        call.known = known
        return call

    @_whole_where_unknown
    def rank(
        self,
        /,
        user_id: Id,
        candidates: Sequence[Candidate],
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
        **options: Any,
    ) -> Call[Ranking]:
        """Rank one user's candidates; `options` are the other fields of RankingRequest. Raises RankerError."""
        request = RankingRequest(user_id, candidates, history, **options)
        if self.wire == "json" or not tensors.can_carry(request):
            return self._json("rank", request.to_json(), [request], Ranking.from_json, timeout_seconds, request_id)
        request_id = request_id or uuid.uuid4().hex
        body, headers = _tensors(request, request_id)

        def parse(headers: httpx.Headers, content: bytes) -> Ranking:
            return tensors.read(request, headers, content)

        return self._call("rank", body, headers, [request], parse, timeout_seconds, request_id)

    def rank_batch(
        self,
        /,
        requests: Sequence[RankingRequest],
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
    ) -> Call[list[Ranking | RankerError]]:
        """Rank several requests in one call; a failed request gives its error. Raises RankerError when the whole call failed.

        The call goes to the process that caches the first request's user: put one user's requests together.
        """

        def sent(some: Sequence[RankingRequest], read: Callable[[Any], T], seconds: float, name: str | None) -> Call[T]:
            body = {"requests": [request.to_json() for request in some]}
            return self._json("rank/batch", body, some, read, seconds, name)

        def read(reply: dict[str, Any]) -> list[Ranking | RankerError]:
            results = batch_results(reply)
            unknown = {
                place: error
                for place, (error, request) in enumerate(zip(results, requests, strict=True))
                if isinstance(error, ContextUnknown) and request.history  # else it may not be the whole
            }
            if not unknown:
                return results
            whole = [replace(requests[place], context=None) for place in unknown]

            def merged(reply: dict[str, Any]) -> list[Ranking | RankerError]:
                found = dict(zip(unknown, batch_results(reply), strict=True))
                return [found.get(place, result) for place, result in enumerate(results)]

            call.make_whole = lambda seconds: sent(whole, merged, seconds, call.request_id)
            call.rest = lambda error: [error if place in unknown else result for place, result in enumerate(results)]
            raise next(iter(unknown.values()))

        call = sent(requests, read, timeout_seconds, request_id)
        return call

    @_whole_where_unknown
    def explain(
        self,
        /,
        user_id: Id,
        candidates: Sequence[Candidate],
        explain: Sequence[Id],
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = EXPLAIN_TIMEOUT_SECONDS,
        request_id: str | None = None,
        **options: Any,
    ) -> Call[Explanation]:
        """Explain the ranks of some candidates: `explain` lists their post ids. Otherwise as `rank`. Raises RankerError."""
        request = RankingRequest(user_id, candidates, history, **options)
        body = request.to_json() | {"explain": list(explain)}
        return self._json("explain", body, [request], Explanation.from_json, timeout_seconds, request_id)

    @_whole_where_unknown
    def retrieve(
        self,
        /,
        user_id: Id,
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
        at_least: int | str | None = None,
        **options: Any,
    ) -> Call[Retrieval]:
        """The best posts of the service's corpus; `options` are the other fields of RetrievalRequest. `at_least`: a sequence of the corpus,
        or a position of its feed, that the reply must include; a replica that is behind is asked again. Raises RankerError."""
        request, read = RetrievalRequest(user_id, history, **options), Retrieval.from_json
        return self._json("retrieve", request.to_json(), [request], read, timeout_seconds, request_id, at_least)

    @_whole_where_unknown
    def recommend(
        self,
        /,
        user_id: Id,
        history: Sequence[Event] = (),
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        request_id: str | None = None,
        at_least: int | str | None = None,
        **options: Any,
    ) -> Call[Recommendation]:
        """The best posts of the service's corpus, ranked; as `retrieve`."""
        request = RetrievalRequest(user_id, history, **options)
        read = Recommendation.from_json
        return self._json("recommend", request.to_json(), [request], read, timeout_seconds, request_id, at_least)

    def _json(
        self,
        path: str,
        body: dict[str, Any],
        requests: Requests,
        read: Callable[[Any], T],
        timeout_seconds: float,
        request_id: str | None,
        at_least: int | str | None = None,
    ) -> Call[T]:
        def parse(headers: httpx.Headers, content: bytes) -> T:
            return read(orjson.loads(content))

        request_id = request_id or uuid.uuid4().hex
        try:
            raw = orjson.dumps(body)
        except orjson.JSONEncodeError as error:
            raise RequestRefused(0, "invalid_request", f"The request is not JSON: {error}", request_id) from error
        headers = JSON if at_least is None else JSON | {"x-corpus-at-least": str(at_least)}
        return self._call(path, raw, headers, requests, parse, timeout_seconds, request_id)

    def _call(
        self,
        path: str,
        body: bytes,
        headers: dict[str, str],
        requests: Requests,
        parse: Callable[[httpx.Headers, bytes], T],
        timeout_seconds: float,
        request_id: str | None,
    ) -> Call[T]:
        """Build the call. A batch carries its first user's routing key: no process is the best one for all its users."""
        if self.api_key is not None:
            headers = headers | {"authorization": f"Bearer {self.api_key}"}
        if requests:
            headers = headers | {"x-routing-key": routing_key(requests[0].user_id, self.routing_secret)}
        return Call(f"{self.base_url.rstrip('/')}/{path}", body, parse, timeout_seconds, request_id, headers)


class KnownCalls:
    """Makes the calls for one user with one history, sending `handle` in their place, to the `version` of the model that keeps it. Each
    reply updates both; the handle is empty if the service keeps nothing of this size."""

    def __init__(self, calls: Calls, user_id: Id, history: Sequence[Event]) -> None:
        self.calls, self.user_id, self.history, self.handle, self.version = calls, user_id, history, "", ""

    def rank(self, /, candidates: Sequence[Candidate], **options: Any) -> Call[Ranking]:
        """As `Calls.rank`."""
        return self._noted(self.calls.rank(self.user_id, candidates, self.history, **self._named(options)))

    def explain(self, /, candidates: Sequence[Candidate], explain: Sequence[Id], **options: Any) -> Call[Explanation]:
        """As `Calls.explain`."""
        named = self._named(options)
        return self._noted(self.calls.explain(self.user_id, candidates, explain, self.history, **named))

    def retrieve(self, /, **options: Any) -> Call[Retrieval]:
        """As `Calls.retrieve`."""
        return self.calls.retrieve(self.user_id, self.history, **self._named(options))

    def recommend(self, /, **options: Any) -> Call[Recommendation]:
        """As `Calls.recommend`."""
        return self._noted(self.calls.recommend(self.user_id, self.history, **self._named(options)))

    def _named(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"context": self.handle or None, **options}

    def _noted(self, call: Call[T]) -> Call[T]:
        call.known = self
        if self.handle and self.version:
            call.headers[VERSION] = self.version
        return call


def _tensors(request: RankingRequest, request_id: str) -> tuple[bytes, dict[str, str]]:
    try:
        return tensors.write(request)
    except (ValueError, TypeError, OverflowError, AttributeError) as error:
        raise RequestRefused(0, "invalid_request", f"The request fits no tensors: {error}", request_id) from error
