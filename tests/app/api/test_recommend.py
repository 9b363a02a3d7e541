"""POST /recommend around a fake ranker. That it is /retrieve and then /rank: tests/e2e/test_retrieve.py."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

from app.errors import EngineDown
from app.service.local import LocalService
from app.settings import Auth, Limits, Queue
from tests.support import corpora
from tests.support.asgi import served
from tests.support.corpora import asked, posts_of
from tests.support.fakes import FakeEngine, fake_loader
from tests.support.rankers import figure
from weights.text_ids import IdKind


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, LocalService]]:
    retrieval = corpora.setting(tmp_path_factory.mktemp("retrieval"))
    with served(retrieval=retrieval, limits=Limits(max_retrieved=400, max_history=20)) as both:
        yield both


@pytest.fixture
def client(running: tuple[TestClient, LocalService]) -> TestClient:
    return running[0]


def test_fewer_posts_than_were_asked_for_are_ranked(running: tuple[TestClient, LocalService]) -> None:
    client, ranker = running
    counted = figure(ranker, 'ranker_reply_probability_count{action="favorite"}')
    reply = client.post("/recommend", json=asked(k=400))
    assert (reply.status_code, len(reply.json()["candidates"])) == (200, 297), reply.text
    assert ranker.admission.candidates == 0
    assert figure(ranker, 'ranker_reply_probability_count{action="favorite"}') == counted + 1


def test_a_handle_is_named_though_nothing_was_ranked(client: TestClient) -> None:
    handle = client.post("/context", json=asked()).json()["context"]
    reply = client.post("/recommend", json={"context": handle, "topics": []})
    content = reply.json()
    assert (content["candidates"], content["context"], reply.headers["x-context"]) == ([], handle, handle)
    assert content["timings_ms"]["forward"] == 0


def test_a_handle_is_looked_up_once(running: tuple[TestClient, LocalService]) -> None:
    client, ranker = running
    handle = client.post("/context", json=asked()).json()["context"]
    found = 'ranker_context_handles_total{result="found"}'
    for path in ("/recommend", "/retrieve"):
        before = figure(ranker, found)
        assert client.post(path, json={"context": handle}).status_code == 200
        assert figure(ranker, found) == before + 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"weights": {"unheard": 1}}, "weights"),
        ({"weights": {"favorite": "1"}}, "weights.favorite"),
        ({"top_k": 0}, "top_k"),
        ({"actions_wanted": ["reply", "1"]}, "actions_wanted"),
    ],
)
def test_it_is_as_strict_as_rank(client: TestClient, changes: dict[str, Any], field: str) -> None:
    candidates = [{"post_id": 1, "author_id": 2}]
    for reply in (
        client.post("/recommend", json=asked(**changes)),
        client.post("/rank", json=asked(candidates=candidates, **changes)),
    ):
        assert (reply.status_code, reply.json()["errors"][0]["field"]) == (422, field)


def test_a_refused_or_answered_request_leaves_no_place_taken(running: tuple[TestClient, LocalService]) -> None:
    client, ranker = running
    some: list[dict[str, Any]] = [{}, {"topics": []}, {"user_id": 0, "history": []}, {"k": 0}, {"exclude": [-1]}]
    for changes in some:
        client.post("/recommend", json=asked(**changes))
    assert (ranker.admission.requests, ranker.admission.candidates) == (0, 0)


def test_a_ranking_that_fails_after_its_search_is_answered(tmp_path: Path) -> None:
    def fails(items: Any) -> None:
        raise EngineDown("planted")

    with served(FakeEngine(before=fails), retrieval=corpora.setting(tmp_path)) as (client, ranker):
        reply = client.post("/recommend", json=asked(k=5))
        assert (reply.status_code, reply.json()["code"]) == (503, "engine_down")
        assert (ranker.admission.requests, len(posts_of(client))) == (0, 200)


def test_a_request_that_the_ranker_refuses_costs_no_search(tmp_path: Path) -> None:
    keys = {"caller": SecretStr(hashlib.sha256(b"secret").hexdigest())}
    queue = Queue(key_candidates_per_second=10.0)
    with served(retrieval=corpora.setting(tmp_path), auth=Auth(keys=keys), queue=queue) as (client, ranker):
        client.headers["X-API-Key"] = "secret"
        assert client.post("/recommend", json=asked(k=100)).status_code == 200
        searches = figure(ranker, "ranker_search_requests_count")
        refused = client.post("/recommend", json=asked(k=100))
        assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
        assert "retry-after" in refused.headers
        assert figure(ranker, "ranker_search_requests_count") == searches


@pytest.mark.parametrize(("ranker_ids", "post_ids"), [("text", "uint64"), ("uint64", "text")])
def test_posts_are_not_ranked_by_a_model_of_other_ids(tmp_path: Path, ranker_ids: IdKind, post_ids: IdKind) -> None:
    event, retrieval = {"post_id": "1", "author_id": "1"}, corpora.setting(tmp_path, ids=post_ids)
    with served(load=fake_loader(FakeEngine(), ids=ranker_ids), retrieval=retrieval) as (client, ranker):
        for user_id in ("5", "u:5", 5):
            reply = client.post("/recommend", json={"user_id": user_id, "history": [event]})
            assert (reply.status_code, reply.json()["code"]) == (404, "no_corpus")
        assert not ranker.admission.requests
        assert client.post("/retrieve", json={"user_id": "5", "history": [event]}).status_code == 200


def test_texts_are_echoed_with_the_scores_of_rank(tmp_path: Path) -> None:
    user = {"user_id": "u:1", "history": [{"post_id": "post:3", "author_id": "author:5", "actions": ["reply"]}]}
    retrieval = corpora.setting(tmp_path, ids="text")
    with served(load=fake_loader(FakeEngine(), ids="text"), retrieval=retrieval) as (client, _):
        found = client.post("/retrieve", json=user | {"k": 20}).json()["posts"]
        ranked = client.post("/recommend", json=user | {"k": 20}).json()["candidates"]
        candidates = [{"post_id": post["post_id"], "author_id": post["author_id"]} for post in found]
        alone = client.post("/rank", json=user | {"candidates": candidates}).json()["candidates"]
    scores = {post["post_id"]: post["score"] for post in alone}
    assert {post["post_id"]: post["score"] for post in ranked} == scores


def test_both_models_must_know_the_words(tmp_path: Path) -> None:
    """The ranker knows favorite, reply and report; these towers know share in place of report."""
    retrieval = corpora.setting(tmp_path, actions=("favorite", "reply", "share"))
    with served(retrieval=retrieval) as (client, _):
        for actions, status in ((["favorite", "1"], 200), (["report"], 422), (["share"], 422), ({"share": 1}, 422)):
            history = [{"post_id": 1, "author_id": 1, "actions": actions}]
            reply = client.post("/recommend", json=asked(history=history, k=5))
            assert reply.status_code == status, actions
        assert client.post("/recommend", json=asked(weights={"report": 1}, k=5)).status_code == 200
        assert client.post("/recommend", json=asked(weights={"share": 1}, k=5)).status_code == 422
