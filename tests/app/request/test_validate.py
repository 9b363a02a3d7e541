"""Requests: the fast checks and the plain definition agree, both shapes mean the same, and checking costs little."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from app.errors import InvalidRequest, MalformedJson, ServiceError, TooLarge
from app.request import contract, strict_json, validate
from app.request.validate import Request, Vocabulary
from app.settings import Limits
from loadtest.fuzz import bodies
from loadtest.fuzz.bodies import in_arrays
from tests.app.fakes import FakeEngine, loaded
from tests.app.serving import good

VOCABULARY = Vocabulary.of(loaded(FakeEngine()).checkpoint.manifest)
LOOP_SECONDS = 0.010  # what one body of 64 KiB may take


def verdict(body: Any) -> Request | None:
    """The checked request, or None when it is refused."""
    try:
        validate.measure(body, Limits())
        return validate.check(body, VOCABULARY)
    except InvalidRequest:
        return None


def plain_verdict(body: Any) -> bool:
    """What the pydantic models say, and of the checkpoint's words what they cannot know."""
    try:
        parsed = contract.RankRequest.model_validate(body)
    except ValidationError:
        return False
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
    return once and all(surface < VOCABULARY.product_surfaces for surface in surfaces)


@settings(max_examples=400, deadline=None)
@given(bodies.nearly_valid())
def test_fast_checks_agree_with_the_plain_definition(body: Any) -> None:
    assert (verdict(body) is not None) == plain_verdict(body)


@settings(max_examples=100, deadline=None)
@given(bodies.valid)
def test_both_shapes_mean_the_same(body: dict[str, Any]) -> None:
    left, right = verdict(body), verdict(bodies.columnar(body))
    assert left is not None
    assert right is not None
    assert (left.user_id, left.echo_ids, left.top_k, left.wanted) == (
        right.user_id,
        right.echo_ids,
        right.top_k,
        right.wanted,
    )
    for name in ("history", "candidates"):
        for column in ("post_ids", "author_ids", "surfaces"):
            assert np.array_equal(getattr(getattr(left, name), column), getattr(getattr(right, name), column))
    assert np.array_equal(left.dwell_seconds, right.dwell_seconds)
    assert np.array_equal(left.created_at, right.created_at)
    for column in ("rows", "columns", "values"):
        assert np.array_equal(getattr(left.actions, column), getattr(right.actions, column))


@settings(max_examples=100, deadline=None)
@given(bodies.valid)
def test_ids_keep_value_and_form(body: dict[str, Any]) -> None:
    request = verdict(body)
    assert request is not None
    sent = [candidate["post_id"] for candidate in body["candidates"]]
    assert [(type(value), value) for value in request.echo_ids] == [(type(value), value) for value in sent]
    assert request.candidates.post_ids.tolist() == [int(value) for value in sent]
    assert request.candidates.author_ids.tolist() == [int(candidate["author_id"]) for candidate in body["candidates"]]


def test_actions_become_cells() -> None:
    history = [
        {"post_id": 1, "author_id": 1, "actions": actions} for actions in (["2", "favorite"], {"reply": 0.5}, [])
    ]
    for shape in (history, in_arrays(history)):
        cells = validate.check(good(history=shape), VOCABULARY).actions
        triples = zip(cells.rows.tolist(), cells.columns.tolist(), cells.values.tolist(), strict=True)
        assert list(triples) == [(0, 2, 1.0), (0, 0, 1.0), (1, 1, 0.5)]


def test_weights_replace_the_defaults_whole() -> None:
    assert validate.check(good(weights=...), VOCABULARY).weights.tolist() == [1.0, 0.0, -2.0]
    assert validate.check(good(weights={"1": 3}), VOCABULARY).weights.tolist() == [0.0, 3.0, 0.0]
    assert validate.check(good(weights={}), VOCABULARY).weights.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("form", [lambda items: items, in_arrays])
def test_size_is_known_before_anything_is_checked(form: Callable[[Any], Any]) -> None:
    items = [{"post_id": "no id", "author_id": None}] * 7
    assert validate.measure({"candidates": form(items), "history": form(items[:3])}, Limits()) == (7, 3)
    with pytest.raises(TooLarge):
        validate.measure({"candidates": form(items)}, Limits(max_candidates=6))


