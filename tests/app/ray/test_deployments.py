"""The service on a real Ray: scores, errors, routing, deaths, updates, autoscaling. Run by `make test-ray`, whose figures it prints."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from phoenix_ranker_client import AsyncRankerClient, Candidate, Event, RankerError
from phoenix_ranker_client.calls import routing_key
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from loadtest.machine import ROOT
from loadtest.matrix import Row, table
from loadtest.servers.launch import HOST, free_port
from loadtest.servers.stream import RedisServer
from loadtest.soak.servers import real
from weights.checkpoint import load_checkpoint, save_checkpoint

ray = pytest.importorskip("ray", reason="Ray is an extra with an environment of its own: make test-ray")

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # Ray's own, by the dozen

USERS = range(1, 41)
WORKERS = 8
REQUESTS = 300
APP = "ranker"
DEFAULT_ROUTER = "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter"
WAIT_SECONDS = 180.0


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """What was measured, printed at the end."""
    rows: list[Row] = []
    yield rows
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{table(rows)}")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Ray and Ray Serve on this machine, without an application."""
    for name, value in {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",  # as docs/scaling.md says; both are read when Ray Serve is imported
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "120",  # on a busy machine the usual 30 are short
        "RAY_agent_register_timeout_ms": "120000",
    }.items():
        os.environ.setdefault(name, value)
    from ray import serve

    port = free_port()
    ray.init("local", num_cpus=8, object_store_memory=80 * 2**20, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": HOST, "port": port, "request_timeout_s": 65})
        yield f"http://{HOST}:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@contextmanager
def deployed(
    *, planted: bool = False, settings: dict[str, Any] | None = None, **options: Any
) -> Iterator[Callable[[], None]]:
    """The application with two replicas, by default of the demo; yields what deploys it anew: as other code does."""
    from ray import serve

    from app.ray.deployments import deployed as bound
    from app.settings import Settings
    from tests.app.ray.planted import Planted

    usual = {"checkpoint": ROOT / "weights/demo", "threads": 1, "logs": {"level": "error"}}
    given = Settings(**usual | (settings or {}))
    options = {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}} | options
    if "autoscaling_config" in options:
        del options["num_replicas"]

    def deploy() -> None:
        serve.run(bound(given, **({"replica": Planted} if planted else {}), **options), name=APP, route_prefix="/")

    try:
        deploy()
        yield deploy
    finally:
        serve.delete(APP)


def body(user: int) -> dict[str, Any]:
    """A user's request, always the same, whose scores and context are that user's."""
    return {
        "user_id": user,
        "history": [{"post_id": i, "author_id": user, "actions": []} for i in range(1, 20)],
        "candidates": [{"post_id": user * 100 + i, "author_id": i} for i in range(8)],
    }


def post(http: httpx.Client, user: int, **headers: str) -> httpx.Response:
    return http.post("/rank", json=body(user), headers={"x-routing-key": routing_key(user)} | headers)


def scrape(url: str) -> str:
    """The metrics of all replicas; nothing while there is none."""
    reply = httpx.get(f"{url}/metrics", timeout=WAIT_SECONDS)
    assert reply.status_code in (200, 503)
    return reply.text if reply.status_code == 200 else ""


def samples(url: str, name: str = "") -> list[Sample]:
    """Of the family of this name, or of all, from the metrics of all replicas."""
    families = text_string_to_metric_families(scrape(url))
    return [sample for family in families if name in ("", family.name) for sample in family.samples]


def replicas(url: str) -> set[int]:
    """Process ids."""
    return {int(sample.labels["replica"].split(":")[1]) for sample in samples(url)}


