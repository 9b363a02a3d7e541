"""POST /explain against its oracle, which is /rank of the request without one thing: equal bits. And its refusals."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient

from app.assembly import build_app
from app.errors import DeadlineExceeded, InvalidRequest, TooLarge
from app.http import explain
from app.request.body import decode
from app.request.replies import ExplainReply
from app.request.schema import ExplainRequest
from app.request.validate import check_explain
from app.settings import Explore, Limits, Settings
from loadtest.fuzz.bodies import in_arrays
from tests.app import serving
from tests.app.bounds import fix
from tests.app.fakes import FakeEngine, Gate, loader, ready, running, until
from tests.app.published import keeps
from tests.app.serving import good, served, value_of
from tests.goldens import imported
from tests.reliability.live import connect, live, one_reply, statuses, wait_until

pytestmark = pytest.mark.anyio
JSON = {"content-type": "application/json"}


def question(**changes: Any) -> dict[str, Any]:
    return good(**({"explain": [90, "9223372036854775809"]} | changes))


def real(name: str, tmp_path_factory: pytest.TempPathFactory, **changes: Any) -> Iterator[TestClient]:
    """A service around a small published ranker whose weights are not zero."""
    path = imported(name, tmp_path_factory.mktemp("explain") / "ranker")
    app = build_app(Settings(checkpoint=path, threads=1, **changes))
    with TestClient(app) as client:
        serving.until_ready(client)
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    yield from real("phoenix-mini", tmp_path_factory)


@pytest.fixture(scope="module", params=[("phoenix-right-anchored", "shared"), ("phoenix-mini", "sequential")])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    name, positions = request.param
    with pytest.MonkeyPatch.context() as patch:
        fix(patch, MAX_EXPLAINED_EVENTS=6)
        yield from real(name, tmp_path_factory, candidate_positions=positions)


def asked(client: TestClient, history: int = 0, candidates: int = 9) -> dict[str, Any]:
    """A request of so many events, by default more than the window holds, in this checkpoint's words."""
    info = client.get("/info").json()
    generator = np.random.default_rng(5)
    history = history or info["architecture"]["history_length"] + 3

    def ids() -> int:
        return int(generator.integers(1, 2**63))

    events = [
        {"post_id": ids(), "author_id": ids(), "actions": [info["actions"][int(generator.integers(5))]]}
        for _ in range(history)
    ]
    events[history // 2]["post_id"] = 0  # padding
    posts = [{"post_id": str(ids()), "author_id": ids()} for _ in range(candidates)]
    weights = {name: float(place + 1) for place, name in enumerate(info["actions"][:4])}
    return {"user_id": ids(), "history": events, "candidates": posts, "weights": weights}


def rank(client: TestClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = client.post("/rank", json={name: value for name, value in body.items() if name != "explain"})
    assert reply.status_code == 200, reply.text
    rows: list[dict[str, Any]] = reply.json()["candidates"]
    return rows


def test_every_change_has_the_bits_of_two_rankings(either: TestClient) -> None:
    """Brute force: delete the event, ask /rank. The window moves with it, and older events come into sight."""
    body = asked(either)
    body["explain"] = [body["candidates"][place]["post_id"] for place in (4, 0, 7)]
    reply = either.post("/explain", json=body).json()
    whole, nobody = rank(either, body), rank(either, body | {"user_id": 0, "history": []})
    anonymous = rank(either, body | {"user_id": 0})
    places = reply["events"]["place"]
    assert places == list(range(len(body["history"]) - 6, len(body["history"])))
    assert reply["events"]["post_id"] == [str(body["history"][place]["post_id"]) for place in places]
    without = [
        rank(either, body | {"history": body["history"][:place] + body["history"][place + 1 :]}) for place in places
    ]
    for row, place in enumerate((4, 0, 7)):
        found, one = reply["candidates"][row], whole[place]
        assert {name: found[name] for name in ("post_id", "score", "rank", "probabilities")} == {
            name: one[name] for name in ("post_id", "score", "rank", "probabilities")
        }
        change = found["change"]
        assert change["events"]["score"] == [one["score"] - other[place]["score"] for other in without]
        assert change["user"]["score"] == one["score"] - anonymous[place]["score"]
        assert change["everything"]["score"] == one["score"] - nobody[place]["score"]
        own = np.float32(one["probabilities"])
        for event, other in zip(change["events"]["probabilities"], without, strict=True):
            assert np.array_equal(np.float32(event), own - np.float32(other[place]["probabilities"]))
        covered = sum(change["events"]["score"]) + change["user"]["score"]
        assert change["not_covered"]["score"] == pytest.approx(change["everything"]["score"] - covered, abs=1e-12)
        assert all(change["events"]["score"]), "each of these events matters, padding by its place"


def test_attention_adds_up_to_one_and_is_the_candidates_own(client: TestClient) -> None:
    body = asked(client, history=6)
    architecture = client.get("/info").json()["architecture"]
    everyone = [post["post_id"] for post in body["candidates"]]
    reply = client.post("/explain", json=body | {"explain": everyone}).json()
    alone = client.post("/explain", json=body | {"explain": everyone[3:4]}).json()
    assert len(reply["candidates"]) == 9
    for found in reply["candidates"]:
        shares = {name: np.array(rows) for name, rows in found["attention"].items()}
        assert "heads" not in shares, "of several candidates they would be too much"
        assert shares["user"].shape == (architecture["layers"], architecture["query_heads"])
        np.testing.assert_allclose(shares["user"] + shares["history"] + shares["itself"], 1, atol=1e-6)
        np.testing.assert_allclose(shares["events"].sum(1), shares["history"].mean(1), atol=1e-6)
        assert not shares["events"][:, 3].any(), "padding"
    heads = np.array(alone["candidates"][0]["attention"]["heads"])
    assert heads.shape == (architecture["layers"], architecture["query_heads"], len(alone["events"]["place"]))
    np.testing.assert_allclose(heads.mean(1), alone["candidates"][0]["attention"]["events"], atol=1e-6)
    np.testing.assert_allclose(heads.sum(2), alone["candidates"][0]["attention"]["history"], atol=1e-6)
    np.testing.assert_allclose(
        alone["candidates"][0]["attention"]["events"], reply["candidates"][3]["attention"]["events"], atol=1e-6
    )


def test_contexts_of_explanations_are_not_cached(client: TestClient) -> None:
    """The control is /rank, whose context is."""
    body = asked(client, history=7)
    body["explain"] = [body["candidates"][0]["post_id"]]

    def entries() -> float:
        return value_of(client.get("/metrics").text, "ranker_context_cache_bytes")

    before = entries()
    assert client.post("/explain", json=body).status_code == 200
    one = entries() - before
    assert (
        client.post("/rank", json={**{k: v for k, v in body.items() if k != "explain"}, "user_id": 5}).status_code
        == 200
    )
    assert 0 < one <= entries() - before - one, "the context of the request itself, and no other"


def test_a_reply_keeps_to_the_contract_and_to_the_wishes(client: TestClient) -> None:
    body = asked(client, history=4) | {"request_id": "page-7", "top_k": 1, "reply": "columns"}
    body |= {"explain": [body["candidates"][1]["post_id"]] * 2, "actions_wanted": ["2", "0"]}
    reply = client.post("/explain", json=body)
    content = msgspec.convert(reply.json(), ExplainReply)
    assert len(content.actions) == 2
    assert {len(row) for row in content.candidates[0].change.events.probabilities} == {2}
    assert reply.headers["x-request-id"] == "page-7" == content.request_id
    assert content.candidates[0].change == content.candidates[1].change
    nothing = client.post("/explain", json=body | {"history": []}).json()
    change = nothing["candidates"][0]["change"]
    assert change["events"] == {"score": [], "probabilities": []}
    assert change["not_covered"]["score"] == 0, "only the user is there to be left out"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"explain": ...}, "explain"),
    "empty": ({"explain": []}, "explain"),
    "null": ({"explain": None}, "explain"),
    "a number": ({"explain": 90}, "explain"),
    "no candidate": ({"explain": [90, 91]}, "explain[1]"),
    "no id": ({"explain": [90, "x"]}, "explain[1]"),
    "2^64": ({"explain": [2**64]}, "explain[0]"),
    "a bad candidate": ({"candidates": [{"post_id": 90}]}, "candidates[0].author_id"),
    "a bad weight": ({"weights": {"favorite": "x"}}, "weights"),
    "an unknown field": ({"explian": [1]}, ""),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("arrays", [False, True])
