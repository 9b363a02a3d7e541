"""Counts of the history over HTTP: a ranker that reads them, asked in every form of a request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.main import create_app
from app.settings import Settings
from tests.support.asgi import ADDRESS
from weights.actions import DWELL_TIME, STANDARD_ACTIONS, default_score_weights
from weights.format.writer import Labels, write_checkpoint
from weights.synthetic.random_weights import mini_config, random_pieces

EVENTS = [{"post_id": 90 + place, "author_id": 7 + place % 2, "actions": ["favorite"]} for place in range(6)]
POSTS = [
    {"post_id": post, "author_id": author} for post, author in ((50, 7), (90, 7), (50, 8), (51, 5), (95, 8), (52, 7))
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    path = tmp_path_factory.mktemp("counts") / "ranker"
    small: dict[str, Any] = {"width": 32, "layers": 1, "query_heads": 2, "kv_heads": 1, "head_width": 16}
    config = replace(mini_config(1, (50, 60, 40), continuous_actions=1), **small, history_length=5, history_counts=True)
    labels = Labels("r", STANDARD_ACTIONS, (DWELL_TIME,), default_score_weights(STANDARD_ACTIONS))
    write_checkpoint(path, config, random_pieces(config, 1), labels)
    with TestClient(create_app(Settings(checkpoint=path, threads=1, dtype="float32")), base_url=ADDRESS) as client:
        while client.get("/readyz").status_code != 200:
            pass
        yield client


def rank(client: TestClient, **asked: Any) -> dict[str, Any]:
    reply = client.post("/rank", json={"user_id": 3} | asked)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def scores(client: TestClient, **asked: Any) -> list[float]:
    return [row["score"] for row in rank(client, **asked)["candidates"]]


def test_the_service_says_that_its_model_counts(client: TestClient) -> None:
    assert client.get("/info").json()["architecture"]["history_counts"] is True


def test_a_candidate_has_the_same_bits_alone_and_among_others(client: TestClient) -> None:
    together = scores(client, history=EVENTS, candidates=POSTS)
    assert [scores(client, history=EVENTS, candidates=[post])[0] for post in POSTS] == together
    assert scores(client, history=EVENTS, candidates=POSTS[::-1]) == together[::-1]


def test_a_handle_gives_the_scores_of_its_history(client: TestClient) -> None:
    made = client.post("/context", json={"user_id": 3, "history": EVENTS}).json()["context"]
    named = client.post("/rank", json={"context": made, "candidates": POSTS})
    assert named.status_code == 200, named.text
    assert [row["score"] for row in named.json()["candidates"]] == scores(client, history=EVENTS, candidates=POSTS)


def test_only_events_that_the_model_reads_are_counted(client: TestClient) -> None:
    """The oldest of six events does not fit a history of five."""
    assert scores(client, history=EVENTS, candidates=POSTS) == scores(client, history=EVENTS[1:], candidates=POSTS)


def test_columns_count_as_objects_do(client: TestClient) -> None:
    columns = {name: [post[name] for post in POSTS] for name in ("post_id", "author_id")}
    assert scores(client, history=EVENTS, candidates=columns) == scores(client, history=EVENTS, candidates=POSTS)
