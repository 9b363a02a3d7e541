"""A corpus that changes while it is searched, in a real process that is then killed: what was acknowledged stays."""

from __future__ import annotations

import hashlib
import random
import signal
import threading
from pathlib import Path
from typing import Any

import httpx

from loadtest.servers.launch import free_port
from tests.app import retrieving
from tests.e2e.process import DEMO, serving
from weights.actions import STANDARD_ACTIONS

TOKEN = "token"
CHANGES = 25


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path) -> None:
    paths, port = retrieving.written(tmp_path, actions=STANDARD_ACTIONS), free_port()
    settings: dict[str, Any] = {
        "threads": 1, "retrieval__checkpoint": paths[0], "retrieval__corpus": paths[1], "admin__port": port,
        "admin__token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest(), "logs__success_sample": 0,
    }  # fmt: skip
    admin = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {TOKEN}"}, timeout=30)
    live = {post["post_id"] for post in posts_at_first()}
    gone: set[str] = set()  # acknowledged as deleted, never to come back
    stop, faults = threading.Event(), []
    chance = random.Random(1)
    with serving(DEMO, **settings) as server, admin:

        def searching(user: int) -> None:
            with httpx.Client(base_url=server.url, timeout=30) as client:
                while not stop.is_set():
                    before = set(gone)
                    back = {post["post_id"] for post in found(client, user)} & before
                    faults.extend(back)

        threads = [threading.Thread(target=searching, args=(user,)) for user in (1, 2)]
        for thread in threads:
            thread.start()
        with httpx.Client(base_url=server.url, timeout=30) as client:
            for step in range(CHANGES):
                leave, come = chance.sample(sorted(live), 2), [str(10_000 + 2 * step), str(10_001 + 2 * step)]
                new = [{"post_id": post, "author_id": 5, "topic": "new"} for post in come]
                reply = admin.post("/admin/posts", json={"upsert": new, "delete": leave}).raise_for_status().json()
                live = (live - set(leave)) | set(come)
                gone |= set(leave)
                assert (reply["deleted"], reply["corpus"]["posts"]) == (2, len(live))
                assert {post["post_id"] for post in found(client, 9, topics=["new"])} >= set(come), "seen at once"
            stop.set()
            for thread in threads:
                thread.join()
            assert faults == []
            before = found(client, 3)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
    with serving(DEMO, **settings) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        assert {post["post_id"] for post in found(client, 3)} == live
        assert found(client, 3) == before, "ids, order and bits"


def posts_at_first() -> list[dict[str, str]]:
    """The posts that the corpus was written with, as a reply has them; post 7 is there once."""
    ids = dict.fromkeys(retrieving.columns()["post_ids"].view("uint64").tolist())
    return [{"post_id": str(post)} for post in ids]


def found(client: httpx.Client, user: int, **options: Any) -> list[dict[str, Any]]:
    """All posts that a search can return."""
    reply = client.post("/retrieve", json={"user_id": user, "k": 2000, **options}).raise_for_status()
    posts: list[dict[str, Any]] = reply.json()["posts"]
    return posts
