"""Requests for posts: the checks and the published schema have one verdict on any body."""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from app.errors import InvalidRequest, MalformedJson, ServiceError, TooLarge
from app.request import strict_json
from app.request.codec import Codec, load_library
from app.request.reply import Joined, ReplyFormat, head_of, names_of, render
from app.request.retrieval import PostsRequest, Reading, check_posts, read_compiled, read_posts
from app.request.schema import RecommendRequest, RetrieveRequest
from app.request.validate import Request
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from model.inputs import Scores
from model.retrieval.inputs import Mark, Retrieved
from tests.app.bounds import bounded
from tests.app.fakes import FakeEngine, loaded
from tests.app.odd_bodies import mutated
from tests.app.published import keeps
from tests.app.request.sanitized_codec import told_of_posts

MANIFEST = loaded(FakeEngine()).checkpoint.manifest
VOCABULARY, CONFIG = Vocabulary.of(MANIFEST), MANIFEST.config
LIMITS = Limits(max_retrieved=2**63)
FORM = ReplyFormat.of(MANIFEST)

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
    "top_k": [1, 0, -1, 1.0, None, True, 2**64 - 1, 2**64],
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


def plain(model: type[RetrieveRequest], raw: bytes) -> type[ServiceError] | None:
    try:
        parsed = strict_json.parse(raw)
    except MalformedJson:
        return MalformedJson
    has_time = "max_age_seconds" not in parsed or parsed.get("impression_ts")
    return None if keeps(model, parsed) and has_time else InvalidRequest


def models_of(*vocabularies: Vocabulary) -> list[Reading]:
    return [Reading(vocabulary, CONFIG) for vocabulary in vocabularies]


def checked(raw: bytes, *vocabularies: Vocabulary) -> PostsRequest:
    models = models_of(*vocabularies)
    return check_posts(read_posts(raw, LIMITS, models), models)


def verdict(raw: bytes, *, ranks: bool) -> type[ServiceError] | None:
    try:
        checked(raw, *[VOCABULARY] * (1 + ranks))
    except ServiceError as error:
        return None if "nothing is known about this user" in error.detail else type(error)  # a rule of the search alone
    return None


@pytest.mark.parametrize("ranks", [False, True])
def test_one_verdict(ranks: bool) -> None:
    model = RecommendRequest if ranks else RetrieveRequest
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
                checked(raw, *vocabularies)
            else:
                with pytest.raises(InvalidRequest, match=r"history\[0\]"):
                    checked(raw, *vocabularies)
    raw = json.dumps({"user_id": 1, "weights": {"share": 1}, "actions_wanted": ["share"]}).encode()
    checked(raw, VOCABULARY, other)
    with pytest.raises(InvalidRequest, match="weights"):
        checked(raw, other, VOCABULARY)


def test_the_history_is_excluded_whole_unless_asked_not_to() -> None:
    body = {"user_id": 1, "exclude": [5, "6"], "history": {"post_id": list(range(10, 40)), "author_id": [1] * 30}}
    for wish, excluded in (
        ({}, [5, 6, *range(10, 40)]),
        ({"exclude_history": False}, [5, 6]),
        ({"exclude_history": False, "exclude": []}, []),
    ):
        request = checked(json.dumps(body | wish).encode(), VOCABULARY)
        assert request.query.filters.exclude.tolist() == excluded


# the codec

LIBRARY = load_library()
assert LIBRARY is not None


def with_codec(library: ctypes.PyDLL, history_length: int = CONFIG.history_length, limits: Limits = LIMITS) -> Reading:
    config = replace(CONFIG, history_length=history_length)
    codec = Codec(library, replace(MANIFEST, config=config), VOCABULARY, limits)
    return Reading(replace(VOCABULARY, codec=codec), config)


def compiled_models(library: ctypes.PyDLL = LIBRARY) -> list[Reading]:
    """Two models of other windows."""
    return [with_codec(library, 4), with_codec(library, 6)]


def plain_told(raw: bytes, models: Sequence[Reading]) -> list[Any]:
    """What the plain path makes of a body, nothing where it refuses it."""
    plain_models = [Reading(replace(model.vocabulary, codec=None), model.config) for model in models]
    try:
        return told_of_posts(check_posts(read_posts(raw, LIMITS, plain_models), plain_models))
    except ServiceError:
        return []


def differing(raws: Iterable[bytes], models: Sequence[Reading]) -> tuple[list[bytes], int]:
    """Bodies that the codec takes though the plain path refuses them, or reads otherwise; and how many it takes."""
    wrong, taken = [], 0
    for raw in raws:
        for some in (models, models[:1]):
            ours = read_compiled(raw, LIMITS, some)
            if ours is None:
                continue
            taken += 1
            if told_of_posts(ours) != plain_told(raw, some):
                wrong.append(raw)
    return wrong, taken


LONG_HISTORY = [
    {"post_id": place + 2**63, "author_id": str(place), "actions": {"reply": place / 3}, "dwell_time": 0.1}
    for place in range(9)
]


def sent(count: int) -> list[bytes]:
    """Bodies as in `test_one_verdict`, some with a history that no window holds."""
    raws = [json.dumps(body).encode() for body in bodies(FIELDS | WISHES, count)]
    raws += [json.dumps({"user_id": 1, "history": LONG_HISTORY} | wish).encode() for wish in
             ({}, {"exclude": [1, "7"], "k": 3}, {"exclude_history": False}, {"weights": {"reply": 2}, "top_k": 3})]  # fmt: skip
    return raws


