"""The Open Inference Protocol over HTTP, asked by the real `tritonclient`: metadata, the same bits as JSON, errors, labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from app.settings import Limits
from loadtest.generate.tensors import Inference, datatype, inference_of
from tests.app.api.live import Live, listening
from tests.support.asgi import served
from tests.support.bodies import good
from tests.support.fakes import ACTIONS, FakeEngine, fake_loader

ASKED = inference_of(good(request_id=...), ACTIONS)
INFER = "/v2/models/fake/infer"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with listening(limits=Limits(max_candidates=100)) as running:
        yield running


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{live.port}") as client:
        yield client


@pytest.fixture(scope="module")
def http(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{live.port}") as client:
        yield client


def inputs(asked: Inference, *, binary: bool = True) -> list[triton.InferInput]:
    made = []
    for name, array in asked.inputs.items():
        tensor = triton.InferInput(name, list(array.shape), datatype(array))
        made.append(tensor.set_data_from_numpy(array, binary_data=binary))
    return made


def test_health_and_metadata(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("fake")
    assert client.is_model_ready("fake", "v1")
    assert not client.is_model_ready("fake", "v2")
    assert not client.is_model_ready("other")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    for described in (client.get_model_metadata("fake"), client.get_model_metadata("fake", "v1")):
        tensors = {tensor["name"]: tensor for tensor in described["inputs"]}
        assert tensors["candidates.post_id"]["datatype"] == "UINT64"
        assert tensors["history.actions"]["shape"] == [-1, 3]
        assert all(len(tensors[name]["shape"]) == array.ndim for name, array in ASKED.inputs.items())
        outputs = {tensor["name"]: tensor["shape"] for tensor in described["outputs"]}
        assert (outputs["probabilities"], outputs["continuous"]) == ([-1, 3], [-1, 1])
        assert described["versions"] == ["v1"]


@pytest.mark.parametrize("actions", [["report", "favorite"], []])
@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("binary", [True, False])
def test_every_way_in_gives_the_same_bits(
    client: triton.InferenceServerClient, http: httpx.Client, binary: bool, compression: str | None, actions: list[str]
) -> None:
    body = good(top_k=2, actions_wanted=actions)
    asked = inference_of(body, ACTIONS)
    result = client.infer(
        "fake",
        inputs(asked, binary=binary),
        outputs=[
            triton.InferRequestedOutput(name, binary_data=binary)
            for name in ("post_id", "score", "rank", "probabilities", "continuous")
        ],
        parameters=asked.parameters,
        request_id="page-7",
        request_compression_algorithm=compression,
    )
    reply = http.post("/rank", json=body).json()
    rows = reply["candidates"]
    bits = np.array([row["probabilities"] for row in rows], np.float32).tobytes()
    assert result.as_numpy("probabilities").tobytes() == bits
    assert result.as_numpy("probabilities").shape == (2, len(actions))
    assert result.as_numpy("score").tolist() == [row["score"] for row in rows]
    assert result.as_numpy("rank").tolist() == [row["rank"] for row in rows]
    assert result.as_numpy("post_id").tolist() == [int(row["post_id"]) for row in rows]
    dwell = [row["continuous"]["dwell_time"] for row in rows]
    assert result.as_numpy("continuous")[:, 0].tobytes() == np.array(dwell, np.float32).tobytes()
    header = result.get_response()
    assert (header["model_name"], header["model_version"], header["id"]) == ("fake", "v1", "page-7")
    told = header["parameters"]
    assert (told["actions"], told["continuous"], told["context"]) == (",".join(actions), "dwell_time", reply["context"])
    assert (told["history_used"], told["history_dropped"]) == (3, 0)
    assert told["forward_ms"] >= 0


def test_a_context_may_be_named(http: httpx.Client) -> None:
    whole, headers = ASKED.body(binary=False)
    replies = [http.post(INFER, content=whole, headers=headers)]
    handle = replies[0].headers["x-context"]
    parameters = ASKED.parameters | {"context": handle}
    few = {name: array for name, array in ASKED.inputs.items() if name.startswith(("candidates", "weights"))}
    replies.append(http.post(INFER, content=Inference(few, parameters).body(binary=False)[0]))
    assert replies[0].json()["outputs"] == replies[1].json()["outputs"]
    unknown = Inference(few, ASKED.parameters | {"context": "0" * 32}).body(binary=False)[0]
    refused = http.post(INFER, content=unknown)
    assert (refused.status_code, refused.json()["code"]) == (412, "context_unknown")


def test_a_binary_reply_says_where_its_json_ends(http: httpx.Client) -> None:
    body, headers = ASKED.body(binary=True)
    reply = http.post(INFER, content=body, headers=headers | {"content-type": "application/octet-stream"})
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/octet-stream")
    length = int(reply.headers["inference-header-content-length"])
    assert json.loads(reply.content[:length])["model_name"] == "fake"
    assert (reply.headers["x-model-version"], reply.headers["x-context-cache"]) == ("v1", "miss")


def test_errors_are_those_of_rank(client: triton.InferenceServerClient, http: httpx.Client) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("fake", inputs(ASKED)[1:], parameters=ASKED.parameters)
    assert (caught.value.status(), caught.value.message()) == ("422", "user_id: is required, unless context is given")
    with pytest.raises(InferenceServerException) as caught:
        client.infer("other", inputs(ASKED))
    assert caught.value.status() == "404"
    with pytest.raises(InferenceServerException) as caught:
        client.infer("fake", inputs(ASKED), request_compression_algorithm="deflate")
    assert caught.value.status() == "415"
    many = {"candidates.post_id": np.ones(101, "u8"), "candidates.author_id": np.ones(101, "u8")}
    with pytest.raises(InferenceServerException) as caught:
        client.infer("fake", inputs(Inference({"user_id": ASKED.inputs["user_id"], **many}, {})))
    assert caught.value.status() == "413"
    reply = http.post(INFER, content=b"{", headers={"content-encoding": "br"})
    assert (reply.headers["content-type"], reply.headers["accept-encoding"]) == ("application/problem+json", "gzip")


UNKNOWN = [
    lambda client: client.get_model_metadata("other"),
    lambda client: client.get_model_config("fake"),
    lambda client: client.get_inference_statistics("fake"),
    lambda client: client.get_model_repository_index(),
]


@pytest.mark.parametrize("call", UNKNOWN, ids=["model", "config", "statistics", "repository"])
def test_what_is_not_there_is_told_in_the_protocols_own_words(client: triton.InferenceServerClient, call: Any) -> None:
    with pytest.raises(InferenceServerException) as caught:
        call(client)
    assert caught.value.status() in ("404", "405")
    assert "There is nothing" in caught.value.message() or "No such model" in caught.value.message()


@pytest.mark.parametrize("path", ["/v2/zq9", "/v2/models/fake/config", "/v2/models/other/versions/1/infer", INFER])
def test_every_error_below_v2_has_the_protocols_field(http: httpx.Client, path: str) -> None:
    reply = http.post(path, content=b"{")
    assert reply.status_code in (400, 404)
    assert reply.json()["error"] == reply.json()["detail"]


def test_below_a_path_of_a_proxy_too() -> None:
    with served(root_path="/ranker") as (client, _):
        for path in ("/v2/config", "/ranker/v2/config"):  # a proxy may take its prefix off, or leave it
            reply = client.get(path)
            assert (reply.status_code, reply.json()["error"]) == (404, reply.json()["detail"])
    assert "zq9" not in reply.text


def test_a_model_name_in_the_body_is_the_paths(http: httpx.Client) -> None:
    """KServe's SDK writes it into every body."""
    body = ASKED.header(binary=False)
    assert http.post(INFER, json=body | {"model_name": "fake"}).status_code == 200
    refused = http.post(INFER, json=body | {"model_name": "zq9marker"})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "model_name")
    assert "zq9marker" not in refused.text


