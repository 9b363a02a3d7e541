"""Callers who give up before the longest wait that is allowed, and come again: they must not fill the queue with work for nobody."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import uvloop

from app.settings import Batching, Queue
from loadtest.server import Server, example, serving
from tests.app.api.live import BODY, QUIET, Live, head, listening, read_reply
from tests.support.fakes import FakeEngine

PATIENCE_SECONDS, FORWARD_SECONDS, WAIT_SECONDS = (
    1.0,
    0.24,
    2.0,
)  # four times the usual ones: slow enough for a busy machine
MEASURED_SECONDS = 8.0


def forward(items: Sequence[Any]) -> None:
    time.sleep(FORWARD_SECONDS)


async def call(port: int, ends: Counter[str], until: float) -> None:
    """One caller: a new connection for each request; after a refusal it waits as long as it would have for a reply."""
    while time.monotonic() < until:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(head() + BODY)
                    status = (await reader.readline()).split()[1].decode()
                finally:
                    writer.close()
        except (TimeoutError, IndexError, OSError):
            ends["left"] += 1
            continue
        ends[status] += 1
        if status != "200":
            await asyncio.sleep(PATIENCE_SECONDS)


def good_replies(callers: int) -> Counter[str]:
    """How the calls of so many callers end at an engine that takes four requests in a forward."""

    async def measure(port: int) -> Counter[str]:
        ends: Counter[str] = Counter()
        until = time.monotonic() + MEASURED_SECONDS
        await asyncio.gather(*(call(port, ends, until) for _ in range(callers)))
        return ends

    queue = Queue(max_wait_seconds=WAIT_SECONDS)
    with listening(FakeEngine(before=forward), batching=Batching(max_requests=4), queue=queue, logs=QUIET) as live:
        return asyncio.run(measure(live.port))


@pytest.mark.slow
def test_callers_who_give_up_keep_others_from_nothing() -> None:
    few = good_replies(8)
    many = good_replies(64)  # without what is learned of them a quarter of the few's replies, with it three quarters
    assert many["200"] > 0.5 * few["200"], (few, many)


def test_callers_who_all_leave_in_one_moment_did_not_give_up() -> None:
    """A feed service that ends takes its calls with it. The next ones may wait as long as before."""

    async def leave_and_come_again(port: int) -> Counter[str]:
        connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for _, writer in connections:
            writer.write(head() + BODY)
        await asyncio.sleep(FORWARD_SECONDS / 4)
        for _, writer in connections:
            writer.close()
        ends: Counter[str] = Counter()
        await asyncio.gather(*(call(port, ends, time.monotonic() + FORWARD_SECONDS) for _ in range(2)))
        return ends

    queue = Queue(max_wait_seconds=WAIT_SECONDS)
    with listening(FakeEngine(before=forward), batching=Batching(max_requests=1), queue=queue, logs=QUIET) as live:
        ends = asyncio.run(leave_and_come_again(live.port))
        assert set(ends) == {"200"}, ends


def leave(live: Live, headers: dict[str, str]) -> None:
    """Callers leave one after the other, so that it is guessed when the next ones will."""
    for _ in range(4):
        with live.connect() as connection:
            connection.sendall(head(headers=headers) + BODY)
            time.sleep(0.12)


def statuses(live: Live, *requests: dict[str, str]) -> list[int]:
    """Of requests with these headers, each sent once the ones before have a place in the queue, or their replies."""
    with ExitStack() as stack:
        connections = []
        for headers in requests:
            connections.append(connection := stack.enter_context(live.connect()))
            connection.sendall(head(headers=headers) + BODY)
            time.sleep(0.03)
        return [read_reply(connection)[0] for connection in connections]


PATIENT, HURRIED = {"x-request-timeout-ms": "20000"}, {"x-request-timeout-ms": "150"}


def test_of_a_caller_that_says_its_deadline_nothing_is_guessed() -> None:
    queue = Queue(max_wait_seconds=WAIT_SECONDS)
    with listening(FakeEngine(before=forward), batching=Batching(max_requests=1), queue=queue, logs=QUIET) as live:
        assert statuses(live, {}) == [200]
        leave(live, PATIENT)
        assert statuses(live, {}, {}) == [200, 200], "those who left had said how long they wait"
        leave(live, {})
        assert statuses(live, PATIENT, PATIENT, HURRIED, {}) == [200, 200, 504, 429]


CANDIDATES, DEMO_PATIENCE_SECONDS, ROUND_SECONDS, ROUNDS = 512, 0.25, 2.0, 12
CROWDS, LEAST_SHARE = (16, 64, 256), 0.7
"""Of `make soak`, on a machine that does nothing else."""
FEW_CROWDS, LEAST_SHARE_BESIDE_OTHERS = (64,), 0.5
"""Of `make test`, beside other tests. Without what admission knows of callers who leave, a crowd got 0.06 to 0.33. Ten other programs on
the server's processor: one process gives a crowd 0.8, but two workers, whose requests pass three processes, 0.26 to 0.5. So workers have
their crowds in `make soak`."""
SOAK_SECONDS = 30.0  # of --duration: from here on it is `make soak`


class Call(asyncio.Protocol):
    """Sends a request on its connection; `status` is that of the reply."""

    def __init__(self, request: bytes, status: asyncio.Future[str]) -> None:
        self.request = request
        self.status = status
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if not self.status.done():
            self.status.set_result(data[9:12].decode())

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.status.done():
            self.status.set_result("closed")


async def status_of(port: int, request: bytes) -> str:
    """The status that a caller gets on a new connection within its patience, else `left`."""
    loop = asyncio.get_running_loop()
    call = Call(request, loop.create_future())
    try:
        async with asyncio.timeout(DEMO_PATIENCE_SECONDS):
            await loop.create_connection(lambda: call, "127.0.0.1", port)
            return await call.status
    except TimeoutError:
        return "left"
    finally:
        if call.transport is not None:
            call.transport.close()


async def ends_of(port: int, request: bytes, callers: int, *, pauses: bool) -> Counter[str]:
    """How the calls of so many callers end, each of whom calls again after the last. `pauses`: a refused one first waits as long as it
    would have for a reply."""
    ends: Counter[str] = Counter()
    until = time.monotonic() + ROUND_SECONDS

    async def caller() -> None:
        while time.monotonic() < until:
            status = await status_of(port, request)
            ends[status] += 1
            if pauses and status not in ("200", "left"):
                await asyncio.sleep(DEMO_PATIENCE_SECONDS)

    await asyncio.gather(*(caller() for _ in range(callers)))
    return ends


async def calm(port: int, request: bytes) -> None:
    """Return once the server has done with an earlier crowd: a caller gets its reply some times in a row."""
    answered = 0
    while answered < 5:
        answered = answered + 1 if await status_of(port, request) == "200" else 0


@contextmanager
def apart() -> Iterator[Sequence[str]]:
    """A command that serves on another processor than this one: callers and server do not take each other's time."""
    usable = sorted(os.sched_getaffinity(0))
    command = (sys.executable, "-m", "app")
    os.sched_setaffinity(0, usable[-1:])
    try:
        yield ("taskset", "--cpu-list", str(usable[0]), *command)
    finally:
        os.sched_setaffinity(0, usable)


