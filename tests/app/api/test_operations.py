"""Probes, what runs here, and scrapes that take little of the loop."""

from __future__ import annotations

import asyncio
import re
import time
import timeit
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import structlog
from pydantic import BaseModel, SecretStr
from starlette.testclient import TestClient

from app.api.operations import SCRAPE_SHARE, Scrapes
from app.main import create_app
from app.queue.loading import LoadedModel
from app.queue.runners import Steps
from app.settings import Group, Served, Settings
from model.engine import EngineError
from tests.app.api.live import until
from tests.support import corpora, rankers
from tests.support.asgi import ADDRESS, served
from tests.support.bodies import good
from tests.support.fakes import FakeEngine, Gate, fake_model
from tests.support.redis import RedisServer

pytestmark = pytest.mark.anyio
PAGE = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with served() as (client, _):
        yield client


def test_info_says_what_runs(client: TestClient) -> None:
    info = client.get("/info").json()
    assert info["model"] == {"name": "fake", "version": "v1"}
    assert info["actions"] == ["favorite", "reply", "report"]
    assert (info["device"], info["dtype"]) == ("cpu", "float32")
    assert info["limits"]["max_candidates"] == 4096
    assert info["architecture"]["history_length"] == 16
    assert len(info["checkpoint"]["digest"]) == 64
    assert {"version", "python", "torch"} <= info["build"].keys()
    assert info["retrieval"] is None


def test_info_has_the_fields_that_the_document_names(client: TestClient) -> None:
    named = client.get("/openapi.json").json()["components"]["schemas"]["Info"]["properties"]
    assert client.get("/info").json().keys() == named.keys()


def test_info_tells_of_the_corpus_but_neither_paths_nor_secrets(tmp_path: Path) -> None:
    retrieval = corpora.setting(tmp_path)
    with served(retrieval=retrieval, served=Served(directory=tmp_path / "served")) as (client, _):
        reply = client.get("/info")
    info = reply.json()
    assert info["retrieval"]["corpus"]["posts"] > 0
    assert not {"auth", "admin", "checkpoint", "retrieval", "served"} & info["settings"].keys()
    assert str(tmp_path) not in reply.text


@pytest.mark.parametrize(
    ("path", "media_type"),
    [
        *((path, "application/json") for path in ("/livez", "/readyz", "/startupz", "/info", "/openapi.json")),
        ("/metrics", "text/plain; version=0.0.4; charset=utf-8"),
        ("/docs", "text/html"),
    ],
)
def test_head_has_the_headers_of_get_and_no_body(client: TestClient, path: str, media_type: str) -> None:
    def headers(reply: httpx.Response) -> dict[str, str]:
        changing = {"x-request-id"} | ({"content-length"} if path == "/metrics" else set())
        return {name: value for name, value in reply.headers.items() if name not in changing}

    got, head = client.get(path), client.head(path)
    assert (head.status_code, headers(head)) == (200, headers(got))
    assert got.headers["content-type"] == media_type
    assert int(head.headers["content-length"]) > 0
    assert got.content
    assert head.content == b""
    assert f'method="HEAD",route="{path}"' in client.get("/metrics").text


def check_probes(client: TestClient, statuses: tuple[int, int, int], code: str, detail: str) -> None:
    """What /livez, /readyz and /startupz are, and the problem that /readyz tells."""
    alive, ready, started = (client.get(path) for path in ("/livez", "/readyz", "/startupz"))
    assert (alive.status_code, ready.status_code, started.status_code) == statuses
    assert (ready.json()["code"], ready.headers["retry-after"]) == (code, "2")
    assert re.fullmatch(detail, ready.json()["detail"])


def test_probes_while_a_process_begins_serves_and_ends() -> None:
    gate = Gate()

    def load(path: Path, steps: Steps) -> LoadedModel:
        gate(())
        return fake_model(FakeEngine())

    ranker = rankers.create(load=load)
    with TestClient(create_app(ranker.settings, ranker), base_url=ADDRESS) as client:
        assert client.portal is not None
        check_probes(client, (200, 503, 503), "not_ready", "The checkpoint is being loaded.")
        gate.opened.set()
        client.portal.call(ranker.wait_ready)
        replies = [client.get(path) for path in ("/livez", "/readyz", "/startupz")]
        assert [reply.json() for reply in replies] == [{"status": name} for name in ("alive", "ready", "started")]
        client.portal.call(ranker.begin_drain)
        check_probes(client, (200, 503, 200), "draining", "The process is shutting down.")


def test_probes_after_the_loss_of_the_engine() -> None:
    def lose(items: object) -> None:
        raise EngineError("planted", sticky=True)

    with served(FakeEngine(before=lose)) as (client, _):
        assert client.post("/rank", json=good()).status_code == 503
        check_probes(
            client,
            (200, 503, 200),
            "engine_down",
            r"The engine is lost; the log says why\.|The engine process has ended\.",
        )


