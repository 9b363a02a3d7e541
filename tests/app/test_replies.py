"""Replies: exact numbers, ranks, both forms, and what a caller asks to have added or left out."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from msgspec.json import Decoder

from app import features, replies, schema
from app.features import CheckedRequest, ReplyOptions
from app.interface import Ranked
from app.vocabulary import Vocabulary
from model.inputs import Candidates, Scores
from model.ranking import combine
from tests.support.bodies import good
from tests.support.fakes import FakeEngine, fake_model

MODEL = fake_model(FakeEngine()).served
WORDS = Vocabulary.of(MODEL.manifest)
BARE = replace(WORDS, continuous_names=(), scales=np.zeros(0, np.float32))
RANK = Decoder(schema.RankRequest)


def wishes(words: Vocabulary = WORDS, **changes: Any) -> ReplyOptions:
    body = good(**{"top_k": ..., "actions_wanted": ..., "request_id": ..., **changes})
    return features.options_of(schema.decode(RANK, json.dumps(body).encode()), words)


def ids(count: int) -> list[int | str]:
    return [str(place) if place % 2 else place for place in range(count)]


def scores(count: int, seed: int = 0) -> Scores:
    random = np.random.default_rng(seed)
    probabilities = random.random((count, 3), dtype=np.float32)
    return Scores(probabilities, probabilities, random.random((count, 1), dtype=np.float32))


def ranked(given: Scores, handle: str = "") -> Ranked:
    return Ranked(given, "hit", 0.0025, handle, history_used=1, history_dropped=2)


def reply_to(
    post_ids: Any,
    given: Ranked,
    asked: ReplyOptions,
    words: Vocabulary = WORDS,
    timings_ms: dict[str, float] | None = None,
) -> bytes:
    none = np.zeros(len(given.scores), np.int64)
    candidates = Candidates(np.arange(len(none), dtype=np.uint64), none.astype(np.uint64), none, none)
    checked = CheckedRequest(words, "", candidates, post_ids, none, 0, asked)
    body, _ = replies.rank_reply(checked, given, timings_ms or {})
    return body


def written(asked: ReplyOptions, given: Scores, post_ids: Any = None, words: Vocabulary = WORDS) -> dict[str, Any]:
    sent = ids(len(given)) if post_ids is None else post_ids
    found: dict[str, Any] = orjson.loads(reply_to(sent, ranked(given), asked, words, {"parse": 0.1}))
    return found


def test_a_reply_byte_by_byte() -> None:
    rows = np.array([[0.5, 0.1, 0.25], [1 / 3, 0.0, 1.0]], np.float32)
    given = ranked(Scores(rows, rows, np.array([[0.5], [0.1]], np.float32)), "ab" * 16)
    asked = wishes(weights={"favorite": 1, "reply": 2}, request_id="page-7")
    timings = replies.timings_of({"parse": 0.0001234, "queue": 0.001, "forward": 0.0025})
    assert reply_to([90, "5"], given, asked, WORDS, timings) == (
        b'{"model":{"name":"fake","version":"v1"},"actions":["favorite","reply","report"],"candidates":['
        b'{"post_id":90,"score":0.7000000029802322,"rank":1,"probabilities":[0.5,0.1,0.25],"continuous":{"dwell_time":15.0}},'
        b'{"post_id":"5","score":0.3333333432674408,"rank":2,"probabilities":[0.33333334,0.0,1.0],"continuous":{"dwell_time":3.0}}],'
        b'"history_used":1,"history_dropped":2,"timings_ms":{"parse":0.123,"queue":1.0,"forward":2.5},'
        b'"context":"abababababababababababababababab","request_id":"page-7"}'
    )
    shorter = reply_to(
        [90, "5"], ranked(given.scores), replace(asked, reply="columns", request_id=None, actions=[2]), WORDS, {}
    )
    assert shorter == (
        b'{"model":{"name":"fake","version":"v1"},"actions":["report"],"candidates":{"post_id":[90,"5"],'
        b'"score":[0.7000000029802322,0.3333333432674408],"rank":[1,2],"probabilities":[[0.25],[1.0]],"continuous":{"dwell_time":[15.0,3.0]}},'
        b'"history_used":1,"history_dropped":2,"timings_ms":{}}'
    )
    assert replies.context_reply(ranked(given.scores), "n", WORDS, {"parse": 1.0}) == (
        b'{"model":{"name":"fake","version":"v1"},"history_used":1,"history_dropped":2,"timings_ms":{"parse":1.0},"request_id":"n"}'
    )


@pytest.mark.parametrize("count", [1, 2, 63, 100, 2049])
@pytest.mark.parametrize("words", [WORDS, BARE], ids=["continuous", "bare"])
def test_every_number_survives_the_round_trip(count: int, words: Vocabulary) -> None:
    given = scores(count)
    given = given if words is WORDS else replace(given, continuous=np.zeros((count, 0), np.float32))
    asked = wishes()
    rows = written(asked, given, words=words)["candidates"]
    assert [row["post_id"] for row in rows] == ids(count)
    assert np.array_equal(np.array([row["probabilities"] for row in rows], np.float32), given.probabilities)
    assert all((*row["continuous"],) == words.continuous_names for row in rows)
    continuous = np.array([[*row["continuous"].values()] for row in rows], np.float32).reshape(count, -1)
    assert np.array_equal(continuous, given.continuous * words.scales)
    assert [row["score"] for row in rows] == combine(given.probabilities, asked.weights).tolist()


@pytest.mark.parametrize("count", [1, 5, 39, 40, 99, 2**63 - 1])
def test_ranks_count_from_the_best_and_top_k_is_their_head(count: int) -> None:
    given = scores(40)
    whole = sorted(written(wishes(), given)["candidates"], key=lambda row: row["rank"])
    assert [row["rank"] for row in whole] == list(range(1, 41))
    assert [row["score"] for row in whole] == sorted((row["score"] for row in whole), reverse=True)
    assert written(wishes(top_k=count), given)["candidates"] == whole[:count]
    numbers = np.arange(40, dtype=np.uint64)
    heads = written(wishes(top_k=count), given, numbers)["candidates"]
    assert [row["post_id"] for row in heads] == [int(row["post_id"]) for row in whole[:count]]


def test_wanted_actions_are_columns_in_that_order() -> None:
    given = scores(9)
    whole, part = written(wishes(), given), written(wishes(actions_wanted=["report", "0"]), given)
    assert whole["actions"] == ["favorite", "reply", "report"]
    assert part["actions"] == ["report", "favorite"]
    for row, every in zip(part["candidates"], whole["candidates"], strict=True):
        assert row["probabilities"] == [every["probabilities"][2], every["probabilities"][0]]
        assert row["score"] == every["score"]
    assert all(row["probabilities"] == [] for row in written(wishes(actions_wanted=[]), given)["candidates"])


def test_equal_scores_keep_the_order_of_the_request() -> None:
    rows = written(wishes(weights={}), scores(4))["candidates"]
    assert [(row["score"], row["rank"]) for row in rows] == [(0.0, 1), (0.0, 2), (0.0, 3), (0.0, 4)]


def test_the_published_weights_weigh_continuous_outputs_too() -> None:
    given = Scores(*(np.array([values], np.float32) for values in ([0.5, 0.25, 0.125], [0.5, 0.25, 0.125], [0.5])))
    (row,) = written(wishes(weights="x-2026-09"), given)["candidates"]
    assert math.isclose(row["score"], 0.5 * 0.5 + 5 * 0.25 - 234 * 0.125 + 0.004 * 15, rel_tol=1e-12)


def test_the_offset_makes_scores_positive_and_keeps_the_order() -> None:
    rows = np.array([[0.1, 0.1, 0.1], [0.0, 0.0, 0.0], [0.1, 0.1, 0.0], [0.9, 0.9, 0.9]], np.float32)
    given = Scores(rows, rows, np.zeros((4, 1), np.float32))
    plain = written(wishes(weights="x-2026-09"), given)["candidates"]
    lifted = written(wishes(weights="x-2026-09", score="offset"), given)["candidates"]
    assert [row["rank"] for row in lifted] == [row["rank"] for row in plain] == [3, 2, 1, 4]
    assert min(row["score"] for row in plain) < 0 < min(row["score"] for row in lifted)
    assert lifted[1]["score"] == 0.001
