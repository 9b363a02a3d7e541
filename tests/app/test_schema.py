"""What a body may say for any checkpoint: its sentences, its bounded cost, and a document that says the same.

What is refused with which path: tests/app/api/test_rank.py.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from typing import Any

import jsonschema
import orjson
import pytest
from hypothesis import given, settings
from msgspec.json import Decoder

from app import schema
from app.errors import InvalidRequest, MalformedJson, ServiceError, TooLarge
from app.settings import Limits
from tests.support import strategies
from tests.support.bodies import good

RANK = Decoder(schema.RankRequest)
LIMITS = Limits()
POST: dict[str, Any] = {"post_id": 1, "author_id": 1}


def read(body: Any) -> schema.RankRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return schema.read(RANK, raw, LIMITS, ("favorite", "reply", "report", "0", "1", "2"))


def problem_of(body: Any) -> tuple[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        read(body)
    ((field, message),) = caught.value.problems
    assert caught.value.detail == (f"{field}: {message}" if field else message)
    return field, message


def test_a_byte_that_is_no_utf8_is_reported_at_its_place() -> None:
    body = b'{"user_id": "abc", "request_id": "ab\xff"}'
    with pytest.raises(MalformedJson, match=f"byte {body.index(255)}"):
        read(body)


@pytest.mark.parametrize(
    ("written", "user"),
    [(b"0", 0), (b"-0", 0), (b"18446744073709551615", 2**64 - 1), (b'"\\u0031"', "1"), (b'1,"user_id":2', 2)],
)
def test_odd_ways_to_write_a_value_have_one_meaning(written: bytes, user: int | str) -> None:
    asked = read(b'{"user_id":%b,"candidates":[{"post_id":1,"author_id":1}]}' % written)
    assert (asked.user_id, type(asked.user_id)) == (user, type(user))


@pytest.mark.parametrize("value", [True, 1.0, -0.0, 1e2, None, [], {}], ids=str)
@pytest.mark.parametrize("name", ["post_id", "author_id", "product_surface", "created_at"])
def test_a_number_is_never_made_of_something_else(name: str, value: Any) -> None:
    field, message = problem_of(good(candidates=[POST, POST | {name: value}]))
    assert field == f"candidates[1].{name}"
    assert message.startswith("expected ")


def test_a_choice_is_told_by_what_there_is() -> None:
    assert problem_of(good(weights="x"))[1] == "must be one of default, x-2026-09, x-2026-10"
    assert problem_of(good(score="mean"))[1] == "must be one of offset, sum"


def test_of_equal_keys_the_last_counts_wherever_the_problem_is() -> None:
    body = (
        b'{"user_id":1,"candidates":[{"post_id":[],"author_id":1}],"candidates":3,"weights":{"reply":"x"},"weights":1}'
    )
    assert problem_of(body)[0].startswith("candidates")
    assert problem_of(b'{"user_id":1,"weights":{"reply":"x"},"weights":"default","candidates":[]}')[0] == "weights"


def test_a_body_of_too_many_values_is_refused_before_it_is_read() -> None:
    most = LIMITS.max_values
    schema.read(RANK, json.dumps(good(candidates=[POST] * 4096)).encode(), LIMITS)
    for piece in (b",", b"[", b"{", b"\\"):
        with pytest.raises(TooLarge, match="values"):
            schema.read(RANK, piece * (most + 1), LIMITS)
        with pytest.raises(MalformedJson):
            schema.read(RANK, piece * most, LIMITS)


def test_a_body_within_the_other_limits_is_never_too_many_values() -> None:
    event = POST | {"product_surface": 1, "dwell_time": 1.5, "actions": ["favorite", "reply", "report", "0"]}
    schema.read(RANK, json.dumps(good(candidates=[POST] * 4096, history=[event] * 2048)).encode(), LIMITS)
    longer = Limits(max_history=8192)
    schema.read(RANK, json.dumps(good(history=[event] * 8000)).encode(), longer)


def filled(head: bytes, pieces: bytes, tail: bytes, last: bytes = b"") -> bytes:
    """As many of `pieces` as a body may hold, between head and tail."""
    count = min(
        (2**20 - len(head + tail + last)) // (len(pieces) + 1), LIMITS.max_values // (1 + pieces.count(b",")) - 20
    )
    return head + b",".join([pieces] * count + ([last] if last else [])) + tail


IDS, REST = b'{"user_id":1,"candidates":{"post_id":[', b'],"author_id":[1]}}'
ONE = b'{"user_id":1,"candidates":[],"history":'
EVENT = b'{"post_id":1,"author_id":1,"actions":{"favorite":1,"reply":2}}'
HOSTILE = {
    "long integers": filled(IDS, b"1" * 4000, REST),
    "long integers, the last one no id": filled(IDS, b"1" * 500, REST, b"null"),
    "integers as long as they come": filled(IDS, b"1" * 128, REST, b"true"),
    "long fractions": filled(ONE + b'{"post_id":[1],"author_id":[1],"dwell_time":[', b"0." + b"9" * 34, b"]}}"),
    "a long number": b'{"user_id":' + b"9" * 2**20 + b"}",
    "events with a bad one at the end": filled(ONE + b"[", EVENT, b"]}", b'{"post_id":[],"author_id":1}'),
    "events with an unknown field at the end": filled(ONE + b"[", EVENT, b"]}", b'{"x":1}'),
    "names of one event": filled(ONE + b'[{"post_id":1,"author_id":1,"actions":[', b'"0"', b"]}]}"),
    "many weights": b'{"user_id":1,"candidates":[],"weights":{'
    + b",".join(b'"k%d":0' % place for place in range(29_000))
    + b"}}",
    "two bytes a letter": b'{"user_id":1,"request_id":"' + "é".encode() * 500_000 + b'\xff"}',
    "escapes": filled(b'{"user_id":1,"request_id":"', b"\\u0061", b'"}'),
    "blanks": b" " * 2**20,
}


def seconds(body: bytes) -> float:
    """Processor time of reading or refusing it, without that of collecting what other tests left."""
    gc.disable()
    started = time.thread_time()
    with contextlib.suppress(ServiceError):
        schema.read(RANK, body, LIMITS, ("favorite",))
    taken = time.thread_time() - started
    gc.enable()
    return taken


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_body_takes_much_longer_than_the_largest_valid_one(body: bytes) -> None:
    assert len(body) <= 2**20 + 100
    largest = json.dumps(
        {"user_id": 1, "candidates": [POST | {"created_at": 1779990000}] * 4096, "history": [POST] * 2000}
    ).encode()
    read(largest)
    assert min(seconds(body) for _ in range(5)) < 10 * min(seconds(largest) for _ in range(5))


def test_a_batch_is_split_where_its_requests_end() -> None:
    items = [b'{"a":"]},{"}', b"[[1,2],3]", b'"x"']
    for count in (1, 2, 3):
        joined = b" , ".join(items[:count])
        assert schema.split_batch(b" [ %b ]" % joined, 3) == (items[:count], True)
        assert schema.split_batch(b'{"requests": [%b]}' % joined, 3) == (items[:count], False)


# the document


def validator(kind: type) -> Any:
    plain = jsonschema.Draft202012Validator
    types = plain.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)  # else 1.0 is one
    strict = jsonschema.validators.extend(plain, type_checker=types)
    return strict({"$ref": f"#/components/schemas/{kind.__name__}", "components": {"schemas": schema.components()}})


@pytest.mark.parametrize("kind", schema.EXAMPLES, ids=lambda kind: kind.__name__)
def test_the_examples_are_valid_by_the_document_and_the_reader(kind: type) -> None:
    extra = schema.body_of(kind)["requestBody"]["content"]["application/json"]
    assert extra["schema"]["$ref"].endswith(kind.__name__)
    assert extra["examples"]
    for example in extra["examples"].values():
        validator(kind).validate(example["value"])
        schema.decode(Decoder(kind), orjson.dumps(example["value"]))


VALIDATOR = validator(schema.RankRequest)


def says_document(body: Any) -> bool:
    """By the JSON Schema, but for the digits of ids and what is between fields."""
    if not VALIDATOR.is_valid(body):
        return False
    posts = [body.get(name, []) for name in ("history", "candidates")]
    equal = all(len({*map(len, each.values())}) <= 1 for each in posts if isinstance(each, dict))
    one_user = ("context" in body) != bool(body.keys() & {"user_id", "history"}) and (
        "context" in body or "user_id" in body
    )
    return equal and one_user and bool(body["candidates"]) and body["candidates"] != {"post_id": [], "author_id": []}


def says_reader(body: Any) -> bool:
    try:
        read(body)
    except InvalidRequest:
        return False
    return True


@settings(max_examples=150, deadline=None)
@given(strategies.nearly_valid())
def test_what_the_document_allows_is_read(body: Any) -> None:
    """The reader may take more: what a checkpoint knows, and bounds of columns, are checked later."""
    if says_document(body):
        assert says_reader(body)
