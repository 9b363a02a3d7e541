"""The Open Inference Protocol over gRPC, in the same event loop: tensors in protobuf, all else as over HTTP. Needs `grpcio`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import orjson

from app.budgets import (
    CALL_AHEAD_BYTES,
    CALL_CONNECTIONS,
    MAX_HEADER_BYTES,
    REFUSED_SECONDS,
    calls_of_a_connection,
    shared_rest_seconds,
)
from app.errors import BadRequest, DeadlineExceeded, RequestTimeout, ServiceError
from app.http.arms import described, named
from app.http.headers import Headers, timeout_seconds_of
from app.http.observe import Recorder
from app.http.open_inference import describe_server
from app.http.problems import retry_after
from app.http.rank import Ranking
from app.interface import ranked
from app.request import protobuf
from app.request.wires import TENSORS
from app.settings import Settings
from app.telemetry.exchange import Exchange

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    412: grpc.StatusCode.FAILED_PRECONDITION,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
METHODS = ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelInfer")
ROUTES = tuple(f"/{protobuf.SERVICE}/{name}" for name in METHODS)

GREETING_MS = 5000
LATE_SECONDS = 0.05  # the caller's clock began earlier, so the call may already have ended at the caller's deadline

Answer = Callable[[Any, "Call"], Awaitable[bytes]]


class Call:
    """One call as its method sees it: headers as over HTTP, its log record, and the metadata of its reply."""

    def __init__(self, context: Any, exchange: Exchange, headers: Headers) -> None:
        self.headers = headers
        self.exchange = exchange
        self.fields: list[tuple[bytes, bytes]] = []
        seconds = context.time_remaining()
        self.seconds: float | None = None if seconds is None else max(0.0, seconds)
        self.deadline: float | None = None  # of a ranking, as in `Terms`


class InferenceServer:
    """The service `inference.GRPCInferenceService` on a port of its own. All methods belong to the event loop."""

    def __init__(self, ranking: Ranking, recorder: Recorder, settings: Settings) -> None:
        self.ranking = ranking
        self.service = ranking.service
        self.recorder = Recorder(recorder.metrics, ROUTES, recorder.request_log, recorder.tracer)
        self.settings = settings
        self.patience_seconds = min(settings.connections.stall_seconds, settings.connections.body_seconds)
        self.host = settings.host
        self.port = 0
        self._server: Any = None
        self._resting = 0

    async def start(self) -> None:
        """Listen. Raises OSError."""
        settings = self.settings
        self._server = grpc.aio.server(
            options=[
                (
                    "grpc.max_receive_message_length",
                    settings.limits.max_body_bytes,
                ),  # and once inflated: since 1.85 at least
                ("grpc.max_concurrent_streams", calls_of_a_connection(settings)),  # more calls wait, or are reset
                # else a client that obeys the limit is refused too: an answered call counts until it is freed completely
                ("grpc.http2.max_deallocating_streams", settings.batching.max_requests),
                ("grpc.http2.settings_timeout", GREETING_MS),  # also for a client that sends nothing at all
                ("grpc.http2.lookahead_bytes", CALL_AHEAD_BYTES),
                ("grpc.http2.bdp_probe", 0),  # it would let a fast client send megabytes of each call
                ("grpc.max_allowed_incoming_connections", CALL_CONNECTIONS),
                ("grpc.max_metadata_size", MAX_HEADER_BYTES),
                ("grpc.max_connection_idle_ms", round(settings.connections.keep_alive_seconds * 1000)),
                ("grpc.so_reuseport", int(settings.fronts > 0)),  # the supervisor has looked whether the port is free
            ],
            maximum_concurrent_rpcs=settings.batching.max_requests,
        )
        answers = (self._live, self._ready, self._metadata, self._model_ready, self._model_metadata, self._infer)
        handlers = {
            name: grpc.stream_unary_rpc_method_handler(self._observed(name, answer))
            for name, answer in zip(METHODS, answers, strict=True)
        }
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(protobuf.SERVICE, handlers)])
        host = f"[{self.host}]" if ":" in self.host else self.host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{settings.grpc.port}")
        except RuntimeError as error:
            raise OSError(str(error)) from None
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """Take nothing new, finish what was begun within this time."""
        if self._server is not None:
            await self._server.stop(seconds)

    def _observed(self, name: str, answer: Answer) -> Callable[[AsyncIterator[bytes], Any], Awaitable[bytes]]:
        """Named, counted and logged as an HTTP request is; errors become statuses.

        All methods are unary; as one that takes a stream it begins with the headers, so that a message which never ends has a deadline.
        """

        async def handle(messages: AsyncIterator[bytes], context: Any) -> bytes:
            headers = {
                key.encode(): value.encode() for key, value in context.invocation_metadata() if type(value) is str
            }
            exchange = self.recorder.begin("POST", f"/{protobuf.SERVICE}/{name}", headers)
            call = Call(context, exchange, headers)
            reply, problem = b"", None
            try:
                if name == METHODS[-1]:
                    self.ranking.enter(headers, exchange)  # do not wait for a caller without a key
                    call.deadline = self.ranking.deadline(call.seconds, timeout_seconds_of(headers))
                data = await _message(messages, self.patience_seconds, context)
                reply = await answer(protobuf.read(f"{name}Request", data), call)
                exchange.status = 200
            except Exception as error:
                problem = self.recorder.problem(error, exchange)
                exchange.status = problem.status
            finally:  # also when the client cancels
                self.recorder.end(exchange, headers)
            if problem is not None or name != METHODS[-1]:
                await self._rest()
            fields = [(name.decode(), value.decode()) for name, value in call.fields]
            fields.append(("x-request-id", exchange.request_id))
            if problem is None:
                context.set_trailing_metadata(tuple(fields))
                return reply
            await context.abort(*_status(problem, exchange.request_id, fields))
            raise AssertionError  # abort raises

        return handle

    async def _rest(self) -> None:
        """Delay the reply to a call that ranked nothing. More of them wait longer, so that they leave the event loop to others."""
        self._resting += 1
        try:
            await asyncio.sleep(shared_rest_seconds(REFUSED_SECONDS, self._resting))
        finally:
            self._resting -= 1

    async def _live(self, request: Any, call: Call) -> bytes:
        return protobuf.write("ServerLiveResponse", live=True)

    async def _ready(self, request: Any, call: Call) -> bytes:
        return protobuf.write("ServerReadyResponse", ready=self.service.health().ready)

    async def _metadata(self, request: Any, call: Call) -> bytes:
        return protobuf.write("ServerMetadataResponse", **describe_server())

    async def _model_ready(self, request: Any, call: Call) -> bytes:
        named(self.service, request.name, request.version)
        return protobuf.write("ModelReadyResponse", ready=self.service.health().ready)

    async def _model_metadata(self, request: Any, call: Call) -> bytes:
        model = described(self.service, request.name, request.version)
        del model["parameters"]
        return protobuf.write("ModelMetadataResponse", **model)

    async def _infer(self, request: Any, call: Call) -> bytes:
        ranking, exchange = self.ranking, call.exchange
        wanted = ranking.wanted(call.headers, request.model_name, request.model_version)
        parsed = ranking.decode(lambda vocabulary: protobuf.tensors_of(request, ranking.limits), exchange, wanted)
        job = ranking.prepare(parsed, TENSORS, call.deadline, exchange, wanted)
        result = await ranked(ranking.service, job.ticket, job.context, job.candidates)
        (reply,) = ranking.render(job, result, exchange.stages["parse"], exchange, protobuf.reply)
        call.fields = ranking.headers(job.model, [result], exchange)
        return reply


async def _message(messages: AsyncIterator[bytes], seconds: float, context: Any) -> bytes:
    """The only message of a call. Raises RequestTimeout, DeadlineExceeded and BadRequest."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(messages)
    except TimeoutError:
        raise RequestTimeout from None
    except StopAsyncIteration:
        left = context.time_remaining()
        if left is not None and left < LATE_SECONDS:  # the call has ended at its deadline
            raise DeadlineExceeded from None
        raise BadRequest("The call holds no message, or a longer one than grpc takes.") from None


def _status(problem: ServiceError, request_id: str, fields: list[tuple[str, str]]) -> tuple[Any, str, tuple[Any, ...]]:
    """Code, sentence and trailing metadata: the whole problem, and when a retry can succeed."""
    trailing: list[tuple[str, Any]] = [*fields, ("problem-bin", orjson.dumps(problem.problem(request_id)))]
    if (seconds := retry_after(problem)) is not None:
        trailing += [("retry-after", str(seconds)), ("grpc-retry-pushback-ms", str(seconds * 1000))]
    return CODES.get(problem.status, grpc.StatusCode.INTERNAL), problem.detail, tuple(trailing)