def until(condition: Callable[[], bool], what: str) -> float:
    """Seconds until it held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < WAIT_SECONDS, what
        time.sleep(0.1)
    return time.monotonic() - began


def running() -> int:
    """Replicas of the ranker that Ray Serve says run."""
    from ray import serve

    application = serve.status().applications.get(APP)
    ranker = application and application.deployments.get("Ranker")
    return int(ranker.replica_states.get("RUNNING", 0)) if ranker else 0


@dataclass
class Load:
    """Clients that ask one request after the other, each once, until `stop`."""

    url: str
    users: list[int]
    answers: list[tuple[int, str, list[list[float]]]] = field(default_factory=list)  # user, version, probabilities
    errors: list[RankerError] = field(default_factory=list)
    stop: bool = False

    async def run(self) -> None:
        async with AsyncRankerClient(self.url, attempts=1) as client:
            await asyncio.gather(*(self._worker(client, number) for number in range(WORKERS)))

    async def _worker(self, client: AsyncRankerClient, number: int) -> None:
        turn = number
        while not self.stop:
            user, turn = self.users[turn % len(self.users)], turn + WORKERS
            candidates = [Candidate(user * 100 + i, i) for i in range(8)]
            history = [Event(i, user, []) for i in range(1, 20)]
            try:
                got = await client.rank(user, candidates, history, timeout_seconds=10)
            except RankerError as error:
                if error.status != 429:  # that is an answer: the machine is too busy for this loop
                    self.errors.append(error)
            else:
                self.answers.append((user, got.model_version, [each.probabilities for each in got.candidates]))


def under_load(url: str, users: list[int], harm: Callable[[], Any]) -> Load:
    """Do `harm` in the middle of the load."""
    load = Load(url, users)

    async def main() -> None:
        asking = asyncio.create_task(load.run())
        try:
            await asyncio.to_thread(until, lambda: len(load.answers) > 5 * WORKERS, "the load begins")
            await asyncio.to_thread(harm)
            seen = len(load.answers)
            await asyncio.to_thread(until, lambda: len(load.answers) > seen + 5 * WORKERS, "the load goes on")
        finally:
            load.stop = True
            await asking

    asyncio.run(main())
    return load


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo, and a second one with other weights."""
    root = tmp_path_factory.mktemp("checkpoints")
    demo = load_checkpoint(shutil.copytree(ROOT / "weights/demo", root / "first"))
    for weights in demo.ranker.parameters():
        weights.mul_(0.9)
    save_checkpoint(
        root / "second", demo.ranker, name="demo", action_names=demo.manifest.action_names,
        continuous=demo.manifest.continuous, version="second",
    )  # fmt: skip
    return root / "first", root / "second"


def test_scores_and_refusals_are_those_of_a_single_process(url: str, rows: list[Row]) -> None:
    limits = {"limits": {"max_body_bytes": 50_000}}
    odd: list[dict[str, Any]] = [
        {"json": body(7) | {"user_id": -1}},
        {"content": b"{"},
        {"json": body(7), "headers": {"x-request-timeout-ms": "0"}},
        {"content": b" " * 50_001},
        {"content": iter([b" " * 30_000, b" " * 30_000])},
        {"json": body(7), "headers": {"accept": "image/png"}},
        {"json": body(7), "headers": {"x-request-timeout-ms": "soon"}},
    ]
    with (
        real(threads=1, limits__max_body_bytes=50_000) as server,
        deployed(settings=limits),
        httpx.Client(base_url=url, timeout=WAIT_SECONDS) as http,
        httpx.Client(base_url=server.url, timeout=WAIT_SECONDS) as alone,
    ):
        differ = sum(post(http, user).json()["candidates"] != post(alone, user).json()["candidates"] for user in USERS)
        assert post(http, 1).json()["candidates"] != post(http, 2).json()["candidates"]
        found = [[refusal(each, request) for each in (http, alone)] for request in odd]
        assert http.get("/nothing").status_code == 404
        assert http.get("/info").json()["checkpoint"] == alone.get("/info").json()["checkpoint"]
        assert http.head("/readyz").status_code == 200
        assert len(http.get("/info", headers={"x-request-id": "mine"}).headers.get_list("x-request-id")) == 1
    what = "users whose scores differ from those of a single process"
    rows.append(Row("Ray 1", what, len(USERS), differ, differ, 0, ""))
    assert differ == 0
    assert [got for got, _ in found] == [expected for _, expected in found]
    assert [status for (status, *_), _ in found] == [422, 400, 504, 413, 413, 406, 422]


