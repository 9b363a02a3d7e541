"""The Open Inference Protocol over HTTP, asked by the real `tritonclient`: metadata, the same bits as JSON, errors, labels."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from app.server.process import RankingServer
from app.settings import Grpc, Limits, Settings
from loadtest.generate.tensors import Inference, datatype, inference_of
from tests.app.fakes import ACTIONS
from tests.app.serving import good, listening, port_of

ASKED = inference_of(good(request_id=...), ACTIONS)
SETTINGS = Settings(port=0, grpc=Grpc(port=0), limits=Limits(max_candidates=100))


@pytest.fixture(scope="module")
def client(server: RankingServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"127.0.0.1:{port_of(server)}") as client:
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
        assert described["versions"] == ["v1"]


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("binary", [True, False])
def test_every_wire_gives_the_same_bits(
    client: triton.InferenceServerClient, http: httpx.Client, binary: bool, compression: str | None
) -> None:
    wanted = [
        triton.InferRequestedOutput(name, binary_data=binary)
        for name in ("post_id", "score", "rank", "probabilities", "continuous")
    ]
    result = client.infer(
        "fake",
        inputs(ASKED, binary=binary),
        outputs=wanted,
        parameters=ASKED.parameters,
        request_compression_algorithm=compression,
    )
    body = json.dumps(good(request_id=...)).encode()
    headers = {"content-type": "application/json"}
    objects = http.post("/rank", content=body, headers=headers).json()
    packed = http.post("/rank", content=gzip.compress(body), headers=headers | {"content-encoding": "gzip"}).json()
    assert packed["candidates"] == objects["candidates"]
    columns = http.post("/rank", json=good(request_id=..., reply="columns")).json()
    rows = objects["candidates"]
    for told in (
        rows,
        [
            dict(zip(("probabilities", "score", "rank"), row, strict=True))
            for row in zip(*(columns["candidates"][n] for n in ("probabilities", "score", "rank")), strict=True)
        ],
    ):
        bits = np.array([row["probabilities"] for row in told], np.float32).tobytes()
        assert result.as_numpy("probabilities").tobytes() == bits
        assert result.as_numpy("score").tolist() == [row["score"] for row in told]
        assert result.as_numpy("rank").tolist() == [row["rank"] for row in told]
    assert result.as_numpy("post_id").tolist() == [int(row["post_id"]) for row in rows]
    dwell = [row["continuous"]["dwell_time"] for row in rows]
    assert result.as_numpy("continuous")[:, 0].tobytes() == np.array(dwell, np.float32).tobytes()
    assert columns["candidates"]["post_id"] == [row["post_id"] for row in rows]
    assert columns["candidates"]["continuous"]["dwell_time"] == dwell


def test_the_path_of_json_takes_tensors_too(http: httpx.Client) -> None:
    body, headers = ASKED.body(binary=True)
    sent = headers | {"content-type": "application/octet-stream"}
    reply = http.post("/rank", content=body, headers=sent | {"accept": "application/octet-stream"})
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/octet-stream")
    length = int(reply.headers["inference-header-content-length"])
    assert json.loads(reply.content[:length])["model_name"] == "fake"
    assert reply.headers["x-model-version"] == "v1"
    assert http.post("/rank", content=body, headers=sent | {"accept": "application/json"}).status_code == 406


def test_errors_are_those_of_rank(client: triton.InferenceServerClient, http: httpx.Client) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("fake", inputs(ASKED)[1:], parameters=ASKED.parameters)
    assert (caught.value.status(), caught.value.message()) == ("422", "user_id: is required, or context in its place")
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
    reply = http.post("/v2/models/fake/infer", content=b"{", headers={"content-encoding": "br"})
    assert (reply.headers["content-type"], reply.headers["accept-encoding"]) == ("application/problem+json", "gzip")
    assert (
        "accept-encoding"
        not in http.post("/v2/models/fake/infer", content=b"{", headers={"content-type": "a/b"}).headers
    )


@pytest.mark.parametrize(("shape", "actions"), [([2**62, 0], ""), ([2**62, 0], "zq9"), ([2**63 - 1, 1], "favorite")])
@pytest.mark.parametrize("binary", [True, False])
def test_a_shape_beyond_memory_is_invalid(http: httpx.Client, shape: list[int], actions: str, binary: bool) -> None:
    header = ASKED.header(binary=False)
    tensor = {"name": "history.actions", "datatype": "FP32", "shape": shape}  # the first says how long a history is
    header["inputs"], header["parameters"] = [tensor, *header["inputs"][:3]], {"actions": actions}
    tensor["data"] = []
    if binary:
        tensor["parameters"] = {"binary_data_size": 0}
        del tensor["data"]
    text = json.dumps(header).encode()
    length = {"inference-header-content-length": str(len(text))} if binary else {}
    reply = http.post("/v2/models/fake/infer", content=text, headers=length)
    assert (reply.status_code, reply.json()["code"]) == (422, "invalid_request")


def test_the_path_of_a_model_takes_a_version_from_the_header(http: httpx.Client) -> None:
    body, headers = ASKED.body(binary=False)
    paths = {"/v2/models/fake/infer": (200, 404), "/v2/models/fake/versions/v1/infer": (200, 200)}
    for path, wanted in paths.items():
        asked = (
            http.post(path, content=body, headers=headers | {"x-model-version": version}) for version in ("v1", "v2")
        )
        assert tuple(reply.status_code for reply in asked) == wanted


def test_a_body_without_a_type_is_not_taken_from_a_page_elsewhere(http: httpx.Client) -> None:
    """A browser names the page's origin in each such request, and asks first before it sends one of these types."""
    body, _ = ASKED.body(binary=False)
    path, page = "/v2/models/fake/infer", {"origin": "http://evil.example"}
    assert http.post(path, content=body).status_code == 200  # as clients of the protocol send it
    for sort, status in (("", 415), ("text/plain", 415), ("application/json", 200)):
        named = {"content-type": sort} if sort else {}
        assert http.post(path, content=body, headers=page | named).status_code == status, sort


