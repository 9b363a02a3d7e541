"""Bytes → typed bodies: the types, required fields, unknown fields and bounds of a request are checked while its JSON is read.

What is wrong with one that does not fit its type is said by `explain`. `contract` is the plain definition of the same, and
tests hold all three to the same verdict. Ids in range, known names and equal lengths are left to `validate`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, cast

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from app.errors import InvalidRequest, MalformedJson, TooLarge
from app.request.bounds import MAX_ACTION_VALUE, MAX_TIME, MAX_WEIGHT
from app.request.explain import MAX_TOPIC_LETTERS, Rule, explain, explanation_rule, request_rule
from app.request.ids import MAX_ID_DIGITS
from app.request.strict_json import parse, refuse_duplicates
from app.request.vocabulary import Vocabulary
from app.settings import Limits

Id = int | Annotated[str, Meta(max_length=MAX_ID_DIGITS)]  # what it holds is checked column by column
Surface = Annotated[int, Meta(ge=0)]
Time = Annotated[int, Meta(ge=0, le=MAX_TIME)]
Dwell = Annotated[float, Meta(ge=0)]
Actions = list[str] | dict[str, Annotated[float, Meta(ge=0, le=MAX_ACTION_VALUE)]]
Topic = Annotated[str, Meta(max_length=MAX_TOPIC_LETTERS)]
Weights = dict[str, Annotated[float, Meta(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]]


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


class Strict(Struct, forbid_unknown_fields=True, gc=False):
    """Unknown fields are errors, and so is `null`. The garbage collector need not look: JSON has no cycles."""


def _shapes(name: str, **optional: Any) -> tuple[type[Struct], type[Struct]]:
    """A post with these optional fields, as one item and as arrays with an entry an item. Both have the fields in this order."""
    required, many = {"post_id": Id, "author_id": Id}, cast(Any, list)
    item: list[Any] = [*required.items(), *((field, kind | UnsetType, UNSET) for field, kind in optional.items())]
    arrays: list[Any] = [(field, many[kind]) for field, kind in required.items()]
    arrays += [(field, many[kind] | UnsetType, UNSET) for field, kind in optional.items()]
    return msgspec.defstruct(name, item, bases=(Strict,)), msgspec.defstruct(f"{name}Arrays", arrays, bases=(Strict,))


HistoryItem, HistoryArrays = _shapes("HistoryItem", product_surface=Surface, actions=Actions, dwell_time=Dwell)
Candidate, CandidateArrays = _shapes("Candidate", product_surface=Surface, created_at=Time)


class Wishes(Strict):
    """What a request says of its reply."""

    weights: Weights | UnsetType = UNSET
    top_k: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    actions_wanted: list[str] | UnsetType = UNSET
    request_id: Annotated[str, Meta(max_length=128)] | UnsetType = UNSET
    reply: Literal["objects", "columns"] | UnsetType = UNSET


class Body(Wishes, kw_only=True):
    """A request whose types are right. Ids, names and lengths are still to be checked."""

    user_id: Id
    candidates: list[Candidate] | CandidateArrays  # type: ignore[valid-type]
    history: list[HistoryItem] | HistoryArrays | UnsetType = UNSET  # type: ignore[valid-type]
    impression_ts: Time | UnsetType = UNSET

    timeout_seconds: ClassVar[None] = None  # a header says it

    def count(self, name: str) -> int:
        """Items of `candidates` or `history`, in either shape: how much work they ask for. Arrays may still differ in length."""
        items: Any = getattr(self, name)
        if isinstance(items, HistoryArrays | CandidateArrays):
            items = items.post_id  # type: ignore[attr-defined]
        return 0 if items is UNSET else len(items)


class ExplainBody(Body, kw_only=True):
    """A request with the post ids of the candidates to explain."""

    explain: Annotated[list[Id], Meta(min_length=1)]


SHORT_BYTES = 2**14  # nothing in a body of that length is slow

T = TypeVar("T")
_BODY, _EXPLAIN = msgspec.json.Decoder(Body), msgspec.json.Decoder(ExplainBody)
_ENCODER = msgspec.json.Encoder()


def decode(body: bytes | bytearray, limits: Limits, vocabulary: Vocabulary) -> Body:
    """The typed body, with no more candidates and history than the limits allow.

    Raises MalformedJson, TooLarge or InvalidRequest. What takes too long to read is refused before it is read.
    """
    check_cost(body, limits.max_values)
    typed = read(_BODY, body, lambda: request_rule(vocabulary))
    refuse_long(typed, limits)
    return typed


def decode_explain(body: bytes | bytearray, limits: Limits, most_explained: int, vocabulary: Vocabulary) -> ExplainBody:
    """As `decode`, with no more candidates to explain than that."""
    check_cost(body, limits.max_values)
    typed = read(_EXPLAIN, body, lambda: explanation_rule(vocabulary))
    refuse_long(typed, limits)
    if len(typed.explain) > most_explained:
        raise TooLarge(f"explain: {len(typed.explain)} items, and at most {most_explained} are taken.")
    return typed


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
