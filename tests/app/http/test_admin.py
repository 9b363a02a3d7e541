"""B6: who may reload, and what a name may mean."""

from __future__ import annotations

import asyncio
import errno
import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from starlette.testclient import TestClient

from app.assembly import create_reloader
from app.engine.loading import LoadedModel, Loader, RetrievalLoader, Steps, retrieval_loader
from app.http.admin import create_admin_app
from app.interface import CheckpointNotFound, ReloadInProgress
from app.service import reload as reloading
from app.service.reload import Reloader
from app.service.service import RankingService
from app.settings import Admin, Settings, Shadow
from app.telemetry.metrics import Metrics
from tests.app import retrieving
from tests.app.fakes import FakeEngine, Gate, loaded, loader, ready, running, until
from tests.reliability.live import wait_until
from weights.checkpoint import load_manifest
from weights.errors import CheckpointError

pytestmark = pytest.mark.anyio
TOKEN = "correct horse"
GOOD = {"host": "localhost:9000", "authorization": f"Bearer {TOKEN}"}
SETTINGS = Admin(port=0, token_sha256=hashlib.sha256(TOKEN.encode()).hexdigest())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("admin")
    for name in ("root/v1", "root/nested/v2", "root/refused", "root/empty", "outside"):
        (tmp_path / name).mkdir(parents=True)
        if name != "root/empty":
            (tmp_path / name / "manifest.json").write_text("{}")
    (tmp_path / "root" / "escape").symlink_to(tmp_path / "outside")
    (tmp_path / "root" / "circle").symlink_to("circle")
    (tmp_path / "root" / "deep").symlink_to(tmp_path)
    return tmp_path / "root"


def by_name(path: Path) -> Loader:
    def load(steps: object) -> LoadedModel:
        if path.name == "refused":
            raise CheckpointError("params.safetensors: digest differs")
        return loaded(FakeEngine(2), path.name)

    return load


@pytest.fixture
def client(root: Path) -> Iterator[TestClient]:
    service = RankingService(loader(FakeEngine()), Settings(), Metrics())
    app = create_admin_app(SETTINGS, Reloader(service, root, root / "v1", by_name), service)
    with TestClient(app, base_url="http://localhost:9000") as client:
        assert client.portal is not None
        client.portal.call(service.start)
        client.portal.call(service.wait_ready)
        client.app_state["service"] = service  # type: ignore[attr-defined]
        yield client
        client.portal.call(service.stop, 1.0)


def reload(client: TestClient, name: object, **headers: str) -> tuple[int, dict[str, object]]:
    reply = client.post("/admin/reload", json={"checkpoint": name}, headers={**GOOD, **headers})
    return reply.status_code, reply.json()


def test_a_named_checkpoint_serves_afterwards(client: TestClient) -> None:
    status, reply = reload(client, "nested/v2")
    assert status == 200
    assert reply["model"]["name"] == "fake"  # type: ignore[index]
    service = client.app_state["service"]  # type: ignore[attr-defined]
    assert service.model.manifest.version == "v2"
    assert 'ranker_reloads_total{result="success"} 1.0' in service.metrics.render().decode()
    assert reply["result"] == "reloaded"