def test_a_timeout_of_its_own_is_a_deadline(client: triton.InferenceServerClient) -> None:
    client.infer("fake", inputs(ASKED), timeout=5_000_000)
    with pytest.raises(InferenceServerException) as caught:
        client.infer("fake", inputs(ASKED), timeout=0)
    assert caught.value.status() == "504"
    with pytest.raises(InferenceServerException) as caught:
        client.infer("fake", inputs(ASKED), timeout=60_000_000, headers={"X-Request-Timeout-Ms": "0"})
    assert caught.value.status() == "504"


def test_a_name_in_the_body_is_the_requests(client: triton.InferenceServerClient) -> None:
    result = client.infer("fake", inputs(ASKED), request_id="page-7")
    assert result.get_response()["id"] == "page-7"


def test_no_path_makes_a_series(http: httpx.Client) -> None:
    for number in range(5):
        body, headers = ASKED.body(binary=True)
        assert http.post(f"/v2/models/m{number}/infer", content=body, headers=headers).status_code == 404
        assert http.get(f"/v2/models/fake/versions/{number}").status_code == 404
        assert http.get(f"/v2/{number}").status_code == 404
    routes = {
        line.split('route="')[1].split('"')[0] for line in http.get("/metrics").text.splitlines() if 'route="' in line
    }
    assert "/v2/models/{name}/infer" in routes
    assert "/v2/models/{name}/versions/{version}" in routes
    assert not any(route.startswith(("/v2/models/m", "/v2/models/fake")) for route in routes)


def test_methods_are_those_of_the_protocol(http: httpx.Client) -> None:
    reply = http.get("/v2/models/fake/infer")
    assert (reply.status_code, reply.headers["allow"], reply.json()["error"]) == (405, "POST", reply.json()["detail"])


def test_a_drain_ends_readiness() -> None:
    with listening() as server:
        answers: dict[str, Any] = {}
        with httpx.Client(base_url=f"http://127.0.0.1:{port_of(server)}") as http:
            server.service.begin_drain()
            for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/fake/ready"):
                answers[path] = http.get(path).status_code
    assert answers == {"/v2/health/live": 200, "/v2/health/ready": 503, "/v2/models/fake/ready": 503}
