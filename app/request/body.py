"""Bytes → JSON values of known size, and the rule of each kind of request. `validate` checks them and makes columns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct

from app.errors import InvalidRequest, MalformedJson, TooLarge
from app.request.ids import read_ids
from app.request.rules import Problems, Rule, column_of, count_of, field, fulfils, rules_of, struct_rule, then
from app.request.schema import (
    DEFAULT_K,
    ExplainRequest,
    RankRequest,
    RecommendRequest,
    RetrieveRequest,
    UserRequest,
)
from app.request.strict_json import parse
from app.request.vocabulary import Vocabulary
from app.settings import Limits


class Typed(Protocol):
    """A decoded request before it asks for a place in the queue: its size is known, its validity is not."""

    @property
    def timeout_seconds(self) -> float | None:
        """How long the caller waits, if the body says so."""

    @property
    def reply(self) -> Any:
        """As in `Request`."""

    @property
    def user_id(self) -> int | str:
        """As it was sent, and not yet checked; 0 if it was not sent."""

    @property
    def handle(self) -> str | None:
        """The context handle sent in place of user and history, not yet checked."""

    def count(self, name: str) -> int:
        """The number of items in `candidates` or `history`."""


T = TypeVar("T", bound=Typed)


@dataclass(frozen=True, slots=True)
class Body:
    """A request as plain JSON values, with only the sizes checked: a `Typed`."""

    value: dict[str, Any]

    timeout_seconds: ClassVar[None] = None  # a header carries it

    @property
    def reply(self) -> Any:
        """As in `Request`."""
        reply = self.value.get("reply")
        return reply if type(reply) is str else None  # only tensor requests ask by a map

    @property
    def user_id(self) -> int | str:
        """As it was sent, and not yet checked."""
        user_id = self.value.get("user_id")
        return user_id if isinstance(user_id, int | str) else 0

    @property
    def handle(self) -> str | None:
        """As in `Typed`."""
        handle = self.value.get("context")
        return handle if type(handle) is str else None

    @property
    def posts(self) -> int:
        """How many posts to retrieve; one if `k` is missing or invalid."""
        k = self.value.get("k")
        return k if type(k) is int and k > 0 else 1

    @property
    def history_length(self) -> int:
        """The number of history items."""
        return self.count("history")

    def count(self, name: str) -> int:
        """The number of items in a field that holds posts or ids."""
        return count_of(self.value.get(name))


def decode(body: bytes | bytearray, limits: Limits, **most: int) -> Body:
    """A request, with no more candidates and history than the limits allow, and no more items in other fields than `most`.

    Raises MalformedJson, TooLarge, or InvalidRequest if it is not an object. A body that is slow to read is refused before it is read.
    """
    value = read(body, limits.max_values)
    if type(value) is not dict:
        raise InvalidRequest([("", "must be a JSON object")])
    return sized(Body(value), limits, **most)


def decode_posts(body: bytes | bytearray, limits: Limits) -> Body:
    """`decode` for a request for posts; a `k` that is missing is the default. Also raises TooLarge for more posts than `max_retrieved`."""
    found = decode(body, limits, exclude=limits.max_excluded)
    found.value.setdefault("k", min(DEFAULT_K, limits.max_retrieved))
    if found.posts > limits.max_retrieved:
        raise TooLarge(f"k: at most {limits.max_retrieved} posts are retrieved.")
    return found


def sized(typed: T, limits: Limits, **most: int) -> T:
    """Return `typed`. Raises TooLarge for more candidates or history than the limits allow, or more items in other fields than `most`."""
    for name, limit in ({"candidates": limits.max_candidates, "history": limits.max_history} | most).items():
        if (count := typed.count(name)) > limit:
            raise TooLarge(f"{name}: {count} items, and at most {limit} are taken.")
    return typed


def read(body: bytes | bytearray, max_values: int) -> Any:
    """Parse a JSON value. Raises TooLarge if it would be slow to read, or MalformedJson."""
    check_cost(body, max_values)
    return parse(body)


def request_rule(vocabulary: Vocabulary) -> Rule:
    """The rule of a request to rank."""
    return vocabulary.rule("rank", lambda: struct_rule(RankRequest, vocabulary))


def explanation_rule(vocabulary: Vocabulary) -> Rule:
    """The rule of a request for an explanation: the posts to explain must be among the candidates."""

    def strangers(values: Sequence[Any]) -> Problems:
        for place, value in enumerate(values):
            known = set(read_ids(column_of(value["candidates"], "post_id"), vocabulary.ids).tolist())
            for number, post in enumerate(read_ids(value["explain"], vocabulary.ids).tolist()):
                if post not in known:
                    yield place, f".explain[{number}]", "must be the post_id of a candidate"

    return vocabulary.rule("explain", lambda: then(struct_rule(ExplainRequest, vocabulary), Rule(strangers)))


AGED = fulfils(
    lambda value: "max_age_seconds" not in value or bool(value.get("impression_ts")),
    "needs impression_ts, from which ages are counted",
    ".max_age_seconds",
)


def retrieval_rule(vocabularies: Sequence[Vocabulary], *without: str) -> Rule:
    """The rule of a request for posts; `without` as in `struct_rule`. The history must be valid in every vocabulary; a second vocabulary is
    the ranker's, which knows the weights."""
    first, words = vocabularies[0], vocabularies[-1]
    kind = RetrieveRequest if len(vocabularies) == 1 else RecommendRequest
    name = " ".join((kind.__name__, *without))
    asked = words.rule(name, lambda: then(struct_rule(kind, words, *without), AGED))
    if words is first or without:
        return asked
    return then(asked, first.rule("history", lambda: field("history", rules_of(UserRequest, first)["history"])))


def check_cost(body: bytes | bytearray, max_values: int) -> None:
    """Raise TooLarge for a body that is slow to read: its values are estimated from the bytes that begin, separate or escape them."""
    if len(body) > max_values and len(body) - len(body.translate(None, b",[{\\")) > max_values:
        raise TooLarge(f"The body holds more than {max_values} values.")


class BatchDecoder:
    """Splits a batch into the bytes of its requests, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # msgspec skips array items beyond the struct's fields, so a million items make no objects.
        fields = [(f"item_{place}", Raw, UNSET) for place in range(limit + 1)]
        items = msgspec.defstruct("Items", fields, array_like=True)
        named = msgspec.defstruct("Named", [("requests", items)], forbid_unknown_fields=True)
        self._bare, self._named = msgspec.json.Decoder(items), msgspec.json.Decoder(named)

    def split(self, body: bytes | bytearray) -> tuple[list[bytes], bool]:
        """The JSON of each request, and whether they came as a bare array. Raises MalformedJson, InvalidRequest or TooLarge."""
        items, is_bare = self._read(body)
        found = [bytes(item) for item in msgspec.structs.astuple(items) if item is not UNSET] if items else []
        if not found:
            raise InvalidRequest([("requests", "must be a non-empty list of requests, with no other fields")])
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
            msgspec.json.decode(body, type=Raw)  # neither form; is it JSON at all?
        except msgspec.DecodeError as error:
            raise MalformedJson(f"The body is not valid JSON: {error}.") from None
        except RecursionError:
            raise MalformedJson("The body is nested too deeply.") from None
        return None, True
