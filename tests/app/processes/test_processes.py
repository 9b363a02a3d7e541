"""Two workers before one engine process, as operators run them: they rank as one process does, and any of them may be killed."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from app.main import create_app
from app.processes.parent import directory, with_copied_config
from app.settings import Retrieval, Settings, load_settings
from loadtest.machine import ROOT
from loadtest.server import DEMO, POSTS, TOWERS, Server, example, free_port, serving, total, wait_until
from tests.app.api.live import head
from tests.support.asgi import ADDRESS
from tests.support.checkpoints import one_and_two
from tests.support.clients import Replies, Reply, callers

TOKEN = "a token of this test"


@pytest.fixture(scope="module")
def one() -> Iterator[TestClient]:
    """The same in this process."""
    app = create_app(Settings(checkpoint=DEMO, retrieval=Retrieval(checkpoint=TOWERS, corpus=POSTS)))
    with TestClient(app, base_url=ADDRESS) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200, 100)
        yield client


@pytest.fixture(scope="module")
def admin_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What reloads may name."""
    folder = one_and_two(tmp_path_factory.mktemp("checkpoints"))
    shutil.copytree(TOWERS, folder / "towers")
    shutil.copytree(POSTS, folder / "posts")
    return folder


@pytest.fixture(scope="module")
def several(admin_port: int, root: Path) -> Iterator[Server]:
    settings: dict[str, Any] = {"admin__port": admin_port, "admin__root": root, "drain__delay_seconds": 2}
    settings["admin__token_sha256"] = hashlib.sha256(TOKEN.encode()).hexdigest()
    with serving(root / "one", retrieval=True, workers=2, **settings) as server:
        yield server


def children(server: Server) -> dict[str, list[int]]:
    """Process ids by part."""
    listed = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    roles: dict[str, list[int]] = {"engine": [], "worker": []}
    for pid in map(int, listed):
        with suppress(OSError, StopIteration):  # it has ended just now
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            role = next(json.loads(each.partition("=")[2]) for each in environment if each.startswith("_RANKER_ROLE="))
            roles["worker" if role["worker"] else "engine"].append(pid)
    return roles


@pytest.mark.slow
def test_workers_give_way_to_the_engine_process(several: Server) -> None:
    """Else, where processors are scarce, they read what is refused while what was admitted is not computed."""
    roles = children(several)
    niceness = {pid: os.getpriority(os.PRIO_PROCESS, pid) for pids in roles.values() for pid in pids}
    assert min(niceness[pid] for pid in roles["worker"]) > max(niceness[pid] for pid in roles["engine"])


def plain(reply: httpx.Response) -> Any:
    content = reply.json()
    return {name: value for name, value in content.items() if name not in ("timings_ms", "context", "request_id")}


def test_a_log_line_says_which_process_wrote_it(several: Server) -> None:
    def writers(event: str) -> set[int | None]:
        return {line.get("worker") for line in several.log_lines if line["event"] == event}

    assert several.post("/rank", example()).status_code == 200
    wait_until(lambda: writers("request"))
    assert writers("request") <= {1, 2}
    assert writers("corpus_loaded") == {0}, "the engine process"


@pytest.mark.parametrize("path", ["/rank", "/rank/batch", "/context", "/retrieve", "/recommend", "/explain", "/v2"])
def test_every_endpoint_gives_what_one_process_gives(one: TestClient, several: Server, path: str) -> None:
    body = example()
    search = {name: value for name, value in body.items() if name != "candidates"} | {"k": 9}
    bodies = {
        "/rank": body,
        "/rank/batch": {"requests": [body, {"user_id": -1}]},
        "/context": {name: body[name] for name in ("user_id", "history")},
        "/retrieve": search,
        "/recommend": search,
        "/explain": body | {"explain": [body["candidates"][0]["post_id"]]},
    }
    if path == "/v2":
        assert one.get("/v2/models/demo").json() == several.get("/v2/models/demo").json()
        return
    theirs, ours = one.post(path, json=bodies[path]), several.post(path, bodies[path])
    assert (theirs.status_code, ours.status_code) == (200, 200), ours.text
    if path == "/rank/batch":
        theirs_plain, ours_plain = (
            [{"candidates": each.get("candidates")} for each in reply.json()["results"]] for reply in (theirs, ours)
        )
        assert ours_plain == theirs_plain
        return
    assert plain(ours) == plain(theirs)