def test_a_version_may_be_in_the_path(http: httpx.Client) -> None:
    body, _ = ASKED.body(binary=False)
    statuses = [http.post(f"/v2/models/fake/versions/{each}/infer", content=body).status_code for each in ("v1", "v2")]
    assert statuses == [200, 404]


def test_a_body_without_a_type_is_refused_from_another_origin(http: httpx.Client) -> None:
    """A browser names the page's origin in each such request, and asks first before it sends one of these types."""
    body, _ = ASKED.body(binary=False)
    page = {"origin": "http://evil.example"}
    assert http.post(INFER, content=body).status_code == 200  # as clients of the protocol send it
    for sort, status in (("", 415), ("text/plain", 415), ("application/json", 200)):
        named = {"content-type": sort} if sort else {}
        assert http.post(INFER, content=body, headers=page | named).status_code == status, sort


def test_a_timeout_of_its_own_is_a_deadline(client: triton.InferenceServerClient) -> None:
    client.infer("fake", inputs(ASKED), timeout=5_000_000)
    with pytest.raises(InferenceServerException) as caught:
        client.infer("fake", inputs(ASKED), timeout=0)
    assert caught.value.status() == "504"
    with pytest.raises(InferenceServerException) as caught:
        client.infer("fake", inputs(ASKED), timeout=60_000_000, headers={"X-Request-Timeout-Ms": "0"})
    assert caught.value.status() == "504"


