"""Two checkpoints in one process: by user or by name, on every wire, with no reply of one under the other's version."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from starlette.testclient import TestClient
from tritonclient.utils import InferenceServerException

from app.engine.loading import RetrievalLoader
from app.http.application import create_app
from app.http.arms import Arms, is_second
from app.interface import ranked
from app.service.service import RankingService
from app.settings import Grpc, Settings, Shadow, Split
from app.telemetry.metrics import Metrics
from loadtest.generate.tensors import inference_of
from tests.app import retrieving
from tests.app.fakes import ACTIONS, FakeEngine, expected, loader, request, right, until
from tests.app.serving import good, listening, port_of, until_ready, value_of
from tests.app.triton_inputs import inputs

pytestmark = pytest.mark.anyio
SECOND = Shadow(checkpoint=Path("second"))
HALF = Split(users=0.5, experiment="march")
OTHER = ("like", "repost", "block")
B = next(user for user in range(1, 99) if is_second(user, HALF))
A = next(user for user in range(1, 99) if not is_second(user, HALF))


@contextmanager
def two(
    second: Any = None, split: Split = HALF, retrieval: RetrievalLoader | None = None
) -> Iterator[tuple[TestClient, RankingService]]:
    """A client of an application that holds both."""
    settings = Settings(shadow=SECOND, split=split)
    service = RankingService(
        loader(FakeEngine()), settings, Metrics(), second=second or loader(FakeEngine(2), "v2"), retrieval=retrieval
    )
    with TestClient(create_app(settings, service), raise_server_exceptions=False) as client:
        until_ready(client)
        yield client, service


def body(user: int, **changes: Any) -> dict[str, Any]:
    """A request in words that every checkpoint here knows."""
    return (
        good(
            user_id=user,
            history=[{"post_id": 17, "author_id": 5, "actions": ["0"]}],
            weights=...,
            actions_wanted=...,
            top_k=...,
        )
        | changes
    )


def tensors(user: int) -> dict[str, Any]:
    ids = {"user_id": [user], "candidates.post_id": [90, 91], "candidates.author_id": [7, 5]}
    inputs = [{"name": name, "datatype": "UINT64", "shape": [len(data)], "data": data} for name, data in ids.items()]
    return {"inputs": inputs, "outputs": [{"name": "score"}]}


def test_a_share_of_users_is_drawn_evenly_for_good_and_anew_for_each_experiment() -> None:
    def drawn(users: float, experiment: str = "march") -> set[int]:
        split = Split(users=users, experiment=experiment)
        return {user for user in range(20_000) if is_second(user, split)}

    small, large, other = drawn(0.05), drawn(0.2), drawn(0.2, "april")
    assert small < large
    assert (len(small) / 20_000, len(large) / 20_000) == pytest.approx((0.05, 0.2), abs=0.01)
    assert len(large & other) / 20_000 == pytest.approx(0.04, abs=0.006), "two experiments draw independently"
    assert drawn(0.0) == set()
    assert drawn(1.0) == set(range(1, 20_000)), "user 0 is nobody in particular"
    split = Split(users=0.5)
    assert is_second("7", split) == is_second(7, split)
    assert not any(is_second(odd, split) for odd in ("x", "", -1, 2**64))


def test_each_user_has_its_checkpoint_on_every_wire() -> None:
    with two() as (client, _service):
        for user, version in ((A, "v1"), (B, "v2"), (0, "v1")):
            reply = client.post("/rank", json=body(user))
            assert (reply.json()["model"]["version"], reply.headers["x-model-version"]) == (version, version)
            batch = client.post("/rank/batch", json=[body(user), body(A)]).json()
            assert [each["model"]["version"] for each in batch] == [version, "v1"]
            for path in ("/v2/models/fake/infer", "/rank"):
                kind = "application/json" if path != "/rank" else "application/octet-stream"
                found = client.post(path, json=tensors(user), headers={"content-type": kind})
                assert (found.status_code, found.headers.get("x-model-version")) == (200, version), found.text
            question = body(user, explain=[90])
            told = client.post("/explain", json=question).json()
            assert told["model"]["version"] == version
            assert told["candidates"][0]["score"] == reply.json()["candidates"][0]["score"]
        said = client.get("/metrics").text
        assert value_of(said, 'ranker_answers_total{checkpoint="second"}') > 4


def test_a_split_and_names_hold_over_grpc() -> None:
    """Each user's scores are the bits that its checkpoint gives over HTTP, and a version may be named."""
    settings = Settings(port=0, grpc=Grpc(port=0), shadow=SECOND, split=HALF)
    with (
        listening(FakeEngine(), settings, loader(FakeEngine(2), "v2")) as server,
        triton.InferenceServerClient(f"127.0.0.1:{server.others[0].port}") as caller,
        httpx.Client(base_url=f"http://127.0.0.1:{port_of(server)}") as client,
    ):
        for user, named, version in ((A, "", "v1"), (B, "", "v2"), (A, "v2", "v2"), (B, "v1", "v1")):
            found = caller.infer("fake", inputs(inference_of(body(user), ACTIONS)), named)
            reply = client.post("/rank", json=body(user), headers={"X-Model-Version": version}).json()
            assert found.get_response().model_version == reply["model"]["version"] == version
            assert found.as_numpy("score").tolist() == [each["score"] for each in reply["candidates"]]
        assert caller.get_model_metadata("fake").versions == ["v1", "v2"]
        with pytest.raises(InferenceServerException, match="No model of that name and version"):
            caller.infer("fake", inputs(inference_of(body(A), ACTIONS)), "v3")


