"""Requests of a connection that reads them itself, `POST /rank` among them: calls in place of ASGI messages, and no task."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from app.errors import Overloaded, ServiceError
from app.http.arms import ANY
from app.http.asgi import Answered, ClientGone, Headers, read_body, too_long
from app.http.negotiation import RANK, Wires, check_accept
from app.http.observe import Recorder
from app.http.problems import problem_reply
from app.http.rank import Prepared, Ranking
from app.interface import Ranked, Ticket
from app.request.body import Typed
from app.request.reply import ROWS_IN_A_PIECE
from app.request.vocabulary import Vocabulary
from app.request.wires import BINARY, LENGTH, media_type
from app.telemetry.exchange import Exchange

Fields = Sequence[tuple[bytes, bytes]]
Reply = Callable[[int, Fields, bytes, bool], None]  # the last: whether an impatient caller's reply may be written later


class DirectEndpoint(ABC):
    """Makes a call of each request. As an ASGI application, which it is too, it serves under any other server."""

    def __init__(self, ranking: Ranking, recorder: Recorder, path: str) -> None:
        self.ranking = ranking
        self.recorder = recorder
        self.path = path

    @abstractmethod
    def begin(self, headers: Fields, reply: Reply) -> DirectCall:
        """The headers have arrived; `reply` is called once, at once perhaps, unless the call is abandoned before."""

    def refuse(self, headers: Fields) -> tuple[int, Fields, bytes, bool] | None:
        """The reply to a request with these headers that is refused unread; None where it has to be read."""
        fields = dict(headers)
        exchange = self.recorder.begin("POST", self.path, fields)
        try:
            self.ranking.enter(fields, exchange)
        except ServiceError as error:
            return self._refusal(error, exchange, fields)
        return None

    def _refusal(self, error: ServiceError, exchange: Exchange, headers: Headers) -> tuple[int, Fields, bytes, bool]:
        """Apart from where the error is caught: a second name for it there would be a circle of error and frame."""
        problem = self.recorder.problem(error, exchange)
        exchange.status, fields, body = problem_reply(problem, exchange)
        self.recorder.end(exchange, headers)
        return exchange.status, _named(fields, body, exchange), body, problem.may_wait

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The same over ASGI."""
        replied: asyncio.Future[tuple[int, Fields, bytes]] = asyncio.get_running_loop().create_future()
        call = self.begin(scope["headers"], lambda *reply: replied.set_result(reply[:3]))
        try:
            if not replied.done():
                call.finish(await read_body(call.headers, receive, call.max_body_bytes))
            status, headers, body = await _unless_disconnected(replied, receive)
        except ClientGone:
            call.abandon()
            return
        except Answered as refusal:
            call.abandon((refusal.status, refusal.code))
            return
        except ServiceError as error:
            call.fail(error)
            status, headers, body = replied.result()
        except asyncio.CancelledError:
            call.abandon()
            raise
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body", "body": body})


class DirectCall(ABC):
    """One request, from its headers to its reply: `finish` with its body, `fail` or `abandon`. Belongs to the event loop."""

    __slots__ = ("_reply", "_tickets", "exchange", "headers", "max_body_bytes", "ranking", "recorder")

    def __init__(self, endpoint: DirectEndpoint, headers: Headers, reply: Reply) -> None:
        self.ranking = endpoint.ranking
        self.recorder = endpoint.recorder
        self.headers = headers
        self.max_body_bytes = self.ranking.limits.max_body_bytes
        self.exchange = self.recorder.begin("POST", endpoint.path, headers)
        self._reply: Reply | None = reply
        self._tickets: tuple[Ticket, ...] = ()  # what is begun for it

    @abstractmethod
    def finish(self, body: bytes | bytearray) -> None:
        """The body has arrived."""

    def too_long(self) -> None:
        """More of the body has arrived than `max_body_bytes`."""
        self.fail(too_long(self.max_body_bytes))

    def no_room(self) -> None:
        """Too much is being read for all callers."""
        self.fail(Overloaded("Too many bytes of requests are being read.", retry_after_seconds=1.0))

    def abandon(self, answered: tuple[int, str] | None = None) -> None:
        """The client has disconnected, or the connection has answered in our place: status and code."""
        if self._reply is None:
            return
        if answered is not None:
            self.exchange.status, self.exchange.code = answered
        elif not self._tickets:
            self.ranking.metrics.cancelled.labels("body").inc()
        self._leave()
        self.recorder.end(self.exchange, self.headers)

    def fail(self, error: Exception) -> None:
        """Answer with a problem."""
        if self._reply is not None:
            problem = self.recorder.problem(error, self.exchange)
            self._answer(*problem_reply(problem, self.exchange), may_wait=problem.may_wait)

    def _answer(
        self, status: int, headers: Fields, body: bytes, *, may_wait: bool = False, at_once: bool = False
    ) -> None:
        """`at_once`: before it is counted and logged."""
        reply, exchange = self._reply, self.exchange
        assert reply is not None
        exchange.status = status
        self._leave()
        if not at_once:
            self.recorder.end(exchange, self.headers)
        try:
            reply(status, _named(headers, body, exchange), body, may_wait)
        finally:
            if at_once:
                self.recorder.end(exchange, self.headers)

    def _leave(self) -> None:
        """Nothing more is said, nothing more is computed."""
        self._reply = None
        for ticket in self._tickets:
            ticket.release()


