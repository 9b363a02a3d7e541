"""A request's columns: both forms mean the same, every value keeps its meaning, and a bad one is told by its place."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from msgspec.json import Decoder
from msgspec.structs import replace as remade

from app import features, schema
from app.errors import InvalidRequest
from app.features import ReplyOptions
from app.vocabulary import Vocabulary
from model.inputs import Candidates, Context
from tests.support import strategies
from tests.support.bodies import good, in_columns
from tests.support.fakes import CONFIG, FakeEngine, fake_model
from weights.actions import CONTINUOUS_WEIGHTS, SCORE_WEIGHT_SETS
from weights.format.manifest import ContinuousOutput
from weights.text_ids import text_id

RANK = Decoder(schema.RankRequest)
MANIFEST = fake_model(FakeEngine()).checkpoint.manifest
WORDS = Vocabulary.of(MANIFEST)
TEXTS = Vocabulary.of(remade(MANIFEST, ids="text", version=""))
POST: dict[str, Any] = {"post_id": 1, "author_id": 2}
NAMED = {"post_id": "p", "author_id": "a"}


def decoded(body: Any) -> schema.RankRequest:
    asked = schema.decode(RANK, json.dumps(body).encode())
    asked.check()
    return asked


def read(body: Any, words: Vocabulary = WORDS) -> tuple[Context, Candidates, ReplyOptions]:
    request = decoded(body)
    checked = features.check(request, words, CONFIG)
    return features.context_of(request, words, CONFIG), checked.candidates, checked.options


def problem_of(body: Any, words: Vocabulary = WORDS) -> tuple[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        read(body, words)
    ((field, message),) = caught.value.problems
    return field, message


def assert_same(one: Any, other: Any) -> None:
    for field in fields(one):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), field.name, strict=True)


@settings(max_examples=80, deadline=None)
@given(strategies.valid)
def test_both_forms_mean_the_same(body: dict[str, Any]) -> None:
    for one, other in zip(read(body)[:2], read(strategies.columnar(body))[:2], strict=True):
        assert_same(one, other)


@settings(max_examples=50, deadline=None)
@given(strategies.valid)
def test_ids_keep_their_value_and_their_form(body: dict[str, Any]) -> None:
    _, candidates, _ = read(body)
    sent = [candidate["post_id"] for candidate in body["candidates"]]
    echoed = features.check(decoded(body), WORDS, CONFIG).post_ids
    assert [(type(value), value) for value in echoed] == [(type(value), value) for value in sent]
    assert candidates.post_ids.tolist() == [int(value) for value in sent]
    assert candidates.author_ids.tolist() == [int(candidate["author_id"]) for candidate in body["candidates"]]


@pytest.mark.parametrize(
    "value", [-1, 2**64, 2**70, "18446744073709551616", "", "00", "01", "-1", "1,2", "1\\", '"', "]", "1.0", " 7", "+7", "1e3", "\u0661"]
)  # fmt: skip
def test_one_that_is_no_id_is_told_by_its_place(value: int | str) -> None:
    for first in (0, "0"):
        with pytest.raises(InvalidRequest, match="64-bit") as caught:
            features.ids_of([first, 5, value], "uint64", "exclude")
        assert caught.value.problems[0].field == "exclude[2]"


def test_actions_become_a_matrix() -> None:
    history = [POST | {"actions": actions} for actions in (["2", "favorite"], {"reply": 0.5, "0": 0}, [], 6, 0)]
    for form in (history, in_columns(history)):
        actions = read(good(history=form))[0].actions
        assert actions.tolist() == [[1, 0, 1], [0, 0.5, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0]]
        assert actions.dtype == np.float32


@pytest.mark.parametrize("actions", [1, 3, 63, 64, 65, 130])
def test_a_mask_is_its_bits(actions: int) -> None:
    names = tuple(f"a{place}" for place in range(actions))
    words = replace(WORDS, action_names=names, index={name: place for place, name in enumerate(names)})
    top = 2 ** min(actions, 64)
    masks = [0, 1, top - 1, top // 2, 0b101 % top]
    named = [[f"a{bit}" for bit in range(min(actions, 64)) if mask >> bit & 1] for mask in masks]
    wanted = read(good(history=[POST | {"actions": each} for each in named], weights={}, actions_wanted=...), words)[
        0
    ].actions
    assert wanted.shape == (5, actions)
    for history in (
        [POST | {"actions": mask} for mask in masks],
        in_columns([POST | {"actions": mask} for mask in masks]),
    ):
        found = read(good(history=history, weights={}, actions_wanted=...), words)[0].actions
        np.testing.assert_array_equal(found, wanted, strict=True)


@pytest.mark.parametrize("length", [0, 15, 16, 17, 40])
def test_the_newest_events_that_fit_the_window_are_kept(length: int) -> None:
    history = [
        {"post_id": place + 1, "author_id": 1, "actions": [str(place % 3)], "dwell_time": place}
        for place in range(length)
    ]
    for form in (history, in_columns(history) if history else []):
        context, _, _ = read(good(history=form))
        kept = min(length, CONFIG.history_length)
        assert (len(context), context.dropped) == (kept, length - kept)
        assert context.post_ids.tolist() == list(range(length - kept + 1, length + 1))
        assert context.dwell_seconds.tolist() == [min(place, 30) for place in range(length - kept, length)]
        context.check(CONFIG)


def test_what_is_left_out_is_zero() -> None:
    for history, candidates in (([POST], [POST]), (in_columns([POST]), in_columns([POST]))):
        context, shown, _ = read({"user_id": 0, "history": history, "candidates": candidates})
        assert (context.user_id, context.surfaces.tolist(), context.dwell_seconds.tolist()) == (0, [0], [0.0])
        assert (context.actions.tolist(), shown.surfaces.tolist(), shown.age_buckets.tolist()) == (
            [[0, 0, 0]],
            [0],
            [0],
        )


@pytest.mark.parametrize(
    ("name", "changes", "place"),
    [
        ("candidates", {"post_id": "x"}, "post_id"),
        ("candidates", {"author_id": 2**64}, "author_id"),
        ("candidates", {"product_surface": 16}, "product_surface"),
        ("candidates", {"product_surface": -1}, "product_surface"),
        ("candidates", {"created_at": -1}, "created_at"),
        ("candidates", {"created_at": 253_402_300_800}, "created_at"),
        ("candidates", {"created_at": 1_779_990_000_000}, "created_at"),
        ("history", {"dwell_time": -0.1}, "dwell_time"),
        ("history", {"actions": ["favorite", "secretive"]}, "actions[1]"),
        ("history", {"actions": ["3"]}, "actions[0]"),
        ("history", {"actions": ["00"]}, "actions[0]"),
        ("history", {"actions": ["favorite", "0"]}, "actions"),
        ("history", {"actions": {"favorite": 1, "0": 0}}, "actions"),
        ("history", {"actions": {"secretive": 1}}, "actions"),
        ("history", {"actions": {"reply": 1, "favorite": 1e7}}, "actions.favorite"),
        ("history", {"actions": {"favorite": -1}}, "actions.favorite"),
        ("history", {"actions": 8}, "actions"),
        ("history", {"actions": -1}, "actions"),
    ],
    ids=str,
)
def test_a_bad_value_is_told_by_its_place(name: str, changes: dict[str, Any], place: str) -> None:
    items = [POST, POST | {"actions": {"reply": 1}} if name == "history" else POST, POST | changes, POST | changes]
    field, message = problem_of(good(**{name: items}))
    assert field == f"{name}[2].{place}"
    column = re.split(r"[.\[]", place)[0]
    below = place.removeprefix(column)
    assert problem_of(good(**{name: in_columns(items)})) == (f"{name}.{column}[2]{below}", message)
    assert message.startswith(("must ", "names ", "every "))
    assert "secretive" not in message


def test_weights_replace_the_checkpoints_whole() -> None:
    assert read(good(weights=...))[2].weights.tolist() == [1.0, 0.0, -2.0]
    assert read(good(weights={"1": 3}))[2].weights.tolist() == [0.0, 3.0, 0.0]
    assert read(good(weights={}))[2].weights.tolist() == [0.0, 0.0, 0.0]


def test_the_published_weights_count_what_the_checkpoint_has() -> None:
    published = SCORE_WEIGHT_SETS["x-2026-09"]
    known = [published[name] for name in MANIFEST.action_names]
    weights = read(good(weights="x-2026-09"))[2].weights
    assert weights.tolist() == [*known, CONTINUOUS_WEIGHTS["x-2026-09"]["dwell_time"]]
    assert len(read(good(weights="default"))[2].weights) == 3
    other = remade(
        MANIFEST, action_names=("a", "favorite", "b"), continuous=(ContinuousOutput("c", 1.0, ""),), score_weights={}, version=""
    )  # fmt: skip
    assert Vocabulary.of(other).sets["x-2026-09"].tolist() == [0.0, 0.5, 0.0]
    clicks = remade(other, continuous=(ContinuousOutput("click_dwell_time", 20.0, "s"),))
    assert Vocabulary.of(clicks).sets["x-2026-10"].tolist() == [0.0, 0.5, 0.0, 0.4 / 20]  # 0.4 of the model's 0 … 1
    assert Vocabulary.of(other).sets.keys() == SCORE_WEIGHT_SETS.keys() == {*schema.WeightSet.__args__}  # type: ignore[attr-defined]


# ids that are texts


def test_texts_are_read_as_their_hashes() -> None:
    posts = [
        {"post_id": name, "author_id": f"author:{name[:8]}"}
        for name in ("64f1c0ffee0ddba11ab1e042", "7", "é" * 64, "\x00")
    ]
    for form in (posts, in_columns(posts)):
        body = {"user_id": "user:1", "history": form, "candidates": form}
        context, candidates, _ = read(body, TEXTS)
        assert context.user_id == text_id("user:1")
        for found in (context.post_ids, candidates.post_ids):
            assert found.tolist() == [text_id(str(post["post_id"])) for post in posts]
        assert candidates.author_ids.tolist() == [text_id(str(post["author_id"])) for post in posts]
        assert features.check(decoded(body), TEXTS, CONFIG).post_ids == [post["post_id"] for post in posts]


@pytest.mark.parametrize("value", [7, "", "x" * 129, "é" * 65], ids=["integer", "empty", "long", "long in bytes"])
def test_what_is_no_text_id_is_told_by_its_place(value: int | str) -> None:
    whole = {"user_id": "u", "candidates": [NAMED, NAMED]}
    read(whole, TEXTS)
    assert problem_of(whole | {"user_id": value}, TEXTS)[0] == "user_id"
    assert (
        problem_of(whole | {"candidates": [NAMED, NAMED | {"author_id": value}]}, TEXTS)[0] == "candidates[1].author_id"
    )
    bad = in_columns([NAMED, NAMED | {"post_id": value}])
    field, message = problem_of(whole | {"history": bad}, TEXTS)
    assert field == "history.post_id[1]"
    assert "1 to 128 bytes" in message
