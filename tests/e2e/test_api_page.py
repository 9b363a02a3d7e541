"""The page for callers: its curl and its Python work as they stand."""

from __future__ import annotations

import json
import re

import httpx
import phoenix_ranker_client
import pytest
from starlette.testclient import TestClient

from tests.app.serving import served
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
        exec(blocks("python")[0].replace('"dwell"', '"reply"'), {})
    assert sorted(
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0].isdigit() and "[" not in line
    ) == ["90", "91"]


def forwarding(client: TestClient) -> httpx.Client:
    """An httpx client whose requests go to the application in this process."""

    def handle(request: httpx.Request) -> httpx.Response:
        reply = client.request(request.method, request.url.path, content=request.content, headers=dict(request.headers))
        return httpx.Response(reply.status_code, content=reply.content, headers=dict(reply.headers))

    return httpx.Client(transport=httpx.MockTransport(handle))
