"""A post is deleted once, in the stream: no process of the service returns it any more, whatever its form; and a
stream that is gone is told at once."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from loadtest.servers.stream import RedisServer
from tests.app import retrieving
from tests.e2e.process import DEMO, Server, serving
from weights.actions import STANDARD_ACTIONS

pytestmark = pytest.mark.skipif(not RedisServer.is_installed(), reason="Debian's redis-server is not installed")


def posts(server: Server, at_least: str) -> set[str]:
    """What a caller gets who insists on a change, as soon as the server has it."""
    until = time.monotonic() + 20
    while True:
        reply = httpx.post(
            f"{server.url}/retrieve", json={"user_id": 3, "k": 400}, headers={"x-corpus-at-least": at_least}, timeout=10
        )
        if reply.status_code == 200:
            return {post["post_id"] for post in reply.json()["posts"]}
        assert (reply.status_code, reply.json()["code"]) == (503, "corpus_behind")
        assert time.monotonic() < until
        time.sleep(0.02)


def told_at_once(server: Server, what: str) -> None:
    """/readyz says why the feed is not read, though the posts are not too old yet."""
    until = time.monotonic() + 20
    while what not in (reply := httpx.get(f"{server.url}/readyz")).json().get("feed", ""):
        assert time.monotonic() < until, reply.text
        time.sleep(0.05)
    assert (reply.status_code, reply.json()["status"]) == (200, "ready")


def test_a_deleted_post_is_gone_from_one_process_and_from_fronts(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        client = redis.client()
        replicas = [retrieving.written(tmp_path / name, actions=STANDARD_ACTIONS) for name in ("one", "other")]
        one, other = (
            {
                "threads": 1,
                "retrieval__checkpoint": towers,
                "retrieval__corpus": corpus,
                "retrieval__feed": redis.url("posts"),
            }
            for towers, corpus in replicas
        )
        with serving(DEMO, **one) as alone, serving(DEMO, fronts=2, **other) as fronts:
            last = client.xadd(
                "posts", {"change": json.dumps({"upsert": [{"post_id": "900", "author_id": "5"}]})}
            ).decode()
            assert "900" in posts(alone, last) & posts(fronts, last)
            last = client.xadd("posts", {"change": json.dumps({"delete": ["900", "1"]})}).decode()
            for server in (alone, fronts):
                assert not posts(server, last) & {"900", "1"}
            told = [httpx.get(f"{server.url}/info").json()["retrieval"]["corpus"] for server in (alone, fronts)]
            assert told[0]["changes_digest"] == told[1]["changes_digest"]
            assert [(one["sequence"], one["position"]) for one in told] == [(2, last)] * 2
            client.rename("posts", "elsewhere")
            for server in (alone, fronts):
                told_at_once(server, "The stream posts, which was read up to")
            client.rename("elsewhere", "posts")
        with serving(DEMO, **one) as again:
            assert httpx.get(f"{again.url}/info").json()["retrieval"]["corpus"]["position"] == last
            assert not posts(again, last) & {"900", "1"}
