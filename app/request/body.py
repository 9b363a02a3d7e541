"""Bytes → typed bodies: the types, required fields, unknown fields and bounds of a request are checked while its JSON is read.

What is wrong with one that does not fit its type is said by `explain`. Ids in range, known names and equal lengths are left to
`validate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Raw, Struct

from app.errors import MAX_PROBLEMS, InvalidRequest, MalformedJson, TooLarge
from app.request.explain import Problem, Rule, explain, object_of, once, required_of, rules_of, struct_rule
from app.request.schema import DEFAULT_K, ExplainRequest, RankRequest, RecommendRequest, RetrieveRequest, UserRequest
from app.request.strict_json import parse, refuse_duplicates
from app.request.vocabulary import Vocabulary
from app.settings import Limits


class Typed(Protocol):
    """What a wire makes of bytes before a place in the queue is asked for: how much work it is, not whether it is right."""

    @property
    def timeout_seconds(self) -> float | None:
        """How long the caller waits, where the body says it."""
        ...

    @property
    def reply(self) -> Any:
        """As in `Request`; UNSET is the same as objects."""
        ...

    @property
    def user_id(self) -> int | str:
        """As it was sent: it may still be none."""
        ...

    def count(self, name: str) -> int:
        """Items of `candidates` or `history`."""
        ...


SHORT_BYTES = 2**14  # nothing in a body of that length is slow

T = TypeVar("T")
_RANK, _EXPLAIN = msgspec.json.Decoder(RankRequest), msgspec.json.Decoder(ExplainRequest)
_POSTS = msgspec.json.Decoder(RetrieveRequest), msgspec.json.Decoder(RecommendRequest)
_ENCODER = msgspec.json.Encoder()


def decode(body: bytes | bytearray, limits: Limits, vocabulary: Vocabulary) -> RankRequest:
    """The typed body, with no more candidates and history than the limits allow.

    Raises MalformedJson, TooLarge or InvalidRequest. What takes too long to read is refused before it is read.
    """
    check_cost(body, limits.max_values)
    typed = read(_RANK, body, lambda: request_rule(vocabulary))
    refuse_long(typed, limits)
    return typed


def decode_explain(
    body: bytes | bytearray, limits: Limits, most_explained: int, vocabulary: Vocabulary
) -> ExplainRequest:
    """As `decode`, with no more candidates to explain than that."""
    check_cost(body, limits.max_values)
    typed = read(_EXPLAIN, body, lambda: explanation_rule(vocabulary))
    refuse_long(typed, limits)
    if len(typed.explain) > most_explained:
        raise TooLarge(f"explain: {len(typed.explain)} items, and at most {most_explained} are taken.")
    return typed


def decode_posts(
    body: bytes | bytearray, limits: Limits, vocabularies: Sequence[Vocabulary]
) -> RetrieveRequest | RecommendRequest:
    """As `decode`. `vocabularies`: of the retrieval model, and of the ranker where the posts are to be ranked."""
    check_cost(body, limits.max_values)
    decoder: Any = _POSTS[len(vocabularies) > 1]
    typed: RetrieveRequest | RecommendRequest = read(decoder, body, lambda: retrieval_rule(vocabularies))
    refuse_many(typed, typed.count("history"), limits)
    return typed


def refuse_many(wishes: Any, events: int, limits: Limits) -> None:
    """Raise TooLarge for more posts, or more items of the history, than the limits allow."""
    for name, count, limit in (
        ("history", events, limits.max_history),
        ("exclude", len(wishes.exclude or ()), limits.max_excluded),
    ):
        if count > limit:
            raise TooLarge(f"{name}: {count} items, and at most {limit} are taken.")
    if (wishes.k or DEFAULT_K) > limits.max_retrieved:
        raise TooLarge(f"k: at most {limits.max_retrieved} posts are retrieved.")


def request_rule(vocabulary: Vocabulary) -> Rule:
    """Of a request to rank."""
    return struct_rule(RankRequest, vocabulary)


def explanation_rule(vocabulary: Vocabulary) -> Rule:
    """Of a request for an explanation: those to explain must be among the candidates."""
    request = struct_rule(ExplainRequest, vocabulary)

    def problems(value: Any) -> Sequence[Problem]:
        if found := request.problems(value):
            return found
        candidates = value["candidates"]
        posts = candidates["post_id"] if type(candidates) is dict else [post["post_id"] for post in candidates]
        known = set(map(int, posts))
        unknown = (place for place, post in enumerate(value["explain"]) if int(post) not in known)
        return [(f".explain[{place}]", "must be the post_id of a candidate") for place in islice(unknown, MAX_PROBLEMS)]

    return once(problems)


def retrieval_rule(vocabularies: Sequence[Vocabulary]) -> Rule:
    """Of a request for posts. The history must make sense to every vocabulary; a second one is the ranker's, which knows the weights."""
    ranker = vocabularies[-1]
    asked = rules_of(RecommendRequest if len(vocabularies) > 1 else RetrieveRequest, ranker)
    rules = [object_of(asked | rules_of(UserRequest, words), required_of(UserRequest)) for words in vocabularies]

    def problems(value: Any) -> Sequence[Problem]:
        for rule in rules:
            if found := rule.problems(value):
                return found
        if "max_age_seconds" in value and not value.get("impression_ts"):
            return [(".max_age_seconds", "needs impression_ts, from which ages are counted")]
        return ()

    return once(problems)


