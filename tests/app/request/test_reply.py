"""Replies: exact numbers, ranks, columns, and bits that do not depend on the batch."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import strategies as st

from app.request.reply import ReplyFormat, render
from app.request.validate import Request
from model.inputs import Scores
from model.ranking import combine
from tests.app.fakes import FakeEngine, loaded
from tests.app.serving import checked, good

MANIFEST = loaded(FakeEngine()).checkpoint.manifest
FORM = ReplyFormat.of(MANIFEST)
BARE = replace(FORM, scales=np.zeros(0, np.float32), before_continuous=())
unit = st.floats(0, 1, width=32)


def request(count: int, **changes: Any) -> Request:
    candidates = [{"post_id": str(place) if place % 2 else place, "author_id": 1} for place in range(count)]
    body = good(candidates=candidates, top_k=..., actions_wanted=..., request_id=...) | changes
    return checked(body)


def scores(count: int, seed: int = 0) -> Scores:
    random = np.random.default_rng(seed)
    probabilities = random.random((count, 3), dtype=np.float32)
    return Scores(probabilities, probabilities, random.random((count, 1), dtype=np.float32))


def rendered(asked: Request, given: Scores, form: ReplyFormat = FORM) -> dict[str, Any]:
    pieces = render(asked, given, form, history_used=1, timings_ms={"parse": 0.1})
    return orjson.loads(b"".join(pieces))  # type: ignore[no-any-return]


@pytest.mark.parametrize("count", [1, 2, 63, 65, 100, 1024, 1025, 2049])
@pytest.mark.parametrize("form", [FORM, BARE], ids=["continuous", "bare"])
def test_every_number_survives_the_round_trip(count: int, form: ReplyFormat) -> None:
    given = scores(count)
    given = given if form is FORM else replace(given, continuous=np.zeros((count, 0), np.float32))
    reply = rendered(request(count), given, form)
    rows = reply["candidates"]
    assert [row["post_id"] for row in rows] == request(count).echo_ids
    assert np.array_equal(np.array([row["probabilities"] for row in rows], np.float32), given.probabilities)
    names = [output.name for output in MANIFEST.continuous] if form is FORM else []
    assert all(list(row["continuous"]) == names for row in rows)
    continuous = np.array([list(row["continuous"].values()) for row in rows], np.float32)
    assert np.array_equal(continuous, given.continuous * form.scales)
    assert [row["score"] for row in rows] == combine(given.probabilities, request(count).weights).tolist()
    assert reply["history_used"] == 1
    assert reply["history_dropped"] == 2
    assert "request_id" not in reply


@pytest.mark.parametrize("count", [1, 5, 39, 40, 99])
def test_ranks_count_from_the_best_and_top_k_is_the_head_of_the_whole(count: int) -> None:
    given = scores(40)
    whole = sorted(rendered(request(40), given)["candidates"], key=lambda row: row["rank"])
    assert [row["rank"] for row in whole] == list(range(1, 41))
    assert [row["score"] for row in whole] == sorted((row["score"] for row in whole), reverse=True)
    assert rendered(request(40, top_k=count), given)["candidates"] == whole[:count]


def test_wanted_actions_are_columns_in_that_order() -> None:
    given = scores(9)
    whole, part = rendered(request(9), given), rendered(request(9, actions_wanted=["report", "0"]), given)
    assert whole["actions"] == ["favorite", "reply", "report"]
    assert part["actions"] == ["report", "favorite"]
    for row, all_of_it in zip(part["candidates"], whole["candidates"], strict=True):
        probabilities = all_of_it["probabilities"]
        assert row["probabilities"] == [probabilities[2], probabilities[0]]
        assert row["score"] == all_of_it["score"]
    assert all(row["probabilities"] == [] for row in rendered(request(9, actions_wanted=[]), given)["candidates"])
    assert rendered(request(1, actions_wanted=[]), scores(1))["candidates"][0]["probabilities"] == []


def test_weights_of_nothing_score_nothing() -> None:
    rows = rendered(request(4, weights={}), scores(4))["candidates"]
    assert [(row["score"], row["rank"]) for row in rows] == [(0.0, 1), (0.0, 2), (0.0, 3), (0.0, 4)]


@pytest.mark.parametrize("form", ["objects", "columns"])
def test_no_piece_of_a_long_reply_holds_the_loop(form: str) -> None:
    given, spent = scores(4096), []
    for _ in range(3):
        pieces = render(request(4096, reply=form), given, FORM, history_used=1, timings_ms={})
        longest = 0.0
        while True:
            started = time.thread_time()
            if next(pieces, None) is None:
                break
            longest = max(longest, time.thread_time() - started)
        spent.append(longest)
    assert min(spent) < 0.010