def test_unknown_names_are_hinted_not_shown() -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate.check(good(canddates=1, **{"x" * 5000: 1}), VOCABULARY)
    messages = [problem.message for problem in caught.value.problems]
    assert messages[0] == "has an unknown field; did you mean candidates?"
    assert "xxx" not in messages[1]


def fill(make: Callable[[int], Any], size: int = 64 * 1024) -> bytes:
    """The longest body of that kind within the size."""
    low, high = 1, size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if len(json.dumps(make(middle), separators=(",", ":"))) <= size else (low, middle - 1)
        )
    return json.dumps(make(low), separators=(",", ":")).encode()


POST: dict[str, Any] = {"post_id": 1, "author_id": 1}
HOSTILE: dict[str, Callable[[int], Any]] = {
    "bad ids": lambda n: good(candidates={"post_id": [-1] * n, "author_id": [1] * n}),
    "bad text ids": lambda n: good(candidates={"post_id": ["x"] * n, "author_id": ["x"] * n}),
    "one bad id at the end": lambda n: good(candidates={"post_id": ["1"] * n + ["x"], "author_id": [1] * (n + 1)}),
    "empty objects": lambda n: good(candidates=[{}] * n),
    "unknown fields": lambda n: good(candidates=[POST | {"dwel": 1}] * n),
    "unknown field at the end": lambda n: good(candidates=[POST] * n + [POST | {"x": 1}]),
    "many keys": lambda n: {f"k{i}": 0 for i in range(n)},
    "many weights": lambda n: good(weights={f"k{i}": 0 for i in range(n)}),
    "many wanted": lambda n: good(actions_wanted=["favorite"] * n),
    "bad actions": lambda n: good(history=[POST | {"actions": ["x"] * n}]),
    "bad action at the end": lambda n: good(history=[POST | {"actions": ["reply"] * n + ["x"]}]),
    "action maps": lambda n: good(history=[POST | {"actions": {"favorite": 1, "reply": 2}}] * n),
    "empty actions": lambda n: good(history={"post_id": [1] * n, "author_id": [1] * n, "actions": [[]] * n}),
    "one long key": lambda n: good(**{"k" * n: 0}),
    "long ids": lambda n: good(user_id="9" * n),
    "escapes": lambda n: good(user_id="\u003a\\" * n),
    "colons": lambda n: good(user_id=":" * n),
    "nested lists": lambda n: good(history=[[[0]]] * n),
    "floats": lambda n: good(history={"post_id": [1] * n, "author_id": [1] * n, "dwell_time": [0.1] * n}),
}  # fmt: skip


def loop_seconds(body: bytes) -> float:
    """How long reading this body holds the event loop: processor time of this thread, the best of five."""
    spent = []
    for _ in range(5):
        started = time.thread_time()
        try:
            value = strict_json.parse(body)
            validate.measure(value, Limits(max_candidates=10**6, max_history=10**6))
            validate.check(value, VOCABULARY)
        except ServiceError:
            pass
        spent.append(time.thread_time() - started)
    return min(spent)


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_body_of_64_kib_holds_the_loop(make: Callable[[int], Any]) -> None:
    assert loop_seconds(fill(make)) < LOOP_SECONDS


@pytest.mark.parametrize(
    "body", [b"[" * 65_536, b'{"a":' * 13_000, b'"' + b"\\u003a" * 10_000 + b'"', b"[" + b"0," * 32_000 + b"0]"]
)
def test_no_odd_body_of_64_kib_holds_the_loop(body: bytes) -> None:
    assert loop_seconds(body) < LOOP_SECONDS


def test_the_bound_would_notice_a_slow_check() -> None:
    body = fill(HOSTILE["bad text ids"])
    started = time.thread_time()
    with pytest.raises((ValidationError, MalformedJson)):
        contract.RankRequest.model_validate(strict_json.parse(body))
    assert time.thread_time() - started > LOOP_SECONDS  # the stock way, on the same body


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    )
)
def test_any_json_is_checked_or_refused(value: Any) -> None:
    verdict(value)
