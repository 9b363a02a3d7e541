"""The Open Inference Protocol over gRPC, asked by the real `tritonclient`: the same bits, statuses, deadlines, logs and drain."""

from __future__ import annotations

import json
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import structlog
import tritonclient.grpc as triton
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import StreamReset
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

import app.assembly
from app.errors import BadRequest, InvalidRequest
from app.http.grpc_server import ROUTES
from app.request import protobuf, tensors
from app.request.vocabulary import Vocabulary
from app.server.process import RankingServer
from app.service.service import OVERRUN, RankingService
from app.settings import Auth, Batching, Connections, Grpc, Limits, Settings, SettingsProblem
from app.telemetry.metrics import Metrics
from loadtest.generate.tensors import Inference, datatype, inference_of
from tests.app.bounds import fix
from tests.app.fakes import ACTIONS, FakeEngine, loaded, loader
from tests.app.serving import good, listening, port_of
from tests.app.triton_inputs import inputs
from tests.reliability.live import wait_until

ASKED = inference_of(good(request_id=...), ACTIONS)
SETTINGS = Settings(port=0, grpc=Grpc(port=0), limits=Limits(max_candidates=100, max_body_bytes=50_000))
INFER = ROUTES[-1]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # of HTTP/2, with empty settings
VOCABULARY = Vocabulary.of(loaded(FakeEngine()).checkpoint.manifest)


@pytest.fixture(scope="module")
def client(server: RankingServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address(server)) as client:
        yield client


def address(server: RankingServer) -> str:
    return f"127.0.0.1:{server.others[0].port}"


