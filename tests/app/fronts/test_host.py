"""The engine process towards fronts that are gone, stopped, or talk nonsense."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.engine.admission import Refusal
from app.errors import ServiceError
from app.exits import EXIT_ENGINE_LOST, EXIT_FAILED
from app.fronts import host, remote, wire
from app.fronts.answers import keep
from app.fronts.wire import Cancel, Counts, Hello, Left, encode
from app.settings import Drain, Queue
from app.telemetry.metrics import Metrics
from loadtest.soak.fake_engine import FakeEngine
from model.engine import EngineError
from model.retrieval.inputs import Filters, Query
from tests.app.fakes import Gate, request, right, until
from tests.app.fronts.linked import Linked, begin, linked

pytestmark = pytest.mark.anyio


async def speak(found: Linked, *sent: Any, seconds: float = 5.0) -> bytes:
    """What comes back on a connection of its own until it is closed. Raises TimeoutError where it is not."""
    reader, writer = await asyncio.open_unix_connection(found.path)
    writer.write(b"".join(frame if isinstance(frame, bytes) else encode(frame) for frame in sent))
    came = b""
    try:
        async with asyncio.timeout(seconds):
            while data := await reader.read(65536):
                came += data
    except ConnectionResetError:
        pass
    finally:
        writer.close()
    return came


RANK, ATTENTION, RETRIEVE = (wire.METHODS[name].question for name in ("rank", "attention", "retrieve"))


def asked(
    kind: Any = RANK, *, surface: int = 0, age: int = 0, count: int = 4, user: int = 1, slot: int = 0, **changes: Any
) -> Any:
    context, candidates = request(1)
    candidates.surfaces[-1], candidates.age_buckets[-1] = surface, age
    fields = {"id": 1, "model": 1, "deadline": time.monotonic() + 3600, "context": replace(context, user_id=user)}
    fields["candidates"] = replace(candidates.chunk(0, count), first_slot=slot)
    if kind is RANK:
        fields |= {"key": None, "again": False, "waits": False}
    return kind(**fields | changes)


def search(k: int = 5, least: float = 0.0, **changes: Any) -> Any:
    query = Query(request(1)[0], k, Filters(np.empty(0, np.uint64)), least)
    return RETRIEVE(
        **{"id": 1, "served": 1, "query": query, "deadline": time.monotonic() + 3600, "key": None} | changes
    )


def short(name: str, context: Any = None) -> Any:
    """A request whose column of that name lacks its last event."""
    context = request(1)[0] if context is None else context
    return asked(context=replace(context, **{name: getattr(context, name)[:-1]}))


def bytes_of(message: Any, old: bytes, new: bytes) -> bytes:
    body = encode(message)[4:].replace(old, new)
    return wire.LENGTH.pack(len(body)) + body


HELLO = Hello(wire.VERSION, 9)
NONSENSE = {
    "no Hello": (asked(),),
    "two Hellos": (HELLO, HELLO),
    "another version": (Hello(wire.VERSION + 1, 9),),
    "another protocol": (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",),
    "another message": (HELLO, bytes_of(asked(), b"\xa4rank", b"\xa4rang")),
    "an unknown model": (HELLO, asked(model=7)),
    "a search of a model that ranks": (HELLO, search()),
    "events without authors": (HELLO, short("author_ids")),
    "events without surfaces": (HELLO, short("surfaces")),
    "events without seconds": (HELLO, short("dwell_seconds")),
    "events without actions": (HELLO, short("actions")),
    "candidates without bytes": (HELLO, bytes_of(asked(), b"author_ids\xc4\x20", b"author_ids\xc4\x1f\x00\xc4")),
    "a number twice": (HELLO, asked(), asked()),
    "a surface of 2^40": (HELLO, asked(surface=2**40)),
    "a negative surface": (HELLO, asked(surface=-1)),
    "an age that no table has": (HELLO, asked(age=2**40)),
    "attention by a surface of 2^40": (HELLO, asked(ATTENTION, surface=2**40)),
    "a slot of 2^62": (HELLO, asked(slot=2**62)),
    "a negative slot": (HELLO, asked(slot=-1)),
    "a negative user": (HELLO, asked(user=-1)),
    "a handle and no candidates": (HELLO, asked(context="0" * 32, count=0)),
    "a deadline that is no number": (HELLO, asked(deadline=float("nan"))),
    "a negative deadline": (HELLO, asked(deadline=-1.0)),
    "a negative number": (HELLO, asked(id=-1)),
    "attention of an unknown model": (HELLO, asked(ATTENTION, model=7)),
    "attention by a number that another has": (HELLO, asked(), asked(ATTENTION)),
}


@pytest.mark.parametrize("kind", NONSENSE)
async def test_nonsense_ends_its_own_link_and_no_other(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(before=lambda items: time.sleep(0.002))
    async with linked(engine, queue=Queue(max_wait_seconds=0)) as found:
        monkeypatch.setattr(found.service, "check_open", lambda key: None)  # a busy machine would refuse it unread
        [front] = found.fronts
        working = [begin(front, user)[1] for user in range(1, 20)]
        await speak(found, *NONSENSE[kind])
        for user, future in enumerate(working, 1):
            assert right((await future).scores, user)
        await until(lambda: not found.service.admission.requests and len(found.host._links) == 1)


async def test_what_is_no_nonsense_gets_an_answer() -> None:
    """The negative control: the same frames, right."""
    async with linked(FakeEngine()) as found:
        reader, writer = await asyncio.open_unix_connection(found.path)
        writer.write(b"".join(map(encode, (HELLO, asked(), Cancel(77), Left(77), Counts(0, [])))))
        kinds: list[type] = []
        while (ranked := wire.METHODS["rank"].answer) not in kinds:
            (length,) = wire.LENGTH.unpack(await reader.readexactly(wire.LENGTH.size))
            kinds.append(type(wire.from_engine.decode(await reader.readexactly(length))))
        writer.close()
        assert [kind for kind in kinds if kind is not wire.State] == [wire.Serve, ranked]


async def test_a_front_that_is_gone_holds_no_place() -> None:
    gate = Gate()
    async with linked(FakeEngine(before=gate), fronts=2) as found:
        one, other = found.fronts
        for user in range(1, 10):
            begin(one, user)[1].add_done_callback(lambda future: future.exception())
        await gate.reached()
        _, kept = begin(other, 20)
        await until(lambda: found.service.admission.requests == 10)
        one.uplink.link._transport.abort()  # type: ignore[union-attr]
        await until(lambda: found.service.admission.requests == 1)
        gate.opened.set()
        assert right((await kept).scores, 20)


async def test_a_front_that_reads_nothing_delays_a_scrape_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "FLUSH_SECONDS", 1.0)
    async with linked(FakeEngine()) as found:
        [front] = found.fronts
        _, writer = await asyncio.open_unix_connection(found.path)
        writer.write(encode(HELLO))
        await until(lambda: len(found.host._fronts) == 2)
        began = time.monotonic()
        await front.exposition()
        assert time.monotonic() - began > host.FLUSH_SECONDS * 0.9
        assert right((await begin(front, 1)[1]).scores, 1)
        writer.close()
        await until(lambda: len(found.host._fronts) == 1)
        began = time.monotonic()
        await front.exposition()
        assert time.monotonic() - began < host.FLUSH_SECONDS


async def test_a_lost_engine_answers_everybody_and_says_so_with_its_exit_code() -> None:
    def lost(items: object) -> None:
        raise EngineError("planted", sticky=True)

    async with linked(FakeEngine(before=lost), fronts=2) as found:
        results = [begin(found.fronts[user % 2], user)[1] for user in range(1, 7)]
        ended = await asyncio.gather(*results, return_exceptions=True)
        assert {getattr(error, "status", error) for error in ended} == {503}
        await until(found.host._ended.is_set)
        assert found.host.exit_code == EXIT_ENGINE_LOST
        assert all(front.health().failed for front in found.fronts)


async def test_a_drain_ends_with_the_last_front() -> None:
    async with linked(FakeEngine(), fronts=2) as found:
        found.host.drain()
        found.host.drain()
        await until(lambda: all(front.health().draining for front in found.fronts))
        one, other = found.fronts
        assert right((await begin(one, 1)[1]).scores, 1)
        await one.stop(1.0)
        assert right((await begin(other, 2)[1]).scores, 2)
        assert not found.host._ended.is_set()
        await other.stop(1.0)
        await until(found.host._ended.is_set)
        assert found.host.exit_code == 0


@pytest.mark.parametrize("hangs", [False, True])
async def test_the_end_closes_every_link_and_says_whether_all_was_answered(
    hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    async with linked(FakeEngine(before=gate), drain=Drain(timeout_seconds=0.05)) as found:
        sent = begin(found.fronts[0], 1)[1]
        await gate.reached()
        if not hangs:
            gate.opened.set()
            await sent
        found.server.close()
        told: list[Any] = []
        [front] = found.host._fronts.values()
        send = front.link.send
        monkeypatch.setattr(front.link, "send", lambda message: (told.append(message), send(message)))
        await found.host.stop()
        assert found.host.exit_code == (EXIT_FAILED if hangs else 0)
        assert not found.host._links
        await until(lambda: not found.host._tasks)
        await until(lambda: found.fronts[0].uplink.link is None)
        assert told[-1].health.draining, "the last thing that it hears"
        gate.opened.set()
        if hangs:
            with pytest.raises(ServiceError):
                await sent


async def test_an_engine_process_that_ends_serves_whom_it_has_and_lets_nobody_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever came now would hold up its end, and be answered by nobody."""
    async with linked(FakeEngine(), fronts=0) as found:
        path, stop = found.path + "-served", found.host.stop
        serving = asyncio.ensure_future(found.host.serve(path))
        await until(lambda: os.path.exists(path))
        front = remote.RemoteService(found.settings, path, 1, Metrics())
        found.fronts.append(front)
        front.start()
        await until(lambda: front.health().ready)

        async def stopped() -> None:
            monkeypatch.undo()
            with pytest.raises(OSError):  # noqa: PT011
                await asyncio.get_running_loop().create_unix_connection(asyncio.Protocol, path)
            assert right((await begin(front, 1)[1]).scores, 1)
            await stop()

        monkeypatch.setattr(found.host, "stop", stopped)
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: front.health().draining)
        assert not serving.done()
        found.host._ended.set()
        assert await serving == 0