def test_a_name_in_the_body_is_the_requests(client: triton.InferenceServerClient, http: httpx.Client) -> None:
    result = client.infer("fake", inputs(ASKED), request_id="page-7")
    assert result.get_response()["id"] == "page-7"
    reply = http.post(INFER, json=ASKED.header(binary=False) | {"id": "page-8"})
    assert reply.headers["x-request-id"] == "page-8"


def test_methods_are_those_of_the_protocol(http: httpx.Client) -> None:
    reply = http.get(INFER)
    assert (reply.status_code, reply.headers["allow"], reply.json()["error"]) == (405, "POST", reply.json()["detail"])


def test_a_drain_ends_readiness() -> None:
    with served() as (client, _):
        client.app.state.ranker.begin_drain()
        paths = ("/v2/health/live", "/v2/health/ready", "/v2/models/fake/ready")
        assert [client.get(path).status_code for path in paths] == [200, 503, 503]


def test_ids_may_be_texts() -> None:
    with served(load=fake_loader(FakeEngine(), ids="text")) as (client, _):
        names = {"user_id": ["u"], "candidates.post_id": ["a,b", "c"], "candidates.author_id": ["d", "e"]}
        sent = [
            {"name": name, "datatype": "BYTES", "shape": [len(texts)], "data": texts} for name, texts in names.items()
        ]
        outputs = {output["name"]: output for output in client.post(INFER, json={"inputs": sent}).json()["outputs"]}
        assert (outputs["post_id"]["datatype"], outputs["post_id"]["data"]) == ("BYTES", ["a,b", "c"])
        posts = [{"post_id": "a,b", "author_id": "d"}, {"post_id": "c", "author_id": "e"}]
        rows = client.post("/rank", json={"user_id": "u", "candidates": posts}).json()["candidates"]
        assert outputs["score"]["data"] == [row["score"] for row in rows]
        wanted = [{"name": "post_id", "parameters": {"binary_data": True}}]
        binary = client.post(INFER, json={"inputs": sent, "outputs": wanted})
        assert binary.content[int(binary.headers["inference-header-content-length"]) :] == b"\3\0\0\0a,b\1\0\0\0c"
        described = client.get("/v2/models/fake").json()["inputs"]
        assert {tensor["datatype"] for tensor in described if tensor["name"].endswith("_id")} == {"BYTES"}
