"""Requests that name their context by a handle, against real processes: the replies of the whole requests, or 412."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from phoenix_ranker_client import Candidate, Context, ContextUnknown, Event, RankerClient, RankingRequest

from app.request import protobuf
from loadtest.servers.launch import free_port
from tests.e2e.process import DEMO, ROOT, Server, serving

EXAMPLE = json.loads((ROOT / "weights/demo/example.json").read_text())
VIEWER = {name: EXAMPLE[name] for name in ("user_id", "history")}
REST = {name: value for name, value in EXAMPLE.items() if name not in VIEWER}
UNKNOWN = "0123456789abcdef" * 2
GRPC_PORT = free_port()
EXPLAINED = {"explain": [EXAMPLE["candidates"][0]["post_id"]]}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """With fronts, which hand on what one process does by itself; that is in tests/app/http/test_context.py."""
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("feed", "other")}
    with serving(
        DEMO, threads=1, fronts=2, grpc__port=GRPC_PORT, auth__keys=json.dumps(keys), explore__enabled="true",
        retrieval__checkpoint=ROOT / "weights/demo-towers", retrieval__corpus=ROOT / "weights/demo-posts",
    ) as started:  # fmt: skip
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"X-API-Key": "feed"}, timeout=60) as client:
        yield client


def said(reply: httpx.Response) -> Any:
    """What a reply says, but for its timings."""
    assert reply.status_code == 200, reply.text
    body = reply.json()
    for one in body.get("results", [body]):
        one.pop("timings_ms", None)
    body.get("parameters", {}).clear()
    return body


def handle_of(client: httpx.Client, user: Any = EXAMPLE["user_id"]) -> str:
    handle: str = client.post("/context", json=VIEWER | {"user_id": user}).json()["context"]
    return handle


def test_a_context_that_was_computed_ahead_is_found_by_the_next_request(client: httpx.Client) -> None:
    viewer = VIEWER | {"user_id": 424242}
    first, ahead = client.post("/context", json=VIEWER | {"user_id": 424243}), client.post("/context", json=viewer)
    assert [reply.headers["X-Context-Cache"] for reply in (first, ahead)] == ["miss", "miss"]
    body = ahead.json()
    assert (len(body["context"]), body["context"]) == (32, ahead.headers["X-Context"])
    assert (body["history_used"], body["history_dropped"]) == (len(VIEWER["history"]), 0)
    assert body["context"] != first.json()["context"]
    whole = client.post("/rank", json={**REST, **viewer})
    named = client.post("/rank", json={**REST, "context": body["context"]})
    assert [reply.headers["X-Context-Cache"] for reply in (whole, named)] == ["hit", "hit"]
    assert [reply.headers["X-Context"] for reply in (whole, named)] == [body["context"]] * 2


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/rank", REST),
        ("/rank", {**REST, "reply": "columns", "top_k": 3, "request_id": "page-2"}),
        ("/explain", {**REST, **EXPLAINED}),
        ("/retrieve", {"k": 20}),
        ("/retrieve", {"k": 20, "exclude_history": False, "exclude": ["1"]}),
        ("/recommend", {"k": 20, "top_k": 5}),
        ("/recommend", {"k": 20, "topics": []}),
    ],
)
def test_a_request_by_handle_is_answered_as_the_whole_is(client: httpx.Client, path: str, more: Any) -> None:
    handle = handle_of(client)
    whole, named = (said(client.post(path, json={**more, **viewer})) for viewer in (VIEWER, {"context": handle}))
    assert named.pop("context") == handle
    assert whole.pop("context", handle) == handle
    assert named == whole


def test_a_batch_takes_whole_requests_and_handles(client: httpx.Client) -> None:
    handle = handle_of(client)
    bodies = [{**REST, "context": handle}, EXAMPLE, {**REST, "context": UNKNOWN}]
    named, whole, unknown = said(client.post("/rank/batch", json={"requests": bodies}))["results"]
    assert named == whole
    assert named["context"] == handle
    assert unknown["error"]["code"] == "context_unknown"


def tensors(viewer: dict[str, Any]) -> dict[str, Any]:
    """The example's candidates as tensors."""

    def ids(field: str, posts: Any) -> dict[str, list[int]]:
        return {f"{field}.{name}": [int(post[name]) for post in posts] for name in ("post_id", "author_id")}

    columns = ids("candidates", EXAMPLE["candidates"])
    if "context" not in viewer:
        columns |= {"user_id": [int(viewer["user_id"])], **ids("history", viewer["history"])}
    inputs = [
        {"name": name, "datatype": "UINT64", "shape": [len(values)], "data": values} for name, values in columns.items()
    ]
    return {"inputs": inputs, "parameters": {"context": viewer["context"]} if "context" in viewer else {}}


