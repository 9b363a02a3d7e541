"""The engine process towards fronts that are gone, stopped, or talk nonsense."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from app.exits import EXIT_ENGINE_LOST
from app.fronts import frames, host
from app.fronts.frames import Attend, Cancel, Counts, Hello, Left, Rank, encode
from app.settings import Queue
from loadtest.soak.fake_engine import FakeEngine
from model.engine import EngineError
from tests.app.fakes import Gate, request, right, run, until
from tests.app.fronts.linked import Linked, begin, linked


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


def asked(kind: type[Rank] = Rank, *, surface: int = 0, age: int = 0, **changes: Any) -> Rank:
    context, candidates = request(1)
    candidates.surfaces[-1], candidates.age_buckets[-1] = surface, age
    fields = {"id": 1, "model": 1, "deadline": time.monotonic() + 3600, "key": None, "user_id": 1}
    words, floats = frames.columns_of(context, candidates)
    columns = {"history": len(context), "candidates": len(candidates), "words": words, "floats": floats}
    return kind(**fields | columns | changes)


NONSENSE = {
    "no Hello": (asked(),),
    "two Hellos": (Hello(frames.VERSION, 9), Hello(frames.VERSION, 9)),
    "another version": (Hello(frames.VERSION + 1, 9),),
    "another protocol": (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",),
    "an unknown model": (Hello(frames.VERSION, 9), asked(model=7)),
    "columns too short": (Hello(frames.VERSION, 9), asked(words=b"1234")),
    "more candidates than columns": (Hello(frames.VERSION, 9), asked(candidates=5)),
    "a number twice": (Hello(frames.VERSION, 9), asked(), asked()),
    "a surface of 2^40": (Hello(frames.VERSION, 9), asked(surface=2**40)),
    "a negative surface": (Hello(frames.VERSION, 9), asked(surface=-1)),
    "an age that no table has": (Hello(frames.VERSION, 9), asked(age=2**40)),
    "attention by a surface of 2^40": (Hello(frames.VERSION, 9), asked(Attend, surface=2**40)),
    "a slot of 2^62": (Hello(frames.VERSION, 9), asked(first_slot=2**62)),
    "no candidates": (Hello(frames.VERSION, 9), asked(candidates=0, words=b"", floats=b"", history=0)),
    "a deadline that is no number": (Hello(frames.VERSION, 9), asked(deadline=float("nan"))),
    "attention of an unknown model": (Hello(frames.VERSION, 9), asked(Attend, model=7)),
    "attention by a number that another has": (Hello(frames.VERSION, 9), asked(), asked(Attend)),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_ends_its_own_link_and_no_other(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = FakeEngine(before=lambda items: time.sleep(0.002))
        async with linked(engine, queue=Queue(max_wait_seconds=0)) as found:
            monkeypatch.setattr(found.service, "check_open", lambda key: None)  # a busy machine would refuse it unread
            [front] = found.fronts
            working = [begin(front, user)[1] for user in range(1, 20)]
            await speak(found, *NONSENSE[kind])
            for user, future in enumerate(working, 1):
                assert right((await future).scores, user)
            await until(lambda: not found.service.admission.requests and len(found.host._links) == 1)

    run(main())


def test_what_is_no_nonsense_gets_an_answer() -> None:
    """The negative control: the same frames, right."""

    async def main() -> None:
        async with linked(FakeEngine()) as found:
            reader, writer = await asyncio.open_unix_connection(found.path)
            writer.write(
                b"".join(map(encode, (Hello(frames.VERSION, 9), asked(), Cancel(77), Left(77), Counts(0, []))))
            )
            kinds: list[type] = []
            while frames.Answer not in kinds:
                (length,) = frames.LENGTH.unpack(await reader.readexactly(frames.LENGTH.size))
                kinds.append(type(frames.from_engine.decode(await reader.readexactly(length))))
            writer.close()
            assert [kind for kind in kinds if kind is not frames.State] == [frames.Model, frames.Answer]

    run(main())


def test_a_front_that_is_gone_holds_no_place() -> None:
    async def main() -> None:
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

    run(main())


def test_a_front_that_reads_nothing_delays_a_scrape_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "FLUSH_SECONDS", 1.0)

    async def main() -> None:
        async with linked(FakeEngine()) as found:
            [front] = found.fronts
            _, writer = await asyncio.open_unix_connection(found.path)
            writer.write(encode(Hello(frames.VERSION, 9)))
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

    run(main())


def test_a_lost_engine_answers_everybody_and_says_so_with_its_exit_code() -> None:
    async def main() -> None:
        def lost(items: object) -> None:
            raise EngineError("planted", sticky=True)

        async with linked(FakeEngine(before=lost), fronts=2) as found:
            results = [begin(found.fronts[user % 2], user)[1] for user in range(1, 7)]
            ended = await asyncio.gather(*results, return_exceptions=True)
            assert {getattr(error, "status", error) for error in ended} == {503}
            await until(found.host._ended.is_set)
            assert found.host.exit_code == EXIT_ENGINE_LOST
            assert all(front.health().failed for front in found.fronts)

    run(main())


def test_a_drain_ends_with_the_last_front() -> None:
    async def main() -> None:
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

    run(main())
