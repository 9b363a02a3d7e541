"""The fuzzer: it finds nothing in the application, and it does find what is planted."""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import numpy as np
import pytest
import structlog
from pydantic import SecretStr

from app.engine.loading import RetrievalLoader
from app.errors import NotReady
from app.http.admin import create_admin_app
from app.http.application import create_app
from app.http.asgi import Routes
from app.http.call import Answer as HttpAnswer
from app.http.call import Call as HttpCall
from app.http.call import Endpoint, Fields, Reply
from app.http.grpc_server import ROUTES
from app.interface import CheckpointNotFound, ReloadInProgress, Reloads
from app.ports import create_grpc_server
from app.request import protobuf
from app.service.reload import Reloader
from app.service.service import RankingService
from app.settings import Admin, Grpc, Logs, Queue, Settings
from app.telemetry import logs
from app.telemetry.metrics import Metrics
from loadtest.fuzz.calls import JSON_TYPE, MARK, REQUEST_ID, Answer, Call, complaint
from loadtest.fuzz.frames import linked
from loadtest.fuzz.mutate import Mutator
from loadtest.fuzz.run import NAME, SHARES, SLOW, Tally, fuzz, learn, plain, random_paths, series_by_route, sources
from loadtest.fuzz.session import DIGEST, TOKEN, Watch
from loadtest.fuzz.sources import apart, corpus
from loadtest.fuzz.targets import InProcess, Sockets, Target
from loadtest.soak.fake_engine import FakeEngine, loader
from model.engine import Item
from model.inputs import Candidates, Context
from tests.app import retrieving
from tests.app.fakes import loaded
from tests.reliability.live import live
from tests.zygote import forked

SETTINGS = Settings(
    logs=Logs(success_sample=0),
    grpc=Grpc(port=0),
    queue=Queue(max_wait_seconds=0),
    admin=Admin(port=0, token_sha256=SecretStr(DIGEST)),
)
FORKED = "loadtest.fuzz.sources.get_context", lambda _: forked("loadtest.fuzz.sources")
Change = Callable[[int, Fields, bytes], HttpAnswer]
Plant = Callable[[Routes], Routes]
Around = Callable[[Target], Target]


@pytest.fixture(scope="module")
def retrieval(tmp_path_factory: pytest.TempPathFactory) -> RetrievalLoader:
    return retrieving.loader(tmp_path_factory.mktemp("retrieval"))


Run = Callable[..., Tally]


