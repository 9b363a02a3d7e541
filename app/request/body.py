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
    """A body as read before a place in the queue is asked for: its sizes are known, its correctness is not."""

    @property
    def timeout_seconds(self) -> float | None:
        """How long the caller waits, where the body says it."""

    @property
    def reply(self) -> Any:
        """As in `Request`."""

    @property
    def user_id(self) -> int | str:
        """As sent, which may not be a valid id; 0 where it was not sent."""

    @property
    def handle(self) -> str | None:
        """The handle sent in place of user and history, which may not be a valid one."""

    def count(self, name: str) -> int:
        """Items of `candidates` or `history`."""


T = TypeVar("T", bound=Typed)


@dataclass(frozen=True, slots=True)
class Body:
    """A request as plain JSON values of which only the sizes are known: a `Typed`."""

    value: dict[str, Any]

    timeout_seconds: ClassVar[None] = None  # a header says it

    @property
    def reply(self) -> Any:
        """As in `Request`."""
        reply = self.value.get("reply")
        return reply if type(reply) is str else None  # only a request for tensors has a map here

    @property
    def user_id(self) -> int | str:
        """As sent, which may not be a valid id."""
        user_id = self.value.get("user_id")
        return user_id if isinstance(user_id, int | str) else 0

    @property
    def handle(self) -> str | None:
        """As in `Typed`."""
        handle = self.value.get("context")
        return handle if type(handle) is str else None

    @property
    def posts(self) -> int:
        """How many posts are to be retrieved; an invalid number counts as the default."""
        k = self.value.get("k")
        return k if type(k) is int and k > 0 else DEFAULT_K

    @property
    def history_length(self) -> int:
        """Items of the history."""
        return self.count("history")

    def count(self, name: str) -> int:
        """Items of a field that holds posts or ids."""
        return count_of(self.value.get(name))


def decode(body: bytes | bytearray, limits: Limits, **most: int) -> Body:
    """A request, with no more candidates and history than the limits allow, and no more items in other fields than `most`.

    Raises MalformedJson, TooLarge, or InvalidRequest for what is no object. What takes too long to read is refused before it is read.
    """
    value = read(body, limits.max_values)
    if type(value) is not dict:
        raise InvalidRequest([("", "must be a JSON object")])
    return sized(Body(value), limits, **most)


def decode_posts(body: bytes | bytearray, limits: Limits) -> Body:
    """As `decode`, of a request for posts."""
    found = decode(body, limits, exclude=limits.max_excluded)
    if found.posts > limits.max_retrieved:
        raise TooLarge(f"k: at most {limits.max_retrieved} posts are retrieved.")
    return found


def sized(typed: T, limits: Limits, **most: int) -> T:
    """The same. Raises TooLarge for more candidates or history than the limits allow, or more items in other fields than `most`."""
    for name, limit in ({"candidates": limits.max_candidates, "history": limits.max_history} | most).items():
        if (count := typed.count(name)) > limit:
            raise TooLarge(f"{name}: {count} items, and at most {limit} are taken.")
    return typed


def read(body: bytes | bytearray, max_values: int) -> Any:
    """A JSON value that is not slow to read. Raises TooLarge or MalformedJson."""
    check_cost(body, max_values)
    return parse(body)


def request_rule(vocabulary: Vocabulary) -> Rule:
    """Of a request to rank."""
    return vocabulary.rule("rank", lambda: struct_rule(RankRequest, vocabulary))


def explanation_rule(vocabulary: Vocabulary) -> Rule:
    """Of a request for an explanation: those to explain must be among the candidates."""

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
    """Of a request for posts, `without` as of `struct_rule`. The history must make sense to every vocabulary; a second one is the
    ranker's, which knows the weights."""
    first, words = vocabularies[0], vocabularies[-1]
    kind = RetrieveRequest if len(vocabularies) == 1 else RecommendRequest
    name = " ".join((kind.__name__, *without))
    asked = words.rule(name, lambda: then(struct_rule(kind, words, *without), AGED))
    if words is first or without:
        return asked
    return then(asked, first.rule("history", lambda: field("history", rules_of(UserRequest, first)["history"])))


def check_cost(body: bytes | bytearray, max_values: int) -> None:
    """Raise TooLarge for a body that is slow to read. Counts values without parsing, by the bytes that begin, separate or escape them."""
    if len(body) > max_values and len(body) - len(body.translate(None, b",[{\\")) > max_values:
        raise TooLarge(f"The body holds more than {max_values} values.")


class BatchDecoder:
    """Splits a batch into the bytes of its requests, of which at most `limit` are taken."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # The rest of an array that is longer than its struct is skipped: a million items make no objects.
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
            msgspec.json.decode(body, type=Raw)  # neither form; is it JSON at all?
        except msgspec.DecodeError as error:
            raise MalformedJson(f"The body is not valid JSON: {error}.") from None
        except RecursionError:
            raise MalformedJson("The body is nested too deeply.") from None
        return None, True