async def test_a_front_has_let_go_of_its_link_when_it_has_stopped() -> None:
    """Its process ends then: what was still to be written would be lost."""
    async with linked(FakeEngine()) as found:
        front = found.fronts[0]
        front.metrics.rejected.labels("queue_full").inc(3)
        assert await front.stop(1.0)
        assert front.uplink.link is None
        assert b'ranker_rejected_total{reason="queue_full"} 3.0' in await found.host._exposition()


async def test_a_full_queue_is_told_at_once_and_how_long_it_takes_only_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look comes every few milliseconds, and each time the wait is another one."""
    async with linked(FakeEngine()) as found:
        [front], seconds = found.host._fronts.values(), iter(range(1, 1000))
        told: list[Any] = []
        monkeypatch.setattr(host, "CLOSED_SECONDS", 1000.0)
        monkeypatch.setattr(
            found.service.admission, "closed", lambda: Refusal("queue_full", "it is full", float(next(seconds)))
        )
        monkeypatch.setattr(front.link, "send", told.append)
        for _ in range(5):
            found.host._look()
        assert [state.closed for state in told] == ["it is full"]
        monkeypatch.setattr(host, "CLOSED_SECONDS", 0.0)
        found.host._look()
        assert told[-1].retry_after_seconds > told[0].retry_after_seconds


async def test_work_that_nobody_waits_for_is_held_to_its_end() -> None:
    """The event loop holds its tasks only weakly."""
    tasks: set[asyncio.Task[None]] = set()
    going = asyncio.Event()

    async def work() -> None:
        await going.wait()

    task = keep(tasks, work())
    assert tasks == {task}
    going.set()
    await task
    await until(lambda: not tasks)
