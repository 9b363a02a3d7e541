"""One message that goes wrong, between an engine process and a worker's end that run here: it ends in an answer, and the link goes on."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import tempfile
import time
import warnings
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import structlog

from app.errors import DeadlineExceeded, InternalError, NotReady, Overloaded
from app.interface import Health, PlaceRequest
from app.main import create_app
from app.processes.engine_process import EngineProcess
from app.processes.link import Link
from app.processes.messages import (
    LENGTH,
    MAX_BYTES,
    METHODS,
    Admit,
    Answer,
    Call,
    Cancel,
    EngineState,
    FromEngine,
    FromWorker,
    Rank,
    ServedNow,
    decoder,
    frame,
)
from app.processes.remote import RemoteService
from app.queue.forecast import Outlook
from app.settings import Deadline, Queue, Settings
from app.telemetry.metrics import Metrics
from tests.support import rankers
from tests.support.asgi import ADDRESS
from tests.support.bodies import good
from tests.support.fakes import FakeEngine, Gate, fake_model, fake_request, is_right

pytestmark = pytest.mark.anyio
HANDLE = "0" * 32


@asynccontextmanager
async def engine_process(path: Path, engine: Any = None, **options: Any) -> AsyncIterator[EngineProcess]:
    """An engine process that has loaded, at `path / "engine"`."""
    ranker = rankers.create(engine, **options)
    process = EngineProcess(ranker, ranker.settings)
    serving = asyncio.create_task(process.serve(str(path / "engine")))
    await rankers.until(lambda: ranker.health().started)
    try:
        yield process
    finally:
        process.end()
        await serving


async def linked(path: Path, take: Callable[[Link, Any], None] = lambda link, message: None) -> Link:
    """A worker's end, which gives what it is sent to `take`."""
    link = Link(FromEngine, take, lambda link: None, lambda link: None)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, str(path / "engine"))
    return link


@asynccontextmanager
async def worker(path: Path, number: int = 1, **groups: Any) -> AsyncIterator[RemoteService]:
    """A worker's ranker, once it knows that its engine process is ready."""
    ranker = RemoteService(Settings(**groups), str(path / "engine"), Metrics(), number)
    ranker.start()
    await ranker.linked.wait()
    await rankers.until(lambda: ranker.health().ready)
    try:
        yield ranker
    finally:
        await ranker.stop(1.0)


@asynccontextmanager
async def overheard(path: Path, far: Path) -> AsyncIterator[list[Any]]:
    """What workers that link to `path / "engine"` send to the engine process at `far / "engine"`, message by message."""
    messages: list[Any] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        engine_reader, engine_writer = await asyncio.open_unix_connection(far / "engine")

        async def pass_answers_back() -> None:
            while data := await engine_reader.read(2**16):
                writer.write(data)

        answering = asyncio.ensure_future(pass_answers_back())
        try:
            while True:
                length = await reader.readexactly(LENGTH.size)
                body = await reader.readexactly(*LENGTH.unpack(length))
                messages.append(decoder(FromWorker).decode(body))
                engine_writer.write(length + body)
        except (asyncio.IncompleteReadError, ConnectionError):  # the worker has ended its link
            engine_writer.close()
            await answering
            writer.close()

    async with await asyncio.start_unix_server(relay, path / "engine"):
        yield messages


