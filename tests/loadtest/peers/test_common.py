"""The peers hold the same model: otherwise their table would compare nothing."""

import asyncio
from contextlib import contextmanager

import httpx
import numpy as np
import orjson
import pytest
import torch

from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.machine import ROOT
from loadtest.peers import run
from loadtest.peers.common import PeerModel, RankBody
from loadtest.peers.plain import create_app
from loadtest.servers.target import Target, TargetError
from model.tolerances import PARITY
from tests.loadtest.toy_server import ToyServer


@pytest.fixture(scope="module")
def bodies():
    settings = TrafficSettings(objects_share=0.0, max_candidates=64)
    return [RankBody.model_validate(orjson.loads(request.body)) for request in Traffic(settings).take(6)]


def environment(patch, engine):
    values = {"CHECKPOINT": str(ROOT / "weights/demo"), "DTYPE": "float32", "THREADS": "1", "ENGINE": engine}
    for name, value in values.items():
        patch.setenv(f"PEER_{name}", value)


@pytest.fixture(scope="module")
def dense():
    with pytest.MonkeyPatch.context() as patch:
        environment(patch, "dense")
        yield PeerModel()


def test_the_dense_reference_in_batches_and_our_engine_score_alike(dense, bodies, monkeypatch):
    environment(monkeypatch, "auto")
    ours = PeerModel()
    features = [dense.features(body) for body in bodies]
    alone = [dense.score([one])[0].probabilities for one in features]
    assert max(float(scores.std()) for scores in alone) > 0.001  # scores that are all the same would show nothing
    for found in (dense.score(features), ours.score(features)):
        for scores, expected in zip(found, alone, strict=True):
            assert np.abs(scores.probabilities - expected).max() < PARITY[torch.float32].probabilities


def test_of_a_long_history_the_newest_events_are_read(dense):
    [page] = Traffic(TrafficSettings.production()).take(1)
    context, candidates = dense.features(RankBody.model_validate(orjson.loads(page.body)))
    assert len(candidates) == 2800
    assert context.post_ids.tolist() == orjson.loads(page.body)["history"]["post_id"][-dense.config.history_length :]


def test_a_plain_reply_ranks_by_score(dense, monkeypatch):
    environment(monkeypatch, "dense")
    body = Traffic(TrafficSettings(objects_share=0.0)).first_visit().body

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app()), base_url="http://peer") as client:
            return await client.post("/rank", content=body, headers={"Content-Type": "application/json"})

    reply = asyncio.run(ask()).json()
    assert reply == dense.rank(RankBody.model_validate(orjson.loads(body)))
    ranked = sorted(reply["candidates"], key=lambda candidate: candidate["rank"])
    scores = [candidate["score"] for candidate in ranked]
    assert scores == sorted(scores, reverse=True)


@contextmanager
def toy(probability):
    """A server that gives this probability to everything."""
    body = orjson.dumps({"candidates": [{"probabilities": [probability]}]})
    with ToyServer(body=body).in_thread() as url:
        yield Target.parse(url)


def test_a_peer_with_another_model_ends_the_run():
    """Negative control of the check that every table starts with."""
    with toy(0.5) as first, toy(0.5004) as alike, toy(0.6) as other:
        assert run.largest_difference({"a": first, "b": alike}, [b"{}"], 0.001) == pytest.approx(0.0004, abs=1e-6)
        with pytest.raises(TargetError, match="c has other scores than a"):
            run.largest_difference({"a": first, "c": other}, [b"{}"], 0.001)


def test_names_are_checked_and_what_is_not_installed_is_said(monkeypatch):
    said = []
    with pytest.raises(ValueError, match="no such peer: Foo"):
        run.chosen(["Foo"], said.append)
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert {peer.needs for peer in run.chosen([], said.append)} == {""}
    assert len(said) == 3


def test_rows_are_medians_with_their_spread():
    block = {"p50_ms": 5.0, "p99_ms": 9.0, "single_p50_ms": 2.0, "failed": 0.0}
    rates = {run.PEERS[0].name: (10, 30, 20), run.PEERS[1].name: (40,)}
    measured = {name: [block | {"throughput_rps": rate} for rate in given] for name, given in rates.items()}
    rows = run.table(list(run.PEERS[:2]), measured)
    assert (rows[0]["throughput_rps"], rows[0]["throughput_spread_rps"], rows[1]["ratio"]) == (20, 10, 2)
    assert "| plain FastAPI | dense reference | 20 | 10 |" in run.report(rows, run.Stand(ROOT, "float32", 64, 2, False))


def test_what_ranks_nothing_is_no_fastest_server():
    rows = [
        {"name": name, "engine": engine, "throughput_rps": rate, "ratio": rate / 10}
        for name, engine, rate in (("plain", "dense", 10.0), ("ours", "ours", 50.0), ("bare", run.NOTHING, 90.0))
    ]
    assert run.verdict(rows, 32).startswith("ours: 50 requests")
