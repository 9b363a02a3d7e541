"""Retrieve and recommend over HTTP, with the demo and its posts: bit for bit, alone and in company."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from app.main import create_app
from app.settings import Retrieval, Settings
from loadtest.server import DEMO, TOWERS, example, wait_until
from tests.support import corpora
from tests.support.asgi import ADDRESS
from tests.support.replies import CheckedClient


def users(count: int) -> list[dict[str, Any]]:
    """The demo's example under other ids, with histories of other lengths."""
    body = {name: value for name, value in example().items() if name in ("history", "impression_ts")}
    return [body | {"user_id": user, "history": body["history"][: user % 6]} for user in range(1, count + 1)]


def said(reply: httpx.Response) -> dict[str, Any]:
    """What a reply says, but for its times."""
    content: dict[str, Any] = reply.raise_for_status().json()
    del content["timings_ms"]
    return content


@pytest.mark.parametrize(
    "options",
    [
        {"k": 50},
        {"k": 60, "exclude_history": False, "history": example()["history"] * 6},
        {
            "k": 60,
            "topics": ["chess", "football"],
            "exclude": [3, 4],
            "weights": {"favorite": 2, "report": -1.5},
            "actions_wanted": ["report", "favorite"],
        },
    ],
    ids=["short", "long", "with every option"],
)
def test_recommend_is_retrieve_and_then_rank(client: httpx.Client, options: dict[str, Any]) -> None:
    """Also with a history beyond the window."""
    info = client.get("/info").json()
    for user in users(5):
        asked = user | options
        viewer = {
            name: value for name, value in asked.items() if name not in ("k", "exclude_history", "topics", "exclude")
        }
        search = {name: value for name, value in asked.items() if name not in ("weights", "actions_wanted")}
        posts = said(client.post("/retrieve", json=search))["posts"]
        candidates = [{key: post[key] for key in ("post_id", "author_id", "created_at")} for post in posts]
        ranked = said(client.post("/rank", json=viewer | {"candidates": candidates, "top_k": len(posts)}))
        reply = client.post("/recommend", json=asked)
        joined = said(reply)
        assert reply.headers["x-model-version"] == info["model"]["version"]
        assert joined["actions"] == ranked["actions"]
        assert joined["models"] == {"ranker": info["model"], "retrieval": info["retrieval"]["model"]}
        extra = {post["post_id"]: {"retrieval_score": post["score"], "retrieval_rank": post["rank"]} for post in posts}
        assert joined["candidates"] == [row | extra[row["post_id"]] for row in ranked["candidates"]]
        assert len({row["score"] for row in joined["candidates"]}) > 40
        assert joined["history_dropped"] == max(0, len(asked["history"]) - joined["history_used"])
        head = said(client.post("/recommend", json=asked | {"top_k": 9}))
        assert head["candidates"] == joined["candidates"][:9]


def test_a_reply_does_not_depend_on_the_company(client: httpx.Client) -> None:
    asked = [(path, user | {"k": 40}) for user in users(12) for path in ("/retrieve", "/recommend")]
    alone = [said(client.post(path, json=body)) for path, body in asked]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda call: said(client.post(call[0], json=call[1])), asked * 3))
    assert together == alone * 3


def test_pages_without_what_was_seen_go_through_the_whole_corpus(client: httpx.Client) -> None:
    seen: list[str] = []
    posts = client.get("/info").json()["retrieval"]["corpus"]["posts"]
    while len(seen) < posts:
        page = said(client.post("/retrieve", json={"user_id": 1, "k": 1000, "exclude": seen}))
        assert page["posts"], "before the end no page is empty"
        seen += [post["post_id"] for post in page["posts"]]
    assert len(seen) == len(set(seen)) == posts


def test_a_corpus_of_other_towers_is_never_ready(tmp_path: Path) -> None:
    _, corpus = corpora.written(tmp_path)
    settings = Settings(checkpoint=DEMO, threads=1, retrieval=Retrieval(checkpoint=TOWERS, corpus=corpus))
    with structlog.testing.capture_logs() as lines, CheckedClient(create_app(settings), base_url=ADDRESS) as client:
        wait_until(lambda: any("were made by towers v1" in line.get("reason", "") for line in lines), 60)
        assert client.get("/readyz").status_code == 503