class RankEndpoint(DirectEndpoint):
    """Makes a `RankCall` of each request."""

    def __init__(
        self,
        ranking: Ranking,
        recorder: Recorder,
        path: str = "/rank",
        wires: Wires = RANK,
        wanted: tuple[str, str] = ANY,
    ) -> None:
        """`wires` by media type of the body; `wanted` are name and version of the model that the path names."""
        super().__init__(ranking, recorder, path)
        self.wires = wires
        self.wanted = wanted

    def begin(self, headers: Fields, reply: Reply) -> RankCall:
        """As `DirectEndpoint.begin`."""
        return RankCall(self, dict(headers), reply)


class RankCall(DirectCall):
    """One request to rank."""

    __slots__ = ("_job", "_terms")

    def __init__(self, endpoint: RankEndpoint, headers: Headers, reply: Reply) -> None:
        super().__init__(endpoint, headers, reply)
        self._job: Prepared | None = None
        try:
            self._terms = self.ranking.open(headers, self.exchange, endpoint.wires, endpoint.wanted)
        except Exception as error:
            self.fail(error)

    def finish(self, body: bytes | bytearray) -> None:
        """As `DirectCall.finish`."""
        ranking, exchange, terms = self.ranking, self.exchange, self._terms

        def read(vocabulary: Vocabulary) -> Typed:
            return terms.wire.decode(ranking.plain(body, terms), self.headers, ranking.limits, vocabulary)

        try:
            typed = ranking.decode(read, exchange, terms.wanted)
            check_accept(self.headers, media_type(typed))
            job = self._job = ranking.prepare(typed, terms.wire, terms.deadline, exchange, terms.wanted)
            self._tickets = (job.ticket,)
            exchange.name(job.request.request_id)
            ranking.service.rank(job.ticket, job.context, job.candidates, self._ranked)
        except Exception as error:
            self.fail(error)

    def _ranked(self, result: Ranked | ServiceError) -> None:
        job = self._job
        assert job is not None
        if isinstance(result, ServiceError):
            self.fail(result)
        else:
            pieces = self.ranking.render(job, result, self.exchange.stages["parse"], self.exchange)
            self._render(job, result, pieces, [])

    def _render(self, job: Prepared, ranked: Ranked, pieces: Iterator[bytes], done: list[bytes]) -> None:
        if self._reply is None:
            return
        try:
            for piece in pieces:
                done.append(piece)
                if len(job.candidates) > ROWS_IN_A_PIECE:  # lets other requests in between
                    asyncio.get_running_loop().call_soon(self._render, job, ranked, pieces, done)
                    return
            fields = [(b"content-type", media_type(job.request))]
            if fields[0][1] is BINARY:
                fields.append((LENGTH, b"%d" % len(done[0])))
            fields += self.ranking.headers(job.model, [ranked], self.exchange)
            self._answer(200, fields, b"".join(done))
        except Exception as error:
            self.fail(error)


def _named(headers: Fields, body: bytes, exchange: Exchange) -> Fields:
    """All headers of a reply."""
    return [*headers, (b"content-length", b"%d" % len(body)), (b"x-request-id", exchange.request_id.encode())]


async def _unless_disconnected(replied: asyncio.Future[Any], receive: Receive) -> Any:
    """The reply. Raises ClientGone when the client disconnects before it; the body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    if replied.done():
        return replied.result()
    watcher: asyncio.Future[Any] = asyncio.get_running_loop().create_task(watch())
    try:
        await asyncio.wait((replied, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
    if not replied.done():
        raise ClientGone
    return replied.result()
