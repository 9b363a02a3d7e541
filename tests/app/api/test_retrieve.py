"""POST /retrieve over real small towers: replies, filters, refusals, and callers who leave."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from app.interface import CorpusState
from app.service.local import LocalService
from app.settings import Deadline, Limits, Queue, Settings
from model.inputs import CLOCK_SKEW_SECONDS, Context
from model.retrieval.inputs import PostChange, PostRows
from tests.app.api.live import head, listening, read_reply, until
from tests.app.corpus.serving import watched
from tests.support import corpora, rankers
from tests.support.asgi import served
from tests.support.corpora import EVENT, asked, posts_of
from tests.support.fakes import FakeEngine, Gate, fake_loader
from tests.support.rankers import figure

NOW = corpora.NOW
PATHS = ("/retrieve", "/recommend")
BOTH = pytest.mark.parametrize("path", PATHS)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, LocalService]]:
    retrieval = corpora.setting(tmp_path_factory.mktemp("retrieval"))
    with served(retrieval=retrieval, limits=Limits(max_retrieved=400, max_history=20)) as both:
        yield both


@pytest.fixture
def client(running: tuple[TestClient, LocalService]) -> TestClient:
    return running[0]


def test_a_reply_holds_what_the_contract_says(client: TestClient) -> None:
    reply = client.post("/retrieve", json=asked(k=10, request_id="page-7"))
    content = reply.json()
    assert reply.status_code == 200
    assert content["model"] == {"name": "towers", "version": "v1"}
    assert content["corpus"] == {"name": "posts", "version": "v1", "posts": 299, "changes": 0, "sequence": 0}
    assert list(content["posts"][0]) == ["post_id", "author_id", "score", "rank", "created_at", "topics"]
    assert [post["rank"] for post in content["posts"]] == list(range(1, 11))
    scores = [post["score"] for post in content["posts"]]
    assert scores == sorted(scores, reverse=True)
    assert content["visible"] == 300 - 1 - 2, "a duplicate, and two posts of the history"
    assert (content["history_used"], content["history_dropped"]) == (2, 0)
    assert list(content["timings_ms"]) == ["parse", "queue", "encode", "search"]
    assert content["request_id"] == "page-7" == reply.headers["x-request-id"]
    assert (reply.headers["x-model-version"], reply.headers["x-corpus-version"]) == ("v1", "v1")
    again = client.post("/retrieve", json=asked(k=10))
    assert again.headers["x-context-cache"] == "hit"
    assert again.json()["posts"] == content["posts"]


def test_a_caller_may_insist_on_a_change(tmp_path: Path) -> None:
    """A header names the change; both endpoints refuse while the corpus lacks it, and say which it has had."""
    retrieval = corpora.setting(tmp_path)

    async def change() -> CorpusState:
        rows = PostRows(np.array([901], np.uint64), np.array([1], np.uint64), np.zeros(1, np.int64), ["chess"])
        admin = {"port": 0, "token_sha256": "9f" * 32}
        async with rankers.running(retrieval=retrieval, admin=admin) as ranker:
            return await ranker.corpus.change(PostChange(np.array([5], np.uint64), rows))

    with served(retrieval=retrieval) as (client, _):
        for path in PATHS:
            refused = client.post(path, json=asked(), headers={"x-corpus-at-least": "1-2-3"})
            assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "X-Corpus-At-Least")
            behind = client.post(path, json=asked(), headers={"x-corpus-at-least": "1"})
            assert (behind.status_code, behind.json()["code"]) == (503, "corpus_behind")
            assert behind.headers["retry-after"] == "1"
            hasty = {"x-corpus-at-least": "1", "x-request-timeout-ms": "50"}
            assert client.post(path, json=asked(), headers=hasty).json()["code"] == "corpus_behind"
            assert client.post(path, json=asked(), headers={"x-corpus-at-least": "0"}).status_code == 200
    changed = asyncio.run(change())
    with served(retrieval=retrieval) as (client, _):
        for path in PATHS:
            reply = client.post(path, json=asked(), headers={"x-corpus-at-least": "1"})
            assert reply.status_code == 200
            told = {"name": "posts", "version": "v1", "posts": 299, "changes": 1, "sequence": 1}
            assert reply.json()["corpus"] == told
            assert reply.headers["x-corpus-version"] == f"v1+1.{changed.mark.digest[:8]}"
        about = client.get("/info").json()["retrieval"]["corpus"]
        assert (about["sequence"], about["changes_digest"], about["posts"]) == (1, changed.mark.digest, 299)
        assert about["topics"] == [*corpora.TOPICS, "chess"]


@BOTH
def test_a_reload_loses_no_request_that_waits_for_a_change(tmp_path: Path, path: str) -> None:
    """It is answered by what serves then: here that lacks the change too."""
    retrieval = corpora.setting(tmp_path)
    with served(retrieval=retrieval) as (client, ranker), ThreadPoolExecutor() as pool:
        assert client.portal is not None
        waiting = pool.submit(client.post, path, json=asked(), headers={"x-corpus-at-least": "1"})
        time.sleep(0.05)  # it waits by now
        client.portal.call(ranker.corpus.swap, retrieval.checkpoint, retrieval.corpus)
        assert waiting.result().json()["code"] == "corpus_behind"


@pytest.mark.one_process("the change is made in the loop of the client")
@BOTH
def test_how_long_replies_take_leaves_out_a_wait_for_a_change(tmp_path: Path, path: str) -> None:
    """Else requests of others would be refused as too late. It is a stage of its own."""
    rows = PostRows(np.array([901], np.uint64), np.array([1], np.uint64), np.zeros(1, np.int64), ["chess"])
    admin = {"port": 0, "token_sha256": "9f" * 32}
    with served(retrieval=corpora.setting(tmp_path), admin=admin) as (client, ranker), ThreadPoolExecutor() as pool:
        assert client.portal is not None
        client.post(path, json=asked())  # the first one takes long
        of_path = client.app.state.leavers.of(None, path)
        before, begun = of_path.reply_seconds, time.monotonic()
        waiting = [pool.submit(client.post, path, json=asked(), headers={"x-corpus-at-least": "1"}) for _ in range(12)]
        time.sleep(0.2)
        client.portal.call(ranker.corpus.change, PostChange(np.zeros(0, np.uint64), rows))
        assert {each.result().status_code for each in waiting} == {200}
        assert time.monotonic() - begun > 0.2
        timed = re.search(r"corpus;dur=([\d.]+)", waiting[0].result().headers["server-timing"])
        assert timed is not None
        assert float(timed[1]) > 100
        assert of_path.reply_seconds < before + 0.05


def test_each_post_has_the_topic_of_the_corpus(client: TestClient) -> None:
    columns = corpora.columns()
    names = dict(zip(columns["post_ids"].view(np.uint64).tolist(), columns["topics"].tolist(), strict=True))
    posts = posts_of(client, k=100)
    wanted = [names[int(post["post_id"])] for post in posts]
    assert [post["topics"] for post in posts] == [[corpora.TOPICS[topic]] if topic >= 0 else [] for topic in wanted]
    assert -1 in wanted


def test_scores_are_the_definitions(client: TestClient) -> None:
    towers = corpora.towers()
    context = Context(
        77,
        np.array([17, 18], np.uint64),
        np.array([5, 6], np.uint64),
        np.array([[1, 0, 1], [0, 0.5, 0]], np.float32),
        np.array([3, 0]),
        np.array([12.5, 0], np.float32),
    )
    user = towers.encode_users([context])[0].numpy()
    posts = posts_of(client, k=400, exclude_history=False)
    ids, authors = (np.array([int(post[key]) for post in posts], np.uint64) for key in ("post_id", "author_id"))
    expected = towers.encode_posts(ids, authors).numpy() @ user
    np.testing.assert_allclose([post["score"] for post in posts], expected, atol=2e-6)
    assert len(posts) == 299


def test_filters(client: TestClient) -> None:
    everything = posts_of(client, k=400, exclude_history=False)

    def left(**changes: Any) -> list[dict[str, Any]]:
        posts = posts_of(client, k=400, exclude_history=False, **changes)
        return [post | {"rank": 0} for post in posts]

    def those(keep: Any) -> list[dict[str, Any]]:
        return [post | {"rank": 0} for post in everything if keep(post)]

    seen = {"17", "18"}
    assert [post["post_id"] for post in posts_of(client, k=400)] == [
        post["post_id"] for post in everything if post["post_id"] not in seen
    ]
    best = everything[0]["post_id"]
    assert left(exclude=[best, 12345]) == those(lambda post: post["post_id"] != best)
    assert left(topics=["sport", "unheard of"]) == those(lambda post: post["topics"] == ["sport"])
    assert left(topics=[]) == []
    assert left(min_score=0.1) == those(lambda post: np.float32(post["score"]) >= np.float32(0.1))
    assert {tuple(post["topics"]) for post in everything} == {(), ("sport",), ("news",), ("art",)}


@pytest.mark.parametrize("before", [0, 24 * 3600])
def test_an_age_limit_leaves_out_old_and_future_posts(client: TestClient, before: int) -> None:
    day, now = 24 * 3600, NOW - before
    posts = posts_of(client, k=400, exclude_history=False, max_age_seconds=day, impression_ts=now)
    everything = posts_of(client, k=400, exclude_history=False)
    wanted = [post for post in everything if now - day <= post["created_at"] <= now + CLOCK_SKEW_SECONDS]
    assert [post["post_id"] for post in posts] == [post["post_id"] for post in wanted]
    assert 0 < len(posts) < len(everything)


def test_the_whole_history_is_excluded(client: TestClient) -> None:
    """The towers read the newest eight events."""
    viewer = {"post_id": list(range(1, 13)), "author_id": [1] * 12}
    found = {post["post_id"] for post in posts_of(client, k=400, history=viewer)}
    assert not found & {str(number) for number in range(1, 13)}
    assert len(posts_of(client, k=400, history=viewer, exclude_history=False)) == 299


def test_visible_does_not_depend_on_min_score_as_documented(client: TestClient) -> None:
    content = client.post("/retrieve", json=asked(k=400, exclude_history=False, min_score=0.1)).json()
    assert 0 < len(content["posts"]) < content["visible"] == 299
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    told = [schema["properties"]["visible"]["description"] for schema in schemas.values() if "visible" in str(schema)]
    assert len(told) == 2
    assert all("min_score" in description for description in told)


def test_k_is_a_prefix(client: TestClient) -> None:
    most = posts_of(client, k=299)
    for k in (1, 2, 63, 200):
        assert posts_of(client, k=k) == most[:k]
    assert len(posts_of(client)) == 200


@BOTH
def test_nothing_visible_is_an_empty_list(client: TestClient, path: str) -> None:
    reply = client.post(path, json=asked(topics=[]))
    assert reply.status_code == 200
    content = reply.json()
    assert content["posts" if path == "/retrieve" else "candidates"] == []
    assert content["visible"] == 0


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"user_id": ...}, 422, "user_id: is required"),
    ({"user_id": -1}, 422, "user_id: must be an unsigned"),
    ({"user_id": 0, "history": []}, 422, "user_id: is 0 and the history has no posts"),
    ({"user_id": 0, "history": [{"post_id": 0, "author_id": 4}]}, 422, "nothing is known about this user"),
    ({"k": 0}, 422, "k: "),
    ({"k": 1.5}, 422, "k: "),
    ({"k": 401}, 413, "k: at most 400 posts"),
    ({"k": 2**70}, 413, "k: at most 400 posts"),
    ({"exclude": [1] * 2001}, 413, "exclude: 2001 items"),
    ({"exclude": [1, -1]}, 422, "exclude[1]: must be an unsigned"),
    ({"exclude": ["01"]}, 422, "exclude[0]: must be an unsigned"),
    ({"exclude_history": 1}, 422, "exclude_history: "),
    ({"topics": "sport"}, 422, "topics: "),
    ({"topics": [1]}, 422, "topics[0]: "),
    ({"min_score": 2}, 422, "min_score: "),
    ({"max_age_seconds": 60}, 422, "max_age_seconds: needs impression_ts"),
    ({"max_age_seconds": 0, "impression_ts": NOW}, 422, "max_age_seconds: "),
    ({"impression_ts": NOW * 1000}, 422, "impression_ts: must be Unix seconds"),
    ({"request_id": "a b"}, 422, "request_id: must be"),
    ({"candidates": []}, 422, "has an unknown field"),
    ({"history": [{"post_id": 1, "author_id": 2, "actions": ["unheard"]}]}, 422, "history[0].actions"),
    ({"history": {"post_id": [1, 2], "author_id": [1]}}, 422, "history: must hold arrays of equal length"),
    ({"history": [EVENT] * 21}, 413, "history: 21 items"),
]


@BOTH
@pytest.mark.parametrize(("changes", "status", "sentence"), WRONG)
def test_what_is_refused(client: TestClient, path: str, changes: dict[str, Any], status: int, sentence: str) -> None:
    body = json.dumps(asked(**changes))
    reply = client.post(path, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == status, reply.text
    assert sentence in reply.json()["detail"]


@pytest.mark.parametrize("changes", [{"weights": {"favorite": 1}}, {"top_k": 3}, {"actions_wanted": ["reply"]}])
def test_retrieve_knows_nothing_of_scores(client: TestClient, changes: dict[str, Any]) -> None:
    assert client.post("/retrieve", json=asked(**changes)).status_code == 422
    assert client.post("/recommend", json=asked(**changes)).status_code == 200


@BOTH
def test_what_takes_long_to_read_is_refused_unread(client: TestClient, path: str) -> None:
    values = client.post(path, json=asked(exclude=[1] * 30_001))
    assert (values.status_code, values.json()["detail"]) == (413, "The body holds more than 30000 values.")


def test_a_request_without_k_asks_for_no_more_than_is_allowed(tmp_path: Path) -> None:
    with served(retrieval=corpora.setting(tmp_path), limits=Limits(max_retrieved=150)) as (client, _):
        assert len(posts_of(client)) == 150


@BOTH
def test_no_search_gets_longer_than_the_settings_allow(tmp_path: Path, path: str) -> None:
    retrieval, gate = corpora.setting(tmp_path), Gate()
    load, _ = watched(Settings(retrieval=retrieval), retrieve=gate)
    with served(retrieval=retrieval, load_corpus=load, deadline=Deadline(max_seconds=0.2)) as (client, _):
        reply = client.post(path, json=asked(), headers={"x-request-timeout-ms": "60000"})
        gate.opened.set()
        assert (reply.status_code, reply.json()["code"]) == (504, "deadline_exceeded")


@BOTH
def test_a_search_whose_client_leaves_is_not_made(path: str, tmp_path: Path) -> None:
    retrieval, gate = corpora.setting(tmp_path), Gate()
    load, engines = watched(Settings(retrieval=retrieval), retrieve=gate)

    def request(user: int) -> bytes:
        body = json.dumps(asked(user_id=user)).encode()
        return head(path=path, length=len(body)) + body

    with listening(retrieval=retrieval, load_corpus=load) as live, live.connect() as first:
        first.sendall(request(1))
        assert gate.entered.wait(10)
        with live.connect() as leaving:
            leaving.sendall(request(2))
            until(lambda: live.figure("ranker_search_queue_requests") == 1)
        until(lambda: live.figure('ranker_cancelled_total{stage="queue"}') == 1)
        gate.opened.set()
        assert read_reply(first)[0] == 200
        first.sendall(request(3))
        assert read_reply(first)[0] == 200
    assert engines[0].scans == [[1], [3]]


@BOTH
def test_without_a_corpus_the_others_serve_on(path: str) -> None:
    with served() as (client, _):
        reply = client.post(path, json=asked())
        assert (reply.status_code, reply.json()["code"]) == (404, "no_corpus")
        candidates = [{"post_id": 1, "author_id": 2}]
        assert client.post("/rank", json=asked(candidates=candidates)).status_code == 200
        assert client.get("/info").json()["retrieval"] is None


def test_info_and_metrics_say_what_is_served(running: tuple[TestClient, LocalService]) -> None:
    client, ranker = running
    for _ in range(2):  # the second finds the user's vector in the cache
        posts_of(client)
    info = client.get("/info").json()["retrieval"]
    assert info["model"] == {"name": "towers", "version": "v1"}
    assert (info["corpus"]["posts"], info["corpus"]["hidden"], info["corpus"]["duplicates"]) == (299, 1, 1)
    assert info["engine"]["user_tower"]["backend"] in ("native", "torch")
    assert figure(ranker, "ranker_search_requests_count") > 0
    assert figure(ranker, 'ranker_stage_duration_seconds_count{stage="search"}') > 0
    assert figure(ranker, 'ranker_user_vectors_total{source="cache"}') > 0
    scored, visible = (figure(ranker, f"ranker_search_{kind}_rows_count") for kind in ("scored", "visible"))
    assert scored == visible > 0


def test_a_search_that_hangs_ends_readiness_then_the_process(tmp_path: Path) -> None:
    """As a forward that hangs does: who waits gets 504 at the deadline, new ones 503, and the process ends."""
    retrieval, gate = corpora.setting(tmp_path), Gate()
    load, _ = watched(Settings(retrieval=retrieval), retrieve=gate)
    queue, fatal = Queue(stall_seconds=0.2, stall_exit_seconds=1.0), list[str]()
    with served(retrieval=retrieval, load_corpus=load, queue=queue) as (client, ranker):
        ranker.on_fatal = fatal.append
        gate.opened.set()
        assert posts_of(client)
        gate.opened.clear()
        late = client.post("/retrieve", json=asked(), headers={"x-request-timeout-ms": "400"})
        assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
        ready = client.get("/readyz")
        assert ready.status_code == 503
        assert "A search has not finished for" in ready.text
        assert client.get("/livez").status_code == 200
        for path in PATHS:
            assert client.post(path, json=asked()).json()["code"] == "engine_down"
        until(lambda: bool(fatal), 10)
        assert fatal[0].startswith("A search has not finished for")
        gate.opened.set()


def test_texts_are_echoed(tmp_path: Path) -> None:
    user = {"user_id": "u:1", "history": [{"post_id": "post:3", "author_id": "author:5", "actions": ["reply"]}]}
    retrieval = corpora.setting(tmp_path, ids="text")
    with served(retrieval=retrieval, load=fake_loader(FakeEngine(), ids="text")) as (client, _):
        found = client.post("/retrieve", json=user | {"k": 20}).json()["posts"]
        assert len(found) == 20
        assert all(post["post_id"].startswith("post:") and post["author_id"].startswith("author:") for post in found)
        assert "post:3" not in [post["post_id"] for post in found]
        fewer = client.post("/retrieve", json=user | {"k": 20, "exclude": [found[0]["post_id"]]}).json()["posts"]
        assert [post["post_id"] for post in fewer[:19]] == [post["post_id"] for post in found[1:]]
