"""Requests for posts: the typed way and the plain definition have one verdict on any body."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from pydantic import ValidationError

from app.errors import InvalidRequest, MalformedJson, ServiceError
from app.request import contract, strict_json
from app.request.posts_body import decode_recommend, decode_retrieve
from app.request.retrieval import check_recommend, check_retrieve
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from tests.app.fakes import FakeEngine, loaded

VOCABULARY = Vocabulary.of(loaded(FakeEngine()).checkpoint.manifest)
LIMITS = Limits(max_retrieved=2**63)

FIELDS: dict[str, list[Any]] = {
    "user_id": [1, "2", 0, -1, "01", 2**64, 2**64 - 1, str(2**64), None, 1.0, True, []],
    "history": [
        [], [{"post_id": 1, "author_id": 2}], [{"post_id": 1}], [{"post_id": 1, "author_id": 2, "actions": ["reply"]}], None,
        {"post_id": [1, "2"], "author_id": [1, 2]}, {"post_id": [1], "author_id": []}, {}, "x",
        [{"post_id": 1, "author_id": 2, "actions": {"reply": -1}}], [{"post_id": 1, "author_id": 2, "surface": 1}],
    ],
    "k": [1, 200, 0, -1, 1.0, "1", True, None, 2**62],
    "exclude": [[], [1, "2"], [2**64], ["x"], [-1], None, {}, 1, [1.0], [True]],
    "exclude_history": [True, False, 0, 1, "true", None],
    "topics": [[], ["a"], ["a" * 100], ["a" * 101], [1], None, "a", ["a"] * 1000, ["a"] * 1001],
    "min_score": [0, 0.5, -1, 1, 1.01, -2, "0", None, True, 1e400],
    "max_age_seconds": [1, 60, 0, -1, 1.5, None, 253_402_300_799, 253_402_300_800],
    "impression_ts": [0, 1780000000, -1, 1.5, None, "1", 253_402_300_800],
    "request_id": ["a", "a b", "", "a" * 128, "a" * 129, 1, None],
    "surprise": [1],
}  # fmt: skip
WISHES: dict[str, list[Any]] = {
    "weights": [{}, {"reply": 1}, {"reply": 1e10}, {"reply": None}, [], None],
    "top_k": [1, 0, -1, 1.0, None, True],
    "actions_wanted": [[], ["reply"], [1], None, "reply"],
}


def bodies(fields: dict[str, list[Any]], count: int) -> list[dict[str, Any]]:
    """Mostly right: each field is absent, its first value, or any; one field alone at first."""
    chance = random.Random(1)
    single = [{"user_id": 1} | {name: value} for name, values in fields.items() for value in values]
    mixed = [
        {"user_id": 1} | {name: chance.choice(values[:2] if chance.random() < 0.8 else values)
                          for name, values in fields.items() if name != "surprise" and chance.random() < 0.5}
        for _ in range(count)
    ]  # fmt: skip
    return [{}, *single, *mixed]


def plain(model: type[contract.RetrieveRequest], raw: bytes) -> type[ServiceError] | None:
    try:
        model.model_validate(strict_json.parse(raw))
    except MalformedJson:
        return MalformedJson
    except ValidationError:
        return InvalidRequest
    return None


def verdict(raw: bytes, *, ranks: bool) -> type[ServiceError] | None:
    try:
        if ranks:
            check_recommend(decode_recommend(raw, LIMITS, [VOCABULARY, VOCABULARY]), [VOCABULARY, VOCABULARY])
        else:
            check_retrieve(decode_retrieve(raw, LIMITS, VOCABULARY), VOCABULARY)
    except ServiceError as error:
        return type(error)
    return None


@pytest.mark.parametrize("ranks", [False, True])
def test_one_verdict(ranks: bool) -> None:
    model = contract.RecommendRequest if ranks else contract.RetrieveRequest
    cases = [json.dumps(body).encode() for body in bodies(FIELDS | (WISHES if ranks else {}), 3000)]
    verdicts = [verdict(raw, ranks=ranks) for raw in cases]
    assert [raw for raw, ours in zip(cases, verdicts, strict=True) if ours != plain(model, raw)] == []
    assert verdicts.count(None) > 500
    assert verdicts.count(InvalidRequest) > 500


def test_both_models_must_know_the_words() -> None:
    other = Vocabulary(("favorite", "share"), {"0": 0, "1": 1, "favorite": 0, "share": 1}, 2, VOCABULARY.weights[:2])
    for vocabularies in ([VOCABULARY, other], [other, VOCABULARY]):
        for event, known in (
            ({"actions": ["favorite"]}, True),
            ({"actions": ["reply"]}, False),
            ({"actions": ["share"]}, False),
            ({"actions": ["favorite", "1"]}, True),
            ({"actions": ["2"]}, False),
            ({"actions": {"share": 1, "1": 1}}, False),
            ({"product_surface": 2}, False),
            ({"product_surface": 1}, True),
        ):
            raw = json.dumps({"user_id": 1, "history": [{"post_id": 1, "author_id": 1} | event]}).encode()
            if known:
                check_recommend(decode_recommend(raw, LIMITS, vocabularies), vocabularies)
            else:
                with pytest.raises(InvalidRequest, match=r"history\[0\]"):
                    check_recommend(decode_recommend(raw, LIMITS, vocabularies), vocabularies)
    raw = json.dumps({"user_id": 1, "weights": {"share": 1}, "actions_wanted": ["share"]}).encode()
    check_recommend(decode_recommend(raw, LIMITS, [VOCABULARY, other]), [VOCABULARY, other])
    with pytest.raises(InvalidRequest, match="weights"):
        check_recommend(decode_recommend(raw, LIMITS, [other, VOCABULARY]), [other, VOCABULARY])


def test_the_history_is_excluded_whole_unless_asked_not_to() -> None:
    body = {"user_id": 1, "exclude": [5, "6"], "history": {"post_id": list(range(10, 40)), "author_id": [1] * 30}}
    request = check_retrieve(decode_retrieve(json.dumps(body).encode(), LIMITS, VOCABULARY), VOCABULARY)
    assert request.filters.exclude.tolist() == [5, 6, *range(10, 40)]
    raw = json.dumps(body | {"exclude_history": False}).encode()
    request = check_retrieve(decode_retrieve(raw, LIMITS, VOCABULARY), VOCABULARY)
    assert request.filters.exclude.tolist() == [5, 6]
    raw = json.dumps(body | {"exclude_history": False, "exclude": []}).encode()
    assert not len(check_retrieve(decode_retrieve(raw, LIMITS, VOCABULARY), VOCABULARY).filters.exclude)
