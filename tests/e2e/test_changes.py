"""Posts that change while they are searched, in a process that is then killed and started again: what was acknowledged stays."""

from __future__ import annotations

import hashlib
import random
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.settings import Retrieval, Settings
from loadtest.server import DEMO, free_port, serving
from tests.app.api.live import ready
from tests.support import corpora
from weights.actions import STANDARD_ACTIONS

TOKEN = "token"
CHANGES = 8


def found(client: httpx.Client, user: int, **options: Any) -> list[dict[str, Any]]:
    """All posts that a search can return."""
    reply = client.post("/retrieve", json={"user_id": user, "k": 2000, **options}).raise_for_status()
    posts: list[dict[str, Any]] = reply.json()["posts"]
    return posts


def ids(posts: list[dict[str, Any]]) -> set[str]:
    return {post["post_id"] for post in posts}


@pytest.mark.slow
def test_an_acknowledged_change_is_visible_and_survives_a_kill(tmp_path: Path) -> None:
    towers, corpus = corpora.written(tmp_path, actions=STANDARD_ACTIONS)
    admin_port, digest = free_port(), hashlib.sha256(TOKEN.encode()).hexdigest()
    settings: dict[str, Any] = {"threads": 1, "retrieval__checkpoint": towers, "retrieval__corpus": corpus}
    settings |= {
        "port": free_port(),
        "admin__port": admin_port,
        "admin__token_sha256": digest,
        "logs__success_sample": 0,
    }
    gone: set[str] = set()  # acknowledged as deleted, never to come back
    stop, came_back = threading.Event(), list[str]()
    with serving(**settings) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        live = ids(found(client, 3))
        assert len(live) > 200

        def search(user: int) -> None:
            while not stop.is_set():
                before = set(gone)
                came_back.extend(ids(found(client, user)) & before)
                stop.wait(0.01)

        threads = [threading.Thread(target=search, args=(user,)) for user in (1, 2)]
        for thread in threads:
            thread.start()
        try:
            chance = random.Random(1)
            with httpx.Client(headers={"authorization": f"Bearer {TOKEN}"}, timeout=60) as admin:
                for step in range(CHANGES):
                    leave, come = chance.sample(sorted(live), 2), [str(10_000 + 2 * step), str(10_001 + 2 * step)]
                    new = [{"post_id": post, "author_id": 5, "topic": "new"} for post in come]
                    change = {"upsert": new, "delete": leave}
                    reply = (
                        admin.post(f"http://127.0.0.1:{admin_port}/admin/posts", json=change).raise_for_status().json()
                    )
                    live = (live - set(leave)) | set(come)
                    gone |= set(leave)
                    assert (reply["deleted"], reply["corpus"]["posts"]) == (2, len(live))
                    assert ids(found(client, 9, topics=["new"])) >= set(come)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert came_back == []
        before = found(client, 3)
        server.signal(signal.SIGKILL)
        server.wait()
    retrieval = Retrieval(checkpoint=towers, corpus=corpus)
    with (
        ready(Settings(port=settings["port"], checkpoint=DEMO, threads=1, retrieval=retrieval)) as again,
        httpx.Client(base_url=again.url, timeout=60) as client,
    ):
        assert ids(found(client, 3)) == live
        assert found(client, 3) == before, "ids, order and bits"
