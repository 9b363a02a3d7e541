"""Retrieve and recommend in a real process, with the demo ranker behind random towers: bit for bit, also in company."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from phoenix_ranker_client import AsyncRankerClient, Event, RankerClient, Recommendation, Retrieval

from tests.app import retrieving
from tests.e2e.process import DEMO, serving
from weights.actions import STANDARD_ACTIONS


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    paths = retrieving.written(tmp_path_factory.mktemp("posts"), actions=STANDARD_ACTIONS)
    with (
        serving(DEMO, threads=1, retrieval__checkpoint=paths[0], retrieval__corpus=paths[1]) as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        yield client


def users(count: int) -> list[dict[str, Any]]:
    """The demo's example under other ids, with histories of other lengths."""
    example = json.loads((DEMO / "example.json").read_text())
    shared = {"impression_ts": retrieving.NOW}
    return [shared | {"user_id": user, "history": example["history"][: user % 6]} for user in range(1, count + 1)]


def without_timings(reply: httpx.Response) -> dict[str, Any]:
    content: dict[str, Any] = reply.raise_for_status().json()
    del content["timings_ms"]
    return content


def test_recommend_is_retrieve_and_then_rank(client: httpx.Client) -> None:
    for user in users(7):
        posts = without_timings(client.post("/retrieve", json=user | {"k": 50}))["posts"]
        candidates = [{key: post[key] for key in ("post_id", "author_id", "created_at")} for post in posts]
        ranked = without_timings(client.post("/rank", json=user | {"candidates": candidates, "top_k": 50}))
        joined = without_timings(client.post("/recommend", json=user | {"k": 50}))
        extra = {post["post_id"]: {"retrieval_score": post["score"], "retrieval_rank": post["rank"]} for post in posts}
        assert joined["candidates"] == [row | extra[row["post_id"]] for row in ranked["candidates"]]
        assert len({row["score"] for row in joined["candidates"]}) > 40


def test_a_reply_does_not_depend_on_the_company(client: httpx.Client) -> None:
    asked = [(path, user | {"k": 40}) for user in users(24) for path in ("/retrieve", "/recommend")]
    alone = [without_timings(client.post(path, json=body)) for path, body in asked]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda call: without_timings(client.post(call[0], json=call[1])), asked * 3))
    assert together == alone * 3


def test_what_was_excluded_never_comes_back(client: httpx.Client) -> None:
    seen: list[str] = []
    for _ in range(7):
        page = without_timings(client.post("/retrieve", json=users(1)[0] | {"k": 50, "exclude": seen}))
        seen += [post["post_id"] for post in page["posts"]]
    assert len(seen) == len(set(seen)) == page["corpus"]["posts"], "all but the duplicate"
    assert page["visible"] < 50


def test_info_names_both_models(client: httpx.Client) -> None:
    info = client.get("/info").json()
    assert info["retrieval"]["model"]["version"] == "v1"
    assert "retrieval" not in info["settings"], "where things lie is nobody's business"
    reply = client.post("/recommend", json=users(1)[0])
    assert reply.headers["x-model-version"] == info["model"]["version"]
    assert reply.json()["models"]["ranker"] == info["model"]


def test_a_corpus_of_other_towers_ends_the_start(tmp_path: Path) -> None:
    first, second = (retrieving.written(tmp_path, seed, f"v{seed}") for seed in (0, 1))
    with (
        pytest.raises(Exception, match="were made by towers v1"),
        serving(DEMO, threads=1, retrieval__checkpoint=first[0], retrieval__corpus=second[1]),
    ):
        pass


def test_the_client_says_the_same(client: httpx.Client) -> None:
    user = users(3)[2]
    history = [Event(**{"dwell_time": 0.0} | event) for event in user["history"]]
    options: dict[str, Any] = {"impression_ts": user["impression_ts"], "k": 30, "exclude": ["3"], "timeout_seconds": 20}
    with RankerClient(str(client.base_url).rstrip("/")) as ours:
        found = ours.retrieve(3, history, **options)
        ranking = ours.recommend(3, history, top_k=5, **options)

    async def the_same() -> tuple[Retrieval, Recommendation]:
        async with AsyncRankerClient(str(client.base_url).rstrip("/")) as theirs:
            return await theirs.retrieve(3, history, **options), await theirs.recommend(3, history, top_k=5, **options)

    body = user | {"k": 30, "exclude": ["3"]}
    posts = without_timings(client.post("/retrieve", json=body))
    ranked = without_timings(client.post("/recommend", json=body | {"top_k": 5}))
    again = asyncio.run(the_same())
    for retrieval, recommendation in ((found, ranking), again):
        assert [asdict(post) for post in retrieval.posts] == posts["posts"]
        assert (retrieval.corpus, retrieval.visible) == (posts["corpus"], posts["visible"])
        assert [asdict(row) for row in recommendation.candidates] == ranked["candidates"]
        assert (recommendation.models, recommendation.actions) == (ranked["models"], ranked["actions"])
