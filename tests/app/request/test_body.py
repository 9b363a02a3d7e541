"""Bodies: the typed decoder, the error walk and the pydantic models give one verdict, and no body holds the loop."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from app.errors import InvalidRequest, MalformedJson, ServiceError, TooLarge
from app.request import body as typed
from app.request import contract, strict_json
from app.request.body import BatchDecoder, decode
from app.request.explain import explain
from app.request.validate import check
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from loadtest.fuzz import bodies
from loadtest.fuzz.bodies import in_arrays
from loadtest.fuzz.mutate import Mutator
from loadtest.fuzz.sources import corpus
from tests.app.serving import VOCABULARY, good

LIMITS = Limits()
LOOP_SECONDS = 0.010  # what one body of 64 KiB may take
LONG_LOOP_SECONDS = (
    0.030  # what one body of 2 MiB may take; docs/decisions/2026-11-21-typed-decoding.md has what each does
)
POST: dict[str, Any] = {"post_id": 1, "author_id": 1}


def verdict(raw: bytes) -> type[ServiceError] | None:
    """How the service refuses a body, None where it takes it."""
    try:
        check(decode(raw, LIMITS, VOCABULARY), VOCABULARY)
    except ServiceError as error:
        return type(error)
    return None


def plain_verdict(raw: bytes) -> type[ServiceError] | None:
    """The same from strict JSON, the pydantic models, and of the checkpoint's words what the models cannot know."""
    try:
        parsed = contract.RankRequest.model_validate(strict_json.parse(raw))
    except MalformedJson:
        return MalformedJson
    except ValidationError:
        return InvalidRequest
    items = parsed.history if isinstance(parsed.history, list) else []
    histories = [item.actions for item in items] or getattr(parsed.history, "actions", [])
    surfaces = [
        surface
        for posts in (parsed.history, parsed.candidates)
        for surface in ([post.product_surface for post in posts] if isinstance(posts, list) else posts.product_surface)  # type: ignore[attr-defined]
    ]
    words = [*histories, parsed.weights or {}, parsed.actions_wanted or []]
    known = all(name in VOCABULARY.index for word in words for name in word)
    maps = [word for word in words if isinstance(word, dict)] + [parsed.actions_wanted or []]
    once = known and all(len({VOCABULARY.index[name] for name in word}) == len(word) for word in maps)
    return None if once and all(surface < VOCABULARY.product_surfaces for surface in surfaces) else InvalidRequest


def doubled(raw: bytes, chance: random.Random) -> bytes:
    """The body with one scalar member written twice."""
    member = chance.choice(list(re.finditer(rb'"\w+":(?:\d+|"\w*")', raw)))
    return raw[: member.start()] + member[0] + b"," + raw[member.start() :]


def mutated(seed: int) -> Iterator[bytes]:
    """Endless bodies that were good once: changed values, changed bytes, doubled keys."""
    good_ones, chance = corpus(seed), random.Random(seed)
    mutator = Mutator(seed, good_ones)
    while True:
        yield mutator.call().body
        yield doubled(chance.choice(good_ones), chance)


@settings(max_examples=400, deadline=None)
@given(bodies.nearly_valid())
def test_nearly_valid_bodies_have_one_verdict(value: Any) -> None:
    raw = json.dumps(value).encode()
    assert verdict(raw) == plain_verdict(raw)


def disagreements(count: int) -> list[bytes]:
    return [raw for raw in islice(mutated(1), count) if verdict(raw) != plain_verdict(raw)]


def test_mutated_bodies_have_one_verdict() -> None:
    assert disagreements(4000) == []


PLANTED: dict[str, tuple[str, Any]] = {
    "duplicate keys pass": ("app.request.body.refuse_duplicates", lambda body, written: None),
    "any id passes": ("app.request.validate.ids_of", lambda values: np.zeros(len(values), np.uint64)),
}


@pytest.mark.parametrize("fault", PLANTED.values(), ids=PLANTED.keys())
def test_a_laxer_check_would_be_noticed(monkeypatch: pytest.MonkeyPatch, fault: tuple[str, Any]) -> None:
    monkeypatch.setattr(*fault)
    assert disagreements(4000)


USER_IDS: dict[bytes, type[ServiceError] | None] = {
    b"0": None, b"-0": None, b"18446744073709551615": None, b'"18446744073709551615"': None, b'"\\u0031"': None,
    b"18446744073709551616": InvalidRequest, b'"18446744073709551616"': InvalidRequest, b"1.0": InvalidRequest,
    b"-0.0": InvalidRequest, b"1e2": InvalidRequest, b"true": InvalidRequest, b"null": InvalidRequest, b'"01"': InvalidRequest,
    b'"1 "': InvalidRequest, b'"\\u0661"': InvalidRequest, b"9" * 300: InvalidRequest, b"9" * 400: MalformedJson,
    b"9" * 5000: MalformedJson, b"1e999": MalformedJson, b"01": MalformedJson, b"NaN": MalformedJson, b"1.": MalformedJson,
    b'"\\ud800"': MalformedJson, b'"\xff"': MalformedJson, b'"\xed\xa0\x80"': MalformedJson, b'"1\x00"': MalformedJson,
    b'1,"user_id":1': MalformedJson, b'1,"\\u0075ser_id":1': MalformedJson, b'1,"weights":{"0":1,"0":1}': MalformedJson,
    b'1,"weights":{"0":1,"\\u0030":1}': MalformedJson,
    b'1,"request_id":":","user_id":1': MalformedJson, b'1,"request_id":"\\u003a","user_id":1': MalformedJson,
    b'1,"request_id":":"': None, b'1,"request_id":"\\u003A\\/"': None, b'1,"request_id":"\\\\u003a"': InvalidRequest,
}  # fmt: skip