def failure(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        call()
    return caught.value.status(), caught.value.message()


def counted(http: httpx.Client, code: str) -> float:
    """Calls of ModelInfer that ended so."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    samples = (sample for family in families for sample in family.samples)
    labels = {"method": "POST", "route": INFER, "code": code}
    return sum(
        sample.value for sample in samples if sample.name == "ranker_http_requests_total" and sample.labels == labels
    )


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("fake", "v1")
    assert failure(lambda: client.is_model_ready("fake", "v2"))[0] == "StatusCode.NOT_FOUND"
    assert list(client.get_server_metadata().extensions) == ["binary_tensor_data"]
    tensors = {tensor.name: tensor for tensor in client.get_model_metadata("fake").inputs}
    assert (tensors["candidates.post_id"].datatype, list(tensors["history.actions"].shape)) == ("UINT64", [-1, 3])


def test_the_same_bits_as_in_json(client: triton.InferenceServerClient, http: httpx.Client) -> None:
    result = client.infer("fake", inputs(ASKED), parameters=ASKED.parameters)
    reply = http.post("/rank", json=good(request_id=...)).json()
    rows = reply["candidates"]
    bits = np.array([row["probabilities"] for row in rows], np.float32).tobytes()
    assert result.as_numpy("probabilities").tobytes() == bits
    assert result.as_numpy("score").tolist() == [row["score"] for row in rows]
    assert result.as_numpy("rank").tolist() == [row["rank"] for row in rows]
    assert result.as_numpy("post_id").tolist() == [int(row["post_id"]) for row in rows]
    dwell = np.array([row["continuous"]["dwell_time"] for row in rows], np.float32)
    assert result.as_numpy("continuous")[:, 0].tobytes() == dwell.tobytes()
    told = result.get_response().parameters
    assert told["actions"].string_param == ",".join(reply["actions"])
    assert told["history_used"].int64_param == 3
    assert told["forward_ms"].double_param > 0
    only = client.infer("fake", inputs(ASKED), outputs=[triton.InferRequestedOutput("rank")])
    assert [output.name for output in only.get_response().outputs] == ["rank"]


def test_errors_have_their_status(client: triton.InferenceServerClient) -> None:
    invalid = "StatusCode.INVALID_ARGUMENT"
    assert failure(lambda: client.infer("fake", inputs(ASKED)[1:])) == (
        invalid,
        "user_id: is required, or context in its place",
    )
    assert failure(lambda: client.infer("fake", inputs(ASKED), parameters={"top_k": 0}))[0] == invalid
    assert failure(lambda: client.infer("fake", inputs(ASKED), parameters={"zq9marker": 0}))[0] == invalid
    assert failure(lambda: client.infer("other", inputs(ASKED)))[0] == "StatusCode.NOT_FOUND"
    many = {"candidates.post_id": np.ones(101, "u8"), "candidates.author_id": np.ones(101, "u8")}
    asked = Inference({"user_id": ASKED.inputs["user_id"], **many}, {})
    assert failure(lambda: client.infer("fake", inputs(asked)))[0] == invalid
    huge = Inference({"user_id": np.ones(10_000, "u8")}, {})
    assert failure(lambda: client.infer("fake", inputs(huge)))[0] == "StatusCode.RESOURCE_EXHAUSTED"  # grpc's own


def test_a_compressed_message_is_read_and_a_bomb_is_not(client: triton.InferenceServerClient) -> None:
    plain = client.infer("fake", inputs(ASKED)).as_numpy("score").tolist()
    huge = Inference({"user_id": np.ones(100_000, "u8")}, {})
    for coding in ("gzip", "deflate"):
        assert client.infer("fake", inputs(ASKED), compression_algorithm=coding).as_numpy("score").tolist() == plain
        status, sentence = failure(
            lambda coding=coding: client.infer("fake", inputs(huge), compression_algorithm=coding)
        )
        assert (status, "larger than max" in sentence) == ("StatusCode.RESOURCE_EXHAUSTED", True)


def call(server: RankingServer, data: bytes, *, method: str = INFER, **options: Any) -> tuple[Any, Any]:
    """One raw call: its answer or error, and what came with it."""
    with grpc.insecure_channel(address(server)) as channel:
        try:
            reply, sent = channel.unary_unary(method).with_call(data, timeout=options.pop("timeout", 10), **options)
        except grpc.RpcError as error:
            return error, dict(error.trailing_metadata() or ())  # type: ignore[attr-defined]
        return reply, dict(sent.trailing_metadata())


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x3a\x05abc", bytes(100)])
def test_garbage_is_a_bad_request_that_carries_its_problem(server: RankingServer, data: bytes) -> None:
    error, trailing = call(server, data, metadata=[("x-request-id", "mine")])
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    problem = json.loads(trailing["problem-bin"])
    assert (problem["status"], problem["request_id"], trailing["x-request-id"]) == (400, "mine", "mine")


def message(**fields: Any) -> bytes:
    made = protobuf.CLASSES["ModelInferRequest"](model_name="fake", **fields)
    for name, array in ASKED.inputs.items():
        made.inputs.add(name=name, datatype=datatype(array), shape=array.shape)
        made.raw_input_contents.append(array.tobytes())
    data: bytes = made.SerializeToString()
    return data


def test_a_reply_says_what_headers_say(server: RankingServer) -> None:
    reply, trailing = call(server, message(id="page-7"))
    assert protobuf.read("ModelInferResponse", reply).id == "page-7"
    assert (trailing["x-request-id"], trailing["x-model-version"], trailing["x-context-cache"]) == (
        "page-7",
        "v1",
        "miss",
    )
    assert "forward;dur=" in trailing["server-timing"]


def test_a_version_is_asked_for_in_metadata_as_in_headers(server: RankingServer) -> None:
    assert isinstance(call(server, message(), metadata=[("x-model-version", "v1")])[0], bytes)
    assert call(server, message(), metadata=[("x-model-version", "v2")])[0].code() is grpc.StatusCode.NOT_FOUND
    version = message(model_version="v1")  # the message's own comes first, as the path's does
    assert isinstance(call(server, version, metadata=[("x-model-version", "v2")])[0], bytes)


def test_typed_contents_are_refused(server: RankingServer) -> None:
    made = protobuf.CLASSES["ModelInferRequest"](model_name="fake")
    made.inputs.add(name="user_id", datatype="UINT64", shape=[1], contents=b"*\x01\x07")  # uint64_contents: 7
    error, _ = call(server, made.SerializeToString())
    assert (error.code(), "raw_input_contents" in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def field(tag: int, data: bytes) -> bytes:
    """A field of bytes, with its length."""
    size = len(data)
    return bytes([tag << 3 | 2, size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + data


MANY = 524_280  # of two bytes each: as many as a body of 1 MiB holds
HOSTILE = {
    "inputs": b"\x2a\0" * MANY,
    "outputs": b"\x32\0" * MANY,
    "parameters": b"\x22\0" * MANY,
    "unknown fields": b"\x78\0" * MANY,
    "parameters of an input": field(5, b"\x22\0" * MANY),
    "sizes of a shape": field(5, field(3, b"\1" * MANY)),
    "sizes one by one": field(5, b"\x18\1" * MANY),
    "choices of a parameter": field(4, field(2, b"\x10\1" * MANY)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_entries_are_counted_before_they_are_parsed(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(3):
        started = time.thread_time()
        with pytest.raises(InvalidRequest):
            protobuf.read("ModelInferRequest", HOSTILE[name])
        seconds.append(time.thread_time() - started)
    assert min(seconds) < 0.005, "to parse it takes 50 ms"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8192  # KiB


def test_a_message_of_entries_alone_is_refused() -> None:
    with listening(settings=SETTINGS.model_copy(update={"limits": Limits()})) as server:
        error, _ = call(server, HOSTILE["inputs"])
        assert (error.code(), "more inputs" in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


def test_what_is_counted_is_every_field_of_a_good_request() -> None:
    """The negative control: a request of every tensor, long enough to be walked, is read as protobuf reads it."""
    made = protobuf.CLASSES["ModelInferRequest"].FromString(message(id="page-7"))
    made.raw_input_contents.append(bytes(2 * protobuf.SHORT_BYTES))
    data = made.SerializeToString()
    assert protobuf.read("ModelInferRequest", data) == made
    for cut in range(1, 400):
        with pytest.raises(BadRequest):
            protobuf.read("ModelInferRequest", data[:-cut])


def test_a_long_parameter_is_refused_before_it_is_split() -> None:
    made = protobuf.CLASSES["ModelInferRequest"]()
    made.parameters.add(key="actions").value.string_param = "," * 2_000_000
    started = time.thread_time()
    with pytest.raises(InvalidRequest):
        tensors.check(protobuf.tensors_of(made, Limits()), VOCABULARY)
    assert time.thread_time() - started < 0.02


@pytest.mark.parametrize(("shape", "actions"), [([2**62, 0], ""), ([2**62, 0], "zq9"), ([2**63 - 1, 1], "favorite")])
def test_a_shape_beyond_memory_is_invalid(server: RankingServer, shape: list[int], actions: str) -> None:
    made = protobuf.CLASSES["ModelInferRequest"](raw_input_contents=[b""])
    made.parameters.add(key="actions").value.string_param = actions
    made.inputs.add(name="history.actions", datatype="FP32", shape=shape)  # the first says how long a history is
    made.MergeFromString(message())
    error, trailing = call(server, made.SerializeToString())
    assert (error.code(), json.loads(trailing["problem-bin"])["status"]) == (grpc.StatusCode.INVALID_ARGUMENT, 422)


def test_keys_and_deadlines_hold() -> None:
    digest = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"  # of "key"
    settings = SETTINGS.model_copy(update={"auth": Auth(keys={"feed": digest})})
    slow = FakeEngine(before=lambda items: time.sleep(0.3))
    with listening(slow, settings) as server:
        key = ("authorization", "Bearer key")
        assert call(server, message())[0].code() is grpc.StatusCode.UNAUTHENTICATED
        forever = threading.Event()
        with grpc.insecure_channel(address(server)) as channel:  # nor is a caller without a key waited for
            asked = channel.stream_unary(INFER).future(iter(forever.wait, True))
            assert asked.exception(2).code() is grpc.StatusCode.UNAUTHENTICATED
            forever.set()
        assert (
            call(server, message(), metadata=[key, ("x-request-timeout-ms", "50")])[0].code()
            is grpc.StatusCode.DEADLINE_EXCEEDED
        )
        assert call(server, message(), metadata=[key], timeout=0.05)[0].code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert isinstance(call(server, message(), metadata=[key])[0], bytes)


def test_an_overload_says_when_to_come_back(server: RankingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.admission, "refusal", lambda job, again=False: OVERRUN)
    error, trailing = call(server, message())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (trailing["retry-after"], trailing["grpc-retry-pushback-ms"]) == ("1", "1000")


def test_a_call_that_is_cancelled_is_dropped_and_counted(http: httpx.Client) -> None:
    entered, opened = threading.Event(), threading.Event()

    def hold(items: Any) -> None:
        entered.set()
        opened.wait(10)

    with listening(FakeEngine(before=hold), SETTINGS) as server, grpc.insecure_channel(address(server)) as channel:
        flying = channel.unary_unary(INFER).future(message())
        assert entered.wait(10)
        flying.cancel()
        with httpx.Client(base_url=f"http://127.0.0.1:{port_of(server)}") as own:
            for _ in range(1000):
                if counted(own, "499"):
                    break
                time.sleep(0.01)
            assert counted(own, "499") == 1
            assert 'ranker_cancelled_total{stage="forward"} 1' in own.get("/metrics").text
        opened.set()


def test_calls_that_rank_nothing_wait_for_each_other(server: RankingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The more of them, the later each is answered; a ranking is answered at once."""
    seen: list[int] = []

    def rest(held: float, resting: int) -> float:
        seen.append(resting)
        return 0.2 + held

    monkeypatch.setattr("app.http.grpc_server.shared_rest_seconds", rest)
    assert isinstance(call(server, message())[0], bytes)
    assert seen == []
    with grpc.insecure_channel(address(server)) as channel:
        asked = [channel.unary_unary(ROUTES[0]).future(b"") for _ in range(4)]
        assert [each.result(10) for each in asked] == [b"\x08\x01"] * 4
    assert sorted(seen) == [1, 2, 3, 4]
    assert call(server, b"\xff")[0].code() is grpc.StatusCode.INVALID_ARGUMENT
    assert seen[4:] == [1], "one that is refused, after the others have gone"


def test_every_call_is_counted_under_its_method(client: triton.InferenceServerClient, http: httpx.Client) -> None:
    before = counted(http, "200")
    client.infer("fake", inputs(ASKED))
    assert counted(http, "200") == before + 1
    assert failure(lambda: client.get_model_config("fake"))[0] == "StatusCode.UNIMPLEMENTED"
    routes = {
        line.split('route="')[1].split('"')[0] for line in http.get("/metrics").text.splitlines() if 'route="' in line
    }
    assert {route for route in routes if route.startswith("/inference")} <= set(ROUTES)


def test_a_call_leaves_one_line(server: RankingServer) -> None:
    with structlog.testing.capture_logs() as lines:
        call(server, message(), metadata=[("x-request-id", "mine")])
        call(server, b"\xff")
    seen = [(line["route"], line["status"], line.get("candidates"), line.get("code")) for line in lines]
    assert seen == [(INFER, 200, 3, None), (INFER, 400, None, "bad_request")]
    assert lines[0]["request_id"] == "mine"


def test_calls_that_never_end_leave_room_for_others() -> None:
    """As many as may be at once on a connection, each of a client that sends its headers and no message."""
    impatient = {"connections": Connections(header_seconds=0.25), "batching": Batching(max_requests=8)}
    with listening(settings=SETTINGS.model_copy(update=impatient)) as server:
        forever = threading.Event()
        with grpc.insecure_channel(address(server)) as channel:
            slow = [channel.stream_unary(INFER).future(iter(forever.wait, True)) for _ in range(2)]
            for one in slow:
                assert one.exception(10).code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert json.loads(dict(one.trailing_metadata())["problem-bin"])["code"] == "request_timeout"
            forever.set()
            assert isinstance(call(server, message())[0], bytes)


HEADERS = [
    (":method", "POST"), (":scheme", "http"), (":path", INFER), (":authority", "x"), ("te", "trailers"),
    ("content-type", "application/grpc"),
]  # fmt: skip


def test_one_connection_cannot_take_every_place(server: RankingServer) -> None:
    """Of a client that opens as many streams as may be at once, and never reads how many it may have."""
    with socket.create_connection(("127.0.0.1", server.others[0].port), 10) as sock:
        peer = H2Connection(H2Configuration(client_side=True))
        peer.initiate_connection()
        for number in range(SETTINGS.batching.max_requests):
            peer.send_headers(1 + 2 * number, HEADERS)
        sock.sendall(peer.data_to_send())
        reset: set[int | None] = set()
        while len(reset) < 48:
            reset |= {
                event.stream_id for event in peer.receive_data(sock.recv(65536)) if isinstance(event, StreamReset)
            }
        assert reset == set(range(33, 129, 2))
        assert isinstance(call(server, message(), timeout=2)[0], bytes)


def test_a_client_takes_turns_on_one_connection(server: RankingServer) -> None:
    """The negative control: more calls than a connection may have at once are all answered, for who keeps to its bound."""
    with grpc.insecure_channel(address(server)) as channel:
        flying = [channel.unary_unary(INFER).future(message()) for _ in range(300)]
        assert all(isinstance(one.result(10), bytes) for one in flying)


@pytest.mark.parametrize("sent", [b"", PREFACE[:9], PREFACE], ids=["nothing", "half a preface", "no acknowledgement"])
def test_silent_connections_go_within_five_seconds(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    fix(monkeypatch, CALL_CONNECTIONS=4)
    with listening(settings=SETTINGS) as server:
        port = server.others[0].port
        with ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)).sendall(sent)
            started = time.monotonic()
            wait_until(lambda: isinstance(call(server, message(), timeout=1)[0], bytes))
            assert 1 < time.monotonic() - started < 12  # a busy machine's 5 s; until then there was no room


