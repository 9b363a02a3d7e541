"""The shipped demo: its example ranks as README says, its reports keep the promised figures, its towers and posts fit together."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.main import create_app
from app.settings import Settings
from loadtest.server import wait_until
from tests.support.asgi import ADDRESS
from weights.actions import STANDARD_ACTIONS
from weights.checkpoint import load_encoder, load_manifest
from weights.corpus.importer import check_corpus
from weights.corpus.store import load_corpus

DEMO, TOWERS, POSTS = (Path("weights", name) for name in ("demo", "demo-towers", "demo-posts"))
MOST_BYTES = 12_000_000
NAMES: dict[str, Any] = json.loads((DEMO / "names.json").read_text())


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    body: dict[str, Any] = json.loads((DEMO / "example.json").read_text())
    return body


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """The service with the demo."""
    app = create_app(Settings(checkpoint=DEMO, dtype="float32", threads=1))
    with TestClient(app, base_url=ADDRESS) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200, 120)
        yield client


def scores(client: TestClient, body: dict[str, Any]) -> list[float]:
    """The score of every candidate of a request, under the checkpoint's own weights."""
    rows = client.post("/rank", json=body).raise_for_status().json()["candidates"]
    return [float(row["score"]) for row in rows]


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


def test_the_example_ranks_the_liked_topic_first_reported_last(client: TestClient, example: dict[str, Any]) -> None:
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
    for other in ("author popularity, test period included", "recency", "random"):
        for ours, theirs in zip(found["recall of towers"], found[f"recall of {other}"], strict=True):
            assert ours > 1.5 * theirs
    assert found["users"] == 100


def test_the_demo_is_small_and_its_report_is_of_its_checkpoint() -> None:
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