def test_both_definitions_refuse_what_is_wrong(name: str, arrays: bool) -> None:
    changes, field = WRONG[name]
    body = question(**changes)
    if arrays and name != "a bad candidate":
        body["candidates"] = in_arrays(body["candidates"])
    with pytest.raises(InvalidRequest) as caught:
        check_explain(decode(json.dumps(body).encode(), Limits(), explain=32), serving.VOCABULARY)
    assert caught.value.problems[0].field == field
    assert not keeps(ExplainRequest, body)
    assert keeps(ExplainRequest, question())


def test_no_more_candidates_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TooLarge):
        decode(json.dumps(question(explain=[90] * 33)).encode(), Limits(), explain=32)
    fix(monkeypatch, MAX_EXPLAINED=1)
    with served() as (client, _):
        assert client.post("/explain", json=question()).status_code == 413


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        (Settings(), 200),
        (Settings(host="0.0.0.0"), 404),  # noqa: S104
        (Settings(host="0.0.0.0", explore=Explore(enabled=True)), 200),  # noqa: S104
        (Settings(explore=Explore(enabled=False)), 404),
    ],
)
def test_it_is_on_where_it_was_asked_for_and_on_loopback(settings: Settings, status: int) -> None:
    with served(settings=settings) as (client, _):
        assert client.post("/explain", json=question()).status_code == status
        assert ("/explain" in client.get("/openapi.json").json()["paths"]) == (status == 200)


