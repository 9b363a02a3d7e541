"""Weights by name, the published offset, and masks of actions: what they mean, on every wire."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.request import inference, tensors
from app.request.body import decode
from app.request.codec import Codec, Packed
from app.request.reply import ranked, render
from app.request.schema import WeightSet
from app.request.validate import Request, bits_of, check
from app.request.vocabulary import Vocabulary
from model.inputs import Scores
from model.ranking import combine, magnitudes, offset, order_of
from tests.app.request.test_codec import CODEC, FORM, LIBRARY, LIMITS, MANIFEST, WRITTEN, problems
from tests.app.serving import VOCABULARY, checked, good
from weights.actions import CONTINUOUS_WEIGHTS, SCORE_WEIGHT_SETS
from weights.format.manifest import ContinuousOutput

X = SCORE_WEIGHT_SETS["x-2026-09"]


def scored(probabilities: Any, dwell: float = 0.5) -> Scores:
    rows = np.asarray(probabilities, np.float32).reshape(-1, 3)
    return Scores(rows, rows, np.full((len(rows), 1), dwell, np.float32))


def test_the_published_weights_count_what_the_checkpoint_has() -> None:
    assert set(VOCABULARY.sets) == set(SCORE_WEIGHT_SETS) == set(WeightSet.__args__)  # type: ignore[attr-defined]
    request = checked(good(weights="x-2026-09"))
    assert request.weights.tolist() == [
        X["favorite"],
        X["reply"],
        X["report"],
        CONTINUOUS_WEIGHTS["x-2026-09"]["dwell_time"],
    ]
    (score,), _, _ = ranked(scored([0.5, 0.25, 0.125]), request, FORM)
    assert math.isclose(score, 0.5 * 0.5 + 5 * 0.25 - 234 * 0.125 + 0.004 * 15, rel_tol=1e-12)
    assert len(checked(good(weights="default")).weights) == 3
    other = Vocabulary.of(
        replace(
            MANIFEST,
            action_names=("a", "favorite", "b"),
            continuous=(ContinuousOutput("c", 1.0, ""),),
            score_weights={},
            version="",
        )
    )
    assert other.sets["x-2026-09"].tolist() == [0.0, 0.5, 0.0]


def test_the_offset_is_the_published_formula() -> None:
    weights = np.array([0.5, 5.0, -234.0, -43.2])
    negative, every = magnitudes(weights)
    assert (negative, every) == (234.0 + 43.2, 0.5 + 5.0 + 234.0 + 43.2)
    lifted = offset(np.array([0.0, 2.0, -0.0, -1e-9, -100.0, -277.2]), negative, every)
    assert lifted[:3].tolist() == [0.001, 2.001, 0.001]
    assert math.isclose(lifted[4], (277.2 - 100) / 282.7 * 0.001)
    assert lifted.min() >= 0
    assert (np.diff(lifted[[1, 0, 3, 4, 5]]) < 0).all()
    assert offset(np.array([0.0]), *magnitudes(np.zeros(3))).tolist() == [0.001]


def test_a_post_with_a_negative_sum_ranks_below_every_other_and_above_0() -> None:
    for name, changes in (("offset", {"score": "offset"}), ("sum", {}), ("sum", {"score": "sum"})):
        request = checked(good(weights="x-2026-09", **changes))
        scores, order, _ = ranked(
            scored([[0.1, 0.1, 0.1], [0.0, 0.0, 0.0], [0.1, 0.1, 0.0], [0.9, 0.9, 0.9]], 0.0), request, FORM
        )
        assert order.tolist()[:2] == [2, 1]
        assert (scores.min() > 0) == (name == "offset")


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 200),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["default", "x-2026-09", {"report": -20, "favorite": 1}, {"report": -1e9, "reply": 1e-9}, {}]),
    st.sampled_from(["objects", "columns"]),
    st.sampled_from([None, 7]),
)
def test_both_ways_combine_to_the_same_bits(count: int, seed: int, weights: Any, form: str, top_k: int | None) -> None:
    random = np.random.default_rng(seed)
    rows = random.random((count, 3), np.float32) ** random.integers(1, 30)
    rows[random.integers(0, count, count // 4)] *= random.choice([0, -0.0, -1, 1e-30])
    scores = Scores(rows, rows, random.random((count, 1), np.float32))
    posts = [{"post_id": place, "author_id": 1} for place in range(count)]
    body = good(candidates=posts, weights=weights, score="offset", reply=form, top_k=top_k or ...)
    request = checked(body)
    for one, other in zip(ranked(scores, request, WRITTEN), ranked(scores, request, FORM), strict=True):
        assert one.tobytes() == other.tobytes()
    tail: dict[str, Any] = {"history_used": 1, "timings_ms": {}}
    ours, theirs = (b"".join(render(request, scores, use, **tail)) for use in (WRITTEN, FORM))
    assert ours == theirs
    packed = CODEC.read(orjson.dumps(body))
    assert isinstance(packed, Packed)
    assert packed.unpack(MANIFEST.config)[0].weights.tobytes() == request.weights.tobytes()
    assert packed.wishes.has_offset


def test_another_formula_would_be_noticed() -> None:
    request = checked(good(weights="x-2026-09", score="offset"))
    scores = scored(np.random.default_rng(1).random((50, 3)))
    found = ranked(scores, request, WRITTEN)[0]
    assert found.tobytes() != combine(scores.probabilities, request.weights[:3]).tobytes()
    assert found.tobytes() != ranked(scores, replace(request, has_offset=False), WRITTEN)[0].tobytes()
    assert found.tobytes() != ranked(scores, replace(request, weights=request.weights[:3]), WRITTEN)[0].tobytes()
    assert order_of(found).tolist() == order_of(ranked(scores, replace(request, has_offset=False), FORM)[0]).tolist()


@pytest.mark.parametrize(("changes", "told"), [
    ({"weights": "x"}, ("weights", "as a name must be one of default, x-2026-09")),
    ({"weights": 1}, ("weights", "must be a map of action to number or a name")),
    ({"score": "mean"}, ("score", "must be one of sum, offset")),
    ({"score": None}, ("score", "must be one of sum, offset")),
])  # fmt: skip
def test_unknown_names_are_refused(changes: dict[str, Any], told: tuple[str, str]) -> None:
    assert CODEC.read(orjson.dumps(good(**changes))) is None
    assert problems(lambda: checked(good(**changes))) == [told]


# masks


def wide(actions: int) -> tuple[Vocabulary, Codec]:
    names = tuple(f"a{place}" for place in range(actions))
    manifest = replace(MANIFEST, action_names=names, score_weights={}, config=replace(MANIFEST.config, actions=actions))
    words = Vocabulary.of(manifest)
    assert LIBRARY is not None
    return words, Codec(LIBRARY, manifest, words, LIMITS)


@pytest.mark.parametrize("actions", [1, 3, 63, 64, 65, 130])
def test_a_mask_is_its_bits(actions: int) -> None:
    words, made = wide(actions)
    top = 2 ** min(actions, 64)
    masks = [0, 1, top - 1, top // 2, 0b101 % top]
    names = [[f"a{bit}" for bit in range(min(actions, 64)) if mask >> bit & 1] for mask in masks]
    ids = {"post_id": [1] * 5, "author_id": [1] * 5}
    for history in ({**ids, "actions": masks}, [{"post_id": 1, "author_id": 1, "actions": mask} for mask in masks]):
        body = {"user_id": 1, "candidates": [{"post_id": 1, "author_id": 1}], "history": history}
        by_names = body | {"history": {**ids, "actions": names}}
        dense = check(decode(orjson.dumps(by_names), LIMITS), words).actions
        assert check(decode(orjson.dumps(body), LIMITS), words).actions.tobytes() == dense.tobytes()
        packed = made.read(orjson.dumps(body))
        assert isinstance(packed, Packed)
        config = replace(MANIFEST.config, actions=actions)
        assert packed.unpack(config)[1].actions.tobytes() == dense.tobytes()


@pytest.mark.parametrize("mask", [8, 2**64 - 1, 2**64, -1, True, 1.0, "7", None])
def test_what_is_no_mask_is_refused(mask: Any) -> None:
    raw = json.dumps(good(history={"post_id": [1], "author_id": [1], "actions": [mask]})).encode()
    assert CODEC.read(raw) is None
    ((place, sentence),) = problems(lambda: check(decode(raw, LIMITS), VOCABULARY))
    assert place == "history.actions[0]"
    beyond = type(mask) is int and mask < 2**64
    assert sentence == ("must have no bits beyond those of the 3 actions" if beyond else
                        "must be a list of names, a map of name to value or a mask")  # fmt: skip


def masked(words: Vocabulary, masks: Any, *, binary: bool, name: str = "history.actions", **parameters: Any) -> Request:
    rows = np.asarray(masks, np.uint64)
    columns: dict[str, Any] = {
        "user_id": np.ones(1, np.uint64), "candidates.post_id": np.ones(1, np.uint64), "candidates.author_id": np.ones(1, np.uint64),
        "history.post_id": np.ones(len(rows), np.uint64), "history.author_id": np.ones(len(rows), np.uint64), name: rows,
    }  # fmt: skip
    inputs = [
        {"name": name, "datatype": "UINT64", "shape": column.shape}
        | ({"parameters": {"binary_data_size": column.nbytes}} if binary else {"data": column.tolist()})
        for name, column in columns.items()
    ]
    text = orjson.dumps({"inputs": inputs, "parameters": parameters})
    data = b"".join(column.tobytes() for column in columns.values()) if binary else b""
    return tensors.check(inference.decode(text + data, LIMITS, b"%d" % len(text) if binary else None), words)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("actions", "width"), [(3, None), (3, 1), (64, None), (65, 2), (130, 3)])
def test_masks_as_tensors(actions: int, width: int | None, binary: bool) -> None:
    words, _ = wide(actions)
    random = np.random.default_rng(actions)
    dense = random.integers(0, 2, (20, actions)).astype(np.float32)
    bits = np.zeros((20, 64 * (width or 1)), np.uint8)
    bits[:, :actions] = dense
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.uint64)
    request = masked(words, masks[:, 0] if width is None else masks, binary=binary)
    assert request.actions.tobytes() == dense.tobytes()
    assert request.actions.dtype == np.float32
    assert masked(words, masks[:0, 0] if width is None else masks[:0], binary=binary).actions.shape == (0, actions)


def test_masks_of_named_columns() -> None:
    request = masked(VOCABULARY, [1, 2], binary=True, actions="report,favorite")
    assert request.actions.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert problems(lambda: masked(VOCABULARY, [4], binary=True, actions="report,favorite")) == [
        ("history.actions", "must have no bits beyond those of the 2 actions")
    ]


def test_masks_that_do_not_fit_are_refused() -> None:
    words, _ = wide(65)
    assert (
        problems(lambda: masked(VOCABULARY, [8], binary=True))[0][1]
        == "must have no bits beyond those of the 3 actions"
    )
    assert (
        problems(lambda: masked(words, [[0, 2]], binary=False))[0][1]
        == "must have no bits beyond those of the 65 actions"
    )
    assert problems(lambda: masked(words, [1], binary=True)) == [("history.actions", "must have the shape [H, W]")]
    for shape in ([[1, 1]], [[[1]]], [[]]):
        assert problems(lambda: masked(VOCABULARY, shape, binary=True))[0][0] == "history.actions"  # noqa: B023
    assert (
        problems(lambda: masked(VOCABULARY, [1], binary=True, name="weights"))[0][1] == "must be of the datatype FP64"
    )


def test_bits_are_read_from_the_lowest() -> None:
    assert bits_of(np.array([[6, 1]], np.uint64), 70)[0].nonzero()[0].tolist() == [1, 2, 64]
    assert bits_of(np.array([[5]], np.uint64), 2).tolist() == [[1, 0]]


def test_a_name_and_a_tensor_of_weights_are_refused_together() -> None:
    inputs = [
        {"name": name, "datatype": "UINT64", "shape": [1], "data": [1]}
        for name in ("user_id", "candidates.post_id", "candidates.author_id")
    ]
    for extra, is_right in (
        ([], True),
        ([{"name": "weights", "datatype": "FP64", "shape": [3], "data": [1, 2, 3]}], False),
    ):
        raw = orjson.dumps({"inputs": inputs + extra, "parameters": {"weights": "x-2026-09", "score": "offset"}})
        typed = inference.decode(raw, LIMITS, None)
        if is_right:
            request = tensors.check(typed, VOCABULARY)
            assert (request.has_offset, request.weights[-1]) == (True, 0.004)
        else:
            told = problems(lambda: tensors.check(typed, VOCABULARY))  # noqa: B023
            assert told == [("parameters.weights", "names weights, and a tensor of weights is there as well")]
