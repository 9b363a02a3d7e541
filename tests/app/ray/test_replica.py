"""A replica without Ray: its checkpoints, its health, its figures."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from app.errors import NotReady
from app.ray.autoscaling import LOAD
from app.ray.ingress import Asked
from app.ray.replica import Replica
from app.settings import Queue, Settings
from tests.app.fakes import run, until
from tests.app.ray.planted import HANG, Planted
from tests.app.serving import good
from weights.errors import CheckpointError

pytestmark = pytest.mark.anyio

HEADERS = [(b"content-type", b"application/json")]


def asked(**changes: object) -> Asked:
    return Asked("POST", "/rank", b"", HEADERS, json.dumps(good(**changes)).encode())


def test_a_checkpoint_that_cannot_be_loaded_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        run(Replica(Settings()).reconfigure({"checkpoint": str(tmp_path / "none")}))


async def test_a_stalled_engine_is_a_replica_to_be_replaced() -> None:
    replica = Planted(Settings(queue=Queue(stall_seconds=0.05)))
    await replica.reconfigure({})
    await replica.check_health()
    assert (await replica.record_autoscaling_stats())[LOAD] < 1
    hung = asyncio.ensure_future(replica.answer(asked(user_id=HANG)))
    await until(lambda: replica.service.health().failed)
    with pytest.raises(NotReady, match="no forward"):
        await replica.check_health()
    hung.cancel()
    await replica.end()


async def test_another_checkpoint_is_loaded_beside_requests_and_the_same_one_is_not_loaded_again(
    tmp_path: Path,
) -> None:
    first, second = (Path(shutil.copytree("weights/demo", tmp_path / name)) for name in ("first", "second"))
    replica = Replica(Settings(threads=1))
    await replica.reconfigure({"checkpoint": str(first)})
    model = replica.service.model
    await replica.reconfigure({"checkpoint": str(first)})
    assert replica.service.model is model
    await replica.reconfigure({"checkpoint": str(second)})
    assert replica.service.model is not model
    with pytest.raises(LookupError):
        await replica.reconfigure({"checkpoint": str(second.parent / "none")})
    assert (await replica.answer(asked(weights=..., actions_wanted=..., history=[]))).status == 200
    await replica.service.stop(1)
