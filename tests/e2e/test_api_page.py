"""The page for callers: its curl and its Python work as they stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import phoenix_ranker_client
import pytest
from starlette.testclient import TestClient

from app.request.tensors import INPUTS, OUTPUTS
from tests.app import retrieving
from tests.app.serving import listening, port_of, served
from tests.e2e.process import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_both_shapes_on_the_page_mean_the_same() -> None:
    curl = json.loads(re.search(r"-d '(.*)'", blocks("bash")[0], re.DOTALL)[1])  # type: ignore[index]
    arrays = json.loads(blocks("json")[0])
    with served() as (client, _):
        known = {
            name: value.replace('"dwell"', '"reply"')
            for name, value in {"a": json.dumps(curl), "b": json.dumps(arrays)}.items()
        }
        headers = {"content-type": "application/json"}
        replies = [client.post("/rank", content=body, headers=headers) for body in known.values()]
        assert [reply.status_code for reply in replies] == [200, 200]
        assert replies[0].json()["candidates"] == replies[1].json()["candidates"]


def test_the_python_on_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with served() as (client, _):

        class Local(phoenix_ranker_client.RankerClient):
            def __init__(self, base_url: str) -> None:
                super().__init__(base_url, http=forwarding(client))

        monkeypatch.setattr(phoenix_ranker_client, "RankerClient", Local)
        exec(blocks("python")[1].replace('"dwell"', '"reply"'), {})
    assert sorted(
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0].isdigit() and "[" not in line
    ) == ["90", "91"]


def test_the_columns_on_the_page_are_what_it_says() -> None:
    body = re.search(r"-d '(.*)'", blocks("bash")[1], re.DOTALL)[1]  # type: ignore[index]
    with served() as (client, _):
        reply = client.post("/rank", content=body, headers={"content-type": "application/json"})
    candidates = reply.json()["candidates"]
    assert candidates["post_id"] == [90, 91]
    assert [len(row) for row in candidates["probabilities"]] == [1, 1]


def test_the_explanation_on_the_page_has_the_shape_that_it_says() -> None:
    [command] = [each for each in blocks("bash") if "/explain" in each]
    body = re.search(r"-d '(.*)'", command, re.DOTALL)[1]  # type: ignore[index]
    [shown] = [json.loads(each) for each in blocks("json") if '"place"' in each]
    with served() as (client, _):
        reply = client.post("/explain", content=body, headers={"content-type": "application/json"}).json()

    def shape(value: object) -> object:
        return {name: shape(below) for name, below in value.items()} if isinstance(value, dict) else type(value)

    assert shape(reply) == shape(shown)
    assert shape(reply["candidates"][0]) == shape(shown["candidates"][0])
    assert (reply["events"], reply["actions"]) == (shown["events"], shown["actions"])


def test_the_recommendation_on_the_page_is_one_that_can_be_asked_for(tmp_path: Path) -> None:
    body = re.search(r"-d '(.*)'", blocks("bash")[2], re.DOTALL)[1]  # type: ignore[index]
    with served(retrieval=retrieving.loader(tmp_path)) as (client, _):
        reply = client.post("/recommend", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 200
    assert len(reply.json()["candidates"]) == 20


def test_the_tensors_on_the_page_are_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    python = blocks("python")[0]
    assert json.loads((ROOT / "weights/demo/manifest.json").read_text())["name"] == "demo"
    with listening() as server:
        address = f"127.0.0.1:{port_of(server)}"
        exec(python.replace("localhost:8000", address).replace('"demo"', '"fake"'), {})
        grpc = python.replace("tritonclient.http", "tritonclient.grpc")
        exec(grpc.replace("localhost:8000", f"127.0.0.1:{server.others[0].port}").replace('"demo"', '"fake"'), {})
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    assert len(printed) == 2
    assert all(line.endswith("(2, 3)") and "90" in line for line in printed)


def test_the_tables_on_the_page_list_every_tensor() -> None:
    names = set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)?)`", PAGE))
    listed = names | {
        f"{part}.{name[1:]}" for part in ("candidates", "history") for name in re.findall(r"`(\.[a-z_]+)`", PAGE)
    }
    assert {*INPUTS, *OUTPUTS} <= listed


def forwarding(client: TestClient) -> httpx.Client:
    """An httpx client whose requests go to the application in this process."""

    def handle(request: httpx.Request) -> httpx.Response:
        reply = client.request(request.method, request.url.path, content=request.content, headers=dict(request.headers))
        return httpx.Response(reply.status_code, content=reply.content, headers=dict(reply.headers))

    return httpx.Client(transport=httpx.MockTransport(handle))