def test_the_codec_reads_alike_or_declines() -> None:
    raws = sent(1500)
    good = [raw.replace(b": ", b":") for raw in raws if verdict(raw, ranks=True) is None]
    cases = [*raws, *islice(mutated(3, good), 3000)]
    wrong, taken = differing(cases, compiled_models())
    assert wrong == []
    assert differing(cases[::7], [with_codec(LIBRARY), with_codec(LIBRARY)])[0] == []
    assert taken > 700


def test_most_requests_for_posts_are_taken() -> None:
    models = compiled_models()
    long = {"user_id": 7, "history": LONG_HISTORY, "k": 5, "exclude": ["3"], "request_id": "a"}
    for body in ({"user_id": "7"}, long):
        for some in (models, models[:1]):
            assert read_compiled(json.dumps(body, indent=1).encode(), LIMITS, some) is not None


@pytest.mark.parametrize("changed", [{"k": 4}, {"exclude": [1, 2]}, {"history": LONG_HISTORY[:3]}])
def test_more_than_the_limits_is_left_to_the_plain_path(changed: dict[str, Any]) -> None:
    limits = bounded(Limits(max_retrieved=3, max_history=2), max_excluded=1)
    assert LIBRARY is not None
    models = [with_codec(LIBRARY, limits=limits)]
    body = {"user_id": 1, "k": 3, "exclude": [1], "history": LONG_HISTORY[:2]}
    assert read_compiled(json.dumps(body).encode(), limits, models) is not None
    with pytest.raises(TooLarge):
        read_posts(json.dumps(body | changed).encode(), limits, models)


@pytest.mark.parametrize(("limit", "k"), [(150, 150), (201, 200)])
@pytest.mark.parametrize("kept", [None, LIBRARY])
def test_a_request_without_k_asks_for_no_more_than_is_allowed(limit: int, k: int, kept: Any) -> None:
    limits = Limits(max_retrieved=limit)
    models = [with_codec(kept, limits=limits) if kept else Reading(VOCABULARY, CONFIG)]
    assert check_posts(read_posts(b'{"user_id": 1}', limits, models), models).query.k == k
    for wrong in ("null", '"9"', "0", "-1"):
        with pytest.raises(InvalidRequest):
            check_posts(read_posts(b'{"user_id": 1, "k": %s}' % wrong.encode(), limits, models), models)


@pytest.mark.parametrize("other", [{"action_names": ("a", "b", "c")}, {"product_surfaces": 3}])
def test_models_of_other_words_or_windows_read_for_themselves(other: dict[str, Any]) -> None:
    assert LIBRARY is not None
    one = with_codec(LIBRARY)
    assert one.reads_as(with_codec(LIBRARY))
    assert not one.reads_as(with_codec(LIBRARY, 5))
    assert not one.reads_as(Reading(replace(VOCABULARY, **other), CONFIG))


def test_another_window_would_be_noticed() -> None:
    assert LIBRARY is not None
    shifted = with_codec(LIBRARY, 4)
    wrong, _ = differing(sent(0), [Reading(shifted.vocabulary, replace(CONFIG, history_length=5))])
    assert wrong


def found(scores: list[float]) -> Retrieved:
    count = len(scores)
    ids, times = np.arange(2**63, 2**63 + count, dtype=np.uint64), np.zeros(count, np.int64)
    return Retrieved(ids, ids, np.array(scores, np.float32), times, [None] * count, 9, 9, True, 99, 0, Mark())


def ranking(numbers: np.ndarray[Any, Any], wish: dict[str, Any]) -> tuple[Request, Scores, dict[str, Any]]:
    """What the reply with these probabilities is written from."""
    request = checked(json.dumps({"user_id": 1} | wish).encode(), VOCABULARY, VOCABULARY)
    posts = found([1.0 - place / 7 for place in range(len(numbers))])
    ranked = request.ranking(posts)
    joined = Joined(head_of(names_of(ranked, FORM), models=1), {"visible": 9}, posts.scores)
    tail = {"history_used": 0, "timings_ms": {"parse": 0.5}, "joined": joined}
    return ranked, Scores(numbers, numbers, np.ascontiguousarray(numbers[:, :1])), tail


REPORT = {"actions_wanted": ["report"], "request_id": "a"}
WISHED: list[dict[str, Any]] = [{}, {"top_k": 3}, REPORT, {"weights": {"reply": -1.5}, "top_k": 99}]


@pytest.mark.parametrize("count", [0, 1, 7, 300])
@pytest.mark.parametrize("wish", WISHED)
def test_ranked_posts_are_the_same_bytes(count: int, wish: dict[str, Any]) -> None:
    assert LIBRARY is not None
    numbers = np.random.default_rng(count).random((count, 3), np.float32)
    asked, scores, tail = ranking(numbers, wish)
    forms = replace(FORM, codec=compiled_models()[1].vocabulary.codec), FORM
    ours, theirs = (b"".join(render(asked, scores, form, **tail)) for form in forms)
    assert ours == theirs
    ranked = json.loads(ours)["candidates"]
    assert len(ranked) == min(count, wish.get("top_k", count))
    assert [row["retrieval_rank"] for row in ranked] == [int(row["post_id"]) - 2**63 + 1 for row in ranked]
    assert all(row["retrieval_score"] == np.float32(1.0 - (row["retrieval_rank"] - 1) / 7) for row in ranked[:5])
