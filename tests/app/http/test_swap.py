"""A reload to a checkpoint that names its actions otherwise: requests and replies speak the words of the model that serves."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from app.request.codec import Codec
from app.service.service import RankingService
from tests.app.fakes import ACTIONS, FakeEngine, loader
from tests.app.serving import good, served

OTHER = ("like", "repost", "block")


def ask(client: TestClient, action: str) -> list[httpx.Response]:
    """The same request that names one action, alone and in a batch."""
    history = [{"post_id": 17, "author_id": 5, "actions": [action]}]
    body = good(history=history, weights={action: 2.0}, actions_wanted=...)
    return [client.post("/rank", json=body), client.post("/rank/batch", json=[body])]


def said(reply: dict[str, Any]) -> tuple[str, list[str]]:
    return reply["model"]["version"], reply["actions"]


def check(client: TestClient, version: str, known: tuple[str, ...], unknown: tuple[str, ...]) -> None:
    alone, batch = ask(client, known[1])
    assert said(alone.json()) == said(batch.json()[0]) == (version, list(known))
    assert alone.headers["x-model-version"] == batch.headers["x-model-version"] == version
    alone, batch = ask(client, unknown[1])
    assert alone.status_code == batch.json()[0]["error"]["status"] == 422
    assert client.get("/info").json()["actions"] == list(known)


def test_after_a_swap_the_words_are_those_of_the_new_model(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Codec]()
    monkeypatch.setattr("app.http.rank.Codec", lambda *given: (made.append(Codec(*given)), made[-1])[1])
    with served() as (client, service):
        check(client, "v1", ACTIONS, OTHER)
        swap(client, service, "v2", OTHER)
        check(client, "v2", OTHER, ACTIONS)
        swap(client, service, "v3", ACTIONS)
        check(client, "v3", ACTIONS, OTHER)
    assert len(made) == 2, "one for the words of v1 and v3, and one for those of v2"


def swap(client: TestClient, service: RankingService, version: str, actions: tuple[str, ...]) -> None:
    assert client.portal is not None
    client.portal.call(service.swap, loader(FakeEngine(2), version, actions))