@pytest.fixture
def run(retrieval: RetrievalLoader, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Fuzz the application around a fake engine, with something planted in front of it, or around all that is asked."""
    monkeypatch.setattr("app.loop_lag.STANDING_SECONDS", math.inf)  # as `python -m loadtest.fuzz` does
    monkeypatch.setattr(*FORKED)

    async def fuzzed(requests: int, plant: Plant, only: str, around: Around, engine: FakeEngine) -> Tally:
        service = RankingService(loader(engine), SETTINGS, Metrics(), retrieval=retrieval)
        app = create_app(SETTINGS, service)
        admin = create_admin_app(SETTINGS.admin, cast(Reloads, Refusing()), service)
        server = create_grpc_server(app, SETTINGS)
        service.start()
        await service.wait_ready()
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")  # type: ignore[attr-defined]
        async with channel, linked(service, cast(Reloader, Refusing()), SETTINGS) as link:
            sound, target = (InProcess(channel, routes, admin, link) for routes in (app, plant(app)))
            calls = sources(app.pages.openapi(), 1, service.model.manifest, TOKEN)
            tally = await fuzz(
                around(target),
                {name: calls[name] for name in only.split()},
                lambda: series_by_route(service.metrics.render()),
                requests=requests,
                seconds=math.inf,
                known=await learn(sound, corpus(1)),
                clock=partial(next, itertools.count()),  # each block takes as long: a busy machine draws no others
            )
        for source in multiprocessing.active_children():  # it would go on making calls
            source.terminate()
            source.join()
        await server.stop(1.0)
        await service.stop(1.0)
        return tally

    with open(os.devnull, "w") as nowhere:
        logs.configure(SETTINGS.logs, nowhere)
        yield lambda requests, only, plant=nothing, around=lambda target: target, engine=None: asyncio.run(
            fuzzed(requests, plant, only, around, engine or FakeEngine())
        )
    structlog.reset_defaults()


class Refusing:
    """Reloads of names that lead nowhere, while another one runs."""

    def resolve(self, name: str) -> Path:
        raise CheckpointNotFound

    async def reload(self, path: Path | None = None) -> None:
        raise ReloadInProgress


def nothing(routes: Routes) -> Routes:
    """Is planted."""
    return routes


class Planted(Endpoint):
    """An endpoint whose replies `change` makes others."""

    def __init__(self, endpoint: Endpoint, change: Change) -> None:
        self.endpoint, self.change = endpoint, change

    def begin(self, headers: Fields, reply: Reply) -> HttpCall:
        return self.endpoint.begin(
            headers, lambda status, fields, body, may_wait: reply(*self.change(status, fields, body), may_wait)
        )


class PlantedRoutes(dict[tuple[bytes, bytes], Endpoint]):
    """All endpoints of an application, each planted with a change of its replies."""

    def __init__(self, routes: Routes, change: Change) -> None:
        self.routes, self.change = routes, change

    def __getitem__(self, asked: tuple[bytes, bytes]) -> Endpoint:
        return Planted(self.routes[asked], self.change)


def changing(change: Change) -> Plant:
    """Replies are not what the application said."""
    return partial(PlantedRoutes, change=change)


class Failing(dict[tuple[bytes, bytes], Endpoint]):
    """Raises for each tenth request."""

    def __init__(self, routes: Routes) -> None:
        self.routes, self.count = routes, 0

    def __getitem__(self, asked: tuple[bytes, bytes]) -> Endpoint:
        self.count += 1
        if self.count % 10 == 0:
            raise KeyError("planted")
        return self.routes[asked]


def test_nothing_is_found(run: Run) -> None:
    """The slow sources are asked last, each alone: what a source makes while others are asked is sent by nobody."""
    quick = " ".join(name for name in SHARES if name not in SLOW)
    tallies = [run(1408, quick), *(run(requests, name) for name, requests in zip(SLOW, (64, 128), strict=True))]
    assert [tally.failures for tally in tallies] == [[]] * 3
    assert [row.ok for row in tallies[0].rows()] == [True] * 4
    assert tallies[0].compared > 50
    assert {name for tally in tallies for name in tally.sent} == set(SHARES)
    statuses = sum((tally.statuses for tally in tallies), Counter[int]())
    assert {200, 400, 404, 412, 413, 415, 422} <= set(statuses)  # it reaches every corner, the good one too
    assert statuses[429] < 100  # bodies that are refused unread show nothing


def rewriting(old: bytes, new: bytes) -> Plant:
    """These bytes of every body are others."""
    return changing(lambda status, fields, body: (status, fields, body.replace(old, new)))


PLANTS: dict[str, Plant] = {
    "raised KeyError": Failing,
    "status 500": changing(lambda status, fields, body: (500 if status == 422 else status, fields, body)),
    "an error that shows the input": rewriting(b'"detail":"', b'"detail":"' + MARK.encode()),
    "scores that are null": rewriting(b'"score":', b'"score":null,"s":'),
    "scores that are no JSON": rewriting(b'"score":', b'"score":NaN,"s":'),
    "a long error": rewriting(b'"detail":"', b'"detail":"' + b" " * 5000),
}


@pytest.mark.parametrize(("plant", "found"), [(plant, found) for found, plant in PLANTS.items()], ids=list(PLANTS))
def test_what_is_planted_is_found(run: Run, plant: Plant, found: str) -> None:
    tally = run(192, "mutations", plant)
    assert tally.failed[found] > 0
    assert not tally.rows()[0].ok
    assert tally.failures


def longer_data(status: int, fields: Fields, body: bytes) -> HttpAnswer:
    """Binary replies have some bytes more."""
    return status, fields, body + bytes(4 * (b'"binary_data_size"' in body))


WIRE_PLANTS: dict[str, Plant] = {
    "data that no tensor has": changing(longer_data),
    "tensors of other numbers than their shapes say": rewriting(b'"datatype":"FP64"', b'"datatype":"FP32"'),
    "scores that are no tensors": rewriting(b'"outputs":', b'"zutputs":'),
    "an error that shows the input": rewriting(b'"detail":"', b'"detail":"' + MARK.encode()),
    "raised KeyError": Failing,
}


@pytest.mark.parametrize(
    ("plant", "found"), [(plant, found) for found, plant in WIRE_PLANTS.items()], ids=list(WIRE_PLANTS)
)
def test_what_is_planted_on_the_other_wires_is_found(run: Run, plant: Plant, found: str) -> None:
    assert run(320, "wires", plant).failed[found] > 0


def test_frames_are_taken_or_end_their_link(run: Run) -> None:
    tally = run(640, "frames")
    assert tally.failures == []
    assert {200, 400} <= set(tally.statuses)
    assert min(tally.statuses[200], tally.statuses[400]) > 100


@pytest.mark.parametrize("kind", [Candidates, Context])
def test_a_check_of_frames_that_is_missing_is_found(run: Run, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(items: Sequence[Item]) -> None:
        given = [item.candidates if kind is Candidates else item.context for item in items]
        assert all(((each.surfaces >= 0) & (each.surfaces < 16)).all() for each in given), "read beyond a table"

    monkeypatch.setattr(kind, "check", lambda self, config: None)

    def native(*asked: object, **more: object) -> None:
        raise NotReady  # what reads real tables would end this process

    monkeypatch.setattr("app.service.service.RankingService.attention", native)
    monkeypatch.setattr("app.service.retrieval.RetrievalService.retrieve", native)
    assert run(256, "frames", engine=FakeEngine(before=look)).failed["status 503"]


def test_a_message_with_odd_numbers_is_found() -> None:
    reply = protobuf.CLASSES["ModelInferResponse"]()
    reply.outputs.add(name="score", datatype="FP64", shape=[2])
    for data, complained in (([1.0, 2.0], False), ([1.0, np.nan], True), ([1.0], True)):
        del reply.raw_output_contents[:]
        reply.raw_output_contents.append(np.array(data).tobytes())
        headers = {b"content-type": b"application/grpc", b"x-request-id": b"x"}
        assert bool(complaint(Answer(200, headers, reply.SerializeToString()))) == complained


def test_each_wire_and_page_is_reached_with_good_requests_and_bad_ones(run: Run) -> None:
    seen: set[tuple[str, bytes]] = set()

    class Watching:
        def __init__(self, target: Target) -> None:
            self.target = target

        async def ask(self, calls: Sequence[Call]) -> list[Answer]:
            answers = await self.target.ask(calls)
            seen.update(
                (call.path, answer.headers[b"content-type"]) for call, answer in zip(calls, answers, strict=True)
            )
            return answers

    assert run(960, "wires", around=Watching).rows()[0].ok
    assert run(576, "pages", around=Watching).rows()[0].ok
    problem = b"application/problem+json"
    assert seen >= {
        ("/rank", b"application/json"), ("/rank", b"application/octet-stream"), ("/rank", problem),
        ("/v2/models/fake/infer", b"application/json"), ("/v2/models/fake/infer", b"application/octet-stream"),
        ("/v2/models/fake/infer", problem), (ROUTES[-1], b"application/grpc"), (ROUTES[-1], problem),
        ("/retrieve", b"application/json"), ("/retrieve", problem), ("/recommend", b"application/json"),
        ("/recommend", problem), ("/admin/posts", b"application/json"), ("/admin/posts", problem), ("/admin/reload", problem),
    }  # fmt: skip


class Crossing:
    """Each gets the reply of the next, under its own name or not."""

    def __init__(self, target: Target, rename: bool) -> None:
        self.target = target
        self.rename = rename

    async def ask(self, calls: Sequence[Call]) -> list[Answer]:
        answers = await self.target.ask(calls)
        headers = [answer.headers for answer in answers]
        crossed = [*answers[1:], answers[0]]
        if not self.rename:
            return crossed
        return [
            replace(answer, headers=answer.headers | {b"x-request-id": fields[b"x-request-id"]})
            for answer, fields in zip(crossed, headers, strict=True)
        ]


@pytest.mark.parametrize("rename", [False, True], ids=["name", "scores"])
def test_replies_that_are_crossed_are_found(run: Run, rename: bool) -> None:
    tally = run(256, "mutations", around=lambda target: Crossing(target, rename))
    assert tally.failed["another request's scores" if rename else "another request's name"] > 0
    assert not tally.rows()[3].ok


def test_a_good_body_that_is_refused_for_its_own_headers_is_not_taken_for_crossed() -> None:
    """A socket's parser refuses an id with a control character, which no call in process does."""
    tally = Tally(known={b"{}": {}})
    problem = Answer(
        400,
        {REQUEST_ID: b"x", b"content-type": b"application/problem+json"},
        b'{"status": 400, "code": "bad_request"}',
    )
    for own in (b"odd\x1b[0m", NAME + b"1"):
        tally.note("mutations", Call(b"{}", headers=(JSON_TYPE, (REQUEST_ID, own))), problem)
        problem.headers[REQUEST_ID] = NAME + b"1"
    assert tally.failed == {"another request's scores": 1}  # of the one whose headers are ours


def test_over_sockets_the_same_calls_get_the_same_answers(run: Run, retrieval: RetrievalLoader) -> None:
    asked: list[tuple[Call, Answer]] = []

    class Noting:
        def __init__(self, target: Target) -> None:
            self.target = target

        async def ask(self, calls: Sequence[Call]) -> list[Answer]:
            answers = await self.target.ask(calls)
            asked.extend(zip(calls, answers, strict=True))
            return answers

    for only in ("mutations", "pages", "paths"):
        run(320, only, around=Noting)
    asked = [(call, answer) for call, answer in asked if not call.path.startswith("/admin")]

    async def over_sockets(port: int) -> list[Answer]:
        target = Sockets(cast(Any, grpc.aio.insecure_channel(f"127.0.0.1:{port}")), port, port)
        answers = await target.ask([call for call, _ in asked])
        await target.close()
        return answers

    settings = {"queue": {"max_wait_seconds": 0}, "logs": {"level": "error"}}
    with live(FakeEngine(), retrieval, **settings) as server:
        answers = asyncio.run(over_sockets(server.port))
    for (call, expected), answer in zip(asked, answers, strict=True):
        assert answer.status == expected.status or (answer.is_last and answer.status == 400), call
        assert not complaint(answer), call
        if call.headers[-1][1].startswith(NAME) and not answer.is_last:
            assert answer.headers[REQUEST_ID] == call.headers[-1][1], call
        if call.path == "/rank" and answer.status == 200 and call.headers[0] == JSON_TYPE:
            own = {"context": ""}  # of each process
            assert plain(answer) | own == plain(expected) | own, call


def test_series_that_grow_are_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Everything:
        def __contains__(self, path: str) -> bool:
            return True

    monkeypatch.setattr("app.http.observe.frozenset", lambda routes: Everything(), raising=False)
    assert run(384, "paths").new_series > 100


def test_a_seed_repeats_its_calls() -> None:
    corpus = [b'{"user_id":1,"history":[],"candidates":[{"post_id":1,"author_id":2}]}']
    first, second, other = (Mutator(seed, corpus) for seed in (3, 3, 4))
    calls: list[list[Call]] = [[mutator.call() for _ in range(200)] for mutator in (first, second, other)]
    assert calls[0] == calls[1]
    assert calls[0] != calls[2]


def test_a_run_sends_the_same_calls_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the hour is; but for the two sources of SLOW, which have tests of their own."""

    class Noting:
        def __init__(self) -> None:
            self.sent: list[Call] = []

        async def ask(self, calls: Sequence[Call]) -> list[Answer]:
            self.sent += calls
            return [Answer(404, {}, b"")] * len(calls)

    runs: list[list[Call]] = []
    monkeypatch.setattr("loadtest.fuzz.frames.time", SimpleNamespace(monotonic=lambda: 0.0))  # frames name a deadline
    for hour in (1e9, 2e9):
        monkeypatch.setattr(time, "time", lambda hour=hour: hour)
        every = sources({}, 1, loaded(FakeEngine()).checkpoint.manifest, TOKEN)
        calls = {name: call for name, call in every.items() if name not in SLOW}
        target, ticks = Noting(), partial(next, itertools.count())
        asyncio.run(fuzz(target, calls, lambda: 0, requests=2048, seconds=math.inf, clock=ticks))
        runs.append(target.sent)
    assert len(runs[0]) == 2048
    assert [place for place, pair in enumerate(zip(*runs, strict=True)) if pair[0] != pair[1]] == []


def test_the_corpus_is_good(run: Run) -> None:
    tally: Any = run(128, "mutations")
    assert tally.statuses[200] > 10


def test_a_source_that_ends_apart_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never stands still in silence."""
    monkeypatch.setattr(*FORKED)
    calls = [*itertools.islice(random_paths(1), 2)]
    made = apart(iter, calls)
    assert [next(made), next(made)] == calls
    with pytest.raises(EOFError):
        next(made)


def test_calls_that_are_made_apart_are_those_that_would_be_made_here(capfd: pytest.CaptureFixture[str]) -> None:
    """And a source of which nobody wants more ends quietly."""
    expected = [*itertools.islice(random_paths(1), 2)]
    calls = apart(itertools.cycle, expected)
    assert [next(calls), next(calls)] == expected
    calls.close()  # type: ignore[attr-defined]  # a generator
    for process in multiprocessing.active_children():
        process.join(10)
    assert "Traceback" not in capfd.readouterr().err


def test_the_memory_row_sees_what_stays_and_no_garbage() -> None:
    watch, tally = Watch(os.getpid()), Tally()

    def look(sent: int) -> None:
        tally.sent["mutations"] = sent
        watch.look(tally)

    look(500_000)
    circle: list[Any] = [np.ones(8 * 2**20)]  # 64 MiB
    circle.append(circle)
    del circle
    look(1_000_000)
    assert watch.row().ok
    kept = np.ones(8 * 2**20)
    look(1_000_001)
    assert not watch.row().ok
    assert kept.all()
