"""The towers and posts of the repository: they retrieve by taste, keep their promised figures, and belong together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest.server import serving
from tests.weights.training.test_demo_taste import DEMO, NAMES, assert_taste, best_first
from weights.checkpoint import load_encoder
from weights.corpus.importer import check_corpus
from weights.corpus.store import load_corpus

TOWERS, POSTS = Path("weights/demo-towers"), Path("weights/demo-posts")
MOST_BYTES = 12_000_000


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        serving(DEMO, threads=1, retrieval=True) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The demo's example without its candidates: a user who reads about one topic and has just reported one author."""
    body: dict[str, Any] = json.loads((DEMO / "example.json").read_text())
    del body["candidates"]
    return body


def recommended(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = client.post("/recommend", json=body).raise_for_status().json()
    posts = {post["post_id"]: post for post in retrieved(client, body)}
    return [row | posts[row["post_id"]] | {"score": row["score"]} for row in reply["candidates"]]


def retrieved(client: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    kept = {name: value for name, value in body.items() if name not in ("top_k", "weights")}
    posts: list[dict[str, Any]] = client.post("/retrieve", json=kept).raise_for_status().json()["posts"]
    return posts


def test_post_rank_shows_the_taste_of_the_engine(client: httpx.Client) -> None:
    body = json.loads((DEMO / "example.json").read_text())
    rows = client.post("/rank", json=body).raise_for_status().json()["candidates"]
    assert_taste(body, best_first(body, [row["score"] for row in rows]))


def test_the_figures_are_promised_ones() -> None:
    found = json.loads((TOWERS / "retrieval.json").read_text())
    at = dict(
        zip(found["depths"], zip(found["recall of towers"], found["ranker's first 20"], strict=True), strict=True)
    )
    assert at[100][0] > 0.3
    assert at[500][0] > 0.7
    assert at[500][1] > 0.8
    for other in ("popularity", "recency", "random"):
        for ours, theirs in zip(found["recall of towers"], found[f"recall of {other}"], strict=True):
            assert ours > 1.5 * theirs
    assert found["users"] == 100


def test_they_belong_together_and_fit() -> None:
    encoder = load_encoder(TOWERS)
    check_corpus(load_corpus(POSTS, encoder.manifest), encoder)
    size = sum(file.stat().st_size for folder in (DEMO, TOWERS, POSTS) for file in folder.rglob("*") if file.is_file())
    assert size < MOST_BYTES


def test_what_is_recommended_is_what_the_user_reads_about(client: httpx.Client, example: dict[str, Any]) -> None:
    topics = [NAMES["authors"][event["author_id"]]["topic"] for event in example["history"]]
    favourite = max(set(topics), key=topics.count)
    likes = NAMES["users"][example["user_id"]]["likes"]
    shown = recommended(client, example | {"k": 200, "top_k": 20})
    share = [topic for post in shown for topic in post["topics"]]
    assert len(shown) == 20
    assert share.count(favourite) >= 8
    assert sum(topic in likes for topic in share) >= 16


def test_a_post_that_was_just_reported_does_not_come_back(client: httpx.Client, example: dict[str, Any]) -> None:
    best = recommended(client, example | {"k": 200, "top_k": 20})[0]
    report = {"post_id": best["post_id"], "author_id": best["author_id"], "actions": ["report"], "dwell_time": 1.0}
    after = example | {"history": [*example["history"], report]}
    ids = [post["post_id"] for post in recommended(client, after | {"k": 2000})]
    assert best["post_id"] not in ids
    authors = [post["author_id"] for post in recommended(client, after | {"k": 200, "top_k": 20})]
    assert best["author_id"] not in authors, "the ranker turns its author away, too"


def test_someone_new_gets_posts_of_what_was_liked_once(client: httpx.Client, example: dict[str, Any]) -> None:
    """An unknown user with a few events of one topic: most of what is retrieved is about it; of another, about that."""
    by_topic: dict[str, list[str]] = {}
    for author, about in NAMES["authors"].items():
        by_topic.setdefault(about["topic"], []).append(author)
    shares = []
    for topic, authors in by_topic.items():
        history = [
            {"post_id": str(10**18 + place), "author_id": author, "actions": ["favorite", "dwell", "reply"]}
            for place, author in enumerate(authors[:6])
        ]
        posts = retrieved(client, {"user_id": 0, "history": history, "k": 100})
        shares.append(sum(post["topics"] == [topic] for post in posts) / 100)
    assert min(shares) > 0.5
