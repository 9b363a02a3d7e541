"""The admin interface: who may change what serves, what a name may mean, and what is told of a change."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
from starlette.testclient import TestClient

from app.main import create_admin_app
from app.queue.loading import LoadedModel
from app.queue.runners import Steps
from app.service.local import LocalService
from app.settings import Admin, Retrieval
from tests.support import corpora, rankers
from tests.support.fakes import Gate, load_by_name

pytestmark = pytest.mark.one_process("the admin ports are in the process that has the engine")

TOKEN = "correct horse"
GOOD = {"host": "localhost:9000", "authorization": f"Bearer {TOKEN}"}
ADMIN: dict[str, Any] = {"port": 0, "token_sha256": hashlib.sha256(TOKEN.encode()).hexdigest()}

Running = tuple[TestClient, LocalService]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("admin") / "root"
    for name in ("v1", "nested/v2", "refused", "empty", "../outside"):
        (root / name).mkdir(parents=True)
        if name != "empty":
            (root / name / "manifest.json").write_text("{}")
    (root / "escape").symlink_to(root.parent / "outside")
    (root / "circle").symlink_to("circle")
    (root / "deep").symlink_to(root.parent)
    return root


@pytest.fixture
def running(root: Path) -> Iterator[Running]:
    yield from administered(load=load_by_name, admin=Admin(**ADMIN, root=root), checkpoint=root / "v1")


@pytest.fixture
def retrieval(tmp_path: Path) -> Iterator[Running]:
    yield from administered(retrieval=corpora.setting(tmp_path), admin=Admin(**ADMIN, root=tmp_path))


def administered(**options: Any) -> Iterator[Running]:
    ranker = rankers.create(**options)
    with TestClient(create_admin_app(ranker.settings, ranker), base_url="http://localhost:9000") as client:
        assert client.portal is not None
        client.portal.call(ranker.start)  # type: ignore[arg-type]
        client.portal.call(ranker.wait_ready)
        yield client, ranker
        client.portal.call(ranker.stop, 1.0)


def reload(client: TestClient, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
    reply = client.post("/admin/reload", json=body, headers={**GOOD, **headers})
    return reply.status_code, reply.json()


def change(client: TestClient, **body: object) -> tuple[int, dict[str, Any]]:
    reply = client.post("/admin/posts", json=body, headers=GOOD)
    return reply.status_code, reply.json()


def test_a_named_checkpoint_is_reloaded_or_said_to_be_unchanged(running: Running) -> None:
    client, ranker = running
    assert reload(client, {}) == (200, {"model": named(ranker), "result": "unchanged"})
    assert reload(client, {"checkpoint": "nested/v2"}) == (200, {"model": named(ranker), "result": "reloaded"})
    assert ranker.model().manifest.version == "v2"
    assert client.post("/admin/reload", headers=GOOD).json()["result"] == "unchanged"
    assert rankers.figure(ranker, 'ranker_reloads_total{result="success"}') == 1
    assert rankers.figure(ranker, 'ranker_reloads_total{result="unchanged"}') == 2


def named(ranker: LocalService) -> Any:
    class Later:
        """Equal to what names the model that serves when this is compared."""

        def __eq__(self, other: object) -> bool:
            manifest = ranker.model().manifest
            return other == {"name": manifest.name, "version": manifest.version, "digest": manifest.digest}

    return Later()


def test_a_refused_checkpoint_says_why_and_the_old_one_serves(running: Running) -> None:
    client, ranker = running
    before = ranker.model()
    with structlog.testing.capture_logs() as lines:
        status, reply = reload(client, {"checkpoint": "refused"})
    assert (status, reply["code"], "digest differs" in reply["detail"]) == (422, "checkpoint_refused", True)
    assert [line["reason"] for line in lines if line["event"] == "reload_failed"] == [reply["detail"]]
    assert ranker.model() is before
    assert rankers.figure(ranker, 'ranker_reloads_total{result="failure"}') == 1


def test_a_second_reload_is_told_to_come_back(root: Path) -> None:
    gate = Gate()

    def load(path: Path, steps: Steps) -> LoadedModel:
        if path.name == "v2":
            gate(())
        return load_by_name(path, steps)

    options: dict[str, Any] = {"load": load, "admin": Admin(**ADMIN, root=root), "checkpoint": root / "v1"}
    with contextmanager(administered)(**options) as (client, _), ThreadPoolExecutor(1) as pool:
        first = pool.submit(reload, client, {"checkpoint": "nested/v2"})
        assert gate.entered.wait(10)
        reply = client.post("/admin/reload", headers=GOOD)
        assert (reply.status_code, reply.json()["code"]) == (409, "reload_in_progress")
        assert reply.headers["retry-after"] == "5"
        gate.opened.set()
        assert first.result()[1]["result"] == "reloaded"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Basic {TOKEN}"}, 401),
        ({"authorization": f"Bearer {TOKEN}x"}, 401),
        ({"host": "127.0.0.1.evil.example:9000"}, 400),
        ({"host": "evil.example", "authorization": "Bearer wrong"}, 400),
    ],
)
@pytest.mark.parametrize("path", ["/admin/reload", "/admin/posts"])
def test_strangers_are_turned_away_and_leave_a_line(
    running: Running, path: str, headers: dict[str, str], status: int
) -> None:
    with structlog.testing.capture_logs() as lines:
        reply = running[0].post(path, json={"checkpoint": "v1"}, headers={**GOOD, **headers})
    assert reply.status_code == status
    assert [line["status"] for line in lines if line["event"] == "request"] == [status]
    assert TOKEN not in str(lines) + reply.text
    assert "wrong" not in str(lines)


NO_NAMES = [
    "", ".", "..", "../outside", "nested/../v1", "/etc", "~/x", "escape", "circle", "deep/outside", "deep/root/../outside", "no-such",
    "empty", "v1\0", "v1\\x", "./v1", "x" * 5000, "%2e%2e/outside", "v1/manifest.json",
]  # fmt: skip


def test_a_name_means_nothing_outside_the_root(running: Running, root: Path) -> None:
    for name in (*NO_NAMES, str(root / "v1")):
        status, reply = reload(running[0], {"checkpoint": name})
        assert (status, reply["code"]) == (404, "not_found"), name
        assert str(root) not in reply["detail"]
    assert (root / "../outside/manifest.json").is_file(), "the guard is what turns it away"


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        *((body, {}, 422) for body in (b"[]", b'{"checkpoint": 5}', b'{"path": "v1"}', b'{"checkpoint": null}')),
        (b'{"checkpoint": "v1", "corpus": "posts"}', {}, 422),
        (b"{", {}, 400),
        (b"\xff", {}, 400),
        (gzip.compress(b"{}", mtime=0), {"content-encoding": "gzip"}, 415),
        (b'{"checkpoint": "v1"}', {"content-type": "text/plain"}, 415),
        (b"{}", {"content-length": "10000000"}, 413),
    ],
)
def test_other_bodies_are_refused(running: Running, body: bytes, headers: dict[str, str], status: int) -> None:
    kind = {"content-type": "application/json"}
    assert running[0].post("/admin/reload", content=body, headers=GOOD | kind | headers).status_code == status


def test_other_paths_and_methods_are_not_there(running: Running) -> None:
    assert running[0].get("/admin/reload", headers=GOOD).status_code == 405
    for path in ("/admin/other", "/admin/posts/compact", "/rank", "/metrics"):
        assert running[0].post(path, headers=GOOD).status_code == 404


def test_without_a_corpus_there_is_nothing_to_change(running: Running) -> None:
    for status, reply in (change(running[0], delete=[1]), reload(running[0], {"corpus": "v1"})):
        assert (status, reply["code"]) == (404, "no_corpus")


def test_posts_are_changed(retrieval: Running) -> None:
    client, ranker = retrieval
    status, reply = change(client, delete=[1, 2, 999_999])
    assert status == 200, reply
    before = reply["corpus"]["posts"]
    assert (reply["upserted"], reply["deleted"], reply["corpus"]["sequence"]) == (0, 2, 1)
    post = {"post_id": 1, "author_id": 5, "created_at": corpora.NOW, "topic": "news"}
    status, reply = change(client, upsert=[post])
    assert (status, reply["upserted"], reply["deleted"]) == (200, 1, 0)
    assert (reply["corpus"]["posts"], reply["corpus"]["sequence"]) == (before + 1, 2)
    assert rankers.figure(ranker, "ranker_corpus_posts") == before + 1


@pytest.mark.parametrize("body", [{}, {"delete": ["x"]}])
def test_a_change_that_is_not_right_changes_nothing(retrieval: Running, body: dict[str, object]) -> None:
    status, reply = change(retrieval[0], **body)
    assert (status, reply["code"]) == (422, "invalid_request")
    assert rankers.figure(retrieval[1], "ranker_corpus_sequence") == 0


@pytest.mark.parametrize(
    ("how", "status", "code", "seconds", "said"),
    [
        ("the disk is full", 507, "storage_full", "30", "No space left on device"),
        ("its file is gone", 503, "log_lost", "30", "was removed or replaced under this process"),
        ("the corpus was replaced", 503, "not_stored", "5", "was replaced on the disk; read it again"),
    ],
)
def test_a_change_that_cannot_be_stored_is_refused_with_why(
    retrieval: Running, monkeypatch: pytest.MonkeyPatch, how: str, status: int, code: str, seconds: str, said: str
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    client, ranker = retrieval
    corpus = ranker.settings.retrieval.corpus
    assert corpus is not None
    if how == "the disk is full":
        monkeypatch.setattr(os, "fsync", full)
    else:
        assert change(client, delete=[1])[0] == 200
        [lost] = corpus.glob("changes-*.sqlite") if how == "its file is gone" else [corpus / "manifest.json"]
        shutil.copy(lost, corpus / "copy")
        lost.unlink()
        if how == "the corpus was replaced":
            (corpus / "copy").rename(lost)
    reply = client.post("/admin/posts", json={"delete": [2]}, headers=GOOD)
    assert (reply.status_code, reply.json()["code"]) == (status, code)
    assert said in reply.json()["detail"]
    assert reply.headers["retry-after"] == seconds


def test_towers_and_corpus_are_changed_as_one(retrieval: Running, tmp_path: Path) -> None:
    client, ranker = retrieval
    settings: Retrieval = ranker.settings.retrieval
    assert settings.corpus is not None
    shutil.copytree(settings.corpus, tmp_path / "copy")
    status, reply = reload(client, {"corpus": "copy"})
    assert (status, reply["result"]) == (200, "unchanged")
    served = ranker.corpus.served
    assert reply["corpus"]["digest"] == served.corpus.digest
    assert reply["retrieval"]["digest"] == served.manifest.digest
    assert change(client, delete=[1])[0] == 200
    status, reply = reload(client, {"corpus": settings.corpus.name})  # whose changes differ
    assert (status, reply["result"]) == (200, "reloaded"), json.dumps(reply)
    assert reload(client, {"corpus": "nowhere"})[0] == 404