def test_a_context_that_one_worker_told_is_known_to_all(several: Server) -> None:
    body = example()
    handle = several.post("/context", {name: body[name] for name in ("user_id", "history")}).json()["context"]
    named = {"context": handle, "candidates": body["candidates"], "impression_ts": body["impression_ts"]}
    whole = several.post("/rank", body).json()["candidates"]
    for _ in range(8):
        assert several.post("/rank", named).json()["candidates"] == whole
    assert several.post("/rank", named | {"context": "0" * 32}).status_code == 412


def test_metrics_hold_the_workers_and_the_engine_with_labels(several: Server) -> None:
    for _ in range(20):
        several.post("/rank", example())
    assert several.metric("ranker_http_requests_total") >= 20
    assert several.metric("ranker_stage_duration_seconds_count", stage="forward") >= 20
    text = several.get("/metrics").text
    assert 'worker="1"' in text
    assert 'worker="2"' in text


def test_a_reload_on_the_admin_port_reaches_every_worker(several: Server, admin_port: int) -> None:
    with asking(several) as replies:
        for name in ("two", "one"):
            version = reloaded(admin_port, name)
            wait_until(lambda version=version: versions(several) == {version})
            more(replies)
    assert replies.statuses == {200}
    assert replies.broken == 0
    scores: dict[str, Any] = {}
    for content in map(Reply.json, replies.all):
        assert scores.setdefault(content["model"]["version"], content["candidates"]) == content["candidates"]
    assert len(scores) == 2


def reloaded(admin_port: int, name: str) -> str:
    """Have another checkpoint served; its version."""
    url, headers = f"http://127.0.0.1:{admin_port}/admin/reload", {"authorization": f"Bearer {TOKEN}"}
    reply = httpx.post(url, json={"checkpoint": name}, headers=headers, timeout=60)
    assert reply.status_code == 200, reply.text
    version: str = reply.json()["model"]["version"]
    return version


def versions(server: Server) -> set[str]:
    """Those that twelve connections are told, which come to either worker."""
    return {server.get("/info").json()["model"]["version"] for _ in range(12)}


@contextmanager
def asking(server: Server) -> Iterator[Replies]:
    """Four callers of /rank, as soon as they have their first answers."""
    with callers(server, lambda turn: json.dumps(example()).encode(), 4, pause=0.01) as replies:
        more(replies)
        yield replies


def more(replies: Replies) -> None:
    """Wait for forty more rankings."""
    enough = len(replies.of(200)) + 40
    wait_until(lambda: len(replies.of(200)) >= enough)


@pytest.mark.slow
def test_the_serving_checkpoint_ranks_after_many_corpus_loads(several: Server, admin_port: int) -> None:
    """And the other way round: a worker forgets what was replaced, never what serves."""
    url, headers = f"http://127.0.0.1:{admin_port}/admin/reload", {"authorization": f"Bearer {TOKEN}"}
    search = {name: value for name, value in example().items() if name != "candidates"} | {"k": 9}
    posts = {"retrieval": "towers", "corpus": "posts"}
    for body in (posts, {}, posts):
        for _ in range(6):
            assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
        for _ in range(8):  # connections come to either worker
            assert several.post("/rank", example()).status_code == 200
            assert several.post("/retrieve", search).status_code == 200


