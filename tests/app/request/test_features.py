"""Requests to model inputs: the window, padding, action values, dwell, ages."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from app.request.features import candidates_of, context_of
from loadtest.fuzz import bodies
from loadtest.fuzz.bodies import in_arrays
from tests.app.fakes import CONFIG
from tests.app.serving import VOCABULARY, checked, good

CONFIG = replace(CONFIG, has_post_age=True)


@settings(max_examples=100, deadline=None)
@given(bodies.valid)
def test_every_event_in_the_window_arrives_whole(body: dict[str, Any]) -> None:
    context = context_of(checked(body), CONFIG)
    newest = body.get("history", [])[-CONFIG.history_length :]
    assert len(context) == len(newest)
    for row, event in enumerate(newest):
        assert int(context.post_ids[row]) == int(event["post_id"])
        assert int(context.author_ids[row]) == int(event["author_id"])
        assert context.surfaces[row] == event.get("product_surface", 0)
        assert context.dwell_seconds[row] == np.float32(min(event.get("dwell_time", 0), 30))
        named = event.get("actions", [])
        if isinstance(named, int):
            named = [str(bit) for bit in range(CONFIG.actions) if named >> bit & 1]
        values = named if isinstance(named, dict) else dict.fromkeys(named, 1)
        wanted = np.zeros(CONFIG.actions, np.float32)
        for name, value in values.items():
            wanted[VOCABULARY.index[name]] = value
        assert np.array_equal(context.actions[row], wanted)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 100])
def test_the_newest_items_are_kept(length: int) -> None:
    history = [{"post_id": place + 1, "author_id": 1, "actions": [str(place % 3)]} for place in range(length)]
    for shape in (history, in_arrays(history) if history else {"post_id": [], "author_id": []}):
        context = context_of(checked(good(history=shape)), CONFIG)
        kept = history[max(0, length - 16) :]
        assert context.post_ids.tolist() == [event["post_id"] for event in kept]
        assert context.actions.argmax(1).tolist() == [int(event["actions"][0]) for event in kept]
        assert context.actions.sum() == len(kept)


def test_dtypes_are_the_models() -> None:
    request = checked(good())
    columns = [*vars_of(context_of(request, CONFIG)), *vars_of(candidates_of(request, CONFIG))]
    assert " ".join(str(column.dtype) for column in columns) == (
        "uint64 uint64 float32 int64 float32 uint64 uint64 int64 int64"
    )


def test_ages_are_counted_from_the_impression() -> None:
    now = 1_780_000_000
    made = [0, now, now - 3599, now - 3600, now - 10**8, now + 1]
    candidates = [{"post_id": 1, "author_id": 1, "created_at": second} for second in made]
    body = good(candidates=candidates, impression_ts=now)
    assert candidates_of(checked(body), CONFIG).age_buckets.tolist() == [0, 1, 1, 2, 81, 0]


def test_without_an_impression_time_every_age_is_unknown() -> None:
    for body in (good(impression_ts=...), good(impression_ts=0)):
        assert candidates_of(checked(body), CONFIG).age_buckets.tolist() == [0, 0, 0]
    assert candidates_of(checked(good()), CONFIG).age_buckets.any()  # else the line above shows nothing


def test_dwell_that_the_model_cannot_tell_apart_is_one_cache_key() -> None:
    keys = []
    for seconds in (30, 31.5, 1e300, 29):
        body = good(history=[{"post_id": 1, "author_id": 1, "dwell_time": seconds}])
        keys.append(context_of(checked(body), CONFIG).events(CONFIG))
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_of_a_long_history_nothing_is_kept_but_what_the_model_reads() -> None:
    for length in (CONFIG.history_length, 20 * CONFIG.history_length):
        posts = list(range(1, length + 1))
        request = checked(good(history={"post_id": posts, "author_id": posts, "dwell_time": posts}))
        context, candidates = context_of(request, CONFIG), candidates_of(request, CONFIG)
        kept = [*vars_of(context), *vars_of(candidates), *vars_of(request.without_history())]
        assert request.without_history().history_length == length
        if length > CONFIG.history_length:
            assert max(map(held_bytes, kept)) < 8 * length
            assert held_bytes(request.history.post_ids) >= 8 * length  # the check can fail


def vars_of(value: Any) -> list[Any]:
    """The arrays of a dataclass, and of those in it."""
    found = [getattr(value, field.name) for field in fields(value)]
    inner = [column for entry in found if is_dataclass(entry) for column in vars_of(entry)]
    return [column for column in found if isinstance(column, np.ndarray)] + inner


def held_bytes(column: Any) -> int:
    """What an array keeps alive: all of what it is a view of."""
    while isinstance(column.base, np.ndarray):
        column = column.base
    return int(column.nbytes)
