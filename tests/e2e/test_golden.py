"""The published implementation's numbers, through import, the service and POST /rank, in every form that a request may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.main import create_app
from app.settings import Settings
from loadtest.server import wait_until
from tests import goldens
from tests.support.asgi import ADDRESS
from tests.support.bodies import in_columns
from tests.support.replies import CheckedClient

PROBABILITIES = 1e-5  # 2e-6 was measured; a tolerance of 2e-4 for logits would allow 5e-5
DWELL_SCALE_SECONDS = 30.0
OUTPUTS = {"sequential": "logits_fp32", "shared": "logits_alone_fp32"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("golden")
    return {name: goldens.imported(name, out / name) for name in goldens.NAMES}


@pytest.fixture(scope="module", params=[(name, mode) for name in goldens.NAMES for mode in OUTPUTS], ids="-".join)
def golden(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Iterator[tuple[str, str, CheckedClient]]:
    """Name, mode, and a client of the application around this checkpoint."""
    name, mode = request.param
    app = create_app(Settings(checkpoint=checkpoints[name], dtype="float32", candidate_positions=mode, threads=1))
    with CheckedClient(app, base_url=ADDRESS) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200, 120)
        yield name, mode, client


def as_text(body: dict[str, Any]) -> dict[str, Any]:
    """The same with all ids as decimal strings."""

    def texts(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [item | {"post_id": str(item["post_id"]), "author_id": str(item["author_id"])} for item in items]

    parts = {name: texts(body[name]) for name in ("history", "candidates")}
    return body | parts | {"user_id": str(body["user_id"])}


def columnar(body: dict[str, Any]) -> dict[str, Any]:
    empty: dict[str, list[Any]] = {"post_id": [], "author_id": []}
    return body | {name: in_columns(body[name]) or empty for name in ("history", "candidates")}


FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "objects": lambda body: body,
    "columns": columnar,
    "text ids": as_text,
    "text ids in columns": lambda body: columnar(as_text(body)),
}


def sigmoid(logits: Any) -> Any:
    return 1 / (1 + np.exp(-logits.astype(np.float64)))


@pytest.mark.slow
def test_rank_equals_the_published_pipeline(golden: tuple[str, str, CheckedClient]) -> None:
    name, mode, client = golden
    expected = goldens.expected(name)
    for index, body in enumerate(goldens.requests(name)):
        replies = [client.post("/rank", json=form(body)) for form in FORMS.values()]
        assert [reply.status_code for reply in replies] == [200] * len(FORMS)
        rows = replies[0].json()["candidates"]
        probabilities = np.array([row["probabilities"] for row in rows])
        assert np.abs(probabilities - sigmoid(expected[f"{index}/{OUTPUTS[mode]}"])).max() <= PROBABILITIES
        assert [row["post_id"] for row in rows] == [candidate["post_id"] for candidate in body["candidates"]]
        if mode == "sequential" and f"{index}/continuous_fp32" in expected:
            dwell = np.array([row["continuous"]["dwell_time"] for row in rows]) / DWELL_SCALE_SECONDS
            assert np.abs(dwell - expected[f"{index}/continuous_fp32"][:, 1]).max() <= 1e-4
        for reply in replies:
            assert numbers(reply.json()["candidates"]) == numbers(rows), "the same bits"


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key != "post_id"} for row in rows]


def test_the_two_modes_are_told_apart() -> None:
    """A service that ignored the mode would fail above."""
    expected = goldens.expected("phoenix-mini")
    apart = np.abs(sigmoid(expected["2/logits_fp32"]) - sigmoid(expected["2/logits_alone_fp32"])).max()
    assert apart > 100 * PROBABILITIES
