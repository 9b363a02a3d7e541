"""The published implementation's numbers through import, `python -m app` and POST /rank, in every shape a request may have."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient

from app.assembly import build_app
from app.settings import Settings
from loadtest.fuzz.bodies import in_arrays
from tests import goldens
from tests.e2e.process import serving

PROBABILITIES = 1e-5  # 2e-6 was measured; a logit tolerance of 2e-4 alone would allow 5e-5
DWELL_SCALE_SECONDS = 30.0
OUTPUTS = {"sequential": "logits_fp32", "shared": "logits_alone_fp32"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("e2e")
    return {name: goldens.imported(name, out / name) for name in goldens.NAMES}


@pytest.fixture(scope="module", params=[(name, mode) for name in goldens.NAMES for mode in OUTPUTS], ids="-".join)
def golden(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[tuple[str, str, httpx.Client]]:
    """A client of a server of one golden: a real process for one of them, the same application in this process for the others."""
    name, mode = request.param
    if name == "phoenix-mini":
        with (
            serving(checkpoints[name], dtype="float32", candidate_positions=mode, threads=1) as server,
            httpx.Client(base_url=server.url, timeout=30) as client,
        ):
            yield name, mode, client
    else:
        settings = Settings(checkpoint=checkpoints[name], dtype="float32", candidate_positions=mode)
        with TestClient(build_app(settings)) as client:
            wait_ready(client)
            yield name, mode, client


def wait_ready(client: httpx.Client) -> None:
    for _ in range(600):
        if client.get("/readyz").status_code == 200:
            return
        time.sleep(0.05)
    raise AssertionError(client.get("/readyz").text)


def as_text(body: dict[str, Any]) -> dict[str, Any]:
    """All ids as decimal strings."""
    body = copy.deepcopy(body) | {"user_id": str(body["user_id"])}
    for item in (*body["history"], *body["candidates"]):
        item |= {"post_id": str(item["post_id"]), "author_id": str(item["author_id"])}
    return body


def columnar(body: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, list[Any]] = {"post_id": [], "author_id": []}
    history = in_arrays(body["history"]) if body["history"] else empty
    return body | {"history": history, "candidates": in_arrays(body["candidates"])}


FORMS = {
    "objects": lambda body: body,
    "arrays": columnar,
    "text ids": as_text,
    "text ids in arrays": lambda body: columnar(as_text(body)),
}


def sigmoid(logits: Any) -> Any:
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


def test_rank_equals_the_published_pipeline(golden: tuple[str, str, httpx.Client]) -> None:
    name, mode, client = golden
    expected = goldens.expected(name)
    for index, body in enumerate(goldens.requests(name)):
        replies = {form: client.post("/rank", json=shape(body)) for form, shape in FORMS.items()}
        assert [reply.status_code for reply in replies.values()] == [200] * len(FORMS)
        rows = replies["objects"].json()["candidates"]
        probabilities = np.array([row["probabilities"] for row in rows])
        wanted = sigmoid(expected[f"{index}/{OUTPUTS[mode]}"])
        assert np.abs(probabilities - wanted).max() <= PROBABILITIES
        assert [row["post_id"] for row in rows] == [candidate["post_id"] for candidate in body["candidates"]]
        if mode == "sequential" and f"{index}/continuous_fp32" in expected:
            dwell = np.array([row["continuous"]["dwell_time"] for row in rows]) / DWELL_SCALE_SECONDS
            assert np.abs(dwell - expected[f"{index}/continuous_fp32"][:, 1]).max() <= 1e-4
        for reply in replies.values():
            assert numbers(reply.json()["candidates"]) == numbers(rows)  # the same bits


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key != "post_id"} for row in rows]


def test_the_two_modes_are_told_apart() -> None:
    expected = goldens.expected("phoenix-mini")
    apart = np.abs(sigmoid(expected["2/logits_fp32"]) - sigmoid(expected["2/logits_alone_fp32"])).max()
    assert apart > 100 * PROBABILITIES  # a server that ignored the mode would fail above
