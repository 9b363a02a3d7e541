"""POST /retrieve and POST /recommend over real small towers and a fake ranker: replies, filters, joins, refusals."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from pydantic import SecretStr
from starlette.testclient import TestClient

from app.errors import EngineDown
from app.http.application import Application, create_app
from app.service.service import RankingService
from app.settings import Auth, Deadline, Limits, Queue, Settings
from model.retrieval.engine import RetrievalEngine, Users
from model.retrieval.inputs import Answers, PostChange, PostRows, Query
from tests.app import retrieving
from tests.app.bounds import bounded
from tests.app.fakes import FakeEngine, Gate, loader, ready, until
from tests.app.serving import ask, chunk, served, value_of

NOW = retrieving.NOW
EVENT = {"post_id": 17, "author_id": 5, "actions": ["favorite", "2"], "product_surface": 3, "dwell_time": 12.5}
ASKED: dict[str, Any] = {
    "user_id": "77",
    "history": [EVENT, {"post_id": "18", "author_id": 6, "actions": {"reply": 0.5}}],
}


def asked(**changes: Any) -> dict[str, Any]:
    """A valid request; `...` takes a field out."""
    return {name: value for name, value in (ASKED | changes).items() if value is not ...}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("retrieval")


@pytest.fixture(scope="module")
def running(directory: Path) -> Iterator[tuple[TestClient, RankingService]]:
    limits = bounded(Limits(max_retrieved=400, max_history=20), max_excluded=20)
    with served(settings=Settings(limits=limits), retrieval=retrieving.loader(directory)) as both:
        yield both


@pytest.fixture
def client(running: tuple[TestClient, RankingService]) -> TestClient:
    return running[0]


def posts_of(client: TestClient, **changes: Any) -> list[dict[str, Any]]:
    reply = client.post("/retrieve", json=asked(**changes))
    assert reply.status_code == 200, reply.text
    posts: list[dict[str, Any]] = reply.json()["posts"]
    return posts


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


def test_a_caller_may_insist_on_a_change(directory: Path) -> None:
    """A header names the change; both endpoints refuse until the corpus has had it, and say which it has had."""
    with served(retrieval=retrieving.loader(directory / "own")) as (client, service):
        for path in ("/retrieve", "/recommend"):
            refused = client.post(path, json=asked(), headers={"x-corpus-at-least": "1-2-3"})
            assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "X-Corpus-At-Least")
            behind = client.post(path, json=asked(), headers={"x-corpus-at-least": "1"})
            assert (behind.status_code, behind.json()["code"]) == (503, "corpus_behind")
            assert behind.headers["retry-after"] == "1"
            assert client.post(path, json=asked(), headers={"x-corpus-at-least": "0"}).status_code == 200
        rows = PostRows(np.array([901], np.uint64), np.array([1], np.uint64), np.zeros(1, np.int64), [None])
        changed = client.portal.call(service.retrieval.change, PostChange(np.array([5], np.uint64), rows))  # type: ignore[union-attr]
        for path in ("/retrieve", "/recommend"):
            reply = client.post(path, json=asked(), headers={"x-corpus-at-least": "1"})
            assert reply.status_code == 200
            assert reply.json()["corpus"] == {
                "name": "posts",
                "version": "v1",
                "posts": 299,
                "changes": 1,
                "sequence": 1,
            }
            assert reply.headers["x-corpus-version"] == f"v1+1.{changed.mark.digest[:8]}"
        about = client.get("/info").json()["retrieval"]["corpus"]
        assert (about["sequence"], about["changes_digest"], about["posts"]) == (1, changed.mark.digest, 299)


def test_each_post_has_the_topic_of_the_corpus(client: TestClient) -> None:
    columns = retrieving.columns()
    names = dict(zip(columns["post_ids"].view(np.uint64).tolist(), columns["topics"].tolist(), strict=True))
    posts = posts_of(client, k=100)
    wanted = [names[int(post["post_id"])] for post in posts]
    assert [post["topics"] for post in posts] == [[retrieving.TOPICS[topic]] if topic >= 0 else [] for topic in wanted]
    assert -1 in wanted


def test_scores_are_the_definitions(client: TestClient) -> None:
    towers = retrieving.towers()
    from app.request.retrieval import Reading, check_posts, read_posts
    from app.request.vocabulary import Vocabulary
    from weights.format.manifest import Manifest

    names = ("favorite", "reply", "report")
    vocabulary = Vocabulary.of(Manifest("x", "1", towers.config, names, (), {}, {}, {}))
    body = json.dumps(asked()).encode()
    models = [Reading(vocabulary, towers.config)]
    context = check_posts(read_posts(body, Limits(), models), models).query.context
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
    day = 24 * 3600
    assert left(max_age_seconds=day, impression_ts=NOW) == those(lambda post: post["created_at"] >= NOW - day)
    assert {tuple(post["topics"]) for post in everything} == {(), ("sport",), ("news",), ("art",)}


def test_what_is_visible_does_not_depend_on_the_least_score_as_docs_say(client: TestClient) -> None:
    content = client.post("/retrieve", json=asked(k=400, exclude_history=False, min_score=0.1)).json()
    assert 0 < len(content["posts"]) < content["visible"] == 299
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    told = [schema["properties"]["visible"]["description"] for schema in schemas.values() if "visible" in str(schema)]
    assert len(told) == 2
    assert all("min_score" in description for description in told)


@pytest.mark.parametrize(("path", "status"), [("/retrieve", 200), ("/recommend", 404)])
def test_a_version_names_a_ranking_model_and_is_read_where_one_answers(
    client: TestClient, path: str, status: int
) -> None:
    no_ranker = {"X-Model-Version": "of-the-towers"}
    assert client.post(path, json=asked(), headers=no_ranker).status_code == status


def test_k_is_a_prefix(client: TestClient) -> None:
    most = posts_of(client, k=299)
    for k in (1, 2, 63, 200):
        assert posts_of(client, k=k) == most[:k]
    assert len(posts_of(client)) == 200


def test_recommend_is_retrieve_and_then_rank(client: TestClient) -> None:
    """Bit for bit, with every option that both have."""
    options = {
        "impression_ts": NOW,
        "weights": {"favorite": 2.0, "report": -1.5},
        "actions_wanted": ["report", "favorite"],
    }
    for changes in ({}, {"k": 7}, {"k": 30, "topics": ["sport", "art"], "exclude": [3, 4]}, {"k": 90, "top_k": 5}):
        joined = client.post("/recommend", json=asked(**options, **changes))
        assert joined.status_code == 200, joined.text
        content = joined.json()
        retrieval = {name: value for name, value in changes.items() if name != "top_k"}
        posts = posts_of(client, **retrieval)
        candidates = [{key: post[key] for key in ("post_id", "author_id", "created_at")} for post in posts]
        top_k = changes.get("top_k", len(posts))
        ranked = client.post("/rank", json=asked(**options, candidates=candidates, top_k=top_k)).json()
        found = {post["post_id"]: post for post in posts}
        expected = [
            row | {"retrieval_score": found[row["post_id"]]["score"], "retrieval_rank": found[row["post_id"]]["rank"]}
            for row in ranked["candidates"]
        ]
        assert content["candidates"] == expected
        assert content["actions"] == ["report", "favorite"]
        assert content["models"] == {"retrieval": {"name": "towers", "version": "v1"}, "ranker": ranked["model"]}
        assert content["corpus"]["version"] == "v1"
        assert list(content["timings_ms"]) == ["parse", "queue", "encode", "search", "forward"]


def test_a_forward_may_be_over_before_the_loop_does_anything_else(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a short one of an idle engine is: what the reply says besides has not been prepared then."""
    results: list[Any] = []
    rank = RankingService.rank

    def noted(service: RankingService, ticket: Any, context: Any, candidates: Any, done: Any) -> None:
        rank(service, ticket, context, candidates, lambda result: (results.append(result), done(result))[1])

    def over(service: RankingService, ticket: Any, context: Any, candidates: Any, done: Any) -> None:
        ranked = msgspec.structs.replace(results[0], queue_seconds=5.0, forward_seconds=7.0)
        asyncio.get_running_loop().call_soon(done, ranked)

    monkeypatch.setattr(RankingService, "rank", noted)
    expected = client.post("/recommend", json=asked(k=20))
    monkeypatch.setattr(RankingService, "rank", over)
    reply = client.post("/recommend", json=asked(k=20))
    assert reply.status_code == expected.status_code == 200, reply.text
    assert reply.json()["candidates"] == expected.json()["candidates"]
    timings = reply.json()["timings_ms"]
    assert (timings["queue"] > 5000, timings["forward"]) == (True, 7000), "it waits in two queues"