@pytest.mark.skipif(not RedisServer.is_installed(), reason="Debian's redis-server is not installed")
def test_a_change_of_posts_reaches_every_replica(url: str, tmp_path: Path) -> None:
    """By the stream that both follow; on one machine they share a directory of posts, on several each has its own."""
    corpus = shutil.copytree(ROOT / "weights/demo-posts", tmp_path / "posts")
    with RedisServer(tmp_path / "redis") as stream:
        retrieval = {"checkpoint": ROOT / "weights/demo-towers", "corpus": corpus, "feed": stream.url("posts")}
        with deployed(settings={"retrieval": retrieval}), httpx.Client(base_url=url, timeout=WAIT_SECONDS) as http:

            def found() -> list[tuple[str, list[Any]]]:
                """For each user the state of the corpus that answered, and the posts."""
                asked = [
                    http.post(
                        "/retrieve", json={"user_id": user, "k": 100}, headers={"x-routing-key": routing_key(user)}
                    )
                    for user in USERS
                ]
                return [
                    (each.headers["x-corpus-version"], [post["post_id"] for post in each.json()["posts"]])
                    for each in asked
                ]

            before = found()
            gone = before[0][1][0]
            assert sum(gone in posts for _, posts in before) > 1
            stream.client().xadd("posts", {"change": json.dumps({"delete": [gone]})})
            until(lambda: all(version != before[0][0] for version, _ in found()), "both replicas have the change")
            after = found()
            assert len({version for version, _ in after}) == 1
            assert not any(gone in posts for _, posts in after)
            served = [each for each in samples(url, "ranker_http_requests") if each.labels.get("route") == "/retrieve"]
            assert len({each.labels["replica"] for each in served if each.value}) == 2, "both were asked"


def refusal(http: httpx.Client, request: dict[str, Any]) -> tuple[int, str, str, str | None]:
    """Status, code, media type and Retry-After."""
    if not isinstance(request.get("content", b""), bytes):
        request = request | {"content": iter([b" " * 30_000, b" " * 30_000])}
    headers = {"content-type": "application/json"} | request.get("headers", {})
    reply = http.post("/rank", **request | {"headers": headers})
    return reply.status_code, reply.json()["code"], reply.headers["content-type"], reply.headers.get("retry-after")


def hits(url: str) -> float:
    """Of a second request by each user, the share that found its context in a cache."""
    with httpx.Client(base_url=url, timeout=WAIT_SECONDS) as http:
        for user in USERS:
            assert post(http, user).status_code == 200
        return sum(post(http, user).headers["x-context-cache"] == "hit" for user in USERS) / len(USERS)


def processor_seconds(*pids: int) -> float:
    """That these processes have taken; without any, those that a request under Ray Serve passes: proxy, ingress, replicas."""
    ours = pids or [
        int(place.parent.name)
        for place in Path("/proc").glob("[0-9]*/cmdline")
        if place.exists() and place.read_bytes().startswith((b"ray::ServeReplica", b"ray::ProxyActor"))
    ]
    ticks = (Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in ours)
    return sum(int(fields[11]) + int(fields[12]) for fields in ticks) / os.sysconf("SC_CLK_TCK")


@contextmanager
def empty() -> Iterator[None]:
    """What Ray Serve costs where nothing is done: `/one` answers, `/two` asks a second deployment first, as our ingress does."""
    from ray import serve
    from starlette.requests import Request
    from starlette.responses import Response

    options: dict[str, Any] = {"logging_config": {"enable_access_log": False}, "ray_actor_options": {"num_cpus": 0.5}}

    @serve.deployment(name="Behind", **options)
    class Behind:
        async def answer(self, body: bytes) -> bytes:
            return body

    @serve.deployment(name="Front", **options)
    class Front:
        def __init__(self, behind: Any = None) -> None:
            self.behind = behind

        async def __call__(self, request: Request) -> Response:
            body = await request.body()
            return Response(body if self.behind is None else await self.behind.answer.remote(body))

    try:
        serve.run(Front.bind(), name="one", route_prefix="/one")
        serve.run(Front.bind(Behind.bind()), name="two", route_prefix="/two")
        yield
    finally:
        serve.delete("one")
        serve.delete("two")