def test_a_call_without_a_message_is_a_bad_request(server: RankingServer) -> None:
    with grpc.insecure_channel(address(server)) as channel:
        assert channel.stream_unary(INFER).future(iter(())).exception(10).code() is grpc.StatusCode.INVALID_ARGUMENT


def late(seconds: float) -> Iterator[bytes]:
    time.sleep(seconds)
    yield message()


def test_a_deadline_counts_from_the_headers_as_over_http(server: RankingServer) -> None:
    with grpc.insecure_channel(address(server)) as channel:
        for milliseconds, code in (("200", grpc.StatusCode.DEADLINE_EXCEEDED), ("60000", grpc.StatusCode.OK)):
            asked = channel.stream_unary(INFER).future(late(0.4), metadata=[("x-request-timeout-ms", milliseconds)])
            assert asked.code() is code


def test_a_call_that_ends_at_its_deadline_is_no_bad_request(server: RankingServer, http: httpx.Client) -> None:
    before = {code: counted(http, code) for code in ("400", "504")}
    never = threading.Event()
    with grpc.insecure_channel(address(server)) as channel:
        asked = channel.stream_unary(INFER).future(iter(never.wait, True), timeout=0.2)
        assert asked.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: sum(counted(http, code) for code in before) > sum(before.values()))
        never.set()
    assert {code: counted(http, code) - count for code, count in before.items()} == {"400": 0, "504": 1}