def test_fewer_posts_than_were_asked_for_are_ranked(
    running: tuple[TestClient, RankingService], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, service = running
    rank, held = service.rank, list[int]()
    monkeypatch.setattr(service, "rank", lambda *given: (held.append(service.admission.candidates), rank(*given))[1])

    def counted() -> float:
        return value_of(client.get("/metrics").text, 'ranker_reply_probability_count{action="favorite"}')

    before = counted()
    reply = client.post("/recommend", json=asked(k=400))
    assert (reply.status_code, len(reply.json()["candidates"])) == (200, 297), reply.text
    assert (held, service.admission.candidates) == ([297], 0), "places for posts that were not found are free at once"
    assert counted() == before + 1


def test_a_ranking_that_fails_after_its_search_is_answered(
    running: tuple[TestClient, RankingService], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, service = running
    monkeypatch.setattr(
        service, "rank", lambda ticket, context, posts, done: done(EngineDown("planted", retry_after_seconds=3.0))
    )
    reply = client.post("/recommend", json=asked(k=5))
    assert (reply.status_code, reply.json()["detail"], reply.headers["retry-after"]) == (503, "planted", "3")
    assert service.admission.requests == 0


@pytest.mark.parametrize("path", ["/retrieve", "/recommend"])
def test_nothing_visible_is_an_empty_list(client: TestClient, path: str) -> None:
    reply = client.post(path, json=asked(topics=[]))
    assert reply.status_code == 200
    content = reply.json()
    assert content["posts" if path == "/retrieve" else "candidates"] == []
    assert content["visible"] == 0
    if path == "/recommend":
        assert content["timings_ms"]["forward"] == 0, "nothing was ranked, in no time"


@pytest.mark.parametrize("path", ["/retrieve", "/recommend"])
def test_by_the_handle_of_a_context_the_reply_is_the_same(client: TestClient, path: str) -> None:
    viewer = asked(history=[EVENT | {"post_id": number} for number in range(1, 13)])
    handle = client.post("/context", json=viewer).json()["context"]
    whole, named = (client.post(path, json=said | {"k": 5}).json() for said in (viewer, {"context": handle}))
    assert whole["history_used"] + whole["history_dropped"] == 12
    assert named | {"timings_ms": 0} == whole | {"timings_ms": 0, "context": handle}


def test_a_handle_is_named_though_nothing_was_ranked(client: TestClient) -> None:
    handle = client.post("/context", json=asked()).json()["context"]
    reply = client.post("/recommend", json={"context": handle, "topics": []})
    assert (reply.json()["candidates"], reply.json()["context"], reply.headers["x-context"]) == ([], handle, handle)


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"user_id": ...}, 422, "user_id: is required"),
    ({"user_id": -1}, 422, "user_id: must be an unsigned"),
    ({"user_id": 0, "history": []}, 422, "user_id: is 0 and the history has no posts"),
    ({"user_id": 0, "history": [{"post_id": 0, "author_id": 4}]}, 422, "nothing is known about this user"),
    ({"k": 0}, 422, "k: must be an integer between 1 and 18446744073709551615"),
    ({"k": 1.5}, 422, "k: must be an integer between 1 and 18446744073709551615"),
    ({"k": 401}, 413, "k: at most 400 posts"),
    ({"exclude": [1] * 21}, 413, "exclude: 21 items"),
    ({"exclude": [1, -1]}, 422, "exclude[1]: must be an unsigned"),
    ({"exclude": ["01"]}, 422, "exclude[0]: must be an unsigned"),
    ({"exclude_history": 1}, 422, "exclude_history: must be true or false"),
    ({"topics": "sport"}, 422, "topics: must be an array"),
    ({"topics": [1]}, 422, "topics[0]: must be a short text"),
    ({"min_score": 2}, 422, "min_score: must be a number between -1 and 1"),
    ({"max_age_seconds": 60}, 422, "max_age_seconds: needs impression_ts"),
    ({"max_age_seconds": 0, "impression_ts": NOW}, 422, "max_age_seconds: must be an integer between 1"),
    ({"request_id": "a b"}, 422, "request_id: must be"),
    ({"candidates": []}, 422, "has an unknown field"),
    ({"history": [{"post_id": 1, "author_id": 2, "actions": ["unheard"]}]}, 422, "history[0].actions"),
    ({"history": {"post_id": [1, 2], "author_id": [1]}}, 422, "history: must hold arrays of equal length"),
    ({"history": [EVENT] * 21}, 413, "history: 21 items"),
]