def test_a_reload_that_changed_nothing_says_so(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    """A mount that is the checkpoint itself still shows the old files after a rename: nobody may be told that it was reloaded."""
    assert reload(client, "nested/v2")[1]["result"] == "reloaded"
    assert reload(client, "v1")[1]["result"] == "reloaded"
    capsys.readouterr()
    reply = client.post("/admin/reload", headers=GOOD).json()
    assert (reply["model"]["version"], reply["result"]) == ("v1", "unchanged")
    service = client.app_state["service"]  # type: ignore[attr-defined]
    assert 'ranker_reloads_total{result="unchanged"} 1.0' in service.metrics.render().decode()
    out = capsys.readouterr().out
    assert "unchanged" in out
    assert "reloaded" not in out


def test_a_refused_checkpoint_says_why_and_the_old_one_serves(client: TestClient) -> None:
    service = client.app_state["service"]  # type: ignore[attr-defined]
    before = service.model
    status, reply = reload(client, "refused")
    assert (status, reply["code"]) == (422, "checkpoint_refused")
    assert "digest differs" in str(reply["detail"])
    assert service.model is before
    assert 'ranker_reloads_total{result="failure"} 1.0' in service.metrics.render().decode()


def test_a_second_reload_is_told_to_come_back(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy(*_: object) -> None:
        raise ReloadInProgress

    monkeypatch.setattr(Reloader, "reload", busy)
    reply = client.post("/admin/reload", headers=GOOD)
    assert (reply.status_code, reply.json()["code"], reply.headers["retry-after"]) == (409, "reload_in_progress", "5")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Basic {TOKEN}"}, 401),
        ({"authorization": f"Bearer {TOKEN}x"}, 401),
        ({"host": "evil.example"}, 404),
        ({"host": "evil.example:9000"}, 404),
        ({"host": "localhost.evil.example"}, 404),
        ({"host": "127.0.0.1.evil.example:9000"}, 404),
        ({"host": ""}, 404),
        ({"host": "evil.example", "authorization": "Bearer wrong"}, 404),
    ],
)
def test_strangers_are_turned_away_and_leave_a_line(
    client: TestClient, headers: dict[str, str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found, reply = reload(client, "v1", **headers)
    out = capsys.readouterr().out
    assert (found, reply["code"]) == (status, "unauthorized" if status == 401 else "not_found")
    assert str(reply["request_id"]) in out
    assert str(reply["code"]) in out
    assert TOKEN not in str(reply) + out
    assert "wrong" not in out


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:9000", "[::1]:9000"])
def test_local_names_are_let_in(client: TestClient, host: str) -> None:
    assert reload(client, "v1", host=host)[0] == 200


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../outside", "v1/../../outside", "nested/../v1", "/etc", "//etc", "~/x", "escape", "circle", "deep/outside",
        "deep/root/../outside", "no-such", "empty", "v1\0", "v1\\..\\..", "./v1", "x" * 5000, "%2e%2e/outside", "v1/manifest.json",
    ],
)  # fmt: skip
def test_a_name_means_nothing_outside_the_root(client: TestClient, root: Path, name: str) -> None:
    status, reply = reload(client, name)
    assert status in (404, 413)
    assert str(root) not in str(reply)


def test_the_guard_is_what_turns_them_away(client: TestClient, root: Path) -> None:
    """The negative controls: joining names without the guard reaches what lies outside, and a name of what is inside is one."""
    assert reload(client, str(root / "v1"))[0] == 404
    assert reload(client, "v1")[0] == 200
    assert (root / "../outside" / "manifest.json").is_file()
    assert (root / "escape" / "manifest.json").is_file()
    with pytest.raises(CheckpointNotFound):
        Reloader(None, root, root, by_name).resolve("escape")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        *((body, {}, 422) for body in (b"[]", b'{"checkpoint": 5}', b'{"path": "v1"}', b'{"checkpoint": null}')),
        (b"{", {}, 400),
        (b"\xff", {}, 400),
        (gzip.compress(b"{}", mtime=0), {"content-encoding": "gzip"}, 415),
        (b'{"checkpoint": "v1"}', {"content-type": "text/plain"}, 415),
        (b"{}", {"content-length": "4097"}, 413),
    ],
)
def test_other_bodies_are_refused(client: TestClient, body: bytes, headers: dict[str, str], status: int) -> None:
    kind = {"content-type": "application/json"}
    assert client.post("/admin/reload", content=body, headers=GOOD | kind | headers).status_code == status