@pytest.fixture(scope="module")
def demo(request: pytest.FixtureRequest) -> Iterator[Server]:
    with apart() as command, serving(command=command, workers=request.param, logs__success_sample=0) as server:
        yield server


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "callers" in metafunc.fixturenames:
        is_soak = metafunc.config.getoption("--duration") >= SOAK_SECONDS
        metafunc.parametrize("callers", CROWDS if is_soak else FEW_CROWDS)
        workers, ids = ([0, 2], ["one", "several"]) if is_soak else ([0], ["one"])
        metafunc.parametrize("demo", workers, ids=ids, indirect=True, scope="module")
        metafunc.parametrize(
            "pauses", [True, False] if is_soak else [True], ids=["after a pause", "at once"][: 1 + is_soak]
        )


@pytest.fixture
def turn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Holds a lock that all processes of a test run share: crowds beside each other would take each other's processor."""
    with (tmp_path_factory.getbasetemp().parent / "crowd.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("turn")
def test_a_crowd_that_gives_up_gets_as_much_as_eight(demo: Server, callers: int, pauses: bool, duration: float) -> None:
    least_share = LEAST_SHARE if duration >= SOAK_SECONDS else LEAST_SHARE_BESIDE_OTHERS
    body = json.dumps(example(CANDIDATES)).encode()
    request = head(length=len(body)) + body
    rounds = []
    for _ in range(ROUNDS):  # other work of the machine spoils some, and some rounds reach a little less
        uvloop.run(calm(demo.port, request))
        few = uvloop.run(ends_of(demo.port, request, 8, pauses=pauses))
        many = uvloop.run(ends_of(demo.port, request, callers, pauses=pauses))
        rounds.append((few, many))
        print(f"{callers} callers: {many['200'] / max(1, few['200']):.2f} of what 8 get")
        if many["200"] >= least_share * few["200"] > 0:
            return
    raise AssertionError(rounds)