@pytest.mark.parametrize("actions", [ACTIONS, OTHER])
def test_recommended_posts_are_ranked_by_the_checkpoint_of_the_user(tmp_path: Path, actions: tuple[str, ...]) -> None:
    """With the same words, and with others, in which the request is read again."""
    with two(loader(FakeEngine(2), "v2", actions), retrieval=retrieving.loader(tmp_path)) as (client, _):
        for user, headers, version in (
            (A, {}, "v1"),
            (B, {}, "v2"),
            (A, {"X-Model-Version": "v2"}, "v2"),
            (B, {"X-Model-Version": "v1"}, "v1"),
        ):
            asked = {"user_id": user, "history": [{"post_id": 17, "author_id": 5, "actions": ["0"]}], "k": 6}
            words = actions if version == "v2" else ACTIONS
            found = client.post("/recommend", json=asked | {"weights": {words[0]: 2.0}}, headers=headers)
            assert found.status_code == 200, found.text
            assert (found.json()["models"]["ranker"]["version"], found.headers["x-model-version"]) == (version, version)
            assert found.json()["actions"] == list(words)
            candidates = [
                {name: post[name] for name in ("post_id", "author_id", "created_at")}
                for post in client.post("/retrieve", json=asked).json()["posts"]
            ]
            body = {"user_id": user, "history": asked["history"], "candidates": candidates, "weights": {words[0]: 2.0}}
            scores = {
                each["post_id"]: each["score"]
                for each in client.post("/rank", json=body, headers=headers).json()["candidates"]
            }
            assert {each["post_id"]: each["score"] for each in found.json()["candidates"]} == scores
        refused = client.post("/recommend", json={"user_id": A}, headers={"X-Model-Version": "v9"})
        assert refused.status_code == 404


def test_a_held_version_may_be_named_and_no_other() -> None:
    with two(split=Split()) as (client, _service):
        scores = []
        for path in ("/v2/models/fake", "/v2/models/fake/versions/v2"):
            assert client.get(path).json()["versions"] == ["v1", "v2"]
        for version in ("v1", "v2"):
            reply = client.post("/rank", json=body(A), headers={"X-Model-Version": version})
            assert reply.json()["model"]["version"] == version
            by_path = client.post(f"/v2/models/fake/versions/{version}/infer", json=tensors(A))
            assert by_path.headers["x-model-version"] == version
            for path in (f"/rank/fake@{version}", f"/rank/%66ake%40{version}?x=1"):
                same = client.post(path, json=body(A))
                assert (same.json()["model"], same.json()["candidates"]) == (
                    reply.json()["model"],
                    reply.json()["candidates"],
                )
            header = client.post("/rank/fake", json=body(A), headers={"X-Model-Version": version})
            assert header.json()["candidates"] == reply.json()["candidates"]
            explained = client.post("/explain", json=body(A, explain=[90]), headers={"X-Model-Version": version})
            assert explained.json()["candidates"][0]["score"] == reply.json()["candidates"][0]["score"]
            batch = client.post("/rank/batch", json=[body(A)], headers={"X-Model-Version": version})
            assert batch.json()[0]["candidates"] == reply.json()["candidates"]
            scores.append([each["score"] for each in reply.json()["candidates"]])
        assert scores[0] != scores[1]
        for path in ("/rank", "/rank/batch", "/explain"):
            refused = client.post(path, json=body(A), headers={"X-Model-Version": "v3"})
            assert (refused.status_code, refused.json()["code"]) == (404, "not_found")
            assert "No model of that name and version" in refused.json()["detail"]
        for path in (
            "/rank/other",
            "/rank/fake@v3",
            "/rank/fake@",
            "/rank/@v1",
            "/rank/fake@v1@v1",
            "/rank/",
            "/rank/fake/v1",
        ):
            assert client.post(path, json=body(A)).status_code == 404, path
        assert client.get("/rank/fake").status_code == 405
        assert client.post("/rank", json=body(A)).json()["model"]["version"] == "v1", "nobody is drawn"
        counted = client.get("/metrics").text
        assert "/rank/fake" not in counted, "a name in a path makes no series: it is counted as /rank"
        assert value_of(counted, 'ranker_http_requests_total{code="200",method="POST",route="/rank"}') == 9