def test_connections_beyond_the_bound_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    fix(monkeypatch, CALL_CONNECTIONS=2)
    with listening(settings=SETTINGS) as server:
        port = server.others[0].port
        with ExitStack() as stack:
            held = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(2)]
            for one in held:
                one.sendall(PREFACE)
                assert one.recv(1)
            with socket.create_connection(("127.0.0.1", port), 10) as further, suppress(ConnectionResetError):
                assert further.recv(1) == b""
        wait_until(lambda: isinstance(call(server, message())[0], bytes))  # the server has seen that they are gone


def test_a_drain_answers_what_was_begun() -> None:
    entered = threading.Event()

    def slow(items: Any) -> None:
        entered.set()
        time.sleep(0.5)

    with listening(FakeEngine(before=slow), SETTINGS) as server, grpc.insecure_channel(address(server)) as channel:
        flying = channel.unary_unary(INFER).future(message())
        assert entered.wait(10)
        server.should_exit = True
        assert protobuf.read("ModelInferResponse", flying.result(10)).model_name == "fake"


def test_without_grpcio_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "app.http.grpc_server", None)
    with pytest.raises(SettingsProblem, match="`grpc` extra"):
        app.assembly.build_server(SETTINGS)


def test_a_taken_port_ends_the_start(server: RankingServer) -> None:
    taken = Settings(port=0, grpc=Grpc(port=server.others[0].port))
    other = app.assembly.build_server(taken, RankingService(loader(FakeEngine()), taken, Metrics()))
    with pytest.raises(SystemExit) as ended:
        other.run()
    assert ended.value.code == 3
