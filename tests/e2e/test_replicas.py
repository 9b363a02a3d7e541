"""A post is deleted once, in the stream: no replica returns it any more; and a stream that is gone is told at once."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx
import pytest

from tests.app import retrieving
from tests.e2e.process import DEMO, Server, serving
from tests.support.redis_server import RedisServer
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


def test_a_deleted_post_is_gone_from_every_replica(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        client = redis.client()
        pairs = [retrieving.written(tmp_path / name, actions=STANDARD_ACTIONS) for name in ("one", "other")]
        settings = [
            {
                "threads": 1,
                "retrieval__checkpoint": towers,
                "retrieval__corpus": corpus,
                "retrieval__feed": redis.address("posts"),
            }
            for towers, corpus in pairs
        ]
        with serving(DEMO, **settings[0]) as one, serving(DEMO, **settings[1]) as other:
            new = {"upsert": [{"post_id": "900", "author_id": "5"}]}
            last = client.xadd("posts", {"change": json.dumps(new)}).decode()
            assert "900" in posts(one, last) & posts(other, last)
            last = client.xadd("posts", {"change": json.dumps({"delete": ["900", "1"]})}).decode()
            for server in (one, other):
                assert not posts(server, last) & {"900", "1"}
            told = [httpx.get(f"{server.url}/info").json()["retrieval"]["corpus"] for server in (one, other)]
            assert told[0]["changes_digest"] == told[1]["changes_digest"]
            assert [(each["sequence"], each["position"]) for each in told] == [(2, last)] * 2
            client.rename("posts", "elsewhere")
            for server in (one, other):
                told_at_once(server, f"The stream, which was read up to {last}, is gone.")
            client.rename("elsewhere", "posts")
        with serving(DEMO, **settings[0]) as again:
            assert httpx.get(f"{again.url}/info").json()["retrieval"]["corpus"]["position"] == last
            assert not posts(again, last) & {"900", "1"}
