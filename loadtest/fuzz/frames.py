"""Corrupts what a front says to the engine process, and says it over a real link. Not for HTTP: see `mutate` and `wires`."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import orjson

from app.errors import NonFiniteScores, error_class
from app.fronts import frames
from app.fronts.host import EngineHost
from app.service.reload import Reloader
from app.service.service import RankingService
from app.settings import Settings
from loadtest.fuzz.calls import REQUEST_ID, Answer, Call
from loadtest.fuzz.mutate import Mutator
from model.config import ModelConfig
from model.inputs import Candidates, Context

PATH = "a frame"
SECONDS = 5.0  # for an answer
NUMBERS = (-1, 0, 1, 2, 15, 16, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**31), -(2**63))
FIRST, CHECK = 1, 2  # numbers of the corrupted frame and of the good one behind it
SERVED = 0  # stands for the number of the model, or corpus, that serves, which a link hears of first
BROKEN = orjson.dumps({"status": 400, "code": "link_broken"})
PROBLEM = (b"content-type", b"application/problem+json")


class FrameMutator:
    """An endless, repeatable source of such calls for one model. A call's body is one frame, without its length."""

    def __init__(self, seed: int, config: ModelConfig) -> None:
        self.mutator = Mutator(seed, [b"{}"])
        self.config = config

    def call(self) -> Call:
        """The next one."""
        random = self.mutator.random
        if random.random() < 0.1:
            others = (
                frames.Cancel(FIRST),
                frames.Left(99),
                frames.Counts(0, []),
                frames.Refused(1),
                frames.Reload(FIRST, "x"),
            )
            frame: Any = random.choice((*others, frames.Change(FIRST, b"12345678", b"", []), frames.Compact(FIRST)))
        elif random.random() < 0.15:
            frame = self._search()
        else:
            frame = self._odd_columns(
                good(self.config, random.choice((frames.Rank, frames.Attend)), random.randint(0, 40))
            )
        if random.random() < 0.4:
            name = random.choice([name for name in frame.__struct_fields__ if type(getattr(frame, name)) is int])
            with contextlib.suppress(OverflowError):
                frame = msgspec.structs.replace(frame, **{name: random.choice(NUMBERS)})
        data = frames.encode(frame)[frames.LENGTH.size :]
        return Call(self.mutator.cut(data) if random.random() < 0.3 else data, path=PATH, headers=())

    def _odd_columns(self, frame: frames.Rank) -> frames.Rank:
        random = self.mutator.random
        words = np.frombuffer(frame.words, np.int64).copy()
        if random.random() < 0.6:
            words[random.randrange(len(words))] = random.choice(NUMBERS)
        return msgspec.structs.replace(frame, words=words.tobytes())

    def _search(self) -> frames.Search:
        random = self.mutator.random
        asked = good(self.config, frames.Rank, random.randint(0, 40))
        return frames.Search(
            FIRST, SERVED, asked.deadline, None, 1, asked.history, random.choice((1, 7, 2**31)),
            asked.words[: 24 * asked.history], asked.floats, b"", None, random.choice((None, *NUMBERS[:7])),
            random.choice((0.0, -1.0, float("nan"), float("inf"))),
        )  # fmt: skip


def good(
    config: ModelConfig, kind: type[frames.Rank] = frames.Rank, history: int = 3, number: int = FIRST
) -> frames.Rank:
    """A frame that is right, for any model of this shape."""
    count = 5
    ids, posts = np.arange(1, history + 1, dtype=np.uint64), np.arange(1, count + 1, dtype=np.uint64)
    zeros, actions = np.zeros(history, np.int64), np.zeros((history, config.actions), np.float32)
    context = Context(7, ids, ids, actions, zeros, np.zeros(history, np.float32))
    columns = frames.columns_of(context, Candidates(posts, posts, np.zeros(count, np.int64), np.zeros(count, np.int64)))
    return kind(number, SERVED, time.monotonic() + SECONDS, None, 7, history, count, *columns)


@asynccontextmanager
async def linked(
    service: RankingService, reloads: Reloader, settings: Settings
) -> AsyncIterator[Callable[[Call], Awaitable[Answer]]]:
    """Who takes calls of frames for this service, over a socket between. What looks after its fronts ends with the loop."""
    config = service.model.manifest.config
    with tempfile.TemporaryDirectory() as directory:
        server = await EngineHost(service, reloads, settings).start(path := f"{directory}/engine")
        yield lambda call: ask_frame(path, config, call)
        server.close()


async def ask_frame(path: str, config: ModelConfig, call: Call) -> Answer:
    """What becomes of a frame on a link of its own, said as HTTP would; a good one behind it must be answered, or the link has ended."""
    reader, writer = await asyncio.open_unix_connection(path)
    told: dict[int, Any] = {}
    try:
        async with asyncio.timeout(SECONDS):
            writer.write(frames.encode(frames.Hello(frames.VERSION, 9)))
            served = await _served(reader)
            behind = msgspec.structs.replace(good(config, number=CHECK), model=served["model"])
            body = _for_served(call.body, served)
            writer.write(frames.LENGTH.pack(len(body)) + body + frames.encode(behind))
            while CHECK not in told:
                frame = await _next(reader)
                if isinstance(frame, frames.Told):
                    told[frame.id] = frame
    except (asyncio.IncompleteReadError, ConnectionError):
        return Answer(400, dict([PROBLEM]), BROKEN, is_last=True)
    except TimeoutError:
        return Answer(fault="a link that neither answers nor ends")
    finally:
        writer.close()
    name = (REQUEST_ID, dict(call.headers).get(REQUEST_ID, b""))  # a frame carries none
    failed = next((each for each in told.values() if isinstance(each, frames.Failed)), None)
    if failed is None:
        return Answer(200, dict([(b"content-type", b"application/protobuf"), name]))
    kind = error_class(failed.code)
    status = (
        422 if kind is NonFiniteScores else kind.status
    )  # of floats that were cut into others: no body can hold these
    return Answer(status, dict([PROBLEM, name]), orjson.dumps({"status": status, "code": failed.code}))


def _for_served(body: bytes, served: dict[str, int]) -> bytes:
    """The same frame for what serves, where it is a frame still, and for that at all."""
    with contextlib.suppress(msgspec.MsgspecError, OverflowError, UnicodeDecodeError):
        frame = frames.from_front.decode(body)
        named = {name: number for name, number in served.items() if getattr(frame, name, None) == SERVED}
        return frames.encode(msgspec.structs.replace(frame, **named))[frames.LENGTH.size :]
    return body


async def _served(reader: asyncio.StreamReader) -> dict[str, int]:
    """The numbers by which a new link hears of what serves, before it hears how all is."""
    found = {}
    while not isinstance(frame := await _next(reader), frames.State):
        if isinstance(frame, frames.Model):
            found["model"] = frame.model
        elif isinstance(frame, frames.Corpus):
            found["corpus"] = frame.corpus
    return found


async def _next(reader: asyncio.StreamReader) -> Any:
    (length,) = frames.LENGTH.unpack(await reader.readexactly(frames.LENGTH.size))
    return frames.from_engine.decode(await reader.readexactly(length))