def test_a_worker_waits_a_moment_for_a_change_of_posts(several: Server, admin_port: int) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    search = {name: value for name, value in example().items() if name != "candidates"} | {"k": 9}
    url, body = f"http://127.0.0.1:{admin_port}/admin/posts", {"delete": ["1"]}

    def read_before_written() -> list[int]:
        """The statuses of both endpoints, asked for a change just before it is made."""
        sequence = several.get("/info").json()["retrieval"]["corpus"]["sequence"] + 1
        with ThreadPoolExecutor() as pool:
            own = [
                pool.submit(several.post, path, search, x_corpus_at_least=str(sequence))
                for path in ("/retrieve", "/recommend")
            ]
            time.sleep(0.1)  # both wait by now
            assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
            return [each.result().status_code for each in own]

    assert any(read_before_written() == [200, 200] for _ in range(5)), "on a busy machine a change may take longer"


def test_a_killed_worker_is_restarted_while_the_others_serve(several: Server) -> None:
    with asking(several) as replies:
        before = children(several)["worker"]
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(children(several)["worker"]) == 2 and before[0] not in children(several)["worker"], 30)
        more(replies)
    assert replies.statuses <= {200, 503}
    assert replies.broken <= 4  # at most what it was answering
    assert several.post("/rank", example()).status_code == 200


@pytest.mark.slow
def test_a_killed_engine_process_restarts_with_what_it_served(several: Server, admin_port: int) -> None:
    version = reloaded(admin_port, "two")
    wait_until(lambda: versions(several) == {version})
    right = several.post("/rank", example()).json()["candidates"]
    with asking(several) as replies:
        os.kill(children(several)["engine"][0], signal.SIGKILL)
        wait_until(lambda: several.get("/readyz").status_code == 503, 10)
        wait_until(lambda: several.get("/readyz").status_code == 200, 90)
        more(replies)
    assert replies.statuses <= {200, 503}
    assert replies.broken == 0
    assert all(reply.json()["candidates"] == right for reply in replies.of(200))
    assert versions(several) == {version}


@pytest.mark.slow
def test_a_damaged_reload_brings_back_what_the_settings_name(several: Server, admin_port: int, root: Path) -> None:
    first, second = reloaded(admin_port, "one"), reloaded(admin_port, "two")
    (root / "one").rename(
        root / "away"
    )  # what the settings name is gone: the engine process begins with what it served
    engine_killed(several)
    assert versions(several) == {second}
    (root / "away").rename(root / "one")
    (root / "two" / "params.safetensors").write_bytes(b"damaged")
    engine_killed(several)
    assert versions(several) == {first}
    assert any(line["event"] == "reload_not_kept" for line in several.log_lines)


def engine_killed(server: Server) -> None:
    """Wait for the next one to be ready."""
    os.kill(children(server)["engine"][0], signal.SIGKILL)
    wait_until(lambda: server.get("/readyz").status_code == 503, 10)
    wait_until(lambda: server.get("/readyz").status_code == 200, 90)


@pytest.mark.slow
def test_a_lost_engine_process_comes_back_beside_a_refused_link(tmp_path: Path) -> None:
    """It serves what it served, and says again that what the link leads to is refused."""
    one_and_two(tmp_path)
    (tmp_path / "two" / "params.safetensors").write_bytes(b"damaged")
    link, fresh = tmp_path / "current", tmp_path / "fresh"
    link.symlink_to(tmp_path / "one")
    with serving(link, workers=2, reload__watch_seconds=0.2) as server:
        before = versions(server)
        fresh.symlink_to(tmp_path / "two")
        fresh.rename(link)

        def refusals() -> int:
            return sum(line["event"] == "reload_failed" for line in server.log_lines)

        wait_until(lambda: refusals() == 1, 20, server)
        engine_killed(server)
        assert versions(server) == before
        wait_until(lambda: refusals() == 2, 20, server)