@pytest.mark.parametrize("path", ["/retrieve", "/recommend"])
@pytest.mark.parametrize(("changes", "status", "sentence"), WRONG)
def test_what_is_refused(client: TestClient, path: str, changes: dict[str, Any], status: int, sentence: str) -> None:
    reply = client.post(path, json=asked(**changes))
    assert reply.status_code == status, reply.text
    assert sentence in reply.json()["detail"]


@pytest.mark.parametrize("changes", [{"weights": {"favorite": 1}}, {"top_k": 3}, {"actions_wanted": ["reply"]}])
def test_retrieve_knows_nothing_of_scores(client: TestClient, changes: dict[str, Any]) -> None:
    assert client.post("/retrieve", json=asked(**changes)).status_code == 422
    assert client.post("/recommend", json=asked(**changes)).status_code == 200


@pytest.mark.parametrize("changes", [{"weights": {"unheard": 1}}, {"top_k": 0}, {"actions_wanted": ["reply", "1"]}])
def test_recommend_is_as_strict_as_rank(client: TestClient, changes: dict[str, Any]) -> None:
    assert client.post("/recommend", json=asked(**changes)).status_code == 422


@pytest.mark.parametrize("raw", [b"", b"{", b'{"user_id": 1, "user_id": 2}', b"[]", b'{"user_id": 1e999}', b"\xff"])
@pytest.mark.parametrize("path", ["/retrieve", "/recommend"])
def test_what_is_no_json_object_is_refused(client: TestClient, path: str, raw: bytes) -> None:
    reply = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code in (400, 422)


