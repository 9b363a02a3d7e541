"""POST /explain against its oracle, which is /rank of the request without one thing: equal bits. And its refusals."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from app.errors import DeadlineExceeded
from app.main import create_app
from app.schema import ExplainReply
from app.settings import Auth, Explore, Queue, Settings
from tests.app.api.live import head, listening, read_reply, until
from tests.goldens import imported
from tests.support import rankers
from tests.support.asgi import ADDRESS, served
from tests.support.bodies import good, in_columns
from tests.support.fakes import CONFIG, FakeEngine, Gate, fake_loader, fake_model
from tests.support.replies import CheckedClient

pytestmark = pytest.mark.anyio


def question(**changes: Any) -> dict[str, Any]:
    return good(**({"explain": [90, "9223372036854775809"]} | changes))


def real(path: Path, **groups: Any) -> Iterator[CheckedClient]:
    """A service around a small published ranker whose weights are not zero."""
    app = create_app(Settings(checkpoint=path, threads=1, **groups))
    with CheckedClient(app, base_url=ADDRESS) as client:
        until(lambda: client.get("/readyz").status_code == 200, 120)
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedClient]:
    yield from real(imported("phoenix-mini", tmp_path_factory.mktemp("explain") / "ranker"))


@pytest.fixture(scope="module", params=[("phoenix-right-anchored", "shared"), ("phoenix-mini", "sequential")])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CheckedClient]:
    name, positions = request.param
    path = imported(name, tmp_path_factory.mktemp("explain") / "ranker", history_length=6)
    yield from real(path, candidate_positions=positions)


def figure(client: CheckedClient, series: str) -> float:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith(series + " ")]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


def asked(client: CheckedClient, history: int = 0, candidates: int = 9) -> dict[str, Any]:
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


def rank(client: CheckedClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = client.post("/rank", json={name: value for name, value in body.items() if name != "explain"})
    assert reply.status_code == 200, reply.text
    rows: list[dict[str, Any]] = reply.json()["candidates"]
    return rows


def test_every_change_has_the_bits_of_two_rankings(either: CheckedClient) -> None:
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


def test_attention_adds_up_to_one_and_is_the_candidates_own(client: CheckedClient) -> None:
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


@pytest.mark.one_process("its service is one process")
def test_contexts_of_explanations_are_not_cached(client: CheckedClient) -> None:
    """The control is /rank, whose context is."""
    body = asked(client, history=7)
    body["explain"] = [body["candidates"][0]["post_id"]]

    def entries() -> float:
        return figure(client, "ranker_context_cache_bytes")

    before = entries()
    assert client.post("/explain", json=body).status_code == 200
    one = entries() - before
    assert (
        client.post("/rank", json={**{k: v for k, v in body.items() if k != "explain"}, "user_id": 5}).status_code
        == 200
    )
    assert 0 < one <= entries() - before - one, "the context of the request itself, and no other"


def test_a_reply_keeps_to_the_contract_and_to_the_wishes(client: CheckedClient) -> None:
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


WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "missing": ({"explain": ...}, 422, "explain"),
    "empty": ({"explain": []}, 422, "explain"),
    "a number": ({"explain": 90}, 422, "explain"),
    "no candidate": ({"explain": [90, 91]}, 422, "explain[1]"),
    "no id": ({"explain": [90, "x"]}, 422, "explain[1]"),
    "2^64": ({"explain": [2**64]}, 422, "explain[0]"),
    "too many": ({"explain": [90] * 33}, 413, ""),
    "a bad candidate": ({"candidates": [{"post_id": 90}]}, 422, "candidates[0].author_id"),
    "a bad weight": ({"weights": {"favorite": "x"}}, 422, "weights.favorite"),
    "an unknown field": ({"explian": [1]}, 422, ""),
}


@pytest.fixture(scope="module")
def fake() -> Iterator[CheckedClient]:
    with served() as (client, _):
        yield client


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("columnar", [False, True])
def test_what_is_wrong_is_named(fake: CheckedClient, name: str, columnar: bool) -> None:
    changes, status, field = WRONG[name]
    body = question(**changes)
    if columnar and name != "a bad candidate":
        body["candidates"] = in_columns(body["candidates"])
    reply = fake.post("/explain", content=json.dumps(body), headers={"content-type": "application/json"})
    assert reply.status_code == status
    if status == 422:
        assert reply.json()["errors"][0]["field"] == field
    assert fake.post("/explain", json=question()).status_code == 200


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"host": "0.0.0.0"}, 404),  # noqa: S104
        ({"host": "0.0.0.0", "explore": Explore(enabled=True)}, 200),  # noqa: S104
        ({"explore": Explore(enabled=False)}, 404),
    ],
)
def test_it_is_on_where_it_was_asked_for_and_on_loopback(settings: dict[str, Any], status: int) -> None:
    with served(**settings) as (client, _):
        assert client.post("/explain", json=question()).status_code == status
        assert ("/explain" in client.get("/openapi.json").json()["paths"]) == (status == 200)


def test_texts_are_echoed() -> None:
    event, posts = {"post_id": "e:1", "author_id": "a"}, [{"post_id": "p,1", "author_id": "a"}]
    body = {"user_id": "u", "history": [event, event | {"post_id": "é"}], "candidates": posts}
    with served(load=fake_loader(FakeEngine(), ids="text")) as (client, _):
        reply = client.post("/explain", json=body | {"explain": ["p,1"]}).json()
        handle = client.post("/context", json={name: body[name] for name in ("user_id", "history")}).json()["context"]
        named = client.post("/explain", json={"context": handle, "candidates": posts, "explain": ["p,1"]})
    assert reply["events"]["post_id"] == ["e:1", "é"]
    assert reply["candidates"][0]["post_id"] == "p,1"
    assert named.status_code == 412, "the texts of its events are not kept"


def test_a_deadline_during_an_explanation_is_no_refusal() -> None:
    events = [{"post_id": number, "author_id": 1} for number in range(1, 17)]
    with served(FakeEngine(before=lambda items: time.sleep(0.1))) as (client, _):
        reply = client.post("/explain", json=question(history=events), headers={"x-request-timeout-ms": "250"})
        assert (reply.status_code, reply.json()["detail"]) == (504, DeadlineExceeded.default_detail)
        assert "retry-after" not in reply.headers
        assert figure(client, 'ranker_rejected_total{reason="deadline"}') == 0


def test_an_explanation_rests_twice_as_long_as_it_computes() -> None:
    """It ranks six contexts one by one and rests five times."""
    with served(FakeEngine(before=lambda items: time.sleep(0.02))) as (client, _):
        began = time.monotonic()
        assert client.post("/explain", json=question()).status_code == 200
        assert time.monotonic() - began >= 0.02 * 6 + 0.04 * 5


def test_an_explanation_rests_until_half_of_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def seem_slow(items: object) -> None:
        nonlocal ahead
        ahead += 1e3

    ahead, real = 0.0, time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + ahead)
    with served(FakeEngine(before=seem_slow)) as (client, _):
        began = time.monotonic()
        assert client.post("/explain", json=question(), headers={"x-request-timeout-ms": "4000"}).status_code == 200
        assert 2 <= time.monotonic() - began < 4


def test_a_refusal_for_want_of_a_place_reads_nothing() -> None:
    """Neither the body nor its end: one that sends its headers alone is told at once, and holds no place before."""
    gate, whole = Gate(), json.dumps(question()).encode()
    with listening(FakeEngine(before=gate)) as live, live.connect() as silent, live.connect() as first:
        silent.sendall(head(path="/explain", length=100))
        first.sendall(head(path="/explain", length=len(whole)) + whole)
        assert gate.entered.wait(10)
        assert live.figure("ranker_queue_requests") == 1, "its first context is admitted as any other"
        with live.connect(2.0) as late:
            late.sendall(head(path="/explain", length=100))
            status, headers, _ = read_reply(late)
            assert (status, headers["retry-after"]) == (429, "1")
        silent.sendall(b"{".ljust(100))
        assert read_reply(silent)[0] == 429, "its place is looked for before its body is"
        gate.opened.set()
        assert read_reply(first)[0] == 200
        first.sendall(head(path="/explain", length=100) + b"{".ljust(100))
        assert read_reply(first)[0] == 400


def test_a_caller_without_a_key_does_not_hear_whether_one_runs() -> None:
    gate, whole = Gate(), json.dumps(question()).encode()
    keys = Auth(keys={"a": hashlib.sha256(b"key").hexdigest()})  # type: ignore[dict-item]
    with listening(FakeEngine(before=gate), auth=keys) as live, live.connect() as first, live.connect() as stranger:
        first.sendall(head(path="/explain", headers={"x-api-key": "key"}, length=len(whole)) + whole)
        assert gate.entered.wait(10)
        stranger.sendall(head(path="/explain", length=len(whole)) + whole)
        assert read_reply(stranger)[0] == 401
        gate.opened.set()
        assert read_reply(first)[0] == 200


def test_a_key_pays_for_an_explanation_at_once_or_not_at_all() -> None:
    """Such a request may take more than its rate holds once nothing of it is used, as a large `/rank` may."""
    keys = Auth(keys={"a": hashlib.sha256(b"key").hexdigest()})  # type: ignore[dict-item]
    with served(auth=keys, queue=Queue(key_candidates_per_second=3.0)) as (client, _):
        client.headers["x-api-key"] = "key"
        assert client.post("/explain", json=question()).status_code == 200
        refused = client.post("/explain", json=question())
        assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
        paid = len(question()["candidates"]) + 2 * (len(question()["history"]) + 2)
        assert paid / 3.0 - 2 <= int(refused.headers["retry-after"]) <= paid / 3.0 + 1


def test_weights_that_are_all_zero_are_warned_of() -> None:
    with served() as (client, _):
        reply = client.post("/explain", json=question(weights={"favorite": 0}))
        assert (reply.status_code, len(reply.json()["warnings"])) == (200, 1)


@pytest.mark.one_process("tests.app.processes has the other: it keeps a replaced model for a while")
async def test_an_explanation_that_meets_a_reload_goes_on() -> None:
    gate = Gate()
    made = [fake_model(FakeEngine(2), "v2"), fake_model(FakeEngine(before=gate))]
    async with rankers.running(load=lambda path, steps: made.pop()) as ranker:
        transport = httpx.ASGITransport(create_app(ranker.settings, ranker))
        async with httpx.AsyncClient(transport=transport, base_url=ADDRESS) as client:
            asking = asyncio.ensure_future(client.post("/explain", json=question()))
            assert await asyncio.to_thread(gate.entered.wait, 10)
            await ranker.reloads.reload()
            gate.opened.set()
            reply = await asking
            assert (reply.status_code, reply.headers["x-model-version"]) == (200, "v1"), reply.text
            assert (await client.post("/rank", json=good())).headers["x-model-version"] == "v2"


LONG = fake_loader(config=replace(CONFIG, history_length=300))  # a window that holds more events than are left out
OF_260: dict[str, Any] = {
    "user_id": 7,
    "history": {"post_id": list(range(1, 261)), "author_id": [1] * 260},
    "candidates": {"post_id": list(range(1001, 1033)), "author_id": [1] * 32},
}


def test_of_a_long_history_the_newest_events_are_left_out() -> None:
    with served(load=LONG) as (client, _):
        reply = client.post("/explain", json=OF_260 | {"explain": [1001]}).json()
    assert reply["events"]["place"] == list(range(4, 260))
    assert reply["events"]["post_id"] == [str(place + 1) for place in range(4, 260)]
    assert len(reply["candidates"][0]["change"]["events"]["score"]) == 256


async def test_others_come_in_between_the_pieces_of_a_reply() -> None:
    async def watch() -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            held.append(now - before)
            before = now

    held = list[float]()
    async with rankers.running(load=LONG) as ranker:
        transport = httpx.ASGITransport(create_app(ranker.settings, ranker))
        async with httpx.AsyncClient(transport=transport, base_url=ADDRESS) as client:
            watching = asyncio.ensure_future(watch())
            reply = await client.post("/explain", json=OF_260 | {"explain": OF_260["candidates"]["post_id"]})
            looks = len(held)
            await rankers.until(lambda: len(held) > looks)
            watching.cancel()
    assert reply.status_code == 200
    assert max(held) < rankers.figure(ranker, 'ranker_stage_duration_seconds_sum{stage="serialize"}') / 2