def test_a_process_that_cannot_be_started_is_tried_again(several: Server) -> None:
    """The parent has no descriptor left when a worker ends."""
    before, parent = children(several)["worker"], several.process.pid
    limits = resource.prlimit(parent, resource.RLIMIT_NOFILE)
    resource.prlimit(parent, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{parent}/fd")), limits[1]))
    try:
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: any(line["event"] == "process_not_started" for line in several.log_lines), 20, several)
        assert several.post("/rank", example()).status_code == 200, "by the other worker"
    finally:
        resource.prlimit(parent, resource.RLIMIT_NOFILE, limits)
    wait_until(lambda: len(children(several)["worker"]) == 2, 30, several)


@pytest.mark.slow
def test_sigterm_to_every_process_loses_nothing_and_ends_with_0(several: Server) -> None:
    """As systemd does, and a second time within a second. The last test that needs these processes."""
    body = json.dumps(example()).encode()
    with asking(several) as replies, several.connect(30) as slow:
        slow.sendall(head(length=len(body)) + body[:100])
        more(replies)  # the head of the slow one has been read by now
        processes = [several.process.pid, *chain.from_iterable(children(several).values())]
        for pid in processes * 2:
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: not is_listening(several), 20, several)
        time.sleep(1.5)
        assert not is_listening(several), "nobody accepts, so nobody may hold the listener"
        slow.sendall(body[100:])
        assert slow.recv(15) == b"HTTP/1.1 200 OK"
        assert several.wait() == 0, several.log_text[-6000:]
    assert replies.statuses <= {200, 503}
    assert replies.broken - replies.refused <= 4, "the kernel's resets of connections that no process had accepted"


def is_listening(server: Server) -> bool:
    try:
        server.connect(2).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture(scope="module")
def probes_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def probed(probes_port: int) -> Iterator[Server]:
    with serving(workers=2, probes__port=probes_port, drain__delay_seconds=3) as server:
        yield server


def probe(port: int) -> tuple[int, str, float]:
    """The status of `/readyz` at this port, its reason, and `ranker_ready`."""
    said, scrape = (httpx.get(f"http://127.0.0.1:{port}/{path}", timeout=10) for path in ("readyz", "metrics"))
    return said.status_code, said.json().get("detail", ""), total(scrape.text, "ranker_ready")


@pytest.mark.slow
def test_the_probe_port_is_not_ready_while_no_worker_is_there(probed: Server, probes_port: int) -> None:
    first, second = children(probed)["worker"]
    os.kill(first, signal.SIGKILL)
    assert probe(probes_port) == (200, "", 1), "the other worker serves"
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: probe(probes_port) == (503, "No worker is linked.", 0), 5, probed)
    wait_until(lambda: probe(probes_port) == (200, "", 1), 30, probed)
    assert probed.post("/rank", example()).status_code == 200


@pytest.mark.slow
def test_the_probe_port_is_not_ready_during_a_drain(probed: Server, probes_port: int) -> None:
    """And what comes meanwhile is ranked, to the last request. The last test that needs these processes."""
    draining = 503, "The process is shutting down.", 0
    body = json.dumps(example()).encode()
    with probed.connect(30) as slow:
        slow.sendall(head(length=len(body)) + body[:100])
        assert probe(probes_port) == (200, "", 1)
        probed.signal(signal.SIGTERM)
        wait_until(lambda: probe(probes_port) == draining, 1.5, probed)
        assert probed.get("/readyz").status_code == 503
        assert probed.post("/rank", body).status_code == 200
        wait_until(lambda: not is_listening(probed), 20, probed)
        assert probe(probes_port) == draining
        slow.sendall(body[100:])
        assert slow.recv(15) == b"HTTP/1.1 200 OK"
    assert probed.wait() == 0, probed.log_text[-6000:]


@pytest.mark.slow
def test_an_engine_process_that_starts_during_a_drain_serves() -> None:
    """It is told of the drain once a worker is linked to it."""
    port = free_port()
    with serving(workers=2, probes__port=port, drain__delay_seconds=30) as server:
        (before,) = children(server)["engine"]
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: children(server)["engine"] not in ([], [before]), 10, server)
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.post("/rank", example()).status_code == 200, 25, server)
        wait_until(lambda: probe(port)[0] == 503, 1, server)
        assert server.post("/rank", example()).status_code == 200
        server.signal(signal.SIGTERM)
        assert server.wait() == 143, "a second signal ends all"


