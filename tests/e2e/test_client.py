"""The Python client: as its users install it, and against the real service."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from phoenix_ranker_client import (
    AsyncRankerClient,
    Candidate,
    ContextUnknown,
    Event,
    NoCorpus,
    RankerClient,
    Ranking,
    RankingRequest,
    RequestRefused,
)

from loadtest.machine import ROOT
from loadtest.server import example, serving, stop
from tests.app.api.live import Live

EXAMPLE = example()
USER, NOW = EXAMPLE["user_id"], EXAMPLE["impression_ts"]
HISTORY = [Event(**event) for event in EXAMPLE["history"]]
CANDIDATES = [Candidate(**post) for post in EXAMPLE["candidates"]]
VIEWER = {name: EXAMPLE[name] for name in ("user_id", "history", "impression_ts")}
UNKNOWN = "0123456789abcdef" * 2
UNEXPLORED = {"propensity": None}  # of a candidate where the request does not explore
CLIENT = ROOT / "app" / "client"


@pytest.fixture
def ranker(server: Live) -> Any:
    with RankerClient(server.url) as client:
        yield client


def same(ranking: Ranking, reply: dict[str, Any]) -> bool:
    """Whether a ranking is this reply, bit for bit."""
    rows = [asdict(row) for row in ranking.candidates]
    return (rows, ranking.context) == ([UNEXPLORED | row for row in reply["candidates"]], reply["context"])


def test_rank_is_what_the_service_says(ranker: RankerClient, client: httpx.Client) -> None:
    reply = client.post("/rank", json=EXAMPLE).json()
    ranking = ranker.rank(USER, CANDIDATES, HISTORY, impression_ts=NOW, timeout_seconds=30)

    async def beside() -> Ranking:
        async with AsyncRankerClient(str(client.base_url)) as other:
            return await other.rank(USER, CANDIDATES, HISTORY, impression_ts=NOW, timeout_seconds=30)

    for each in (ranking, asyncio.run(beside())):
        assert same(each, reply)
    assert ranking.actions == reply["actions"]
    assert (ranking.model_name, ranking.model_version) == ("demo", reply["model"]["version"])
    best = ranker.rank(USER, CANDIDATES, HISTORY, impression_ts=NOW, top_k=2, timeout_seconds=30)
    assert [row.rank for row in best.candidates] == [1, 2]


def test_a_batch_gives_a_ranking_or_an_error_for_each_request(ranker: RankerClient, client: httpx.Client) -> None:
    requests = [
        RankingRequest(USER, CANDIDATES, HISTORY, context=UNKNOWN, impression_ts=NOW),  # its history is sent
        RankingRequest(USER, CANDIDATES, context=UNKNOWN),
        RankingRequest(USER, CANDIDATES, top_k=0),
    ]
    ranking, unknown, refused = ranker.rank_batch(requests, timeout_seconds=30)
    assert isinstance(ranking, Ranking)
    assert same(ranking, client.post("/rank", json=EXAMPLE).json())
    assert isinstance(unknown, ContextUnknown)
    assert isinstance(refused, RequestRefused)
    assert [field for field, _ in refused.errors] == ["top_k"]


def test_exploration_is_asked_for_and_its_propensities_come_back(ranker: RankerClient, client: httpx.Client) -> None:
    explore = {"temperature": 0.1}
    ranking = ranker.rank(
        USER, CANDIDATES, HISTORY, impression_ts=NOW, explore=explore, request_id="feed-17", timeout_seconds=30
    )
    reply = client.post("/rank", json=EXAMPLE | {"explore": explore, "request_id": "feed-17"}).json()
    assert same(ranking, reply)
    assert ranking.request_id == reply["request_id"] == "feed-17"
    assert all(0 < row.propensity <= 1 for row in ranking.candidates if row.propensity is not None)
    assert not [row for row in ranking.candidates if row.propensity is None]
    asked = RankingRequest(USER, CANDIDATES, HISTORY, impression_ts=NOW, explore=explore)
    (of_batch,) = ranker.rank_batch([asked], timeout_seconds=30)
    assert isinstance(of_batch, Ranking)
    assert of_batch.request_id.endswith("/0")
    best = ranker.recommend(USER, HISTORY, impression_ts=NOW, k=30, explore=explore, timeout_seconds=30)
    for candidate in (of_batch.candidates[0], best.candidates[0]):
        assert candidate.propensity is not None


def test_the_client_repeats_what_the_service_replies(ranker: RankerClient, client: httpx.Client) -> None:
    posts = [EXAMPLE["candidates"][0]["post_id"]]
    explained = ranker.explain(USER, CANDIDATES, posts, HISTORY, impression_ts=NOW)
    reply = client.post("/explain", json=EXAMPLE | {"explain": posts}).json()
    assert [asdict(row) for row in explained.candidates] == reply["candidates"]
    options: dict[str, Any] = {"impression_ts": NOW, "k": 30, "exclude": ["3"], "timeout_seconds": 30}
    found = ranker.retrieve(USER, HISTORY, **options)
    reply = client.post("/retrieve", json=VIEWER | {"k": 30, "exclude": ["3"]}).json()
    assert [asdict(post) for post in found.posts] == [post | {"codes": ()} for post in reply["posts"]]
    assert explained.request_id != found.request_id != ""
    assert (found.corpus, found.visible) == (reply["corpus"], reply["visible"])
    best = ranker.recommend(USER, HISTORY, top_k=5, **options)
    reply = client.post("/recommend", json=VIEWER | {"k": 30, "exclude": ["3"], "top_k": 5}).json()
    assert [asdict(row) for row in best.candidates] == [UNEXPLORED | row for row in reply["candidates"]]
    assert (best.models, best.actions) == (reply["models"], reply["actions"])


@pytest.mark.slow
def test_without_a_corpus_nothing_is_tried_again() -> None:
    with serving(threads=1) as server, RankerClient(server.url) as ranker:
        for ask in (ranker.retrieve, ranker.recommend):
            with pytest.raises(
                NoCorpus, match=r"no_corpus \(404\): This process serves no corpus: set retrieval.checkpoint"
            ):
                ask(USER, HISTORY, timeout_seconds=30)
        stop(server)
        asked = [line["route"] for line in server.log_lines if line.get("event") == "request"]
        assert asked == ["/retrieve", "/recommend"]


def test_a_handle_stands_for_the_history_sent_where_unknown(ranker: RankerClient, client: httpx.Client) -> None:
    handle = ranker.context(USER, HISTORY, timeout_seconds=30)
    reply = client.post("/rank", json=EXAMPLE).json()
    assert handle == reply["context"]
    for context in (handle, UNKNOWN):
        ranking = ranker.rank(USER, CANDIDATES, HISTORY, context=context, impression_ts=NOW, timeout_seconds=30)
        assert same(ranking, reply)
        found = ranker.retrieve(USER, HISTORY, context=context, timeout_seconds=30)
        assert found.posts == ranker.retrieve(USER, HISTORY, timeout_seconds=30).posts
    with pytest.raises(ContextUnknown):
        ranker.rank(USER, CANDIDATES, context=UNKNOWN, timeout_seconds=30)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the client's sdist and wheel."""
    out = tmp_path_factory.mktemp("client")
    command: list[str | Path] = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, CLIENT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_wheel_and_sdist_hold_the_client_and_nothing_else(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {f"phoenix_ranker_client/{path.name}" for path in (CLIENT / "phoenix_ranker_client").glob("*.py")}
    assert names == modules | {"phoenix_ranker_client/py.typed"}
    with tarfile.open(sdist) as archive:
        assert {"README.md", "LICENSE", "pyproject.toml"} <= {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.slow
def test_the_readme_example_runs_without_the_server_installed(built: Path, server: Live, tmp_path: Path) -> None:
    """In an environment with the wheel and what it asks for alone."""
    venv.create(tmp_path, symlinks=True)
    python, (wheel,) = tmp_path / "bin/python", built.glob("*.whl")
    words = ["install", "--quiet", "--disable-pip-version-check", str(wheel)]
    pip = [sys.executable, "-m", "pip", "--python", str(python), *words]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=110)
    if done.returncode:
        pytest.skip(f"pip reaches no package index from here: {done.stderr[-200:]}")
    readme = (CLIENT / "README.md").read_text()
    [program, *_] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    program = program.replace("http://localhost:8000", server.url).replace("timeout_seconds=0.5", "timeout_seconds=30")
    program += "\nimport importlib.util, json\nothers = ('torch', 'numpy', 'fastapi', 'pydantic', 'app', 'model')"
    program += "\nprint(json.dumps([name for name in others if importlib.util.find_spec(name)]))"
    done = subprocess.run([python, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    best, others = map(json.loads, done.stdout.splitlines())
    assert best in (90, 91)
    assert others == []