@pytest.mark.parametrize("path", ["/retrieve", "/recommend"])
def test_what_takes_long_to_read_is_refused_unread(client: TestClient, path: str) -> None:
    values = client.post(path, json=asked(exclude=[1] * 30_001))
    assert (values.status_code, values.json()["detail"]) == (413, "The body holds more than 30000 values.")
    number = client.post(
        path, content=b'{"user_id": %b}' % (b"1" * 2**15), headers={"content-type": "application/json"}
    )
    assert number.status_code == 400


def test_a_refused_or_answered_request_leaves_no_place_taken(
    client: TestClient, running: tuple[TestClient, RankingService]
) -> None:
    for changes in ({}, {"topics": []}, {"user_id": 0, "history": []}, {"k": 0}, {"exclude": [-1]}):
        client.post("/recommend", json=asked(**changes))
    assert (running[1].admission.requests, running[1].admission.candidates) == (0, 0)


def test_less_than_no_post_gives_a_key_nothing_of_its_rate_back(tmp_path: Path) -> None:
    keys = {"caller": SecretStr(hashlib.sha256(b"secret").hexdigest())}
    settings = Settings(auth=Auth(keys=keys), queue=Queue(key_candidates_per_second=10.0))
    with served(settings=settings, retrieval=retrieving.loader(tmp_path)) as (client, service):
        client.headers["X-API-Key"] = "secret"
        assert client.post("/recommend", json=asked(k=100)).status_code == 200
        assert client.post("/recommend", json=asked(k=-(2**40))).status_code != 200
        assert client.post("/recommend", json=asked(k=100)).status_code == 429
        assert service.admission.offered.forwards_per_second(service.clock()) > 0


@pytest.mark.parametrize(("seconds", "headers"), [(10.0, {"x-request-timeout-ms": "60000"}), (60.0, {})])
def test_no_search_gets_longer_than_the_settings_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, headers: dict[str, str]
) -> None:
    held, load, search = threading.Event(), retrieving.loader(tmp_path), RetrievalEngine.retrieve
    settings = Settings(deadline=Deadline(default_seconds=seconds, max_seconds=0.2))
    with served(settings=settings, retrieval=load) as (client, _):
        monkeypatch.setattr("app.engine.runners.SHORT_SEARCH_SECONDS", 0.0)
        monkeypatch.setattr(RetrievalEngine, "retrieve", lambda *asked: (held.wait(3), search(*asked))[1])
        for path in ("/retrieve", "/recommend"):
            reply = client.post(path, json=asked(), headers=headers)
            assert (reply.status_code, reply.json()["code"]) == (504, "deadline_exceeded")
        held.set()