@pytest.mark.slow
def test_a_stopped_engine_process_ends_all_with_70_if_so_set(tmp_path: Path) -> None:
    """In a directory whose path is too long for the address of a socket."""
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    settings = {"engine_loss": "exit", "queue__stall_seconds": 3, "queue__stall_exit_seconds": 3}
    with serving(workers=2, env={"TMPDIR": str(folder)}, **settings) as server:
        assert server.post("/rank", example()).status_code == 200
        os.kill(children(server)["engine"][0], signal.SIGSTOP)
        assert server.wait(40) == 70
        assert any(line["event"] == "stopped_process_killed" for line in server.log_lines)
    assert [*folder.iterdir()] == []


def test_what_a_killed_parent_left_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with directory() as folder:
        [left] = tmp_path.iterdir()
        (left / "loaded.json").touch()
        copies = [tmp_path / f"{left.name}{number}" for number in (1, 2)]
        for copy in copies:
            shutil.copytree(left, copy)
        (copies[1] / "notes.txt").touch()
        assert os.path.samestat(os.fstat(folder), left.stat())
        with directory():  # another service that starts meanwhile
            assert left.exists()
            assert len([*tmp_path.iterdir()]) == 3
    assert [*tmp_path.iterdir()] == [copies[1]], "somebody has put a file of his own there"


@pytest.mark.parametrize("name", ["ranker-production", "phoenix-ranker-processes-mine"])
@pytest.mark.parametrize("holds", [(), ("settings.toml",)])
def test_a_directory_of_the_users_own_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, holds: tuple[str, ...]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / name).mkdir()
    for each in holds:
        (tmp_path / name / each).write_text("workers = 2\n")
    with directory():
        pass
    assert sorted(each.name for each in (tmp_path / name).iterdir()) == [*holds]


def test_processes_started_again_have_the_settings_of_the_first(tmp_path: Path) -> None:
    """Somebody edits the file for the next restart."""
    config, copies = tmp_path / "settings.toml", tmp_path / "copies"
    config.write_text("workers = 2\n")
    copies.mkdir()
    folder = os.open(copies, os.O_RDONLY)
    try:
        for given in (["--config", str(config)], [f"--config={config}"]):
            arguments = with_copied_config(["--port", "8100", *given], folder)
            config.write_text("workers = what\n")
            settings = load_settings(arguments)
            assert (settings.workers, settings.port) == (2, 8100)
            config.write_text("workers = 2\n")
        assert with_copied_config(["--port", "8100"], folder) == ["--port", "8100"]
    finally:
        os.close(folder)


@pytest.mark.slow
def test_processes_started_again_have_the_keys_of_the_others(tmp_path: Path) -> None:
    """The file of keys was written wrongly, then lost."""
    keys, folder = tmp_path / "keys.json", tmp_path / "temporary"
    folder.mkdir()

    def write(key: str) -> None:
        keys.write_text(json.dumps({"feed": hashlib.sha256(key.encode()).hexdigest()}))

    with ExitStack() as stack:
        write("one")
        server = stack.enter_context(serving(workers=2, threads=1, auth__keys_file=keys, env={"TMPDIR": str(folder)}))

        def takes(key: str) -> bool:
            """Whether both workers take this key and no other."""
            other = {"one": "two", "two": "one"}[key]
            body = json.dumps(example(1)).encode()
            return statuses_by_worker(server, "/rank", body, {"x_api_key": key}, least=2) == {
                1: {200},
                2: {200},
            } and statuses_by_worker(server, "/rank", body, {"x_api_key": other}, least=2) == {1: {401}, 2: {401}}

        assert takes("one")
        write("two")
        server.signal(signal.SIGHUP)
        wait_until(lambda: takes("two"), 60, server)
        keys.write_text(keys.read_text() + ",")
        server.signal(signal.SIGHUP)
        wait_until(lambda: f"{keys}: must be JSON" in server.log_text, 20, server)
        engine_killed(server)
        keys.unlink()
        for worker in children(server)["worker"]:
            os.kill(worker, signal.SIGKILL)
        wait_until(lambda: is_listening(server) and server.get("/readyz").status_code == 200, 60, server)
        assert takes("two")
        write("one")
        server.signal(signal.SIGHUP)
        wait_until(lambda: takes("one"), 60, server)
        [copy] = folder.glob("*/keys.json")
        assert copy.stat().st_mode & 0o777 == 0o600
    assert [*folder.iterdir()] == []


