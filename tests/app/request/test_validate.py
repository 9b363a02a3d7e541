"""Checked requests: both shapes mean the same, ids keep value and form, actions become a matrix."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from hypothesis import given, settings

from loadtest.fuzz import bodies
from loadtest.fuzz.bodies import in_arrays
from tests.app.serving import checked, good


@settings(max_examples=100, deadline=None)
@given(bodies.valid)
def test_both_shapes_mean_the_same(body: dict[str, Any]) -> None:
    np.testing.assert_equal(asdict(checked(bodies.columnar(body))), asdict(checked(body)))


@settings(max_examples=100, deadline=None)
@given(bodies.valid)
def test_ids_keep_value_and_form(body: dict[str, Any]) -> None:
    request = checked(body)
    sent = [candidate["post_id"] for candidate in body["candidates"]]
    assert [(type(value), value) for value in request.echo_ids] == [(type(value), value) for value in sent]
    assert request.candidates.post_ids.tolist() == [int(value) for value in sent]
    assert request.candidates.author_ids.tolist() == [int(candidate["author_id"]) for candidate in body["candidates"]]


def test_actions_become_a_matrix() -> None:
    history = [
        {"post_id": 1, "author_id": 1, "actions": actions} for actions in (["2", "favorite"], {"reply": 0.5}, [])
    ]
    for shape in (history, in_arrays(history)):
        assert checked(good(history=shape)).actions.tolist() == [[1.0, 0.0, 1.0], [0.0, 0.5, 0.0], [0.0, 0.0, 0.0]]


def test_weights_replace_the_defaults_whole() -> None:
    assert checked(good(weights=...)).weights.tolist() == [1.0, 0.0, -2.0]
    assert checked(good(weights={"1": 3})).weights.tolist() == [0.0, 3.0, 0.0]
    assert checked(good(weights={})).weights.tolist() == [0.0, 0.0, 0.0]
