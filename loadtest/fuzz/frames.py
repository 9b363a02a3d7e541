"""Corrupts the messages of a front to the engine process and sends them over a real link. For HTTP see `mutate` and `wires`."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

from app.errors import NonFiniteScores, error_class
from app.fronts import wire
from app.fronts.host import EngineHost
from app.service.reload import Reloader
from app.service.service import RankingService
from app.settings import Settings
from loadtest.fuzz.calls import REQUEST_ID, Answer, Call
from loadtest.fuzz.mutate import Mutator
from model.config import ModelConfig
from model.inputs import Candidates, Context
from model.retrieval.inputs import Filters, PostChange, PostRows, Query

PATH = "a frame"
SECONDS = 5.0  # for an answer
NUMBERS = (-1, 0, 1, 2, 15, 16, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**31), -(2**63))
FIRST, CHECK = 1, 2  # numbers of the corrupted message and of the good one behind it
SERVED = 0  # replaced by the number of the served model or corpus, which the engine process sends first
BROKEN = orjson.dumps({"status": 400, "code": "link_broken"})
PROBLEM = (b"content-type", b"application/problem+json")
NONE = np.empty(0, np.uint64)


class FrameMutator:
    """An endless, repeatable source of corrupted messages for one model. The body of a call is one message, without its length."""

    def __init__(self, seed: int, config: ModelConfig) -> None:
        self.mutator = Mutator(seed, [b"{}"])
        self.config = config

    def call(self) -> Call:
        """The next call."""
        random = self.mutator.random
        message = self._others() if random.random() < 0.1 else self._question()
        if random.random() < 0.4:
            name = random.choice([name for name in message.__struct_fields__ if type(getattr(message, name)) is int])
            with contextlib.suppress(OverflowError):
                message = msgspec.structs.replace(message, **{name: random.choice(NUMBERS)})
        data = wire.encode(message)[wire.LENGTH.size :]
        return Call(self.mutator.cut(data) if random.random() < 0.3 else data, path=PATH, headers=())

    def _others(self) -> Any:
        """A message other than a question for scores."""
        empty = PostRows(NONE, NONE, NONE.view(np.int64), [])
        gone = PostChange(np.array([12345678], np.uint64), empty)
        return self.mutator.random.choice(
            (
                wire.Cancel(FIRST), wire.Left(99), wire.Counts(0, []), wire.Refused(1), asked("reload", FIRST, Path("x"), False),
                asked("reload_retrieval", FIRST, Path("x"), None), asked("change", FIRST, gone), asked("compact", FIRST),
            )
        )  # fmt: skip

    def _question(self) -> Any:
        """A ranking request, a search or an attention request, often with one number of a column replaced."""
        random = self.mutator.random
        context, candidates = inputs(self.config, random.randint(0, 40))
        column = random.choice((context.surfaces, candidates.surfaces, candidates.age_buckets, candidates.post_ids))
        if len(column) and random.random() < 0.6:
            column.view(np.int64)[random.randrange(len(column))] = random.choice(NUMBERS)
        if random.random() < 0.1:
            context.actions = context.actions[: random.randint(0, 2)]
        soon = time.monotonic() + SECONDS
        if random.random() < 0.15:
            filters = Filters(NONE, None, random.choice((None, *NUMBERS[:7])))
            least = random.choice((0.0, -1.0, float("nan"), float("inf")))
            query = Query(context, random.choice((1, 7, 2**31)), filters, least)
            return asked("retrieve", FIRST, SERVED, query, soon, None)
        if random.random() < 0.5:
            return asked("attention", FIRST, SERVED, context, candidates, soon)
        return asked("rank", FIRST, SERVED, soon, None, False, False, context, candidates)


def asked(name: str, number: int, *arguments: Any) -> Any:
    """The message with id `number` that calls a method of the interface."""
    return wire.METHODS[name].question(number, *arguments)


def inputs(config: ModelConfig, history: int = 3) -> tuple[Context, Candidates]:
    """A context and five candidates that are valid for any model of this shape."""
    ids, posts = np.arange(1, history + 1, dtype=np.uint64), np.arange(1, 6, dtype=np.uint64)
    actions, zeros = np.zeros((history, config.actions), np.float32), np.zeros(5, np.int64)
    context = Context(7, ids, ids.copy(), actions, np.zeros(history, np.int64), np.zeros(history, np.float32))
    return context, Candidates(posts, posts.copy(), zeros, zeros.copy())


@asynccontextmanager
async def linked(
    service: RankingService, reloads: Reloader, settings: Settings
) -> AsyncIterator[Callable[[Call], Awaitable[Answer]]]:
    """Yield a function that sends a frame to this service over a real socket. The host's tasks end with the loop."""
    config = service.model.manifest.config
    with tempfile.TemporaryDirectory() as directory:
        server = await EngineHost(service, reloads, settings).start(path := f"{directory}/engine")
        yield lambda call: ask_frame(path, config, call)
        server.close()


async def ask_frame(path: str, config: ModelConfig, call: Call) -> Answer:
    """Send a message on its own link, then a good one, which must be answered unless the link ends. Return the outcome as in HTTP."""
    reader, writer = await asyncio.open_unix_connection(path)
    told: dict[int, Any] = {}
    try:
        async with asyncio.timeout(SECONDS):
            writer.write(wire.encode(wire.Hello(wire.VERSION, 9)))
            served = await _served(reader)
            behind = asked(
                "rank", CHECK, served["model"], time.monotonic() + SECONDS, None, False, False, *inputs(config)
            )
            body = _for_served(call.body, served)
            writer.write(wire.LENGTH.pack(len(body)) + body + wire.encode(behind))
            while CHECK not in told:
                message = await _next(reader)
                if isinstance(message, wire.Answer):
                    told[message.id] = message
    except (asyncio.IncompleteReadError, ConnectionError):
        return Answer(400, dict([PROBLEM]), BROKEN, is_last=True)
    except TimeoutError:
        return Answer(fault="a link that neither answers nor ends")
    finally:
        writer.close()
    name = (REQUEST_ID, dict(call.headers).get(REQUEST_ID, b""))  # a frame carries no request id
    failed = next(
        (each for each in told.values() if isinstance(each, wire.Failed) and each.code not in wire.FAILURES), None
    )
    if failed is None:
        return Answer(200, dict([(b"content-type", b"application/protobuf"), name]))
    kind = error_class(failed.code)
    status = 422 if kind is NonFiniteScores else kind.status  # corrupted floats, which no HTTP body could hold
    return Answer(status, dict([PROBLEM, name]), orjson.dumps({"status": status, "code": failed.code}))


def _for_served(body: bytes, served: dict[str, int]) -> bytes:
    """The message with SERVED replaced by the served numbers; unchanged if it cannot be decoded."""
    with contextlib.suppress(msgspec.MsgspecError, OverflowError, UnicodeDecodeError, ValueError):
        message = wire.from_front.decode(body)
        named = {name: number for name, number in served.items() if getattr(message, name, None) == SERVED}
        return wire.encode(msgspec.structs.replace(message, **named))[wire.LENGTH.size :]
    return body


async def _served(reader: asyncio.StreamReader) -> dict[str, int]:
    """The numbers of the served model and corpus, by their field names in questions."""
    while not isinstance(message := await _next(reader), wire.State):
        pass
    return {"model": message.model, "served": message.corpus}


async def _next(reader: asyncio.StreamReader) -> Any:
    (length,) = wire.LENGTH.unpack(await reader.readexactly(wire.LENGTH.size))
    return wire.from_engine.decode(await reader.readexactly(length))