def test_a_fault_of_ours_is_told_and_logged(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("where the key lies")

    monkeypatch.setattr(Reloader, "reload", fail)
    status, reply = reload(client, "v1")
    out = capsys.readouterr().out
    assert (status, reply["code"]) == (500, "internal")
    assert "RuntimeError" in out
    assert "where the key lies" not in out + str(reply)


def test_other_paths_and_methods_are_not_there(client: TestClient) -> None:
    assert client.get("/admin/reload", headers=GOOD).status_code == 405
    assert client.post("/admin/other", headers=GOOD).status_code == 404


Turns = Callable[[int], Awaitable[None]]


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """Waits until a watch of 0.01 s has slept so many times more: one time fewer it has looked."""
    slept, sleep = [0], asyncio.sleep

    async def counted(seconds: float) -> None:
        await sleep(seconds)
        slept[0] += seconds == 0.01

    monkeypatch.setattr(asyncio, "sleep", counted)

    async def wait(more: int) -> None:
        goal = slept[0] + more
        await until(lambda: slept[0] >= goal)

    return wait


def test_the_watch_loads_a_new_manifest_once_and_does_not_retry_a_refused_one(tmp_path: Path, turns: Turns) -> None:
    place, loads = tmp_path / "model", []

    def load(path: Path) -> Loader:
        loads.append(path.resolve().name)
        return by_name(path.resolve())

    def point(name: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "manifest.json").write_text(name)
        fresh = tmp_path / "fresh"
        fresh.symlink_to(tmp_path / name)
        fresh.rename(place)

    async def main() -> None:
        point("v1")
        service = await ready(loader(FakeEngine()))
        reloader = Reloader(service, tmp_path, place, load)
        reloader.watch(0.01)
        await turns(3)
        assert loads == []
        point("refused")
        await until(lambda: loads == ["refused"])
        point("v3")
        await until(lambda: service.model.manifest.version == "v3")
        assert loads == ["refused", "v3"]
        reloader.stop()
        await service.stop(1.0)
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()}, 5.0)  # nothing looks any more

    asyncio.run(main())