def read(decoder: msgspec.json.Decoder[T], body: bytes | bytearray, rule: Callable[[], Rule]) -> T:
    """The typed value of strict JSON. Raises MalformedJson, or InvalidRequest as the rule explains it."""
    try:
        typed = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise explain(parse(body), rule()) from None
    refuse_duplicates(body, _ENCODER.encode(typed))
    return typed


def refuse_long(typed: Typed, limits: Limits) -> None:
    """Raise TooLarge for more items than the limits allow."""
    for name, limit in (("candidates", limits.max_candidates), ("history", limits.max_history)):
        if (count := typed.count(name)) > limit:
            raise TooLarge(f"{name}: {count} items, and at most {limit} are taken.")


def check_cost(body: bytes | bytearray, max_values: int) -> None:
    """Refuse what is slow to read, by its bytes alone. Raises TooLarge or InvalidRequest.

    Values are counted by the bytes that begin, separate or escape them. Integers are read in quadratic time.
    """
    if len(body) > max_values and len(body) - len(body.translate(None, b",[{\\")) > max_values:
        raise TooLarge(f"The body holds more than {max_values} values.")
    if len(body) < SHORT_BYTES:
        return
    digits = np.frombuffer(body, np.uint64, len(body) // 8) & 0xF0F0F0F0F0F0F0F0 == 0x3030303030303030
    for step in (1, 2, 4, 8, 1):  # words of digits and colons, 17 in a row
        digits = digits[:-step] & digits[step:]
    if digits.any():
        raise InvalidRequest([("", "must hold no number of more than 128 digits")])


class BatchDecoder:
    """Splits a batch into the bytes of its requests, of which at most `limit` are taken."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Of an array that is longer than its struct the rest is skipped: a million items cost no objects.
        fields = [(f"item_{place}", Raw, UNSET) for place in range(limit + 1)]
        items = msgspec.defstruct("Items", fields, array_like=True)
        named = msgspec.defstruct("Named", [("requests", items)], forbid_unknown_fields=True)
        self._bare, self._named = msgspec.json.Decoder(items), msgspec.json.Decoder(named)

    def split(self, body: bytes | bytearray) -> tuple[list[bytes], bool]:
        """The JSON of each request, and whether they came as a bare array. Raises MalformedJson, InvalidRequest or TooLarge."""
        items, is_bare = self._read(body)
        found = [bytes(item) for item in msgspec.structs.astuple(items) if item is not UNSET] if items else []
        if not found:
            raise InvalidRequest([("requests", "must be a list of requests that is not empty, and nothing else")])
        if len(found) > self.limit:
            raise TooLarge(f"requests: at most {self.limit} are taken.")
        if not is_bare and body.count(b":") != 1 + sum(item.count(b":") for item in found):
            raise MalformedJson("The body has the key requests twice.")
        return found, is_bare

    def _read(self, body: bytes | bytearray) -> tuple[Struct | None, bool]:
        try:
            with suppress(msgspec.ValidationError):
                return self._named.decode(body).requests, False  # type: ignore[attr-defined]
            with suppress(msgspec.ValidationError):
                return self._bare.decode(body), True
            msgspec.json.decode(body, type=Raw)  # neither; is it JSON?
        except msgspec.DecodeError as error:
            raise MalformedJson(f"The body is not valid JSON: {error}.") from None
        except RecursionError:
            raise MalformedJson("The body is nested too deeply.") from None
        return None, True
