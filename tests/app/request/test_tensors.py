"""Tensors mean what the same request in JSON means, and nothing that is wrong with one passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from app.errors import InvalidRequest, TooLarge
from app.request import features, inference, tensors
from app.request.validate import Request
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from loadtest.fuzz import bodies
from loadtest.generate.tensors import Inference, inference_of
from tests.app.fakes import ACTIONS, CONFIG, FakeEngine, loaded
from tests.app.serving import checked, good

MANIFEST = loaded(FakeEngine()).checkpoint.manifest
VOCABULARY = Vocabulary.of(MANIFEST)


def read(asked: Inference, *, binary: bool = True, limits: Limits | None = None) -> Request:
    body, headers = asked.body(binary=binary)
    length = next(iter(headers.values()), None)
    decoded = inference.decode(body, limits or Limits(), None if length is None else length.encode())
    return tensors.check(decoded, VOCABULARY)


def problems(asked: Inference, *, binary: bool = True) -> list[tuple[str, str]]:
    with pytest.raises(InvalidRequest) as caught:
        read(asked, binary=binary)
    return list(caught.value.problems)


@pytest.mark.parametrize("binary", [True, False])
@settings(max_examples=100, deadline=None)
@given(body=bodies.valid)
def test_tensors_mean_what_json_means(binary: bool, body: dict[str, Any]) -> None:
    one, other = checked(body), read(inference_of(body, ACTIONS), binary=binary)
    names = ("user_id", "impression_ts", "top_k", "wanted", "request_id", "handle", "has_offset")
    assert [getattr(one, name) for name in names] == [getattr(other, name) for name in names]
    assert one.weights.tolist() == other.weights.tolist()
    left, right = features.context_of(one, CONFIG), features.context_of(other, CONFIG)
    assert left.events(CONFIG) == right.events(CONFIG)
    for name in ("post_ids", "author_ids", "surfaces", "age_buckets"):
        columns = [getattr(features.candidates_of(request, CONFIG), name) for request in (one, other)]
        assert columns[0].tolist() == columns[1].tolist()
        assert columns[1].flags.aligned


def test_columns_of_actions_are_those_that_are_named() -> None:
    history = [{"post_id": 1, "author_id": 1, "actions": {"report": 0.5}}, {"post_id": 2, "author_id": 2}]
    asked = inference_of(good(history=history), ACTIONS)
    few = asked.inputs | {"history.actions": np.array([[0, 0.5], [0, 0]], "f4"), "weights": np.array([2.0, -3.0])}
    request = read(replace(asked, inputs=few, parameters={"actions": "favorite,2"}))
    assert request.actions.tolist() == [[0, 0, 0.5], [0, 0, 0]]
    assert request.weights.tolist() == [2.0, 0.0, -3.0]


Change = Callable[[Inference], Any]


def with_input(name: str, values: Any, kind: str = "u8") -> Change:
    return lambda asked: replace(asked, inputs=asked.inputs | {name: np.array(values, kind)})


def with_parameters(**parameters: Any) -> Change:
    return lambda asked: replace(asked, parameters=asked.parameters | parameters)


def without(name: str) -> Change:
    return lambda asked: replace(asked, inputs={key: array for key, array in asked.inputs.items() if key != name})


WRONG: dict[str, tuple[Change, str]] = {
    "no user": (without("user_id"), "user_id"),
    "no candidates": (without("candidates.post_id"), "candidates.post_id"),
    "no authors": (without("candidates.author_id"), "candidates.author_id"),
    "history without authors": (without("history.author_id"), "history.author_id"),
    "two users": (with_input("user_id", [1, 2]), "user_id"),
    "user as INT64": (with_input("user_id", [1], "i8"), "user_id"),
    "user of two axes": (with_input("user_id", [[1]]), "user_id"),
    "unequal": (with_input("candidates.author_id", [1, 2, 3, 4]), "candidates.author_id"),
    "surface too high": (with_input("candidates.product_surface", [0, 16, 0], "i8"), "candidates.product_surface[1]"),
    "surface negative": (with_input("history.product_surface", [0, 0, -1], "i8"), "history.product_surface[2]"),
    "created too late": (with_input("candidates.created_at", [2**60, 0, 0], "i8"), "candidates.created_at[0]"),
    "dwell NaN": (with_input("history.dwell_time", [0, np.nan, 0], "f4"), "history.dwell_time[1]"),
    "dwell infinite": (with_input("history.dwell_time", [0, 0, np.inf], "f4"), "history.dwell_time[2]"),
    "dwell negative": (with_input("history.dwell_time", [-1, 0, 0], "f4"), "history.dwell_time[0]"),
    "action too large": (with_input("history.actions", [[0] * 3, [0, 0, 2e6], [0] * 3], "f4"), "history.actions[1][2]"),
    "action NaN": (with_input("history.actions", [[0] * 3, [0] * 3, [np.nan, 0, 0]], "f4"), "history.actions[2][0]"),
    "too few actions": (with_input("history.actions", np.zeros((3, 2)), "f4"), "history.actions"),
    "no actions": (with_parameters(actions=""), "history.actions"),
    "weights as FP32": (with_input("weights", [1, 2, 3], "f4"), "weights"),
    "weight infinite": (with_input("weights", [1, np.inf, 3], "f8"), "weights[1]"),
    "unknown tensor": (with_input("zq9marker", [1]), "inputs[11].name"),
    "unknown action": (with_parameters(actions="favorite,zq9marker,report"), "parameters.actions"),
    "an action twice": (with_parameters(actions="favorite,0,report"), "parameters.actions"),
    "unknown wanted": (with_parameters(actions_wanted="zq9marker"), "parameters.actions_wanted"),
    "top_k zero": (with_parameters(top_k=0), "parameters.top_k"),
    "top_k text": (with_parameters(top_k="zq9marker"), "parameters.top_k"),
    "impression late": (with_parameters(impression_ts=2**60), "parameters.impression_ts"),
    "timeout endless": (with_parameters(timeout=2**63), "parameters.timeout"),
    "unknown parameter": (with_parameters(zq9marker=1), "parameters"),
    "bad id": (lambda asked: replace(asked, request_id="zq9marker\n"), "id"),
}  # fmt: skip


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("change", "field"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_named_and_not_shown(change: Change, field: str, binary: bool) -> None:
    asked = inference_of(good(), ACTIONS)
    read(asked, binary=binary)  # the request is right but for the change
    found = problems(change(asked), binary=binary)
    is_json_null = not binary and not all(np.isfinite(array).all() for array in change(asked).inputs.values())
    assert (field.partition("[")[0] if is_json_null else field) in [name for name, _ in found]
    assert "zq9marker" not in str(found)


def test_only_ten_problems_are_told() -> None:
    asked = with_input("candidates.product_surface", np.full(3, 99), "i8")(inference_of(good(), ACTIONS))
    many = with_input("history.actions", np.full((3, 3), np.nan), "f4")(asked)
    assert len(problems(many)) == 10


def test_no_candidates_is_no_request() -> None:
    inputs = inference_of(good(), ACTIONS).inputs
    nobody = {name: array[:0] if name.startswith("candidates") else array for name, array in inputs.items()}
    assert ("candidates", "must not be empty") in problems(Inference(nobody, {}))


def test_shapes_say_how_long_a_request_is() -> None:
    for limits in (Limits(max_candidates=2), Limits(max_history=2)):
        with pytest.raises(TooLarge):
            read(inference_of(good(), ACTIONS), limits=limits)


def test_metadata_describes_the_tensors() -> None:
    described = tensors.describe_model(MANIFEST)
    inputs = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in described["inputs"]}
    assert inputs["candidates.post_id"] == ("UINT64", [-1])
    assert inputs["history.actions"] == ("FP32", [-1, 3])
    outputs = {tensor["name"]: tensor["shape"] for tensor in described["outputs"]}
    assert (outputs["probabilities"], outputs["continuous"]) == ([-1, 3], [-1, 1])
    for name, array in inference_of(good(), ACTIONS).inputs.items():
        assert len(inputs[name][1]) == array.ndim
