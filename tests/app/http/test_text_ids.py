"""Checkpoints whose ids are texts, over HTTP and gRPC: every endpoint takes them, echoes them, and refuses anything else with a 422."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.testclient import TestClient

from app.request.body import decode
from app.request.features import candidates_of, context_of
from app.request.posts import read_change
from app.request.validate import check
from app.service.service import RankingService
from app.settings import Limits, Settings
from loadtest.soak.fake_engine import ACTIONS, expected
from model.ranking import combine
from tests.app import retrieving
from tests.app.request.test_text_ids import CONFIG, TEXTS, WORDS
from tests.app.serving import served
from weights.text_ids import IdKind, text_id

USER = {"user_id": TEXTS["user_id"], "history": TEXTS["history"]}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, RankingService]]:
    posts = retrieving.loader(tmp_path_factory.mktemp("texts"), ids="text")
    with served(None, Settings(), posts, "v1", ACTIONS, "text") as both:
        yield both


@pytest.fixture
def client(running: tuple[TestClient, RankingService]) -> TestClient:
    return running[0]


@pytest.mark.parametrize("form", ["objects", "columns"])
def test_a_ranking_echoes_texts(client: TestClient, form: str) -> None:
    content = client.post("/rank", json=TEXTS | {"reply": form}).json()["candidates"]
    rows = content if form == "objects" else [
        {"post_id": post, "score": score} for post, score in zip(content["post_id"], content["score"], strict=True)
    ]  # fmt: skip
    assert sorted(row["post_id"] for row in rows) == sorted(post["post_id"] for post in TEXTS["candidates"])


def test_a_batch_and_an_explanation_echo_texts(client: TestClient) -> None:
    alone = client.post("/rank", json=TEXTS).json()["candidates"]
    results = client.post("/rank/batch", json=[TEXTS, TEXTS | {"user_id": 7}]).json()
    assert results[0]["candidates"] == alone
    assert results[1]["error"]["status"] == 422
    wanted = TEXTS["candidates"][1]["post_id"]
    told = client.post("/explain", json=TEXTS | {"explain": [wanted]})
    assert told.status_code == 200, told.text
    assert [row["post_id"] for row in told.json()["candidates"]] == [wanted]
    assert told.json()["events"]["post_id"] == [event["post_id"] for event in TEXTS["history"]]


def test_posts_come_with_their_texts(client: TestClient) -> None:
    found = client.post("/retrieve", json=USER | {"k": 20}).json()["posts"]
    assert len(found) == 20
    assert all(post["post_id"].startswith("post:") and post["author_id"].startswith("author:") for post in found)
    fewer = client.post("/retrieve", json=USER | {"k": 20, "exclude": [found[0]["post_id"]]}).json()["posts"]
    assert [post["post_id"] for post in fewer[:19]] == [post["post_id"] for post in found[1:]]
    ranked = client.post("/recommend", json=USER | {"k": 20}).json()["candidates"]
    assert sorted(post["post_id"] for post in ranked) == sorted(post["post_id"] for post in found)
    candidates = [{"post_id": post["post_id"], "author_id": post["author_id"]} for post in found]
    alone = client.post("/rank", json=USER | {"candidates": candidates}).json()["candidates"]
    scores = {post["post_id"]: post["score"] for post in alone}
    assert {post["post_id"]: post["score"] for post in ranked} == scores


@pytest.mark.parametrize(("ranker", "posts"), [("text", "uint64"), ("uint64", "text")])
def test_posts_are_not_ranked_by_a_model_of_other_ids(tmp_path: Path, ranker: IdKind, posts: IdKind) -> None:
    event = {"post_id": "1", "author_id": "1"}
    with served(None, Settings(), retrieving.loader(tmp_path, ids=posts), "v1", ACTIONS, ranker) as (client, service):
        for user_id in ("5", "u:5", 5):
            reply = client.post("/recommend", json={"user_id": user_id, "history": [event]})
            assert (reply.status_code, reply.json()["code"]) == (503, "corpus_not_loaded")
        assert not service.admission.requests
        assert client.post("/retrieve", json={"user_id": "5", "history": [event]}).status_code == 200


def test_a_change_brings_a_text(running: tuple[TestClient, RankingService]) -> None:
    client, service = running
    before = client.post("/retrieve", json=USER | {"k": 300}).json()
    gone = before["posts"][0]["post_id"]
    body = {"upsert": [{"post_id": "brand,new", "author_id": 'a"b'}], "delete": [gone]}
    change = read_change(orjson.dumps(body), service.retrieval.served.corpus.ids)
    assert client.portal is not None
    client.portal.call(service.retrieval.change, change)
    after = client.post("/retrieve", json=USER | {"k": 400}).json()["posts"]
    names = {post["post_id"]: post["author_id"] for post in after}
    assert names["brand,new"] == 'a"b'
    assert gone not in names


def test_scores_are_those_of_the_hashes(client: TestClient) -> None:
    body = TEXTS | {"weights": {"favorite": 1.0}, "top_k": 3}
    request = check(decode(orjson.dumps(body), Limits()), WORDS)
    scores = expected(context_of(request, CONFIG), candidates_of(request, CONFIG))
    wanted = dict(zip(request.echo_ids, combine(scores.probabilities, request.weights).tolist(), strict=True))
    rows = client.post("/rank", json=body).json()["candidates"]
    assert {row["post_id"]: row["score"] for row in rows} == wanted
    assert request.candidates.post_ids.tolist() == [text_id(str(id_)) for id_ in request.echo_ids]


def test_what_serves_is_described(client: TestClient) -> None:
    assert client.get("/info").json()["ids"] == "text"
    inputs = client.get("/v2/models/fake").json()["inputs"]
    assert {tensor["datatype"] for tensor in inputs if tensor["name"].endswith("_id")} == {"BYTES"}
    document = client.get("/openapi.json").json()
    for path in ("/rank", "/rank/batch", "/explain", "/retrieve", "/recommend", "/v2/models/{name}/infer"):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        for example in content["examples"].values():
            reply = client.post(path.replace("{name}", "fake"), json=example["value"])
            assert reply.status_code == 200, reply.text
            assert "error" not in reply.text
    kinds = document["components"]["schemas"]["Candidate"]["properties"]["post_id"]
    assert {kind["type"] for kind in kinds["anyOf"]} == {"integer", "string"}
    assert [type(example) for example in kinds["examples"]] == [int, str]


HANDLE = "0123456789abcdef" * 2
POST = {"post_id": "p", "author_id": "a"}
BAD: list[tuple[str, bytes | dict[str, Any], int]] = [
    ("/rank", {"user_id": 7, "candidates": [POST]}, 422),
    ("/rank", {"user_id": "", "candidates": [POST]}, 422),
    ("/rank", {"user_id": "u" * 129, "candidates": [POST]}, 422),
    ("/rank", {"user_id": "u", "candidates": [POST | {"post_id": 5}]}, 422),
    ("/rank", {"user_id": "u", "candidates": {"post_id": ["a", "é" * 65], "author_id": ["b", "c"]}}, 422),
    ("/rank", {"user_id": "u", "candidates": [POST], "history": [POST | {"actions": 8}]}, 422),
    ("/rank", {"context": HANDLE[:16], "candidates": [POST]}, 422),
    ("/rank", {"context": HANDLE, "user_id": "u", "candidates": [POST]}, 422),
    ("/rank", {"candidates": [POST]}, 422),
    ("/rank", b'{"user_id":"\xff","candidates":[{"post_id":"p","author_id":"a"}]}', 400),
    ("/rank", b'{"user_id":"\\ud800","candidates":[{"post_id":"p","author_id":"a"}]}', 400),
    ("/explain", {"user_id": "u", "candidates": [POST], "explain": [5]}, 422),
    ("/retrieve", {"user_id": 7}, 422),
    ("/retrieve", {"user_id": "u", "exclude": [5]}, 422),
    ("/recommend", {"user_id": "u", "exclude": [""]}, 422),
    ("/v2/models/fake/infer", {"inputs": [{"name": "user_id", "datatype": "UINT64", "shape": [1], "data": [1]}]}, 422),
    ("/v2/models/fake/infer", {"inputs": [{"name": "user_id", "datatype": "BYTES", "shape": [1], "data": [""]}]}, 422),
]


@pytest.mark.parametrize(("path", "body", "status"), BAD)
def test_bad_ids_are_refused_and_never_a_fault(client: TestClient, path: str, body: Any, status: int) -> None:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    reply = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == status, reply.text
    if status == 422:
        assert reply.json()["errors"][0]["message"]


def test_the_next_request_is_answered(client: TestClient) -> None:
    assert client.post("/rank", json=TEXTS).status_code == 200