@pytest.mark.skipif(not RedisServer.is_installed(), reason="Debian's redis-server is not installed")
def test_readiness_names_a_feed_that_went_away(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        retrieval = corpora.setting(tmp_path).model_copy(update={"feed": SecretStr(redis.address())})
        with served(retrieval=retrieval) as (client, _):
            until(lambda: client.get("/readyz").json() == {"status": "ready"})
            redis.kill()
            until(lambda: "feed" in client.get("/readyz").json())
            ready = client.get("/readyz")
            assert (ready.status_code, ready.json()["status"]) == (200, "ready"), (
                "within the lag that the settings allow"
            )
            assert ready.json()["feed"].startswith("Redis cannot be reached")


def test_readiness_names_the_rung_of_the_engine() -> None:
    engine = FakeEngine()
    engine.info.notes["rung"] = "native"
    with served(engine) as (client, _):
        assert client.get("/readyz").json() == {"status": "ready", "engine": "native"}


def test_info_leaves_out_paths_that_compilers_and_drivers_name() -> None:
    engine = FakeEngine()
    said = (
        "/usr/bin/g++ -O3 -I=/opt/x /home/anna/kernel.cpp -o '~/.cache/it.so' failed:\n/home/anna/kernel.cpp:1: error"
    )
    steps = [{"rung": "recorded", "reason": "RuntimeError: Failed to find C compiler, 5 of 7, see (/var/log/x)"}]
    engine.info.notes.update(rung="torch", steps_down=steps, fallback=said, row_sizes=[64, 128], share=0.5)
    with served(engine) as (client, ranker):
        notes = client.get("/info").json()["engine"]
        assert rankers.figure(ranker, "ranker_engine_steps_down") == 1
    assert notes == {
        "rung": "torch",
        "steps_down": [{"rung": "recorded", "reason": "RuntimeError: Failed to find C compiler, 5 of 7, see (…)"}],
        "fallback": "… -O3 -I=… … -o '…' failed:",
        "row_sizes": [64, 128],
        "share": 0.5,
    }


def test_what_a_library_says_of_a_lost_engine_is_only_logged() -> None:
    said = "CUDA error at 10.1.2.3, see /home/anna/secret"

    def lose(items: object) -> None:
        raise EngineError(said, sticky=True)

    with structlog.testing.capture_logs() as lines, served(FakeEngine(before=lose)) as (client, _):
        replies = [client.post("/rank", json=good()), client.get("/readyz"), client.post("/rank", json=good())]
        replies.append(client.get("/v2/health/ready"))
    assert [reply.status_code for reply in replies] == [503] * 4
    assert replies[1].json()["detail"] == "The engine is lost; the log says why."
    assert not [reply.text for reply in replies if "CUDA" in reply.text or "anna" in reply.text]
    assert said in str([line["exc_info"] for line in lines if line["event"] == "forward_failed"])


def test_until_it_is_loaded_only_probes_answer() -> None:
    ranker = rankers.create()
    client = TestClient(create_app(ranker.settings, ranker), base_url=ADDRESS)
    paths = {"/livez": 200, "/metrics": 200, "/docs": 200, "/readyz": 503, "/startupz": 503, "/info": 503}
    assert {path: client.get(path).status_code for path in paths} == paths
    assert client.post("/rank", json={}).json()["code"] == "not_ready"


async def test_one_scrape_runs_at_a_time_and_waiting_callers_share_it() -> None:
    begun, running = 0, 0

    async def make() -> bytes:
        nonlocal begun, running
        begun, running = begun + 1, running + 1
        assert running == 1
        number = b"%d" % begun
        await asyncio.sleep(0.001)
        computed = time.thread_time() + 0.005
        while time.thread_time() < computed:
            pass
        running -= 1
        if begun == 3:
            raise OSError("planted")
        return number

    scrapes = Scrapes(make)
    assert await scrapes.get() == b"1"
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await asyncio.gather(*(scrapes.get() for _ in range(50))) == [b"2"] * 50
    assert loop.time() - began >= 0.8 * 0.005 / SCRAPE_SHARE
    third = asyncio.ensure_future(scrapes.get())
    while begun < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    fourth = asyncio.ensure_future(scrapes.get())  # what the third holds may be older than this question
    with pytest.raises(OSError, match="planted"):
        await third
    assert await fourth == b"4"
    gone = asyncio.ensure_future(scrapes.get())
    stays = asyncio.ensure_future(scrapes.get())
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays == b"5"


async def test_the_next_scrape_waits_for_what_the_last_computed_alone() -> None:
    """Not for the time in which another process did not answer, and never for long."""

    begun, ended = list[float](), list[float]()

    async def wait() -> bytes:
        begun.append(time.monotonic())
        await asyncio.sleep(0.3)
        ended.append(time.monotonic())
        return b""

    async def compute() -> bytes:
        begun.append(time.monotonic())
        computed = time.thread_time() + 2 * SCRAPE_SHARE
        while time.thread_time() < computed:
            pass
        ended.append(time.monotonic())
        return b""

    for scrape, most in ((wait, 0.5), (compute, 1.5)):
        begun.clear(), ended.clear()
        scrapes = Scrapes(scrape)
        await scrapes.get()
        await scrapes.get()
        assert begun[1] - ended[0] < most


def test_constant_scrapes_take_a_small_share_of_the_loop() -> None:
    with served() as (client, ranker):

        def seconds_of_one() -> float:
            return min(timeit.repeat(ranker.metrics.render, number=1, repeat=20))

        seconds, scrapes, began = seconds_of_one(), 0, time.monotonic()
        while time.monotonic() - began < 1:
            assert client.get("/metrics").status_code == 200
            scrapes += 1
        took = time.monotonic() - began
        assert scrapes * min(seconds, seconds_of_one()) < 2 * SCRAPE_SHARE * took


def defaults(model: type[BaseModel], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Group):
            found |= defaults(field.annotation, f"{prefix}{name.upper()}__")
        else:
            found[prefix + name.upper()] = field.default
    return found


def test_the_operators_page_lists_every_setting_with_its_default() -> None:
    listed = dict(re.findall(r"^\| `([A-Z0-9_]+)` \| `?([^|`]*?)`? \|", PAGE, re.M))
    shown = {name: "none" if value in (None, {}, "") else str(value) for name, value in defaults(Settings).items()}
    shown = {name: value.lower() if value in ("True", "False") else value for name, value in shown.items()}
    assert listed == shown
