"""`explore` over HTTP: ranks are drawn by the name of the request; scores and probabilities keep their bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from app.settings import Served
from loadtest.generate.tensors import inference_of
from tests.support import corpora
from tests.support.asgi import served
from tests.support.bodies import good
from tests.support.fakes import ACTIONS
from tests.support.parts import by_name

POSTS = [{"post_id": place, "author_id": 1} for place in range(1, 9)]
EXPLORE = {"temperature": 0.5}
INFER = "/v2/models/fake/infer"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with served(retrieval=corpora.setting(tmp_path_factory.mktemp("retrieval")), explore={"enabled": True}) as (
        client,
        _,
    ):
        yield client


def asked(**changes: Any) -> dict[str, Any]:
    return good(**{"candidates": POSTS, "top_k": ..., "actions_wanted": ..., "explore": EXPLORE, **changes})


def rows(client: TestClient, path: str = "/rank", **changes: Any) -> list[dict[str, Any]]:
    reply = client.post(path, json=asked(**changes))
    assert reply.status_code == 200, reply.text
    return reply.json()["candidates"]


def without(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in names} for row in rows]


def test_only_ranks_move(client: TestClient) -> None:
    plain, drawn = rows(client, explore=...), rows(client)
    assert without(drawn, "rank", "propensity") == without(plain, "rank")
    assert all("propensity" not in row for row in plain)
    ranks = [row["rank"] for row in drawn]
    assert sorted(ranks) == [*range(1, 9)]
    assert any(ranks != [row["rank"] for row in rows(client, request_id=f"other-{number}")] for number in range(5))


def test_the_same_name_draws_the_same_order(client: TestClient) -> None:
    first = rows(client)
    assert rows(client) == first
    backwards = rows(client, candidates=POSTS[::-1])
    assert backwards[::-1] == first


def test_propensities_are_those_of_a_softmax_over_what_is_left(client: TestClient) -> None:
    left = sorted(rows(client), key=lambda row: row["rank"])
    for place, row in enumerate(left):
        total = sum(math.exp((each["score"] - row["score"]) / 0.5) for each in left[place:])
        assert math.isclose(row["propensity"], 1 / total, rel_tol=1e-9)


def test_top_k_keeps_the_best_of_the_drawn_order(client: TestClient) -> None:
    whole = sorted(rows(client), key=lambda row: row["rank"])
    assert rows(client, top_k=3) == whole[:3]


def test_features_and_tensors_say_the_same(client: TestClient) -> None:
    objects, columns = rows(client), rows(client, reply="columns")
    tensors = inference_of(asked(explore=...), ACTIONS)
    tensors.parameters["explore_temperature"] = 0.5
    reply = client.post(INFER, json=tensors.header(binary=False))
    assert reply.status_code == 200, reply.text
    outputs = {output["name"]: output["data"] for output in reply.json()["outputs"]}
    for name in ("rank", "propensity", "score"):
        told = [row[name] for row in objects]
        assert columns[name] == told == outputs[name]  # type: ignore[call-overload]


def test_each_of_a_batch_is_drawn_by_its_own_name(client: TestClient) -> None:
    items = [asked(request_id="page-7"), asked(request_id=...), asked(request_id=..., explore=...)]
    batch = client.post("/rank/batch", json=items, headers={"x-request-id": "call"}).json()
    assert batch[0]["candidates"] == rows(client)
    assert batch[1]["candidates"] == rows(client, request_id="call/1")
    assert "propensity" not in batch[2]["candidates"][0]


def test_a_batch_that_is_sent_again_draws_the_same_orders(client: TestClient) -> None:
    items = [asked(), asked(top_k=0), asked()]  # the second one is refused
    first, again = (client.post("/rank/batch", json=items, headers={"x-request-id": name}).json() for name in "ab")
    assert [result["candidates"] for result in first[::2]] == [result["candidates"] for result in again[::2]]
    for result in first[::2]:
        assert result["candidates"] == rows(client, request_id=result["request_id"]), "drawn by the name that it tells"


def test_recommended_posts_are_drawn_best_first(client: TestClient) -> None:
    def found(**changes: Any) -> list[dict[str, Any]]:
        return client.post("/recommend", json=corpora.asked(k=50, request_id="feed", **changes)).json()["candidates"]

    plain, drawn = found(), found(explore={"temperature": 2.0})
    assert [row["rank"] for row in drawn] == [*range(1, 51)]
    by_post = {row["post_id"]: row for row in without(plain, "rank")}
    assert {row["post_id"]: row for row in without(drawn, "rank", "propensity")} == by_post
    assert [row["post_id"] for row in drawn] != [row["post_id"] for row in plain]
    assert found(explore={"temperature": 2.0}, top_k=5) == drawn[:5]


def test_the_log_has_the_propensity_of_every_candidate(tmp_path: Path) -> None:
    with served(served=Served(directory=tmp_path / "log")) as (client, _):
        told = rows(client)
        rows(client, request_id="cut", top_k=2)
        rows(client, request_id="plain", explore=...)
    logged = by_name(tmp_path / "log")
    row = logged["page-7"]
    assert row.temperature == 0.5
    assert row.propensities is not None
    assert row.propensities.tolist() == [each["propensity"] for each in told]
    assert row.ranks.tolist() == [each["rank"] for each in told]
    assert len(np.asarray(logged["cut"].propensities)) == 8
    assert logged["cut"].returned == 2
    assert (logged["plain"].temperature, logged["plain"].propensities) == (None, None)


@pytest.mark.parametrize(
    ("explore", "field"),
    [
        ({}, "explore.temperature"),
        ({"temperature": 0}, "explore.temperature"),
        ({"temperature": -1}, "explore.temperature"),
        ({"temperature": 1e-10}, "explore.temperature"),
        ({"temperature": 1e300}, "explore.temperature"),
        ({"temperature": "1"}, "explore.temperature"),
        ({"temperature": 1, "seed": 1}, "explore"),
        (0.5, "explore"),
    ],
)
def test_a_bad_temperature_is_refused_with_its_field(client: TestClient, explore: Any, field: str) -> None:
    reply = client.post("/rank", json=asked(explore=explore))
    assert (reply.status_code, reply.json()["errors"][0]["field"]) == (422, field)


@pytest.mark.parametrize("changes", [{"explore_temperature": 0}, {"explore_temperature": "x"}])
def test_a_bad_temperature_of_tensors_is_refused(client: TestClient, changes: dict[str, Any]) -> None:
    header = inference_of(asked(explore=...), ACTIONS).header(binary=False)
    header["parameters"] |= changes
    reply = client.post(INFER, json=header)
    assert (reply.status_code, reply.json()["errors"][0]["field"]) == (422, "parameters.explore_temperature")


def test_the_output_propensity_needs_exploration(client: TestClient) -> None:
    header = inference_of(asked(explore=...), ACTIONS).header(binary=False) | {"outputs": [{"name": "propensity"}]}
    assert client.post(INFER, json=header).status_code == 422
    header["parameters"]["explore_temperature"] = 1
    assert [each["name"] for each in client.post(INFER, json=header).json()["outputs"]] == ["propensity"]


def test_an_explanation_has_no_drawn_order(client: TestClient) -> None:
    reply = client.post("/explain", json=asked(explain=[1]))
    assert (reply.status_code, reply.json()["errors"][0]["field"]) == (422, "explore")
