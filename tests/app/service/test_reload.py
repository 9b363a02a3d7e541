"""Changing the checkpoint of a running ranker: what serves meanwhile, and that nothing is locked for ever. Names: app/api/test_admin.py."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import os
import shutil
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import structlog

from app.errors import Draining, NotReady
from app.interface import CheckpointNotFound, PlaceRequest, ReloadInProgress
from app.queue.loading import LoadedModel, checkpoint_loader
from app.queue.runners import Steps
from app.service.local import LocalService
from app.settings import Admin, Reload, Retrieval, Settings
from model.engine import EngineError
from model.synthetic import random_request
from tests.app.corpus.serving import ADMIN, change, ids_of, write_mapped_corpus
from tests.support import corpora
from tests.support.fakes import FakeEngine, Gate, fake_model, fake_request, is_right, load_by_name
from tests.support.rankers import create, figure, rank, running, until
from weights.errors import CheckpointError, NotStored

pytestmark = pytest.mark.anyio

DEMO = Path(__file__).parents[3] / "weights" / "demo"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints below a root, and one outside."""
    for name in ("root/v1", "root/nested/v2", "outside"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").write_text("{}")
    return tmp_path / "root"


def settings_of(root: Path, **groups: Any) -> dict[str, Any]:
    return {"checkpoint": root / "v1", "admin": Admin(root=root), **groups}


def reloads(ranker: LocalService) -> dict[str, float]:
    counts = {
        result: figure(ranker, f'ranker_reloads_total{{result="{result}"}}')
        for result in ("success", "unchanged", "failure", "busy")
    }
    return {result: count for result, count in counts.items() if count}


# what serves. Under load: tests/reliability/test_endings.py


async def test_the_old_engine_is_freed_after_its_last_request(root: Path) -> None:
    gate = Gate()
    old = FakeEngine(1, before=gate)
    made = [fake_model(FakeEngine(2), "v2"), fake_model(old)]
    async with running(load=lambda path, steps: made.pop(), **settings_of(root)) as ranker:
        first = ranker.model()
        early = [asyncio.create_task(rank(ranker, user)) for user in (1, 2, 3)]
        await asyncio.to_thread(gate.entered.wait, 10)
        with ranker.admit(first, PlaceRequest(4, 2, math.inf)) as job:
            await ranker.reloads.reload()
            assert is_right((await rank(ranker, 4)).scores, 4, version=2)
            gate.opened.set()
            for user, task in enumerate(early, start=1):
                assert is_right((await task).scores, user)
            assert not old.closed.is_set()
            assert job.model is first
            assert is_right((await ranker.rank(job, *fake_request(5))).scores, 5)
        assert await asyncio.to_thread(old.closed.wait, 2)
        with pytest.raises(NotReady):
            ranker.admit(first, PlaceRequest(1, 0, math.inf))
        assert figure(ranker, 'ranker_context_cache_lookups_total{result="miss"}') == 5  # no count runs backwards


async def test_a_replaced_native_engine_is_freed_without_the_collector() -> None:
    settings = Settings(checkpoint=DEMO, device="cpu", backend="native")
    engines: list[weakref.ref[Any]] = []
    load = checkpoint_loader(settings)

    def noted(path: Path, steps: Steps) -> LoadedModel:
        made = load(path, steps)
        engines.append(weakref.ref(made.engine))
        return made

    async with running(load=noted, checkpoint=DEMO, device="cpu", backend="native") as ranker:
        gc.disable()
        model = ranker.model()
        context, candidates = random_request(model.manifest.config, 5, 64)
        with ranker.admit(model, PlaceRequest(64, 5, math.inf)) as job:
            assert (await ranker.rank(job, context, candidates)).scores.is_finite()
        del model, job
        assert engines[0]() is not None
        await ranker.reloads.reload()
        await until(lambda: engines[0]() is None)


async def test_a_failed_load_leaves_nothing_of_its_engine(root: Path) -> None:
    made: list[weakref.ref[FakeEngine]] = []

    def load(path: Path, steps: Steps) -> LoadedModel:
        engine = FakeEngine()
        if path.name == "v1":
            return fake_model(engine)
        made.append(weakref.ref(engine))
        try:
            raise MemoryError
        except MemoryError as error:
            raise EngineError("self-test failed") from error

    async with running(load=load, **settings_of(root)) as ranker:
        gc.disable()
        with pytest.raises(EngineError, match="self-test failed"):
            await ranker.reloads.reload("nested/v2")
        await until(lambda: made[0]() is None)
        assert is_right((await rank(ranker, 1)).scores, 1)


async def test_a_reload_during_a_drain_is_refused(root: Path) -> None:
    async with running(load=load_by_name, **settings_of(root)) as ranker:
        ranker.begin_drain()
        with pytest.raises(Draining):
            await ranker.reloads.reload("nested/v2")
        assert ranker.model().manifest.version == "v1"


# names


async def test_reading_the_present_checkpoint_again_follows_its_link(root: Path) -> None:
    """As SIGHUP does; unless it leads out of the root now."""

    def point(target: Path) -> None:
        (root / "fresh").symlink_to(target)
        (root / "fresh").rename(root / "current")

    async with running(load=load_by_name, **settings_of(root)) as ranker:
        point(root / "v1")
        await ranker.reloads.reload("current")
        point(root / "nested" / "v2")
        model, is_changed = await ranker.reloads.reload()
        assert (model.manifest.version, is_changed) == ("v2", True)
        point(root.parent / "outside")
        with pytest.raises(CheckpointNotFound):
            await ranker.reloads.reload()
        assert ranker.model().manifest.version == "v2"


@pytest.mark.parametrize(
    ("checkpoint", "admin", "root"),
    [
        ("/a/b", Admin(), "/a"),
        ("/weights", Admin(), "/weights"),
        ("/", Admin(), "/"),
        ("/weights", Admin(root=Path("/a")), "/a"),
    ],
)
def test_by_default_names_lie_beside_the_first_checkpoint(checkpoint: str, admin: Admin, root: str) -> None:
    assert create(load=load_by_name, checkpoint=Path(checkpoint), admin=admin).reloads.root == Path(root)


# loads that do not end


def slow_second_load(second: Callable[[Steps], LoadedModel]) -> Callable[[Path, Steps], LoadedModel]:
    """A loader whose second load is this, and whose others are by name."""
    count = 0

    def load(path: Path, steps: Steps) -> LoadedModel:
        nonlocal count
        count += 1
        return second(steps) if count == 2 else load_by_name(path, steps)

    return load


async def test_a_load_that_takes_too_long_is_given_up_before_the_next(root: Path) -> None:
    """It stops at its next step; only then may another one begin, so that two never take memory together."""
    goes_on, ended = threading.Event(), list[str]()

    def slow(steps: Steps) -> LoadedModel:
        assert goes_on.wait(10)
        try:
            steps.go_on()
        except EngineError as error:
            ended.append(str(error))
            raise
        raise AssertionError("nobody told it to stop")

    groups = settings_of(root, reload=Reload(timeout_seconds=0.2))
    async with running(load=slow_second_load(slow), **groups) as ranker:
        with pytest.raises(EngineError, match=r"the checkpoint was not loaded within 0\.2 s"):
            await ranker.reloads.reload("nested/v2")
        with pytest.raises(ReloadInProgress):
            await ranker.reloads.reload("nested/v2")
        goes_on.set()
        await until(lambda: bool(ended))
        await _reload_once_possible(ranker, "nested/v2")
        assert is_right((await rank(ranker, 1)).scores, 1, version=2)
    assert ended == ["the load was cancelled"]


async def test_a_load_that_hangs_does_not_lock_others_out_for_ever(root: Path) -> None:
    hangs, threads = threading.Event(), list[threading.Thread]()

    def hanging(steps: Steps) -> LoadedModel:
        threads.append(threading.current_thread())
        hangs.wait(20)
        return fake_model(FakeEngine(3), "v3")

    groups = settings_of(root, reload=Reload(timeout_seconds=0.2))
    async with running(load=slow_second_load(hanging), **groups) as ranker:
        with pytest.raises(EngineError, match="not loaded within"):
            await ranker.reloads.reload("nested/v2")
        with pytest.raises(ReloadInProgress):
            await ranker.reloads.reload("nested/v2")
        await _reload_once_possible(ranker, "nested/v2")
        hangs.set()
        await until(lambda: not threads[0].is_alive())
        await asyncio.sleep(0.01)  # and what it has told the loop is done
        assert ranker.model().manifest.version == "v2"  # what comes late is thrown away


async def test_a_cancelled_load_frees_its_engine_when_it_is_there(root: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()
    late = FakeEngine(2)

    def slow(steps: Steps) -> LoadedModel:
        begun.set()
        assert go_on.wait(10)
        return fake_model(late, "v2")

    async with running(load=slow_second_load(slow), **settings_of(root)) as ranker:
        reload = asyncio.create_task(ranker.reloads.reload("nested/v2"))
        await asyncio.to_thread(begun.wait, 10)
        reload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reload
        with pytest.raises(ReloadInProgress):
            await ranker.reloads.reload("nested/v2")
        go_on.set()
        assert await asyncio.to_thread(late.closed.wait, 5)
        assert is_right((await rank(ranker, 1)).scores, 1)


async def test_a_reload_without_a_thread_is_refused_and_the_next_loads(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    async with running(load=load_by_name, **settings_of(root)) as ranker:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            with pytest.raises(EngineError, match=r"cannot start a thread .* can't start new thread"):
                await ranker.reloads.reload("nested/v2")
        assert is_right((await rank(ranker, 1)).scores, 1)
        await ranker.reloads.reload("nested/v2")


async def test_a_reload_during_the_first_load_does_not_end_the_process(root: Path) -> None:
    gate = threading.Event()

    def load(path: Path, steps: Steps) -> LoadedModel:
        assert gate.wait(10)
        return load_by_name(path, steps)

    ranker = create(load=load, **settings_of(root))
    ranker.start()
    with pytest.raises(ReloadInProgress):
        await ranker.reloads.reload("nested/v2")
    gate.set()
    await ranker.wait_ready()
    assert ranker.model().manifest.version == "v1"
    await ranker.stop(1.0)


async def _reload_once_possible(ranker: LocalService, name: str) -> None:
    async with asyncio.timeout(10):
        while True:
            with suppress(ReloadInProgress):
                await ranker.reloads.reload(name)
                return
            await asyncio.sleep(0.02)


# by itself


class Place:
    """A checkpoint directory that is a link, as a deployment replaces it, and the names that were loaded from it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model"
        self.loads: list[str] = []
        self._folder = folder
        self.point("v1")

    def point(self, name: str) -> None:
        (self._folder / name).mkdir(exist_ok=True)
        (self._folder / name / "manifest.json").write_bytes(
            fake_model(FakeEngine(), name).checkpoint.manifest.to_json()
        )
        fresh = self._folder / "fresh"
        fresh.symlink_to(self._folder / name)
        fresh.rename(self.path)

    def load(self, path: Path, steps: Steps) -> LoadedModel:
        self.loads.append(path.resolve().name)
        return load_by_name(path, steps)


class SlowPlace(Place):
    """One whose second load has read what is there, and then waits for `go_on`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def load(self, path: Path, steps: Steps) -> LoadedModel:
        loaded = super().load(path, steps)
        if len(self.loads) == 2:
            self.begun.set()
            assert self.go_on.wait(10)
        return loaded


async def test_the_watch_loads_a_manifest_once_and_retries_no_refusal(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with running(load=place.load, checkpoint=place.path) as ranker:
        ranker.reloads.watch(0.01)
        await asyncio.sleep(0.1)
        assert place.loads == ["v1"]
        place.point("refused")
        await until(lambda: reloads(ranker) == {"failure": 1})
        await asyncio.sleep(0.1)
        place.point("v3")
        await until(lambda: ranker.model().manifest.version == "v3")
        await asyncio.sleep(0.1)
        assert place.loads == ["v1", "refused", "v3"]
        ranker.reloads.stop()
        place.point("v4")
        await asyncio.sleep(0.1)
        assert place.loads == ["v1", "refused", "v3"]


async def test_a_refusal_is_told_until_a_reload_succeeds(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with running(load=place.load, checkpoint=place.path) as ranker:

        def is_told() -> bool:
            return figure(ranker, 'ranker_reload_failed{of="checkpoint"}') == 1

        assert not is_told()
        place.point("refused")
        with pytest.raises(CheckpointError):
            await ranker.reloads.reload()
        assert is_told()
        place.point("v2")
        await ranker.reloads.reload()
        assert not is_told()


async def test_the_watch_ends_a_refusal_when_the_link_goes_back(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with running(load=place.load, checkpoint=place.path) as ranker:
        ranker.reloads.watch(0.01)
        place.point("refused")
        await until(lambda: figure(ranker, 'ranker_reload_failed{of="checkpoint"}') == 1)
        place.point("v1")
        await until(lambda: figure(ranker, 'ranker_reload_failed{of="checkpoint"}') == 0)
        assert place.loads == ["v1", "refused"]


async def test_the_watch_loads_what_was_switched_before_it_began(tmp_path: Path) -> None:
    """The first load may have read what was there before."""
    place = Place(tmp_path)
    async with running(load=place.load, checkpoint=place.path) as ranker:
        place.point("v2")
        ranker.reloads.watch(0.01)
        await until(lambda: ranker.model().manifest.version == "v2")


async def test_the_watch_does_not_load_again_what_serves(tmp_path: Path) -> None:
    """A manifest that was written anew as it was."""
    place = tmp_path / "model"
    place.mkdir()

    def write(version: str) -> None:
        (tmp_path / "fresh").write_bytes(fake_model(FakeEngine(), version).checkpoint.manifest.to_json())
        (tmp_path / "fresh").rename(place / "manifest.json")

    loads: list[str] = []

    def load(path: Path, steps: Steps) -> LoadedModel:
        loads.append(json.loads((path / "manifest.json").read_bytes())["version"])
        return fake_model(FakeEngine(), loads[-1])

    write("v1")
    async with running(load=load, checkpoint=place) as ranker:
        ranker.reloads.watch(0.01)
        await asyncio.sleep(0.1)
        write("v1")
        await asyncio.sleep(0.1)
        assert loads == ["v1"]
        write("v2")
        await until(lambda: ranker.model().manifest.version == "v2")


async def test_the_watch_sees_a_manifest_of_equal_inode_size_and_time(tmp_path: Path) -> None:
    """As after a switch to another volume, where a copy may have all three."""
    manifest = tmp_path / "manifest.json"

    def write(version: str) -> os.stat_result:
        manifest.write_bytes(fake_model(FakeEngine(), version).checkpoint.manifest.to_json())
        os.utime(manifest, ns=(0, 0))
        return manifest.stat()

    def load(path: Path, steps: Steps) -> LoadedModel:
        return fake_model(FakeEngine(), json.loads((path / "manifest.json").read_bytes())["version"])

    before = write("v1")
    async with running(load=load, checkpoint=tmp_path) as ranker:
        ranker.reloads.watch(0.01)
        await asyncio.sleep(0.1)
        after = write("v2")
        assert all(getattr(before, name) == getattr(after, name) for name in ("st_ino", "st_size", "st_mtime_ns"))
        await until(lambda: ranker.model().manifest.version == "v2")


async def test_the_watch_reads_a_corpus_that_a_copy_of_it_has_replaced(tmp_path: Path) -> None:
    """As when a backup is put back: the manifests are equal, the changes are not."""
    checkpoint, corpus = corpora.written(tmp_path)
    shutil.copytree(corpus, tmp_path / "backup")
    retrieval = Retrieval(checkpoint=checkpoint, corpus=corpus)
    async with running(checkpoint=tmp_path / "none", retrieval=retrieval, admin=ADMIN) as ranker:
        await ranker.corpus.change(change([1], []))
        ranker.reloads.watch(0.01)
        await asyncio.sleep(0.1)
        assert reloads(ranker) == {}
        corpus.rename(tmp_path / "old")
        (tmp_path / "backup").rename(corpus)
        await until(lambda: reloads(ranker) == {"success": 1})
        assert 1 in await ids_of(ranker.corpus)
        assert (await ranker.corpus.change(change([2], []))).changes == 1
        await asyncio.sleep(0.1)
        assert reloads(ranker) == {"success": 1}


@pytest.mark.parametrize("is_replaced_first", [False, True])
async def test_the_watch_ends_answers_of_503_with_an_equal_directory(tmp_path: Path, is_replaced_first: bool) -> None:
    """Somebody has written into a file that was served from. What was served before may be no longer in its place then."""
    place = Place(tmp_path)
    served = tmp_path / "v1" / "params"
    served.write_bytes(b"right")

    def load(path: Path, steps: Steps) -> LoadedModel:
        loaded = place.load(path, steps)
        file = FileIO(path / "params")
        loaded.checkpoint.mapped.add("params", file, os.fstat(file.fileno()))
        return loaded

    def replace() -> None:
        shutil.copytree(tmp_path / "v1", tmp_path / "fresh")
        (tmp_path / "fresh" / "params").write_bytes(b"right")
        (tmp_path / "v1").rename(tmp_path / "old")
        (tmp_path / "fresh").rename(tmp_path / "v1")

    async with running(load=load, checkpoint=place.path) as ranker:
        ranker.reloads.watch(0.01)
        await asyncio.sleep(0.1)
        before = served.open("r+b")
        if is_replaced_first:
            replace()
            await asyncio.sleep(0.1)
        with before:
            before.write(b"changed")
        assert "was written to" in ranker.health().reason
        if not is_replaced_first:
            replace()
        await until(lambda: ranker.health().ready)
        await asyncio.sleep(0.1)
        assert len(place.loads) <= 3, "it has not been loaded at each look"


async def test_the_watch_reads_a_corpus_again_that_was_written_into(tmp_path: Path) -> None:
    write_mapped_corpus(tmp_path)
    corpus = tmp_path / "corpus-v1"
    shutil.copytree(corpus, tmp_path / "fresh")
    retrieval = Retrieval(checkpoint=tmp_path / "towers-v1", corpus=corpus)
    async with running(checkpoint=tmp_path / "none", retrieval=retrieval, threads=1) as ranker:
        ranker.reloads.watch(0.01)
        await asyncio.sleep(0.1)
        with (corpus / "vectors.safetensors").open("r+b") as file:
            file.seek(4096)
            file.write(bytes(8192))
        assert "was written to" in ranker.health().reason
        corpus.rename(tmp_path / "old")
        (tmp_path / "fresh").rename(corpus)
        await until(lambda: ranker.health().ready)


async def test_the_watch_leaves_a_rollback_until_the_link_is_switched(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.point("v2")
    async with running(load=place.load, checkpoint=place.path) as ranker:
        ranker.reloads.watch(0.01)
        await ranker.reloads.reload("v1")
        for _ in range(2):
            await asyncio.sleep(0.1)
            assert ranker.model().manifest.version == "v1"
            place.point("v2")  # published once more
        place.point("v3")
        await until(lambda: ranker.model().manifest.version == "v3")
        await ranker.reloads.reload("v2")
        await asyncio.sleep(0.1)
        place.point("v2")  # for good
        await asyncio.sleep(0.1)
        assert place.loads == ["v2", "v1", "v3", "v2"]
        place.point("v4")
        await until(lambda: ranker.model().manifest.version == "v4")


async def test_the_watch_leaves_named_posts_until_a_link_is_switched(tmp_path: Path) -> None:
    both = [corpora.written(tmp_path, seed, f"v{seed}") for seed in (1, 2, 3)]
    links = tmp_path / "towers", tmp_path / "posts"

    def point(version: int) -> None:
        for link, target in zip(links, both[version - 1], strict=True):
            (tmp_path / "fresh").symlink_to(target)
            (tmp_path / "fresh").rename(link)

    point(2)
    retrieval = Retrieval(checkpoint=links[0], corpus=links[1])
    groups: dict[str, Any] = {"retrieval": retrieval, "admin": Admin(root=tmp_path), "threads": 1}
    async with running(checkpoint=tmp_path / "none", **groups) as ranker:
        ranker.reloads.watch(0.01)
        await ranker.reloads.reload_corpus("towers-v1", "corpus-v1")
        await asyncio.sleep(0.1)
        assert ranker.corpus.served.corpus.version == "v1"
        point(3)
        await until(lambda: ranker.corpus.served.corpus.version == "v3")


async def test_the_watch_goes_on_after_another_reload_has_kept_it_out(tmp_path: Path) -> None:
    place = SlowPlace(tmp_path)
    async with running(load=place.load, checkpoint=place.path) as ranker:
        ranker.reloads.watch(0.01)
        await asyncio.sleep(0.05)
        other = asyncio.create_task(ranker.reloads.reload())
        await asyncio.to_thread(place.begun.wait, 10)
        place.point("v4")
        await until(lambda: reloads(ranker).get("busy", 0) > 0)
        assert "failure" not in reloads(ranker), "no checkpoint was refused, so no alert"
        place.go_on.set()
        await other
        await until(lambda: ranker.model().manifest.version == "v4")


async def test_a_signal_reads_the_present_checkpoint_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with running(load=place.load, checkpoint=place.path) as ranker:
        place.point("v2")
        ranker.reloads.reload_soon()
        await until(lambda: ranker.model().manifest.version == "v2")


async def test_a_signal_during_a_reload_reads_again_after_it(tmp_path: Path) -> None:
    """The reload under way may have read what was there before. Several signals are one."""
    place = SlowPlace(tmp_path)
    async with running(load=place.load, checkpoint=place.path) as ranker:
        place.point("v2")
        ranker.reloads.reload_soon()
        await asyncio.to_thread(place.begun.wait, 10)
        place.point("v3")
        for _ in range(5):
            ranker.reloads.reload_soon()
        await asyncio.sleep(0.05)
        place.go_on.set()
        await until(lambda: ranker.model().manifest.version == "v3")
        assert reloads(ranker) == {"success": 2}


async def test_a_signal_during_the_first_load_reads_again_after_it(tmp_path: Path) -> None:
    place, go_on = Place(tmp_path), threading.Event()

    def slow(path: Path, steps: Steps) -> LoadedModel:
        loaded = place.load(path, steps)
        assert go_on.wait(10)
        return loaded

    ranker = create(load=slow, checkpoint=place.path)
    ranker.start()
    await until(lambda: place.loads == ["v1"])
    place.point("v2")
    ranker.reloads.reload_soon()
    await asyncio.sleep(0.05)
    go_on.set()
    await until(lambda: ranker.model().manifest.version == "v2" if place.loads == ["v1", "v2"] else False)
    await until(lambda: reloads(ranker) == {"success": 1})
    await ranker.stop(1.0)


async def test_a_signal_while_a_load_was_given_up_reads_again_after_it(tmp_path: Path) -> None:
    place = SlowPlace(tmp_path)
    async with running(load=place.load, checkpoint=place.path) as ranker:
        place.point("v2")
        other = asyncio.create_task(ranker.reloads.reload())
        await asyncio.to_thread(place.begun.wait, 10)
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        place.point("v3")
        ranker.reloads.reload_soon()
        await asyncio.sleep(0.05)
        place.go_on.set()
        await until(lambda: ranker.model().manifest.version == "v3")


# the process that takes the place of an engine process


async def test_the_next_process_begins_with_what_served(tmp_path: Path) -> None:
    place = Place(tmp_path)
    process = partial(running, resume=tmp_path / "loaded.json", load=place.load, checkpoint=place.path)
    async with process() as ranker:
        place.point("v2")
        await ranker.reloads.reload("v2")
    place.point("v3")
    async with process() as ranker:
        assert ranker.model().manifest.version == "v2"
        assert ranker.reloads.root == tmp_path, "names of reloads mean what they meant"
        await ranker.reloads.reload()
        assert ranker.model().manifest.version == "v2"


async def test_the_next_process_begins_with_what_served_if_it_exists(tmp_path: Path) -> None:
    place, other = Place(tmp_path), tmp_path / "other"
    place.point("v2")
    place.point("v1")
    for target in (tmp_path / "gone", DEMO):  # the second lies outside the root
        other.symlink_to(tmp_path / "v2")
        process = partial(running, resume=tmp_path / f"{target.name}.json", load=place.load, checkpoint=place.path)
        async with process() as ranker:
            await ranker.reloads.reload("other")
        other.unlink()
        other.symlink_to(target)
        async with process() as ranker:
            assert ranker.model().manifest.version == "v2", "what was served is there still"
        (tmp_path / "v2").rename(tmp_path / "away")
        with structlog.testing.capture_logs() as lines:
            async with process() as ranker:
                assert ranker.model().manifest.version == "v1"
        assert [line["event"] for line in lines if line["log_level"] == "error"] == ["reload_not_kept"]
        (tmp_path / "away").rename(tmp_path / "v2")
        other.unlink()


async def test_the_next_process_does_not_begin_with_what_was_refused(tmp_path: Path) -> None:
    """Also where nothing else was loaded before. It says again that it is refused, and follows the link on."""
    place = Place(tmp_path)
    process = partial(running, resume=tmp_path / "loaded.json", load=place.load, checkpoint=place.path)
    async with process() as ranker:
        place.point("refused")
        with pytest.raises(CheckpointError):
            await ranker.reloads.reload()
    async with process() as ranker:
        assert ranker.model().manifest.version == "v1"
        ranker.reloads.watch(0.01)
        await until(lambda: reloads(ranker) == {"failure": 1})
        place.point("v3")
        await until(lambda: ranker.model().manifest.version == "v3")


async def test_the_next_process_does_not_begin_with_refused_posts(tmp_path: Path) -> None:
    """And refuses changes as the one before, for the next corpus would lack them."""
    checkpoint, corpus = corpora.written(tmp_path)
    _, other = corpora.written(tmp_path, seed=5, version="v2")
    (tmp_path / "posts").symlink_to(corpus)
    retrieval = Retrieval(checkpoint=checkpoint, corpus=tmp_path / "posts")
    groups: dict[str, Any] = {"checkpoint": Place(tmp_path).path, "retrieval": retrieval, "admin": ADMIN}
    process = partial(running, resume=tmp_path / "loaded.json", **groups)
    async with process() as ranker:
        await ranker.corpus.change(change([1], []))
        (tmp_path / "fresh").symlink_to(other)
        (tmp_path / "fresh").rename(tmp_path / "posts")
        with pytest.raises(CheckpointError, match="made by"):
            await ranker.reloads.reload_corpus()
        with pytest.raises(NotStored, match="was replaced on the disk"):
            await ranker.corpus.change(change([2], []))
    async with process() as ranker:
        assert {1, 2} & await ids_of(ranker.corpus) == {2}
        with pytest.raises(NotStored, match="was replaced on the disk"):
            await ranker.corpus.change(change([2], []))


async def test_the_next_process_leaves_a_rollback_and_follows_the_link(tmp_path: Path) -> None:
    place = Place(tmp_path)
    process = partial(running, resume=tmp_path / "loaded.json", load=place.load, checkpoint=place.path)
    place.point("v2")
    async with process() as ranker:
        await ranker.reloads.reload("v1")
    async with process() as ranker:
        ranker.reloads.watch(0.01)
        await asyncio.sleep(0.1)
        assert ranker.model().manifest.version == "v1"
    place.point("v3")
    async with process() as ranker:
        ranker.reloads.watch(0.01)
        await until(lambda: ranker.model().manifest.version == "v3")


async def test_nothing_older_comes_back_if_what_served_was_not_saved(tmp_path: Path) -> None:
    place = Place(tmp_path)
    process = partial(running, resume=tmp_path / "loaded.json", load=place.load, checkpoint=place.path)
    for name in ("v2", "v3", "v1"):
        place.point(name)
    async with process() as ranker:
        await ranker.reloads.reload("v2")
        (tmp_path / "loaded.partial").mkdir()  # as on a full disk, nothing can be written
        with structlog.testing.capture_logs() as lines:
            await ranker.reloads.reload("v3")
        assert "reload_not_kept" in [line["event"] for line in lines]
    async with process() as ranker:
        assert ranker.model().manifest.version == "v1", "what the settings name"
