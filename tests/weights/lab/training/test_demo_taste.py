"""The demo of the repository has learned: it ranks and retrieves by taste, and its reports keep the promised figures."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.main import create_app
from app.settings import Retrieval, Settings
from loadtest.server import wait_until
from tests.support.asgi import ADDRESS
from weights.actions import STANDARD_ACTIONS
from weights.checkpoint import load_encoder, load_manifest
from weights.corpus.importer import check_corpus
from weights.corpus.store import load_corpus

DEMO, TOWERS, POSTS = (Path("weights", name) for name in ("demo", "demo-towers", "demo-posts"))
MOST_BYTES = 12_000_000
NAMES: dict[str, Any] = json.loads((DEMO / "names.json").read_text())
UNKNOWN_USER = "4242424242424242424"


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    body: dict[str, Any] = json.loads((DEMO / "example.json").read_text())
    return body


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """The service with the demo, its towers and its posts."""
    posts = shutil.copytree(POSTS, tmp_path_factory.mktemp("posts") / "posts")
    retrieval = Retrieval(checkpoint=TOWERS, corpus=posts)
    app = create_app(Settings(checkpoint=DEMO, retrieval=retrieval, dtype="float32", threads=1))
    with TestClient(app, base_url=ADDRESS) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200, 120)
        yield client


def scores(client: TestClient, body: dict[str, Any]) -> list[float]:
    """The score of every candidate of a request, under the checkpoint's own weights."""
    rows = client.post("/rank", json=body).raise_for_status().json()["candidates"]
    return [float(row["score"]) for row in rows]