@pytest.mark.parametrize("path", ["/retrieve", "/recommend"])
def test_a_search_whose_client_leaves_is_not_made(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, search, made = Gate(), RetrievalEngine.retrieve, list[int]()

    def held(engine: RetrievalEngine, queries: list[Query], users: Users) -> Answers:
        made.extend(query.context.user_id for query in queries)
        gate(queries)
        return search(engine, queries, users)

    monkeypatch.setattr("app.engine.runners.SHORT_SEARCH_SECONDS", 0.0)

    async def main() -> None:
        service = await ready(loader(FakeEngine()), retrieval=retrieving.loader(tmp_path))
        monkeypatch.setattr(RetrievalEngine, "retrieve", held)
        app = create_app(Settings(), service)

        def asking(user: int) -> asyncio.Future[Any]:
            return asyncio.ensure_future(ask(app, [chunk(json.dumps(asked(user_id=user)).encode(), False)], path=path))

        first = asking(1)
        await gate.reached()
        left = asking(2)
        await until(lambda: service.retrieval.queue.admission.requests == 2)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        gate.opened.set()
        assert (await first)[0]["status"] == 200
        assert (await asking(3))[0]["status"] == 200
        assert made == [1, 3]
        assert service.metrics.cancelled.labels("queue")._value.get() == 1
        await service.stop(1.0)

    asyncio.run(main())


def test_a_fault_of_the_reply_is_told(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.http.retrieve.reply.render", lambda *given, **named: 1 / 0)
    reply = client.post("/recommend", json=asked())
    assert (reply.status_code, reply.json()["code"]) == (500, "internal")


def test_without_a_corpus_the_others_serve_on() -> None:
    with served() as (client, _):
        for path in ("/retrieve", "/recommend"):
            reply = client.post(path, json=asked())
            assert (reply.status_code, reply.json()["code"]) == (503, "corpus_not_loaded")
        candidates = [{"post_id": 1, "author_id": 2}]
        assert client.post("/rank", json=asked(candidates=candidates)).status_code == 200
        assert client.get("/info").json()["retrieval"] is None


def test_info_and_metrics_say_what_is_served(client: TestClient) -> None:
    posts_of(client)
    info = client.get("/info").json()["retrieval"]
    assert info["model"] == {"name": "towers", "version": "v1"}
    assert (info["corpus"]["posts"], info["corpus"]["hidden"], info["corpus"]["duplicates"]) == (299, 1, 1)
    assert info["engine"]["user_tower"]["backend"] in ("native", "torch")
    metrics = client.get("/metrics").text
    assert value_of(metrics, "ranker_search_requests_count") > 0
    assert value_of(metrics, 'ranker_stage_duration_seconds_count{stage="search"}') > 0
    assert value_of(metrics, 'ranker_user_vectors_total{source="cache"}') > 0
    assert value_of(metrics, "ranker_search_scored_rows_count") == value_of(metrics, "ranker_search_visible_rows_count")


def test_a_search_that_hangs_costs_readiness_and_then_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a forward that hangs does: who waits gets 504 at the deadline, new ones 503, and the process ends."""
    gate, load = Gate(), retrieving.loader(tmp_path)

    def hangs(*arguments: Any) -> None:
        gate(None)

    queue, fatal = Queue(stall_seconds=0.2, stall_exit_seconds=1.0), list[str]()
    with served(settings=Settings(queue=queue), retrieval=load) as (client, service):
        service.on_fatal = fatal.append
        assert posts_of(client)
        monkeypatch.setattr(RetrievalEngine, "retrieve", hangs)
        monkeypatch.setattr("app.engine.runners.SHORT_SEARCH_SECONDS", 0.0)
        late = client.post("/retrieve", json=asked(), headers={"x-request-timeout-ms": "400"})
        assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
        ready = client.get("/readyz")
        assert ready.status_code == 503
        assert "A search has not finished for" in ready.text
        assert client.get("/livez").status_code == 200
        for path in ("/retrieve", "/recommend"):
            assert client.post(path, json=asked()).json()["code"] == "engine_down"
        for _ in range(300):
            if fatal:
                break
            time.sleep(0.01)
        assert fatal == [service.lifecycle.failure]
        assert fatal[0].startswith("A search has not finished for")
        gate.opened.set()


@pytest.mark.parametrize("path", ["/retrieve", "/recommend"])
def test_posts_are_sent_before_their_log_line(
    running: tuple[TestClient, RankingService], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = running
    app, order = client.app, list[str]()
    assert isinstance(app, Application)
    assert client.portal is not None
    endpoint = app.endpoints[path]
    monkeypatch.setattr(endpoint.recorder, "end", lambda exchange, headers: order.append(f"log of {exchange.status}"))

    async def ask() -> None:
        fields = [(b"content-type", b"application/json")]
        call = endpoint.begin(fields, lambda status, headers, body, may_wait: order.append(f"reply {status}"))
        call.finish(json.dumps(asked()).encode())
        await until(lambda: len(order) == 2)

    client.portal.call(ask)
    assert order == ["reply 200", "log of 200"]