def test_a_taken_address_ends_several_processes_with_3() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serving(workers=2, port=port, wait_ready=False) as server:
            assert server.wait(60) == 3


GREEDY, MODEST = {"x_api_key": "greedy"}, {"x_api_key": "modest"}
KEYS = json.dumps({name: hashlib.sha256(name.encode()).hexdigest() for name in ("greedy", "modest")})


def replies_by_worker(
    server: Server, path: str, body: bytes, headers: dict[str, str], least: int = 10
) -> dict[int, list[httpx.Response]]:
    """The replies of two workers to one request after another, until each has given so many."""
    replies: dict[str, httpx.Response] = {}
    workers: dict[int, list[httpx.Response]] = {1: [], 2: []}
    until = time.monotonic() + 60
    while min(map(len, workers.values())) < least:
        assert time.monotonic() < until, {worker: len(answers) for worker, answers in workers.items()}
        for _ in range(least):
            name = os.urandom(8).hex()
            replies[name] = server.post(path, body, x_request_id=name, **headers)
        wait_until(lambda: replies.keys() <= {line.get("request_id") for line in server.log_lines}, 60, server)
        workers = {1: [], 2: []}
        for line in server.log_lines:
            if line.get("request_id") in replies:
                workers[line["worker"]].append(replies[line["request_id"]])
    return workers


def statuses_by_worker(
    server: Server, path: str, body: bytes, headers: dict[str, str], least: int = 10
) -> dict[int, set[int]]:
    """The statuses among those replies."""
    by_worker = replies_by_worker(server, path, body, headers, least)
    return {worker: {reply.status_code for reply in replies} for worker, replies in by_worker.items()}