@asynccontextmanager
async def http_of(ranker: RemoteService) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application of this worker."""
    transport = httpx.ASGITransport(create_app(ranker.settings, ranker))
    async with httpx.AsyncClient(transport=transport, base_url=ADDRESS) as client:
        yield client


async def test_a_number_of_a_replaced_model_is_answered(tmp_path: Path) -> None:
    async with engine_process(tmp_path):
        with closing(await linked(tmp_path)) as link:
            with pytest.raises(NotReady):
                await link.call("context", 999, HANDLE, None)
            with pytest.raises(InternalError):  # no number at all
                await link.ask(lambda number: Call(number, "context", []), METHODS["context"][1])
            with pytest.raises(InternalError):
                await link.ask(lambda number: Call(number, "unheard", []), bytes)
            assert await link.call("corpus_state") is None


@pytest.mark.slow
async def test_a_replaced_model_ranks_until_requests_for_it_are_too_late(tmp_path: Path) -> None:
    """A row of a batch may wait so long after it was checked for this model."""
    made = [fake_model(FakeEngine(2), "v2"), fake_model(FakeEngine(1))]
    options: dict[str, Any] = {"load": lambda path, steps: made.pop(), "deadline": Deadline(default_seconds=6.0)}
    async with engine_process(tmp_path, **options) as process, worker(tmp_path) as ranker:
        first, request = ranker.model(), PlaceRequest(4, 2, math.inf)
        await process.ranker.reloads.reload()
        await rankers.until(lambda: ranker.model() is not first)
        with ranker.admit(first, request) as late:
            await asyncio.sleep(5.5)
            assert is_right((await ranker.rank(late, *fake_request(1))).scores, 1, version=1)
        await asyncio.sleep(0.8)
        with ranker.admit(first, request) as too_late, pytest.raises(NotReady):
            await ranker.rank(too_late, *fake_request(2))
        with ranker.admit(ranker.model(), request) as job:
            assert is_right((await ranker.rank(job, *fake_request(3))).scores, 3, version=2)


async def test_an_answer_that_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    def answer(link: Link, message: Any) -> None:
        link.send(Answer(message.id, b"\xc1" if message.arguments else b"\xc0"))

    server = await asyncio.get_running_loop().create_unix_server(
        lambda: Link(FromWorker, answer, lambda link: None, lambda link: None), str(tmp_path / "engine")
    )
    async with server, asyncio.timeout(10):
        with closing(await linked(tmp_path)) as link:
            with pytest.raises(InternalError):
                await link.call("context", 1, HANDLE, None)
            assert await link.call("corpus_state") is None


async def test_a_fault_in_a_message_handler_ends_one_link_with_a_line(tmp_path: Path) -> None:
    def fail(link: Link, message: Any) -> None:
        raise ZeroDivisionError

    async with engine_process(tmp_path), worker(tmp_path) as other:
        with structlog.testing.capture_logs() as lines:
            await linked(tmp_path, fail)
            await rankers.until(lambda: bool(lines))
        assert [(line["event"], line["error"]) for line in lines] == [("link_broken", "ZeroDivisionError")]
        assert other.health().ready


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (LENGTH.pack(MAX_BYTES + 1), f"a message of {MAX_BYTES + 1} bytes"),
        (LENGTH.pack(1) + b"\xc1", "MessagePack data is malformed"),
        (2 * frame(Call(7, "exposition", [])), "a question with an id in use"),
    ],
    ids=["too long", "no message", "an id in use"],
)
async def test_bytes_that_break_the_protocol_end_one_link(tmp_path: Path, sent: bytes, reason: str) -> None:
    """The line says what the peer sent. A fault of ours would be named by its exception."""
    async with engine_process(tmp_path), worker(tmp_path) as other, asyncio.timeout(10):
        with structlog.testing.capture_logs() as lines:
            reader, writer = await asyncio.open_unix_connection(tmp_path / "engine")
            writer.write(sent)
            await reader.read()  # to its end
            writer.close()
        assert [(line["event"], line["reason"].partition(":")[0], "error" in line) for line in lines] == [
            ("link_broken", reason, False)
        ]
        assert other.health().ready


async def test_a_peer_that_stops_reading_is_cut_off(tmp_path: Path) -> None:
    """Otherwise what it is sent would fill the memory."""
    links: list[Link] = []
    closed = asyncio.Event()
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: Link(FromWorker, lambda link, message: None, links.append, lambda link: closed.set()),
        str(tmp_path / "engine"),
    )
    answer = Answer(1, bytes(2**22))
    async with server, asyncio.timeout(20):
        _, writer = await asyncio.open_unix_connection(tmp_path / "engine")
        with closing(writer), structlog.testing.capture_logs() as lines:
            await rankers.until(lambda: bool(links))
            for _ in range(MAX_BYTES // 2**22 - 4):
                links[0].send(answer)
                await asyncio.sleep(0)
            assert lines == []
            for _ in range(8):
                links[0].send(answer)
                await asyncio.sleep(0)
            await closed.wait()
    assert [(line["event"], line["reason"]) for line in lines] == [("link_broken", "has stopped reading")]


async def test_questions_under_way_end_with_their_link(tmp_path: Path) -> None:
    links: list[Link] = []
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: Link(FromWorker, lambda link, message: link.close(), links.append, lambda link: None),
        str(tmp_path / "engine"),
    )
    async with server, asyncio.timeout(10):
        with closing(await linked(tmp_path)) as link, pytest.raises(ConnectionError):
            await link.call("corpus_state")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_a_process_of_another_user_is_cut_off() -> None:
    connect = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print(s.recv(1))"
    with tempfile.TemporaryDirectory() as name, structlog.testing.capture_logs() as lines:
        folder = Path(name)
        async with engine_process(folder):
            for path, mode in ((name, 0o755), (f"{name}/engine", 0o777)):
                os.chmod(path, mode)
            process = await asyncio.create_subprocess_exec(
                "/usr/bin/env", "python3", "-c", connect, str(folder / "engine"), user=65534, stdout=PIPE
            )
            output, _ = await asyncio.wait_for(process.communicate(), 20)
    assert output in (b"b''\n", b"")  # the end, or a reset
    assert [(line["event"], line["user"]) for line in lines if line["event"] == "stranger"] == [("stranger", 65534)]


async def test_a_question_cancelled_in_its_turn_warns_of_nothing(tmp_path: Path) -> None:
    async with engine_process(tmp_path):
        with closing(await linked(tmp_path)) as link, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            link.send(Call(1, "corpus_state", []))
            link.send(Cancel(1))
            assert await link.call("corpus_state") is None
            gc.collect()
    assert [str(each.message) for each in warned] == []


async def test_a_worker_too_slow_with_its_metrics_keeps_its_link(tmp_path: Path) -> None:
    """They are left out, and what was asked for is taken back."""
    async with engine_process(tmp_path), worker(tmp_path) as other:
        with closing(await linked(tmp_path)) as silent:
            assert await silent.call("exposition")
            assert await silent.call("corpus_state") is None
        assert other.health().ready


async def test_a_worker_takes_what_the_engine_process_takes_back(tmp_path: Path) -> None:
    def greet(link: Link) -> None:
        for message in (Cancel(1), EngineState(Health(True, True, False, False, ""))):
            link.send(message)

    server = await asyncio.get_running_loop().create_unix_server(
        lambda: Link(FromWorker, lambda link, message: None, greet, lambda link: None), str(tmp_path / "engine")
    )
    async with server, worker(tmp_path) as ranker:
        assert ranker.health().ready


async def test_a_fault_in_sending_the_state_does_not_end_it(tmp_path: Path) -> None:
    fails = False

    def clock() -> float:
        if fails:
            raise ZeroDivisionError
        return time.monotonic()

    states: list[Any] = []
    async with engine_process(tmp_path, clock=clock):
        with closing(await linked(tmp_path, lambda link, message: states.append(message))):
            with structlog.testing.capture_logs() as lines:
                fails = True
                await rankers.until(lambda: bool(lines))
                await asyncio.sleep(0.1)
                fails = False
            sent = len(states)
            await rankers.until(lambda: len(states) > sent)
    assert [line["event"] for line in lines] == ["state_not_sent"]


async def test_a_handle_is_not_waited_for_beyond_the_deadline(tmp_path: Path) -> None:
    """The engine process says that it is well, and answers nothing."""
    state = EngineState(Health(True, True, False, False, ""), ServedNow.of(1, fake_model(FakeEngine()).served))
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: Link(FromWorker, lambda link, message: None, lambda link: link.send(state), lambda link: None),
        str(tmp_path / "engine"),
    )
    async with server, worker(tmp_path) as ranker, asyncio.timeout(10):
        with pytest.raises(DeadlineExceeded):
            await ranker.context(ranker.model(), HANDLE, None, ranker.clock() + 0.1)


async def test_a_reserved_place_is_never_refused_and_is_freed(tmp_path: Path) -> None:
    gate, tight = Gate(), Queue(max_candidates=4)
    async with engine_process(tmp_path, FakeEngine(before=gate), queue=tight) as process, worker(tmp_path) as ranker:
        admission, (context, posts) = process.ranker.admission, fake_request(1)
        request = PlaceRequest(4, 2, math.inf)
        with ranker.admit(ranker.model(), request) as job:
            await ranker.reserve(job)
            assert admission.candidates == 4
            with ranker.admit(ranker.model(), request) as late, pytest.raises(Overloaded):
                await ranker.reserve(late)
            gate.opened.set()
            assert len((await ranker.rank(job, context, posts)).scores) == 4
        assert admission.candidates == 0
        with ranker.admit(ranker.model(), request) as unused:
            await ranker.reserve(unused)
        await rankers.until(lambda: admission.candidates == 0)
        with ranker.admit(ranker.model(), request) as cancelled:
            await ranker.reserve(cancelled)
            ranking = asyncio.ensure_future(ranker.rank(cancelled, context, posts))
            await asyncio.sleep(0)
            ranking.cancel()
        await rankers.until(lambda: admission.candidates == 0)


async def test_a_key_that_fills_the_link_leaves_it_open_to_others(tmp_path: Path) -> None:
    """The engine process says that it is well, and reads nothing for a while."""
    state = EngineState(Health(True, True, False, False, ""), ServedNow.of(1, fake_model(FakeEngine()).served))
    is_over = asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(state))
        await is_over.wait()
        writer.close()

    async def rank(ranker: RemoteService, key: str, count: int) -> None:
        context, posts = fake_request(1, candidates=count)
        with ranker.admit(ranker.model(), PlaceRequest(count, len(context), math.inf, key)) as job:
            await ranker.rank(job, context, posts)

    @asynccontextmanager
    async def ranking(ranker: RemoteService, *requests: tuple[str, int]) -> AsyncIterator[None]:
        tasks = [asyncio.ensure_future(rank(ranker, key, count)) for key, count in requests]
        await asyncio.sleep(0.05)
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async with await asyncio.start_unix_server(greet, tmp_path / "engine"), worker(tmp_path) as ranker:
        async with ranking(ranker, *[("greedy", 20_000)] * 4, ("modest", 4)):
            with pytest.raises(Overloaded):
                ranker.check_open("greedy")
            ranker.check_open("modest")
            ranker.check_open("newcomer")
        ranker.check_open("modest")  # nor for what its caller left on the link
        async with ranking(ranker, ("greedy", MAX_BYTES // 4 // 16)):
            with pytest.raises(Overloaded):
                ranker.check_open("modest")
        is_over.set()


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """Where the engine process of `overheard` listens."""
    (folder := tmp_path / "far").mkdir()
    return folder


async def test_metrics_name_a_worker_by_its_number(tmp_path: Path) -> None:
    """Not by the order in which they link, which is another one after the engine process was started again."""
    async with engine_process(tmp_path), worker(tmp_path, 2) as second, worker(tmp_path, 1) as first:
        second.metrics.history_truncated.inc()
        text = (await first.exposition()).decode()
    assert 'ranker_history_truncated_total{worker="2"} 1.0' in text
    assert 'ranker_history_truncated_total{worker="1"} 0.0' in text


async def test_metrics_tell_which_workers_answered(tmp_path: Path) -> None:
    async with engine_process(tmp_path, workers=3), worker(tmp_path, 1) as ranker, worker(tmp_path, 3):
        text = (await ranker.exposition()).decode()
        for number, value in ((1, 1), (2, 0), (3, 1)):
            assert f'ranker_worker_up{{worker="{number}"}} {value:.1f}' in text
        async with worker(tmp_path, 2):
            assert 'ranker_worker_up{worker="2"} 1.0' in (await ranker.exposition()).decode()
        assert 'ranker_worker_up{worker="2"} 0.0' in (await ranker.exposition()).decode()


async def test_a_worker_refuses_callers_who_leave_too_soon(tmp_path: Path) -> None:
    """The engine process tells what awaits a request while it refuses some, and ends to tell it afterwards."""
    tight = Queue(max_candidates=8, max_wait_seconds=0)
    async with engine_process(tmp_path, queue=tight), worker(tmp_path) as ranker:
        model, now = ranker.model(), ranker.clock()
        ranker.state = msgspec.structs.replace(ranker.state, outlook=Outlook(now + 1.0, 0.0, 0.1, 0.0))
        soon, late = (PlaceRequest(8, 2, math.inf, None, now + seconds) for seconds in (0.5, 5.0))
        with pytest.raises(Overloaded):
            ranker.check_open(None, soon.leaves_at)
        with pytest.raises(Overloaded), ranker.admit(model, soon):
            pass
        said = PlaceRequest(8, 2, soon.leaves_at)
        with pytest.raises(DeadlineExceeded, match="on arrival"), ranker.admit(model, said):
            pass
        for request in (late, PlaceRequest(8, 2, math.inf)):
            ranker.check_open(None, request.leaves_at)
            with ranker.admit(model, request):
                pass
        ranker.state = msgspec.structs.replace(ranker.state, outlook=None)
        with ExitStack() as places:
            held = places.enter_context(ranker.admit(model, late))
            await ranker.reserve(held)
            refused = places.enter_context(ranker.admit(model, late))
            with pytest.raises(Overloaded):
                await ranker.reserve(refused)
            await rankers.until(lambda: ranker.state.outlook is not None)
        await rankers.until(lambda: ranker.state.outlook is None)


async def test_rows_of_a_batch_take_one_message_each(tmp_path: Path, far: Path) -> None:
    rows = [good(user_id=user) for user in range(1, 33)]
    async with (
        engine_process(far),
        overheard(tmp_path, far) as messages,
        worker(tmp_path) as ranker,
        http_of(ranker) as client,
    ):
        reply = await client.post("/rank/batch", json=rows)
    assert [result.get("error") for result in reply.json()] == [None] * 32
    assert [type(message) for message in messages] == [Rank] * 32


async def test_rows_that_the_queue_refuses_come_in_later(tmp_path: Path, far: Path) -> None:
    """In a queue with room for one, each row but the first is sent at most twice, and reserves its place when another one has left."""
    rows, engine = [good(user_id=user) for user in range(1, 9)], FakeEngine()
    tight = Queue(max_candidates=len(rows[0]["candidates"]), max_wait_seconds=0)
    async with (
        engine_process(far, engine, queue=tight),
        overheard(tmp_path, far) as messages,
        worker(tmp_path) as ranker,
        http_of(ranker) as client,
    ):
        reply = await client.post("/rank/batch", json=rows)
    assert [result.get("error") for result in reply.json()] == [None] * 8
    assert sorted(engine.forwards) == [[user] for user in range(1, 9)]
    assert sum(isinstance(message, Admit) for message in messages) <= 2 * 7
    assert len(messages) <= 8 + 3 * 7


async def test_a_cancelled_batch_frees_the_places_of_all_its_rows(tmp_path: Path, far: Path) -> None:
    rows, gate = [good(user_id=user) for user in range(1, 9)], Gate()
    tight = Queue(max_candidates=2 * len(rows[0]["candidates"]), max_wait_seconds=0)
    async with (
        engine_process(far, FakeEngine(before=gate), queue=tight) as process,
        overheard(tmp_path, far) as messages,
        worker(tmp_path) as ranker,
        http_of(ranker) as client,
    ):
        batch = asyncio.ensure_future(client.post("/rank/batch", json=rows))
        await rankers.until(lambda: sum(isinstance(message, Rank) for message in messages) >= 3)
        await rankers.until(lambda: process.ranker.admission.requests == 2)
        batch.cancel()
        await rankers.until(lambda: process.ranker.admission.requests == 0, 5)  # their deadline is after 10
        gate.opened.set()
