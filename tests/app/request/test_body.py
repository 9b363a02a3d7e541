"""Bodies: the checks and the published schema give one verdict, and no body holds the loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings

from app.errors import InvalidRequest, MalformedJson, ServiceError, TooLarge
from app.request import strict_json
from app.request.body import BatchDecoder, decode
from app.request.schema import RankRequest
from app.request.validate import check
from app.settings import Limits
from loadtest.fuzz import bodies
from loadtest.fuzz.bodies import in_arrays
from tests.app.bounds import bounded
from tests.app.odd_bodies import USER_IDS, mutated
from tests.app.published import keeps
from tests.app.serving import VOCABULARY, good

LIMITS = Limits()
POST: dict[str, Any] = {"post_id": 1, "author_id": 1}


def verdict(raw: bytes) -> type[ServiceError] | None:
    """How the service refuses a body, None where it takes it."""
    try:
        check(decode(raw, LIMITS), VOCABULARY)
    except ServiceError as error:
        return type(error)
    return None


def plain_verdict(raw: bytes) -> type[ServiceError] | None:
    """The same from strict JSON, the published schema, and of the checkpoint's words what a schema cannot know."""
    try:
        parsed = strict_json.parse(raw)
    except MalformedJson:
        return MalformedJson
    if not keeps(RankRequest, parsed):
        return InvalidRequest
    weights = parsed.get("weights", {})
    surfaces, words = [], [{} if isinstance(weights, str) else weights, parsed.get("actions_wanted", [])]
    for posts in (parsed.get("history", []), parsed["candidates"]):
        items = in_rows(posts) if isinstance(posts, dict) else posts
        surfaces += [item["product_surface"] for item in items if "product_surface" in item]
        words += [item["actions"] for item in items if "actions" in item]
    masks, words = [word for word in words if type(word) is int], [word for word in words if type(word) is not int]
    known = all(name in VOCABULARY.index for word in words for name in word)
    maps = [word for word in words if isinstance(word, dict)] + [parsed.get("actions_wanted", [])]
    once = known and all(len({VOCABULARY.index[name] for name in word}) == len(word) for word in maps)
    known_bits = all(mask < 2 ** len(VOCABULARY.action_names) for mask in masks)
    is_right = once and known_bits and all(surface < VOCABULARY.product_surfaces for surface in surfaces)
    return None if is_right else InvalidRequest


def in_rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@settings(max_examples=200, deadline=None)
@given(bodies.nearly_valid())
def test_nearly_valid_bodies_have_one_verdict(value: Any) -> None:
    raw = json.dumps(value).encode()
    assert verdict(raw) == plain_verdict(raw)


def disagreements() -> Iterator[bytes]:
    return (raw for raw in islice(mutated(1), 4000) if verdict(raw) != plain_verdict(raw))


def test_mutated_bodies_have_one_verdict() -> None:
    assert list(disagreements()) == []


def lenient(body: bytes) -> Any:
    """Takes a key twice."""
    with suppress(orjson.JSONDecodeError):
        return orjson.loads(body)
    return strict_json.parse(body)


def any_ids(values: list[Any], kind: str = "uint64") -> Any:
    return np.zeros(len(values), np.uint64)


PLANTED: dict[str, dict[str, Any]] = {
    "duplicate keys pass": {"app.request.body.parse": lenient},
    "any id passes": {"app.request.ids.read_ids": any_ids, "app.request.validate.read_ids": any_ids},
}


@pytest.mark.parametrize("faults", PLANTED.values(), ids=PLANTED.keys())
def test_a_laxer_check_would_be_noticed(monkeypatch: pytest.MonkeyPatch, faults: dict[str, Any]) -> None:
    for place, fault in faults.items():
        monkeypatch.setattr(place, fault)
    assert next(disagreements(), None)


@pytest.mark.parametrize("written", USER_IDS)
def test_odd_ways_to_write_a_value(written: bytes) -> None:
    raw = json.dumps(good(user_id="@", weights=..., request_id=...)).encode().replace(b'"@"', written)
    assert verdict(raw) == plain_verdict(raw) == USER_IDS[written]


@pytest.mark.parametrize("form", [lambda items: items, in_arrays])
def test_sizes_are_refused_before_anything_is_checked(form: Callable[[Any], Any]) -> None:
    raw = json.dumps(good(candidates=form([{"post_id": "no id", "author_id": 0}] * 7))).encode()
    assert verdict(raw) == InvalidRequest
    with pytest.raises(TooLarge):
        decode(raw, Limits(max_candidates=6))


def test_a_request_of_more_values_than_allowed_is_refused_unread() -> None:
    names = list(VOCABULARY.action_names)
    longest = good(history=[POST | {"actions": names}] * 30)
    count = sum(map(json.dumps(longest).count, ",[{"))
    decode(json.dumps(longest).encode(), bounded(Limits(), max_values=count))
    for raw in (json.dumps(longest).encode(), b"," * count):
        with pytest.raises(TooLarge):
            decode(raw, bounded(Limits(), max_values=count - 1))


def test_a_batch_is_split_where_its_requests_end() -> None:
    decoder, items = BatchDecoder(3), [b'{"a":"]},{"}', b"[[1,2],3]", b'"x"']
    for count in (1, 2, 3):
        joined = b" , ".join(items[:count])
        assert decoder.split(b"[ %b ]" % joined) == (items[:count], True)
        assert decoder.split(bytearray(b'{"requests": [%b]}' % joined)) == (items[:count], False)
    for raw, error in {
        b"[1,1,1,1]": TooLarge, b"[]": InvalidRequest, b'{"requests":1}': InvalidRequest, b'{"requests":[1],"x":1}': InvalidRequest,
        b'"x"': InvalidRequest, b'"x': MalformedJson, b"[1,NaN]": MalformedJson, b"[1] x": MalformedJson, b"[" * 9000: MalformedJson,
        b'{"requests":[1],"requests":[2]}': MalformedJson, b"[1,1,1,1,01]": MalformedJson,
    }.items():  # fmt: skip
        with pytest.raises(error):
            decoder.split(raw)