async def test_the_watch_does_not_load_again_what_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that was written anew as it was."""
    place, looked, loads, digest = tmp_path / "model", [], [], reloading._digest
    place.mkdir()

    def write(version: str) -> None:
        (tmp_path / "fresh").write_bytes(loaded(FakeEngine(), version).checkpoint.manifest.to_json())
        (tmp_path / "fresh").rename(place / "manifest.json")

    def load(path: Path) -> Loader:
        loads.append(version := load_manifest(path).version)
        return loader(FakeEngine(), version)

    def once_more() -> bool:
        write("v1")
        return bool(looked or loads)

    monkeypatch.setattr(reloading, "_digest", lambda path: looked.append(path) or digest(path))
    write("v1")
    async with running(FakeEngine()) as service:
        reloader = Reloader(service, tmp_path, place, load)
        reloader.watch(0.01)
        await until(once_more)
        write("v2")
        await until(lambda: service.model.manifest.version == "v2")
        assert loads == ["v2"]
        reloader.stop()


async def test_the_watch_goes_on_after_a_change_during_the_first_load_or_another_reload(
    tmp_path: Path, turns: Turns
) -> None:
    place, gate = tmp_path / "model", Gate()
    place.mkdir()

    def write(name: str) -> None:
        (tmp_path / "fresh").write_text(name)
        (tmp_path / "fresh").rename(place / "manifest.json")

    def first(steps: Steps) -> LoadedModel:
        gate(None)
        return loaded(FakeEngine())

    def load(path: Path) -> Loader:
        return loader(FakeEngine(), f"v{(path / 'manifest.json').read_text()}")

    write("1")
    service = RankingService(first, Settings(), Metrics())
    service.start()
    await gate.reached()
    reloader = Reloader(service, tmp_path, place, load)
    reloader.watch(0.01)
    await turns(1)
    write("2")
    await turns(3)
    gate.opened.set()
    await until(lambda: service.versions.current is not None and service.model.manifest.version == "v2")

    other = Gate()
    swap = asyncio.ensure_future(service.swap(lambda steps: (other(None), loaded(FakeEngine(), "v3"))[1]))
    await other.reached()
    write("4")
    await until(lambda: service.metrics.reloads.labels("failure")._value.get() > 0)
    other.opened.set()
    await swap
    await until(lambda: service.model.manifest.version == "v4")
    reloader.stop()
    await service.stop(1.0)


async def test_a_reload_before_the_first_load_has_ended_does_not_end_the_process(tmp_path: Path) -> None:
    paths, gates = retrieving.written(tmp_path), (Gate(), Gate())

    def first(steps: Steps) -> LoadedModel:
        gates[0](None)
        return loaded(FakeEngine())

    def load(checkpoint: Path, corpus: Path) -> RetrievalLoader:
        load = retrieval_loader(checkpoint, corpus, Settings(threads=1))
        return lambda: (gates[1](None), load())[1]

    service = RankingService(first, Settings(), Metrics(), retrieval=load(*paths))
    reloader = Reloader(service, tmp_path, tmp_path / "none", by_name, paths, load)
    service.start()
    await gates[0].reached()
    with pytest.raises(ReloadInProgress):
        await reloader.reload_retrieval()
    reloader.reload_soon()
    await until(lambda: service.metrics.reloads.labels("failure")._value.get() == 3)
    gates[0].opened.set()
    await gates[1].reached()
    gates[1].opened.set()
    await service.wait_ready()
    assert service.retrieval.served.corpus.version == "v1"
    await service.stop(1.0)


@pytest.fixture
def retrieving_client(tmp_path: Path) -> Iterator[tuple[TestClient, RankingService]]:
    """An admin port of a service that serves towers-v1 and corpus-v1; v2 of both lies beside them."""
    for seed, version in enumerate(("v1", "v2")):
        retrieving.written(tmp_path, seed, version)
    paths = tmp_path / "towers-v1", tmp_path / "corpus-v1"

    def load(checkpoint: Path, corpus: Path) -> RetrievalLoader:
        return retrieval_loader(checkpoint, corpus, Settings(threads=1))

    service = RankingService(loader(FakeEngine()), Settings(), Metrics(), retrieval=load(*paths))
    reloader = Reloader(service, tmp_path, tmp_path / "none", by_name, paths, load)
    with TestClient(create_admin_app(SETTINGS, reloader, service), base_url="http://localhost:9000") as client:
        assert client.portal is not None
        client.portal.call(service.start)
        client.portal.call(service.wait_ready)
        yield client, service
        client.portal.call(service.stop, 1.0)


@pytest.mark.parametrize("by", ["name", "watch"])
def test_a_copy_of_the_corpus_without_its_changes_is_not_what_served_before(
    retrieving_client: tuple[TestClient, RankingService], tmp_path: Path, turns: Turns, by: str
) -> None:
    """It brings back what was deleted. The copy is beside the corpus, or takes its place under a watch."""
    client, service = retrieving_client
    place, towers = tmp_path / "corpus-v1", tmp_path / "towers-v1"
    shutil.copytree(place, tmp_path / "copy")
    assert client.post("/admin/posts", json={"delete": [1]}, headers=GOOD).json()["deleted"] == 1
    again = client.post("/admin/reload", json={"corpus": "corpus-v1"}, headers=GOOD)
    assert again.json()["result"] == "unchanged"

    async def replaced() -> None:
        reloader = Reloader(
            service, tmp_path, tmp_path / "none", by_name, (towers, place),
            lambda *paths: retrieval_loader(*paths, Settings(threads=1)),
        )  # fmt: skip
        reloader.watch(0.01)
        await turns(2)
        place.rename(tmp_path / "old")
        (tmp_path / "copy").rename(place)
        await until(lambda: changes() == 0)
        reloader.stop()

    def changes() -> int:
        state = service.retrieval.state()
        return -1 if state is None else state.mark.sequence

    assert changes() == 1
    if by == "watch":
        assert client.portal is not None
        client.portal.call(replaced)
    else:
        reply = client.post("/admin/reload", json={"corpus": "copy"}, headers=GOOD)
        assert reply.json()["result"] == "reloaded"
    assert changes() == 0
    counts = [service.metrics.reloads.labels(result)._value.get() for result in ("success", "unchanged")]
    assert counts == [1, 1]


def test_the_second_checkpoint_is_changed_by_name_by_signal_and_by_watching(tmp_path: Path) -> None:
    """And a first one of the same root stays what it is. Without a second one that is a sentence."""
    for name in ("v1", "b", "c", "refused"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    settings = Settings(shadow=Shadow(checkpoint=tmp_path / "b"))
    service = RankingService(loader(FakeEngine()), settings, Metrics(), second=by_name(tmp_path / "b"))
    reloader = Reloader(
        service, tmp_path, tmp_path / "v1", by_name, second=tmp_path / "b", second_loader=by_name
    )  # fmt: skip

    def held() -> str:
        assert service.second is not None
        return "" if service.second.model is None else service.second.model.manifest.version

    async def replaced(begin: Callable[[], None], later: Callable[[], object] = lambda: None) -> None:
        """The same name again is another model, by identity."""
        assert service.second is not None
        before = service.second.model
        begin()
        await asyncio.sleep(0.1)
        later()
        await until(lambda: service.second is not None and service.second.model is not before)
        reloader.stop()

    with TestClient(create_admin_app(SETTINGS, reloader, service), base_url="http://localhost:9000") as client:
        assert client.portal is not None
        client.portal.call(service.start)
        client.portal.call(service.wait_ready)
        wait_until(lambda: held() == "b")
        reply = client.post("/admin/reload", json={"second": "c"}, headers=GOOD)
        assert (reply.status_code, reply.json()["second"]["version"], held()) == (200, "c", "c")
        reply = client.post("/admin/reload", json={"second": "refused"}, headers=GOOD)
        assert (reply.status_code, held()) == (422, "c")
        assert "digest differs" in reply.json()["detail"]
        assert client.post("/admin/reload", json={"second": "elsewhere"}, headers=GOOD).status_code == 404
        assert client.post("/admin/reload", json={"second": "b", "checkpoint": "v1"}, headers=GOOD).status_code == 422
        assert service.model.manifest.version == "v1"
        client.portal.call(replaced, reloader.reload_soon)

        touch = partial((tmp_path / "c" / "manifest.json").write_text, "{} ")
        client.portal.call(replaced, partial(reloader.watch, 0.01), touch)
        client.portal.call(service.stop, 1.0)


async def test_a_reload_that_changed_nothing_says_so_whatever_else_was_reloaded_meanwhile(tmp_path: Path) -> None:
    for name in ("b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    gate = Gate()

    def slow(path: Path) -> Loader:
        return lambda steps: (gate(None), loaded(FakeEngine()))[1]

    settings = Settings(shadow=Shadow(checkpoint=tmp_path / "b"))
    service = await ready(loader(FakeEngine()), settings, second=by_name(tmp_path / "b"))
    await until(lambda: service.second is not None and service.second.model is not None)
    reloader = Reloader(
        service, tmp_path, tmp_path / "b", slow, second=tmp_path / "b", second_loader=by_name
    )  # fmt: skip
    first = asyncio.ensure_future(reloader.reload())
    await gate.reached()
    await reloader.reload(tmp_path / "c", second=True)
    gate.opened.set()
    await first
    told = {result: service.metrics.reloads.labels(result)._value.get() for result in ("success", "unchanged")}
    assert told == {"success": 1, "unchanged": 1}
    await service.stop(1.0)


def test_names_that_cannot_be_kept_do_not_fail_a_reload(client: TestClient, root: Path, tmp_path: Path) -> None:
    """The next engine process then serves what it did before: the log says so."""
    service: RankingService = client.app_state["service"]  # type: ignore[attr-defined]
    reloader = Reloader(service, root, root / "v1", by_name)
    reloader.names = tmp_path / "gone" / "engine.json"
    assert client.portal is not None
    with structlog.testing.capture_logs() as lines:
        client.portal.call(partial(reloader.reload, root / "nested" / "v2"))
    assert service.model.manifest.version == "v2"
    assert {"event": "reload_not_kept", "reason": "No such file or directory", "log_level": "error"} in lines


def test_towers_and_corpus_are_changed_as_one(retrieving_client: tuple[TestClient, RankingService]) -> None:
    client, service = retrieving_client

    def ask(**names: str) -> tuple[int, str]:
        reply = client.post("/admin/reload", json=names, headers=GOOD)
        return reply.status_code, reply.text

    def served() -> tuple[str, str]:
        now = service.retrieval.served
        return now.manifest.version, now.corpus.version

    status, text = ask(corpus="corpus-v2")
    assert (status, "were made by towers v2" in text, served()) == (422, True, ("v1", "v1")), text
    status, text = ask(retrieval="towers-v2")
    assert (status, "were made by towers v1" in text, served()) == (422, True, ("v1", "v1")), text
    status, text = ask(retrieval="towers-v2", corpus="corpus-v2")
    assert (status, served()) == (200, ("v2", "v2"))
    before = service.retrieval.served
    said = {"retrieval": before.manifest, "corpus": before.corpus}
    assert json.loads(text) == {"result": "reloaded"} | {
        what: {"name": each.name, "version": "v2", "digest": each.digest} for what, each in said.items()
    }
    assert (ask(corpus="corpus-v2")[0], served()) == (200, ("v2", "v2"))
    assert service.retrieval.served is not before, "the present towers with a corpus read again"
    assert ask(corpus="nothing")[0] == 404
    assert ask(checkpoint="towers-v2", corpus="corpus-v2")[0] == 422
    assert 'ranker_reloads_total{result="failure"} 2.0' in service.metrics.render().decode()


@pytest.mark.parametrize(
    ("name", "status", "code", "said"),
    [("second", 422, "checkpoint_refused", "RANKER_SHADOW__CHECKPOINT"), ("corpus", 503, "corpus_not_loaded", "")],
)
def test_what_is_not_served_is_not_changed(client: TestClient, name: str, status: int, code: str, said: str) -> None:
    reply = client.post("/admin/reload", json={name: "v1"}, headers=GOOD)
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert said in reply.json()["detail"]


def change(client: TestClient, **body: object) -> tuple[int, dict[str, Any]]:
    reply = client.post("/admin/posts", json=body, headers=GOOD)
    return reply.status_code, reply.json()


def test_posts_are_changed(retrieving_client: tuple[TestClient, RankingService], tmp_path: Path) -> None:
    client, _ = retrieving_client
    new = [
        {"post_id": str(2**64 - 1), "author_id": 3, "created_at": 60, "topic": "sport"},
        {"post_id": 9, "author_id": 4},
    ]
    status, reply = change(client, upsert=new, delete=[1, "2", 12345])
    assert (status, reply["upserted"], reply["deleted"]) == (200, 2, 2)
    assert reply["corpus"] == {"name": "posts", "version": "v1", "posts": 299 - 2 + 1, "changes": 1, "sequence": 1}
    assert change(client, delete=[1])[1]["deleted"] == 0
    before = (tmp_path / "corpus-v1").glob("changes-*.log")
    assert len(list(before)) == 1
    # read again, with its log
    assert client.post("/admin/reload", json={"corpus": "corpus-v1"}, headers=GOOD).status_code == 200
    status, reply = change(client, delete=["9"])
    assert (status, reply["deleted"]) == (200, 1)
    assert reply["corpus"] == {"name": "posts", "version": "v1", "posts": 299 - 2, "changes": 3, "sequence": 3}


WRONG: list[tuple[dict[str, object], int]] = [
    ({}, 422), ({"delete": []}, 422), ({"delete": [-1]}, 422), ({"delete": ["x"]}, 422), ({"delete": [1, "1"]}, 422),
    ({"delete": 1}, 422), ({"upsert": [{"post_id": 1}]}, 422), ({"upsert": [{"post_id": 0, "author_id": 1}]}, 422),
    ({"upsert": [{"post_id": 1, "author_id": 1}], "delete": [1]}, 422), ({"surprise": 1}, 422),
    ({"upsert": [{"post_id": 1, "author_id": 1, "topic": ""}]}, 422), ({"upsert": None}, 422),
    ({"upsert": [{"post_id": 1, "author_id": 1, "created_at": -1}]}, 422), ({"delete": list(range(1, 10_002))}, 413),
]  # fmt: skip


def test_a_change_that_is_not_right_changes_nothing(
    retrieving_client: tuple[TestClient, RankingService], tmp_path: Path
) -> None:
    assert [change(retrieving_client[0], **body)[0] for body, _ in WRONG] == [status for _, status in WRONG]
    assert not list((tmp_path / "corpus-v1").glob("changes-*.log"))


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OSError(errno.ENOSPC, "no"), 507, "storage_full"),
        (OSError(errno.EROFS, "no"), 507, "storage_full"),
        (MemoryError(), 503, "engine_down"),
    ],
    ids=repr,
)
def test_a_change_that_cannot_be_stored_is_refused_for_now(
    retrieving_client: tuple[TestClient, RankingService],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    status: int,
    code: str,
) -> None:
    """A compaction says the same."""
    client, _ = retrieving_client

    def opened(path: Any, flags: int, *arguments: Any, **further: Any) -> int:
        if flags & (os.O_RDWR | os.O_WRONLY) and Path(path).name.startswith("changes-"):
            raise error
        return real(path, flags, *arguments, **further)

    real = os.open
    assert change(client, delete=[5])[0] == 200
    assert client.post("/admin/reload", json={"corpus": "corpus-v1"}, headers=GOOD).status_code == 200
    monkeypatch.setattr(os, "open", opened)
    for path, body in (("/admin/posts", {"delete": [1]}), ("/admin/posts/compact", None)):
        reply = client.post(path, json=body, headers=GOOD) if body else client.post(path, headers=GOOD)
        assert (reply.status_code, reply.json()["code"]) == (status, code), reply.text
        assert reply.headers["retry-after"]
    monkeypatch.undo()
    assert change(client, delete=[1])[1]["deleted"] == 1


def test_who_may_change_posts(client: TestClient, retrieving_client: tuple[TestClient, RankingService]) -> None:
    posts, _ = retrieving_client

    def status(headers: dict[str, str], content: bytes = b'{"delete": [1]}') -> int:
        kind = {"content-type": "application/json"}
        return posts.post("/admin/posts", content=content, headers=GOOD | kind | headers).status_code

    assert status({"authorization": "Bearer x"}) == 401
    assert status({"host": "evil.example"}) == 404
    assert status({}, b"{") == 400
    assert change(client, delete=[1])[0] == 503, "no corpus"
    compaction = posts.post("/admin/posts/compact", json={"delete": [1]}, headers=GOOD)
    assert (compaction.status_code, compaction.json()["detail"]) == (422, "must be empty")


def test_a_link_that_was_changed_is_followed_when_the_present_one_is_read_again(root: Path) -> None:
    """As SIGHUP does; unless it leads out of the root now."""
    loads: list[str] = []

    def load(path: Path) -> Loader:
        loads.append(path.name)
        return by_name(path)

    def point(target: Path) -> None:
        (root / "fresh").symlink_to(target)
        (root / "fresh").rename(root / "current")

    async def main() -> None:
        service = await ready(loader(FakeEngine()))
        reloader = Reloader(service, root, root / "v1", load)
        point(root / "v1")
        await reloader.reload(reloader.resolve("current"))
        point(root / "nested" / "v2")
        await reloader.reload()
        point(root.parent / "outside")
        with pytest.raises(CheckpointNotFound):
            await reloader.reload()
        assert service.model.manifest.version == "v2"
        await service.stop(1.0)

    try:
        asyncio.run(main())
    finally:
        (root / "current").unlink()
    assert loads == ["v1", "v2"]


def test_by_default_reloads_are_named_beside_the_first_checkpoint_and_never_from_the_very_top() -> None:
    service = RankingService(loader(FakeEngine()), Settings(), Metrics())
    roots = {
        place: create_reloader(service, Settings(checkpoint=Path(place))).root for place in ("/a/b", "/weights", "/")
    }
    assert roots == {"/a/b": Path("/a"), "/weights": Path("/weights"), "/": Path("/")}
    assert create_reloader(service, Settings(checkpoint=Path("/weights"), admin=Admin(root=Path("/a")))).root == Path(
        "/a"
    )