@pytest.mark.parametrize("written", USER_IDS)
def test_odd_ways_to_write_a_value(written: bytes) -> None:
    raw = json.dumps(good(user_id="@", weights=..., request_id=...)).encode().replace(b'"@"', written)
    assert verdict(raw) == plain_verdict(raw) == USER_IDS[written]


@pytest.mark.parametrize("form", [lambda items: items, in_arrays])
def test_sizes_are_refused_before_anything_is_checked(form: Callable[[Any], Any]) -> None:
    raw = json.dumps(good(candidates=form([{"post_id": "no id", "author_id": 0}] * 7))).encode()
    assert verdict(raw) == InvalidRequest
    with pytest.raises(TooLarge):
        decode(raw, Limits(max_candidates=6), VOCABULARY)


def test_the_longest_request_has_no_more_values_than_are_counted() -> None:
    limits = Limits(max_candidates=20, max_history=30)
    names = list(VOCABULARY.action_names)
    event = POST | {"actions": names, "product_surface": 0, "dwell_time": 1}
    candidate = POST | {"created_at": 1, "product_surface": 0}
    longest = good(
        history=[event] * 30, candidates=[candidate] * 20, weights=dict.fromkeys(names, 1), actions_wanted=names
    )
    decode(json.dumps(longest).encode(), limits, VOCABULARY)
    longest["history"][-1] = event | {"actions": names * 100}  # few items, and far too many names
    with pytest.raises(TooLarge):
        decode(json.dumps(longest).encode(), limits, VOCABULARY)


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


def fill(make: Callable[[int], Any], size: int) -> bytes:
    """The longest body of that kind within the size, nearly."""
    write: Callable[[int], bytes] = lambda count: json.dumps(make(count), separators=(",", ":")).encode()  # noqa: E731
    start = len(write(0))
    return write(int((size - start) / (len(write(1000)) - start) * 1000 * 0.98))


HOSTILE: dict[str, Callable[[int], Any]] = {
    "bad ids": lambda n: good(candidates={"post_id": [-1] * n, "author_id": [1] * n}),
    "bad text ids": lambda n: good(candidates={"post_id": ["x"] * n, "author_id": ["x"] * n}),
    "one bad id at the end": lambda n: good(candidates={"post_id": ["1"] * n + ["x"], "author_id": [1] * (n + 1)}),
    "empty objects": lambda n: good(candidates=[{}] * n),
    "unknown fields": lambda n: good(candidates=[POST | {"dwel": 1}] * n),
    "unknown field at the end": lambda n: good(candidates=[POST] * n + [POST | {"x": 1}]),
    "many keys": lambda n: {f"k{i:07}": 0 for i in range(n)},
    "many weights": lambda n: good(weights={f"k{i:07}": 0 for i in range(n)}),
    "many wanted": lambda n: good(actions_wanted=["favorite"] * n),
    "equal names": lambda n: good(history=[POST | {"actions": ["0"] * n}]),
    "bad actions": lambda n: good(history=[POST | {"actions": ["x"] * n}]),
    "bad action at the end": lambda n: good(history=[POST | {"actions": ["reply"] * n + ["x"]}]),
    "action maps": lambda n: good(history=[POST | {"actions": {"favorite": 1, "reply": 2}}] * n),
    "empty actions": lambda n: good(history={"post_id": [1] * n, "author_id": [1] * n, "actions": [[]] * n}),
    "one long key": lambda n: good(**{"k" * n: 0}),
    "long ids": lambda n: good(user_id="9" * n),
    "escapes": lambda n: good(user_id="\u003a\\" * n),
    "line feeds": lambda n: good(request_id=":" + "\n" * n),
    "colons": lambda n: good(user_id=":" * n),
    "nested lists": lambda n: good(history=[[[0]]] * n),
    "empty lists": lambda n: good(history=[[]] * n),
    "lists of lists": lambda n: [[[]]] * n,
    "floats": lambda n: good(history={"post_id": [1] * n, "author_id": [1] * n, "dwell_time": [0.1] * n}),
}  # fmt: skip


def loop_seconds(raw: bytes) -> float:
    """How long one body holds the event loop, as a request and as a batch: processor time of this thread, the best of five."""
    spent = []
    for _ in range(5):
        for read in (verdict, BatchDecoder(64).split):
            started = time.thread_time()
            with suppress(ServiceError):
                read(raw)
            spent.append(time.thread_time() - started)
    return max(min(spent[0::2]), min(spent[1::2]))


SIZES = pytest.mark.parametrize(
    ("size", "limit"), [(2**16, LOOP_SECONDS), (2**21, LONG_LOOP_SECONDS)], ids=["64 KiB", "2 MiB"]
)


@SIZES
@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_body_holds_the_loop(make: Callable[[int], Any], size: int, limit: float) -> None:
    assert loop_seconds(fill(make, size)) < limit


@SIZES
@pytest.mark.parametrize("piece", [b"[", b'{"a":', b"\\u003a", b"0,", b"{},"])
def test_no_odd_body_holds_the_loop(piece: bytes, size: int, limit: float) -> None:
    middle = piece * (size // len(piece))
    for raw in (middle, b"[%b0]" % middle, b'"%b"' % middle):
        assert loop_seconds(raw) < limit


def test_the_bound_would_notice_a_slow_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(body: Any, vocabulary: Vocabulary) -> InvalidRequest:
        until = time.thread_time() + 2 * LOOP_SECONDS
        while time.thread_time() < until:
            pass
        return explain(body, vocabulary)

    raw = fill(HOSTILE["empty objects"], 2**16)
    assert loop_seconds(raw) < LOOP_SECONDS
    monkeypatch.setattr(typed, "explain", slow)
    assert loop_seconds(raw) > LOOP_SECONDS