@pytest.mark.parametrize("user", [A, B, 0])
def test_a_version_that_both_have_is_the_firsts_for_every_user(user: int) -> None:
    """So a handle that was given under a version is looked for where it was given: with it no user is named."""
    with two(loader(FakeEngine(2), "v1")) as (client, _service):
        first = client.post("/rank", json=body(user), headers={"X-Model-Version": "v1"}).json()
        own = client.post("/rank/fake", json=body(user)).json()
        assert (own["candidates"] == first["candidates"]) == (user != B)
        assert own["candidates"] == client.post("/rank", json=body(user)).json()["candidates"]


def test_each_speaks_its_own_words() -> None:
    with two(loader(FakeEngine(2), "v2", OTHER)) as (client, _service):
        for user, words in ((A, ("favorite", "reply", "report")), (B, OTHER), (A, ("favorite", "reply", "report"))):
            reply = client.post("/rank", json=body(user, weights={words[0]: 2.0}))
            assert reply.json()["actions"] == list(words)
        assert client.post("/rank", json=body(B, weights={"favorite": 2.0})).status_code == 422
        assert client.get("/info").json()["second"]["actions"] == list(OTHER)


def test_either_may_be_swapped_and_a_lost_one_leaves_its_users_to_the_first() -> None:
    with two() as (client, service):
        assert client.portal is not None
        client.portal.call(service.second_checkpoint.swap, loader(FakeEngine(3), "v3"))
        client.portal.call(service.swap, loader(FakeEngine(4), "v4"))
        for user, version in ((A, "v4"), (B, "v3")):
            assert client.post("/rank", json=body(user)).json()["model"]["version"] == version
        info = client.get("/info").json()
        assert (info["model"]["version"], info["second"]["model"]["version"], info["second"]["users"]) == (
            "v4",
            "v3",
            0.5,
        )
        client.portal.call(service.second_checkpoint.engine_lost, "planted")
        assert client.post("/rank", json=body(B)).json()["model"]["version"] == "v4"
        ready = client.get("/readyz")
        assert ready.status_code == 200
        assert "planted" in ready.json()["second"]
        assert "planted" in client.get("/info").json()["second"]["reason"]
        assert "app.settings" not in client.get("/info").text
        assert "shadow" not in client.get("/info").json()["settings"], "where it lies is nobody's business"


async def test_none_is_crossed_in_shared_queues_while_both_are_swapped() -> None:
    """Every reply has the bits of the version that it was given, and the other version's are others."""
    settings = Settings(shadow=SECOND, split=HALF)
    service = RankingService(loader(FakeEngine()), settings, Metrics(), second=loader(FakeEngine(2), "v2"))
    arms = Arms(service, HALF)
    service.start()
    await service.wait_ready()
    await until(lambda: service.second is not None and service.second.answers)

    async def one(user: int) -> str:
        model = arms.model(user)
        version = int(model.manifest.version[1:])
        ticket = service.admit(model, candidates=4, history=2, deadline=None)
        scores = (await ranked(service, ticket, *request(user))).scores
        assert right(scores, user, version)
        assert not np.array_equal(scores.logits, expected(*request(user), 3 - version if version < 3 else 1).logits)
        assert version % 2 == (0 if is_second(user, HALF) else 1)
        return model.manifest.version

    seen = set(await asyncio.gather(*map(one, range(1, 200))))
    later = [asyncio.ensure_future(one(user)) for user in range(1, 200)]
    await service.swap(loader(FakeEngine(3), "v3"))
    await service.second_checkpoint.swap(loader(FakeEngine(4), "v4"))
    seen |= set(await asyncio.gather(*later, *map(one, range(200, 400))))
    assert seen == {"v1", "v2", "v3", "v4"}
    await service.stop(1.0)