REFUSED_BY_BOTH, SCORED_BY_BOTH = {1: {429}, 2: {429}}, {1: {200}, 2: {200}}


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Two workers that have little room: each for 6.4 MB of bodies and 1024 candidates of batches, and together for 16 requests."""
    with serving(
        workers=2,
        threads=1,
        auth__keys=KEYS,
        limits__max_body_bytes=100_000,
        limits__max_candidates=64,
        queue__max_requests=16,
        queue__max_wait_seconds=0,
    ) as server:
        yield server


@pytest.mark.slow
def test_stalled_uploads_of_one_key_leave_room_in_each_worker(small: Server) -> None:
    size, body = 99_000, json.dumps(example()).encode().ljust(70_000)
    with ExitStack() as stack:

        def is_full() -> bool:
            for _ in range(60):  # the kernel says which worker gets them, and each reads them when it can
                client = stack.enter_context(small.connect())
                client.sendall(head(headers={"x-api-key": "greedy"}, length=size) + (size - 1) * b" ")
            return statuses_by_worker(small, "/rank", body, GREEDY) == REFUSED_BY_BOTH

        wait_until(is_full, 30)
        assert statuses_by_worker(small, "/rank", body, MODEST) == SCORED_BY_BOTH
        assert statuses_by_worker(small, "/rank", body, GREEDY) == REFUSED_BY_BOTH


def busy_with(server: Server, path: str, body: bytes, count: int) -> AbstractContextManager[Replies]:
    """So many callers of the greedy key, who ask again at once."""
    return callers(server, lambda turn: body, count, path=path, impatient=True, headers={"x-api-key": "greedy"})


@pytest.mark.slow
def test_requests_of_one_key_leave_room_to_another(small: Server) -> None:
    body = json.dumps(example(64)).encode()
    with busy_with(small, "/rank", body, 40) as greedy:
        wait_until(lambda: greedy.of(429))
        assert statuses_by_worker(small, "/rank", body, MODEST) == SCORED_BY_BOTH
    assert greedy.statuses == {200, 429}


@pytest.mark.slow
def test_batches_of_one_key_leave_room_in_each_worker(small: Server) -> None:
    one = example(64)
    with busy_with(small, "/rank/batch", json.dumps({"requests": [one] * 4}).encode(), 40) as greedy:
        wait_until(lambda: any(b"overloaded" in reply.content for reply in greedy.all))
        modest = replies_by_worker(small, "/rank/batch", json.dumps({"requests": [one] * 2}).encode(), MODEST)
    assert any(b'"rank"' in reply.content for reply in greedy.all)
    for replies in modest.values():
        assert {reply.status_code for reply in replies} == {200}
        assert not any(b"overloaded" in reply.content for reply in replies)


def test_explanations_of_one_key_leave_turns_in_each_worker(small: Server) -> None:
    body = json.dumps(example(history=4) | {"explain": [example()["candidates"][0]["post_id"]]}).encode()
    with busy_with(small, "/explain", body, 8) as greedy:
        wait_until(lambda: greedy.of(429))
        assert statuses_by_worker(small, "/explain", body, MODEST, least=2) == SCORED_BY_BOTH
    assert greedy.statuses == {200, 429}


@pytest.mark.slow
def test_settings_that_only_a_worker_reads_end_all_with_2() -> None:
    with serving(workers=2, tracing__enabled="true", env={"OTEL_BSP_SCHEDULE_DELAY": "0"}, wait_ready=False) as server:
        assert server.wait(60) == 2
        assert "OpenTelemetry refuses its variables" in server.log_text


@pytest.mark.slow
def test_workers_that_all_fail_at_their_start_end_all(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        """
import json, os
if json.loads(os.environ.get("_RANKER_ROLE", "{}")).get("worker"):
    os._exit(1)
"""
    )
    with serving(workers=2, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, wait_ready=False) as server:
        assert server.wait(60) == 1
        ended = [line["worker"] for line in server.log_lines if line["event"] == "process_ended"]
    assert {*ended} == {1, 2}, "the engine process runs to the end"
    assert len(ended) >= 2 * 3


@pytest.mark.slow
def test_workers_that_are_killed_at_their_start_end_all(tmp_path: Path) -> None:
    """As for lack of memory."""
    (tmp_path / "sitecustomize.py").write_text(
        """
import json, os, signal
if json.loads(os.environ.get("_RANKER_ROLE", "{}")).get("worker"):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    with serving(workers=2, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, wait_ready=False) as server:
        assert server.wait(60) == 1


@pytest.mark.slow
def test_workers_that_start_slowly_and_fail_end_all(tmp_path: Path) -> None:
    # The second needs 11 s for its start, and the first is being started again when it fails.
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import json, os, time
worker = json.loads(os.environ.get("_RANKER_ROLE", "{{}}")).get("worker")
if worker:
    again = worker == 1 and os.path.exists({str(tmp_path)!r} + "/again")
    if worker == 1:
        open({str(tmp_path)!r} + "/again", "w").close()
    time.sleep(11 if worker == 2 else 60 if again else 0)
    os._exit(2)
"""
    )
    with serving(workers=2, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, wait_ready=False) as server:
        assert server.wait(40) == 2


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_loaded_ends_all(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    with serving(tmp_path, workers=2, wait_ready=False) as server:
        assert server.wait(60) == 1
        assert str(tmp_path) in str([line["reason"] for line in server.log_lines if "reason" in line])