def test_what_ray_costs_a_request(url: str, rows: list[Row]) -> None:
    """Figures, no promises: the same requests in turns, at one connection, beside deployments that do nothing."""
    with (
        real(threads=1) as server,
        deployed(num_replicas=1),
        empty(),
        httpx.Client(base_url=url, timeout=WAIT_SECONDS) as http,
        httpx.Client(base_url=server.url, timeout=WAIT_SECONDS) as alone,
    ):
        idle: dict[str, list[float]] = {"/one": [], "/two": []}
        for path, taken in idle.items():
            for turn in range(REQUESTS + 20):
                began = time.perf_counter()
                assert http.post(path, json=body(1)).status_code == 200
                taken += [time.perf_counter() - began] * (turn >= 20)
        seconds: dict[httpx.Client, list[float]] = {http: [], alone: []}
        for each in (http, alone):
            post(each, 1)
        before = processor_seconds(), processor_seconds(server.process.pid)
        for _ in range(REQUESTS):
            for each, taken in seconds.items():
                began = time.perf_counter()
                assert post(each, 1).status_code == 200
                taken.append(time.perf_counter() - began)
        used = processor_seconds() - before[0], processor_seconds(server.process.pid) - before[1]
    through, direct = (1e3 * statistics.median(taken) for taken in seconds.values())
    one, two = (1e3 * statistics.median(taken) for taken in idle.values())
    for what, figure in (
        ("p50 of a request, one connection", through),
        ("the same to a deployment of Ray Serve that does nothing", one),
        ("the same to one that asks another one first", two),
        ("the same to a single process", direct),
        ("processor time of a request in proxy, ingress and replica", 1e3 * used[0] / REQUESTS),
        ("the same in a single process", 1e3 * used[1] / REQUESTS),
    ):
        rows.append(Row("Ray 2", what, REQUESTS, 0, figure, math.inf, "ms"))
    assert min(used) > 0


def test_one_user_keeps_to_one_replica(url: str, rows: list[Row]) -> None:
    from ray.serve.config import RequestRouterConfig

    with deployed():
        share = hits(url)
        merged = scrape(url)
        served = [line for line in merged.splitlines() if 'http_requests_total{code="200",method="POST"' in line]
        assert len(served) == 2, "each replica has some of the users"
    with deployed(request_router_config=RequestRouterConfig(request_router_class=DEFAULT_ROUTER)):
        control = hits(url)
    rows.append(Row("Ray 3", "second requests that find their context in a cache", len(USERS), 0, share, 1.0, "", True))
    rows.append(Row("Ray 3", "control: the same with Ray Serve's own router", len(USERS), 0, control, 0.9, ""))
    assert share == 1.0
    assert control < 0.9