def test_tensors_name_a_context_too(client: httpx.Client) -> None:
    whole = client.post("/v2/models/demo/infer", json=tensors(VIEWER))
    handle = whole.json()["parameters"]["context"]
    assert handle == whole.headers["X-Context"]
    named = client.post("/v2/models/demo/infer", json=tensors({"context": handle}))
    assert named.json()["parameters"]["history_used"] == len(VIEWER["history"])
    assert said(named) == said(whole)
    assert client.post("/v2/models/demo/infer", json=tensors({"context": UNKNOWN})).status_code == 412


@pytest.mark.usefixtures("server")
def test_grpc_names_a_context_too() -> None:
    with grpc.insecure_channel(f"127.0.0.1:{GRPC_PORT}") as channel:
        ask = channel.unary_unary(f"/{protobuf.SERVICE}/ModelInfer")

        def infer(viewer: dict[str, Any]) -> Any:
            asked, body = protobuf.CLASSES["ModelInferRequest"](model_name="demo"), tensors(viewer)
            for tensor in body["inputs"]:
                asked.inputs.add(name=tensor["name"], datatype="UINT64", shape=tensor["shape"])
                asked.raw_input_contents.append(b"".join(value.to_bytes(8, "little") for value in tensor["data"]))
            for name, value in body["parameters"].items():
                asked.parameters.add(key=name).value.string_param = value
            reply = ask(asked.SerializeToString(), metadata=[("x-api-key", "feed")], timeout=60)
            return protobuf.CLASSES["ModelInferResponse"].FromString(reply)

        whole = infer(VIEWER)
        handle = {entry.key: entry.value.string_param for entry in whole.parameters}["context"]
        named = infer({"context": handle})
        assert list(named.raw_output_contents) == list(whole.raw_output_contents)
        with pytest.raises(grpc.RpcError) as refused:
            infer({"context": UNKNOWN})
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_a_handle_is_the_api_keys_that_made_it(client: httpx.Client) -> None:
    handle = handle_of(client)
    for path, more in (("/rank", REST), ("/retrieve", {}), ("/recommend", {}), ("/explain", {**REST, **EXPLAINED})):
        other = client.post(path, json={**more, "context": handle}, headers={"X-API-Key": "other"})
        assert (other.status_code, other.json()["code"]) == (412, "context_unknown"), path
    own = client.post("/rank", json=EXAMPLE, headers={"X-API-Key": "other"}).json()["context"]
    assert own != handle, "one context, two handles"
    assert client.post("/rank", json={**REST, "context": own}, headers={"X-API-Key": "other"}).status_code == 200


def test_what_is_no_handle_is_a_wrong_request(client: httpx.Client) -> None:
    handle = handle_of(client)
    for wrong in ({"context": handle[:-1]}, {"context": handle.upper()}, {"context": 7}, {**VIEWER, "context": handle}):
        refused = client.post("/rank", json={**REST, **wrong})
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "context"), wrong


def test_the_client_sends_the_whole_again_where_a_handle_is_unknown(server: Server) -> None:
    history = [Event(item["post_id"], item["author_id"], item["actions"]) for item in VIEWER["history"]]
    candidates = [Candidate(post["post_id"], post["author_id"]) for post in EXAMPLE["candidates"]]
    for wire in ("json", "binary"):
        with RankerClient(server.url, api_key="feed", wire=wire) as ranker:  # type: ignore[arg-type]
            whole = ranker.rank(7, candidates, history, timeout_seconds=30)
            known: Context = ranker.context(7, history, timeout_seconds=30)
            assert known.handle == whole.context
            assert known.rank(candidates, timeout_seconds=30).candidates == whole.candidates
            known._calls.handle = UNKNOWN
            assert known.rank(candidates, timeout_seconds=30).candidates == whole.candidates
            assert known.handle == whole.context, "the reply's"
            assert known.retrieve(timeout_seconds=30).posts == ranker.retrieve(7, history, timeout_seconds=30).posts
            assert known.recommend(timeout_seconds=30).context == whole.context
            (alone,) = ranker.rank_batch([RankingRequest(7, candidates, context=UNKNOWN)], timeout_seconds=30)
            assert isinstance(alone, ContextUnknown)


def test_no_handle_survives_a_reload(server: Server, client: httpx.Client) -> None:
    """Of the same checkpoint even. Last, since it loads anew."""
    handle = handle_of(client)
    os.kill(server.process.pid, signal.SIGHUP)
    until = time.monotonic() + 60
    while client.post("/rank", json={**REST, "context": handle}).status_code == 200:
        assert time.monotonic() < until, "not reloaded"
        time.sleep(0.05)
    refused = client.post("/rank", json={**REST, "context": handle})
    assert (refused.status_code, refused.json()["code"]) == (412, "context_unknown")
    again = client.post("/rank", json=EXAMPLE)
    assert again.json()["context"] not in (handle, None)