def test_a_call_whose_time_ends_in_its_midst_was_not_refused_on_arrival() -> None:
    events = [{"post_id": number, "author_id": 1} for number in range(1, 17)]
    with served(FakeEngine(before=lambda items: time.sleep(0.1))) as (client, _):
        reply = client.post("/explain", json=question(history=events), headers={"x-request-timeout-ms": "250"})
        assert (reply.status_code, reply.json()["detail"]) == (504, DeadlineExceeded.default_detail)
        assert "retry-after" not in reply.headers
        assert value_of(client.get("/metrics").text, 'ranker_rejected_total{reason="deadline"}') == 0


def test_between_contexts_it_only_lets_others_in() -> None:
    """Were each of them a second's pause, the default deadline would be over."""
    events = [{"post_id": number, "author_id": 1} for number in range(1, 17)]
    with served() as (client, _):
        assert client.post("/explain", json=question(history=events)).status_code == 200


LONG = good(candidates={"post_id": list(range(1, 4101)), "author_id": [1] * 4100}, top_k=...)


@pytest.mark.parametrize(
    ("path", "writer", "body"),
    [
        ("/explain", explain.explanation, question()),
        ("/rank", explain.Ranking, LONG),
        ("/rank/batch", explain.Ranking, [LONG]),
    ],
)
async def test_others_come_in_between_the_pieces_of_a_reply(
    path: str, writer: Any, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, seen, render = [0], list[int](), writer.render

    def watched(*given: Any, **named: Any) -> Iterator[bytes]:
        for piece in render(*given, **named):
            seen.append(turns[0])
            yield piece

    monkeypatch.setattr(writer, "render", watched)
    async with running(FakeEngine()) as service:
        app = serving.create_app(Settings(limits=Limits(max_candidates=4100)), service)
        loop = asyncio.get_running_loop()

        def turn() -> None:
            turns[0] += 1
            loop.call_soon(turn)

        turn()
        messages = [serving.chunk(json.dumps(body).encode(), False)]
        assert (await serving.ask(app, messages, path=path))[0]["status"] == 200
    assert len(set(seen)) == len(seen) >= 2


def test_a_context_may_be_named(client: TestClient) -> None:
    body = asked(client, history=4)
    named = [body["candidates"][0]["post_id"]]
    context = {name: body.pop(name) for name in ("user_id", "history")}
    handle = client.post("/context", json=context).json()["context"]
    whole, by_handle = (
        client.post("/explain", json=body | {"explain": named} | said).json() for said in (context, {"context": handle})
    )
    assert whole["candidates"] == by_handle["candidates"]
    assert whole["events"] == by_handle["events"]


async def test_as_many_run_as_are_allowed_and_all_work_is_admitted() -> None:
    """While one is held in the engine, its contexts are in the queue, and another is refused."""
    gate = Gate()
    service = await ready(loader(FakeEngine(before=gate)))
    app = serving.create_app(Settings(), service)
    body = json.dumps(question()).encode()
    first = asyncio.ensure_future(serving.ask(app, [serving.chunk(body, False)], path="/explain"))
    await gate.reached()
    for _ in range(100):
        await asyncio.sleep(0)
    assert service.admission.requests == 1, "the first of its contexts"
    second, told = await serving.ask(app, [serving.chunk(body, False)], path="/explain"), list[tuple[int, bool]]()
    assert second[0]["status"] == 429
    fields = [(b"content-type", b"application/json")]
    app.endpoints["/explain"].begin(fields, lambda status, headers, body, may_wait: told.append((status, may_wait)))
    assert told == [(429, True)], "who asks again at once need not be told at once"
    gate.opened.set()
    assert (await first)[0]["status"] == 200
    assert service.admission.requests == 0
    assert (await serving.ask(app, [serving.chunk(body, False)], path="/explain"))[0]["status"] == 200
    await service.stop(1.0)


def test_a_refusal_for_want_of_a_place_reads_nothing() -> None:
    """Neither the body nor its end: one that sends its headers alone is told at once, and holds no place before."""

    def head(length: int) -> bytes:
        return (
            b"POST /explain HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % length
        )

    gate, whole = Gate(), json.dumps(question()).encode()
    with live(FakeEngine(before=gate)) as server, connect(server.port) as silent, connect(server.port) as first:
        silent.sendall(head(100))
        first.sendall(head(len(whole)) + whole)
        wait_until(lambda: server.sample("ranker_budget_used", budget="explanations") == 1)
        with connect(server.port, 2.0) as late:
            late.sendall(head(100))
            assert statuses(one_reply(late)) == [429]
        silent.sendall(b"{".ljust(100))
        assert statuses(one_reply(silent)) == [429], "its place is looked for before its body is"
        assert server.sample("ranker_budget_refusals_total", budget="explanations") == 2
        gate.opened.set()
        assert statuses(one_reply(first)) == [200]
        wait_until(lambda: server.sample("ranker_budget_used", budget="explanations") == 0)
        first.sendall(head(100) + b"{".ljust(100))
        assert statuses(one_reply(first)) == [400]
        assert server.sample("ranker_budget_used", budget="explanations") == 0


def test_an_explanation_rests_between_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen contexts without any rest would take a fraction of the time."""
    monkeypatch.setattr(explain, "REST_TIMES", 1e3)
    with served() as (client, _):
        began = time.monotonic()
        assert client.post("/explain", json=question(), headers={"x-request-timeout-ms": "900"}).status_code == 200
        assert 0.45 <= time.monotonic() - began < 0.9, "it rests until half of its time is over, and no longer"


async def test_a_client_that_disconnects_drops_all_of_it() -> None:
    gate = Gate()
    service = await ready(loader(FakeEngine(before=gate)))
    app = serving.create_app(Settings(), service)
    gone = asyncio.Event()
    body = json.dumps(question()).encode()
    given = iter([serving.chunk(body, False)])

    async def receive() -> dict[str, Any]:
        for message in given:
            return message
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        raise AssertionError

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/explain",
        "headers": [(b"content-type", b"application/json")],
    }
    call = asyncio.ensure_future(app(scope, receive, send))
    await gate.reached()
    gone.set()
    await call
    await until(lambda: service.admission.requests == 0)
    assert not gate.left.is_set()
    gate.opened.set()
    await asyncio.sleep(0.05)
    assert service.plain_path._executor._work_queue.empty()
    assert (await serving.ask(app, [serving.chunk(body, False)], path="/explain"))[0]["status"] == 200
    await service.stop(1.0)