def test_a_full_queue_is_429_and_a_disconnect_frees_its_place(url: str) -> None:
    from tests.app.ray.planted import HANG

    def waiting() -> float:
        return sum(sample.value for sample in samples(url, "ranker_queue_requests"))

    queue = {"max_requests": 1, "stall_seconds": 600, "stall_exit_seconds": 600}  # a hang is no stall here
    with deployed(planted=True, num_replicas=1, settings={"queue": queue}), ThreadPoolExecutor(1) as pool:
        hung = pool.submit(httpx.post, f"{url}/rank", json=body(HANG), timeout=10)
        until(lambda: waiting() == 1, "the first is in the queue")
        reply = httpx.post(f"{url}/rank", json=body(7), timeout=WAIT_SECONDS)
        assert (reply.status_code, reply.json()["code"]) == (429, "overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        assert isinstance(hung.exception(), httpx.ReadTimeout)
        until(lambda: waiting() == 0, "its client has disconnected")
        assert 'ranker_http_requests_total{code="499"' in scrape(url)


def test_what_meets_a_killed_replica_is_not_lost_and_without_the_second_attempt_it_is(
    url: str, rows: list[Row]
) -> None:
    from tests.app.ray.planted import SLOW

    lost = {}
    for attempts in (2, 1):
        with deployed(planted=True, attempts=attempts):
            before = replicas(url)
            assert len(before) == 2

            def kill(before: set[int] = before) -> None:
                os.kill(min(before), signal.SIGKILL)
                until(lambda: running() == 2 and len(replicas(url) - before) == 1, "another replica comes")

            load = under_load(url, list(SLOW[:40]), kill)  # so that each has some in flight
            assert {error.status for error in load.errors} <= {503}
            lost[attempts] = len(load.errors)
            control, most = ("", 0) if attempts == 2 else ("control, asked once: ", WORKERS)
            what = f"{control}requests lost by kill -9 of a replica, {len(load.answers)} answered"
            rows.append(Row("Ray 4", what, 1, 0, lost[attempts], most, ""))
    assert lost[2] == 0
    assert 0 < lost[1] <= WORKERS


def expected(url: str) -> dict[int, list[list[float]]]:
    with httpx.Client(base_url=url, timeout=WAIT_SECONDS) as http:
        return {user: [each["probabilities"] for each in post(http, user).json()["candidates"]] for user in USERS}


def test_an_update_of_the_checkpoint_loses_nothing_and_crosses_no_versions(
    url: str, rows: list[Row], checkpoints: tuple[Path, Path]
) -> None:
    """In place, by the configuration file that we ship: nobody moves. Then with new processes."""
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    config = yaml.safe_load((ROOT / "docker/ray/serve.yaml").read_text())
    application = config["applications"][0]
    application["args"] |= {"logs.level": "error", "admin.root": str(checkpoints[1].parent)}
    ranker = next(each for each in application["deployments"] if each["name"] == "Ranker")
    ranker |= {"ray_actor_options": {"num_cpus": 0.5}}
    del ranker["autoscaling_config"]
    ranker["num_replicas"] = 2
    client = _get_global_client()

    def deploy(checkpoint: Path) -> None:
        ranker["user_config"] = {"checkpoint": str(checkpoint)}
        client.deploy_apps(ServeDeploySchema.model_validate(config))

    def versions() -> set[str]:
        return {sample.labels["version"] for sample in samples(url, "ranker_model_info")}

    def update() -> None:
        deploy(checkpoints[1])
        until(lambda: versions() == {"second"} and running() == 2, "both replicas have the second checkpoint")

    def renew() -> None:
        application["args"]["logs.success_sample"] = "0.5"
        before = replicas(url)
        deploy(checkpoints[1])
        until(lambda: running() == 2 and not replicas(url) & before, "both replicas are new")

    try:
        deploy(checkpoints[0])
        until(lambda: running() == 2 and len(replicas(url)) == 2, "both replicas serve")
        right = {httpx.get(f"{url}/info", timeout=WAIT_SECONDS).json()["model"]["version"]: expected(url)}
        processes = replicas(url)
        load = under_load(url, list(USERS), update)
        right["second"] = expected(url)
        assert replicas(url) == processes
        again = under_load(url, list(USERS), renew)
        assert expected(url) == right["second"]
    finally:
        from ray import serve

        serve.delete(APP)
    assert {version for _, version, _ in load.answers} == set(right)
    crossed = sum(right[version][user] != scores for user, version, scores in load.answers + again.answers)
    for what, one in (("in place", load), ("with new processes", again)):
        told = f"requests lost by an update {what}, {len(one.answers)} answered"
        rows.append(Row("Ray 5", told, 1, 0, len(one.errors), 0, ""))
    answers = len(load.answers + again.answers)
    rows.append(Row("Ray 5", "answers with another version's scores", answers, crossed, crossed, 0, ""))
    assert (load.errors, again.errors, crossed) == ([], [], 0)


def test_a_stalled_engine_is_replaced(url: str, rows: list[Row]) -> None:
    from tests.app.ray.planted import HANG

    with deployed(planted=True, num_replicas=1, settings={"queue": {"stall_seconds": 0.5}}, health_check_period_s=0.5):
        (before,) = replicas(url)
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{url}/rank", json=body(HANG), timeout=1)
        seconds = until(lambda: running() == 1 and replicas(url) not in (set(), {before}), "another process serves")
        assert httpx.post(f"{url}/rank", json=body(7), timeout=WAIT_SECONDS).status_code == 200
    rows.append(Row("Ray 6", "a stalled engine's replica is another one after", 1, 0, seconds, WAIT_SECONDS, "s"))


def test_replicas_come_while_requests_wait_and_go_afterwards(url: str, rows: list[Row]) -> None:
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    from tests.app.ray.planted import SLOW

    scaling = AutoscalingConfig(
        min_replicas=1, max_replicas=2, upscale_delay_s=0, downscale_delay_s=1, look_back_period_s=2,
        policy=AutoscalingPolicy(policy_function="app.ray.autoscaling:ByLoad"),
    )  # fmt: skip
    with deployed(planted=True, autoscaling_config=scaling):
        assert running() == 1
        load = under_load(url, list(SLOW[:1]), lambda: until(lambda: running() == 2, "a second replica comes"))
        down = until(lambda: running() == 1, "it goes")
    lost = len(load.errors)
    rows.append(Row("Ray 7", "requests lost as replicas come and go", len(load.answers), lost, lost, 0, ""))
    rows.append(Row("Ray 7", "the second replica is gone, after the load", 1, 0, down, WAIT_SECONDS, "s"))
    assert load.errors == []