def retrieved(client: TestClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    posts: list[dict[str, Any]] = client.post("/retrieve", json=body).raise_for_status().json()["posts"]
    return posts


def recommended(client: TestClient, body: dict[str, Any], k: int = 200, top_k: int = 20) -> list[dict[str, Any]]:
    """The best `top_k` of `k` posts, with their topics."""
    viewer = {name: value for name, value in body.items() if name != "candidates"} | {"k": k}
    posts = {post["post_id"]: post for post in retrieved(client, viewer)}
    rows = client.post("/recommend", json=viewer | {"top_k": top_k}).raise_for_status().json()["candidates"]
    return [row | posts[row["post_id"]] for row in rows]


def topic(post: dict[str, Any]) -> str:
    return str(NAMES["authors"][post["author_id"]]["topic"])


def best_first(body: dict[str, Any], values: list[float]) -> list[dict[str, Any]]:
    order = sorted(range(len(values)), key=lambda index: -values[index])
    return [body["candidates"][index] for index in order]


def reported_of(body: dict[str, Any]) -> str:
    """The author whom the last event of the history reports."""
    last = body["history"][-1]
    assert last["actions"] == ["report"]
    return str(last["author_id"])


def test_the_example_ranks_its_users_topic_first_and_the_reported_author_last(
    client: TestClient, example: dict[str, Any]
) -> None:
    """Two authors of the liked topic stand first, then the four of other topics, and the reported one of the liked topic last."""
    liked, ranked = NAMES["example"]["likes"], best_first(example, scores(client, example))
    assert topic(example["history"][-1]) == liked
    assert [topic(post) == liked for post in ranked] == [True] * 2 + [False] * 4 + [True]
    assert ranked[-1]["author_id"] == reported_of(example)


def test_a_report_is_its_authors_alone(client: TestClient, example: dict[str, Any]) -> None:
    """Without it the author stands with the topic; with it nobody else's score moves half as far."""
    body = copy.deepcopy(example)
    place = [post["author_id"] for post in body["candidates"]].index(reported_of(body))
    body["history"].pop()
    before, after = scores(client, body), scores(client, example)
    liked = NAMES["example"]["likes"]
    assert [topic(post) == liked for post in best_first(body, before)] == [True] * 3 + [False] * 4
    drops = [then - now for then, now in zip(before, after, strict=True)]
    own = drops.pop(place)
    assert own > 2 * max(map(abs, drops))


@pytest.mark.parametrize("act", ["report", "block_author", "mute_author"])
def test_whoever_is_turned_away_sinks_whatever_the_topic(act: str, client: TestClient, example: dict[str, Any]) -> None:
    """Each candidate's author in turn, with an event of another post of that author."""
    for place, post in enumerate(example["candidates"]):
        body = copy.deepcopy(example)
        body["history"][-1] |= {"post_id": str(10**6), "author_id": post["author_id"], "actions": [act]}
        values = scores(client, body)
        assert min(values) == values[place], post


@pytest.mark.parametrize("liked", NAMES["topics"])
def test_an_unknown_user_who_favorites_a_topic_gets_that_topic(
    liked: str, client: TestClient, example: dict[str, Any]
) -> None:
    authors = {name: [a for a, entry in NAMES["authors"].items() if entry["topic"] == name] for name in NAMES["topics"]}
    now = example["impression_ts"]
    history = [
        {"post_id": str(10**6 + index), "author_id": author, "actions": ["favorite", "dwell"], "dwell_time": 12.0}
        for index, author in enumerate((authors[liked][:8] * 2)[:16])
    ]
    # eight authors of each topic, none of them in the history: the taste is for the topic, and the mean levels qualities
    shown = [author for name in NAMES["topics"] for author in authors[name][8:16]]
    candidates = [
        {"post_id": str(10**7 + index), "author_id": author, "product_surface": 0, "created_at": now - 7200}
        for index, author in enumerate(shown)
    ]
    body = {"user_id": UNKNOWN_USER, "history": history, "candidates": candidates, "impression_ts": now}

    def means() -> dict[str, float]:
        values = scores(client, body)
        return {name: sum(values[8 * i : 8 * i + 8]) / 8 for i, name in enumerate(NAMES["topics"])}

    with_history = means()
    assert max(with_history, key=lambda name: with_history[name]) == liked
    body["history"] = []
    assert means() != with_history


def test_the_report_keeps_its_promises() -> None:
    figures = json.loads((DEMO / "report/figures.json").read_text())
    assert figures["verdict"].startswith("The model is ahead of every baseline on every metric")
    way = figures["way_to_optimum"]
    assert way["model"] >= 0.96
    assert way["true affinity"] <= 0.8
    assert figures["calibration_error"] <= 0.01
    whole = figures["ablations"]["none"]["mean_auc"]
    for name, least in (("no history", 0.04), ("shuffled history", 0.08), ("no user", 0.015)):
        assert figures["ablations"][name]["mean_auc"] < whole - least, name


def test_the_figures_of_retrieval_are_promised_ones() -> None:
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


def test_the_directories_are_small_and_the_report_is_of_this_checkpoint() -> None:
    size = sum(file.stat().st_size for folder in (DEMO, TOWERS, POSTS) for file in folder.rglob("*") if file.is_file())
    assert size < MOST_BYTES
    manifest = load_manifest(DEMO)
    assert (manifest.name, manifest.action_names) == ("demo", STANDARD_ACTIONS)
    page = (DEMO / "report/report.md").read_text()
    assert manifest.version in page
    assert "phoenix-ranker eval --checkpoint weights/demo --world " in page
    assert {file.name for file in (DEMO / "report").iterdir()} == {"report.md", "figures.json"}


def test_towers_and_posts_belong_together() -> None:
    encoder = load_encoder(TOWERS)
    check_corpus(load_corpus(POSTS, encoder.manifest), encoder)


def test_what_is_recommended_is_what_the_user_reads_about(client: TestClient, example: dict[str, Any]) -> None:
    topics = [topic(event) for event in example["history"]]
    favourite = max(set(topics), key=topics.count)
    likes = NAMES["users"][example["user_id"]]["likes"]
    shown = recommended(client, example)
    share = [topic for post in shown for topic in post["topics"]]
    assert len(shown) == 20
    assert share.count(favourite) >= 8
    assert sum(topic in likes for topic in share) >= 16


def test_a_post_that_was_just_reported_does_not_come_back(client: TestClient, example: dict[str, Any]) -> None:
    best = recommended(client, example)[0]
    report = {"post_id": best["post_id"], "author_id": best["author_id"], "actions": ["report"], "dwell_time": 1.0}
    after = example | {"history": [*example["history"], report]}
    assert best["post_id"] not in [post["post_id"] for post in recommended(client, after, k=2000, top_k=2000)]
    authors = [post["author_id"] for post in recommended(client, after)]
    assert best["author_id"] not in authors, "the ranker turns its author away, too"


def test_someone_new_gets_posts_of_what_was_liked_once(client: TestClient) -> None:
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
