"""Loads that are given up: the old version serves on, and nothing is locked for ever."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.loading import LoadedModel, Steps
from app.engine.versions import Versions
from app.interface import ReloadInProgress
from app.settings import Reload
from model.engine import EngineError
from tests.app.fakes import FakeEngine, loaded, loader, rank, right, running, until

pytestmark = pytest.mark.anyio


async def test_a_load_that_takes_too_long_is_given_up_and_lets_others_load() -> None:
    """It stops at its next step; only then may another one begin, so that two never take memory together."""
    goes_on = threading.Event()
    ended: list[str] = []

    def slow(steps: Steps) -> LoadedModel:
        assert goes_on.wait(10)
        try:
            steps.go_on()
        except EngineError as error:
            ended.append(str(error))
            raise
        raise AssertionError("nobody told it to stop")

    async with running(FakeEngine(), reload=Reload(timeout_seconds=0.2)) as service:
        with pytest.raises(EngineError, match=r"the checkpoint was not loaded within 0\.2 s"):
            await service.swap(slow)
        with pytest.raises(ReloadInProgress):
            await service.swap(loader(FakeEngine(2), "v2"))
        goes_on.set()
        await until(lambda: bool(ended))
        await until(lambda: service.versions._loading.closed.done())
        assert (await service.swap(loader(FakeEngine(2), "v2"))).manifest.version == "v2"
        assert right(await rank(service, 1), 1, 2)
    assert ended == ["the load was cancelled"]


async def test_a_load_that_hangs_for_good_does_not_lock_others_out_for_ever() -> None:
    hangs, thread = threading.Event(), list[threading.Thread]()

    def hanging(steps: object) -> LoadedModel:
        thread.append(threading.current_thread())
        hangs.wait(20)
        return loaded(FakeEngine(3), "v3")

    async with running(FakeEngine(), reload=Reload(timeout_seconds=0.2)) as service:
        with pytest.raises(EngineError, match="not loaded within"):
            await service.swap(hanging)
        with pytest.raises(ReloadInProgress):
            await service.swap(loader(FakeEngine(2), "v2"))
        async with asyncio.timeout(10):
            while service.model.manifest.version != "v2":
                with suppress(ReloadInProgress):
                    await service.swap(loader(FakeEngine(2), "v2"))
                await asyncio.sleep(0.05)
        hangs.set()
        await until(lambda: not thread[0].is_alive())
        await asyncio.sleep(0)  # and what it has told the loop is done
        assert service.model.manifest.version == "v2"  # what comes late is thrown away


async def test_a_cancelled_load_keeps_others_out_until_it_has_ended() -> None:
    goes_on, steps_of = threading.Event(), list[Steps]()

    def slow(steps: Steps) -> LoadedModel:
        steps_of.append(steps)
        assert goes_on.wait(10)
        steps.go_on()
        raise AssertionError("nobody told it to stop")

    async with running(FakeEngine()) as service:
        swap = asyncio.ensure_future(service.swap(slow))
        await until(lambda: bool(steps_of))
        swap.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swap
        with pytest.raises(ReloadInProgress):
            await service.swap(loader(FakeEngine(2)))
        goes_on.set()
        await until(lambda: service.versions._loading.closed.done())
        await service.swap(loader(FakeEngine(2)))


async def test_a_reload_without_a_thread_is_refused_and_the_next_one_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    async with running(FakeEngine()) as service:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            with pytest.raises(EngineError, match=r"cannot start a thread .* can't start new thread"):
                await service.swap(loader(FakeEngine(2), "v2"))
        assert right(await rank(service, 1), 1)
        assert (await service.swap(loader(FakeEngine(2), "v2"))).manifest.version == "v2"


def test_the_version_that_is_silent_longest_counts() -> None:
    held = {version: SimpleNamespace(silent_seconds=lambda version=version: float(version)) for version in (3, 7, 5)}
    assert Versions.silent_seconds(SimpleNamespace(_held=held)) == 7  # type: ignore[arg-type]
    assert Versions.silent_seconds(SimpleNamespace(_held={})) == 0  # type: ignore[arg-type]
