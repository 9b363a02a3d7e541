"""Bodies of the Open Inference Protocol: replies with the numbers of the JSON reply, and requests that do not fit together."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from numpy.typing import NDArray

from app.errors import InvalidRequest, MalformedJson, ServiceError, TooLarge
from app.request import inference, tensors
from app.request.reply import render
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from loadtest.generate.tensors import inference_of
from tests.app.fakes import ACTIONS
from tests.app.request.test_reply import FORM, MANIFEST, request, scores
from tests.app.serving import good

VOCABULARY = Vocabulary.of(MANIFEST)
DTYPES = {"UINT64": "<u8", "INT64": "<i8", "FP32": "<f4", "FP64": "<f8"}
TIMES = {"parse": 0.1, "queue": 0.2, "forward": 0.3}
GOOD = inference_of(good(), ACTIONS).header(binary=False)
USER: dict[str, Any] = {"name": "user_id", "datatype": "UINT64", "shape": [1]}


def decode(body: bytes | dict[str, Any], length: bytes | None = None) -> tensors.Tensors:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    return inference.decode(data, Limits(), length)


def read_reply(pieces: list[bytes]) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The JSON of a reply, and its outputs."""
    header, rest = orjson.loads(pieces[0]), b"".join(pieces[1:])
    arrays = {}
    for output in header["outputs"]:
        dtype = np.dtype(DTYPES[output["datatype"]])
        if "data" in output:
            array = np.array(output["data"], dtype)
        else:
            size = output["parameters"]["binary_data_size"]
            array, rest = np.frombuffer(rest[:size], dtype), rest[size:]
        arrays[output["name"]] = array.reshape(output["shape"])
    assert not rest
    return header, arrays


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(
    "changes", [{}, {"top_k": 5}, {"actions_wanted": ["report", "favorite"]}, {"actions_wanted": []}]
)
@pytest.mark.parametrize("count", [1, 63, 1025])
def test_the_same_bits_as_in_json(count: int, changes: dict[str, Any], binary: bool) -> None:
    asked, given = request(count, **changes), scores(count)
    rows = orjson.loads(b"".join(render(asked, given, FORM, history_used=1, timings_ms=TIMES)))
    posts = replace(asked.candidates, sent=None)
    as_tensors = replace(asked, candidates=posts, reply=dict.fromkeys(tensors.OUTPUTS, binary))
    header, arrays = read_reply(list(inference.render(as_tensors, given, FORM, history_used=1, timings_ms=TIMES)))
    table = rows["candidates"]
    assert arrays["post_id"].tolist() == [int(row["post_id"]) for row in table]
    assert arrays["score"].tolist() == [row["score"] for row in table]
    assert arrays["rank"].tolist() == [row["rank"] for row in table]
    shape = (len(table), len(rows["actions"]))
    told = np.array([row["probabilities"] for row in table], np.float32).reshape(shape)
    assert arrays["probabilities"].tobytes() == told.tobytes()
    assert arrays["continuous"][:, 0].tolist() == [np.float32(row["continuous"]["dwell_time"]) for row in table]
    said = header["parameters"]
    assert (said["actions"], said["continuous"]) == (",".join(rows["actions"]), "dwell_time")
    assert (said["history_used"], said["history_dropped"], said["forward_ms"]) == (1, 2, 0.3)
    assert (header["model_name"], header["model_version"]) == ("fake", "v1")


def test_outputs_are_those_that_are_wanted_each_in_its_form() -> None:
    wanted = [{"name": "score", "parameters": {"binary_data": True}}, {"name": "post_id"}]
    assert decode(GOOD | {"outputs": wanted}).reply == {"score": True, "post_id": False}
    binary = {"outputs": [{"name": "rank"}], "parameters": {"binary_data_output": True}}
    assert decode(GOOD | binary).reply == {"rank": True}
    assert set(decode(GOOD).reply) == set(tensors.OUTPUTS)
    for bad in ([{"name": "zq9marker"}], [{"name": "rank"}, {"name": "rank"}]):
        with pytest.raises(InvalidRequest) as caught:
            decode(GOOD | {"outputs": bad})
        assert "zq9marker" not in str(caught.value.problems)


WHOLE = orjson.dumps({"inputs": [USER | {"parameters": {"binary_data_size": 8}}]})
BAD: dict[str, tuple[bytes | dict[str, Any], bytes | None, type[ServiceError], str]] = {
    "no data": ({"inputs": [USER]}, None, InvalidRequest, "inputs[0]"),
    "both": ({"inputs": [USER | {"data": [1], "parameters": {"binary_data_size": 0}}]}, None, InvalidRequest, "inputs[0]"),
    "binary without the header": (WHOLE + bytes(8), None, MalformedJson, ""),
    "binary missing": (WHOLE, b"%d" % len(WHOLE), InvalidRequest, "inputs"),
    "binary cut off": (WHOLE + bytes(7), b"%d" % len(WHOLE), InvalidRequest, "inputs"),
    "binary too long": (WHOLE + bytes(9), b"%d" % len(WHOLE), InvalidRequest, "inputs"),
    "header too long": (WHOLE, b"%d" % (len(WHOLE) + 1), InvalidRequest, inference.LENGTH_HEADER),
    "header no number": (WHOLE + bytes(8), b"zq9marker", InvalidRequest, inference.LENGTH_HEADER),
    "header negative": (WHOLE + bytes(8), b"-1", InvalidRequest, inference.LENGTH_HEADER),
    "no inputs": ({"outputs": []}, None, InvalidRequest, "inputs"),
    "null": (b"null", None, InvalidRequest, ""),
    "unknown field": (GOOD | {"zq9marker": 1}, None, InvalidRequest, ""),
    "shape negative": ({"inputs": [USER | {"shape": [-1], "data": [1]}]}, None, InvalidRequest, "inputs[0].shape[0]"),
    "shape endless": ({"inputs": [USER | {"shape": [2**63], "data": [1]}]}, None, InvalidRequest, "inputs[0].shape[0]"),
    "shape of text": ({"inputs": [USER | {"shape": ["zq9marker"]}]}, None, InvalidRequest, "inputs[0].shape[0]"),
    "shared memory": (
        {"inputs": [USER | {"parameters": {"shared_memory_region": "zq9marker"}}]}, None, InvalidRequest, "inputs[0].parameters",
    ),
    "key twice": (b'{"inputs":[],"inputs":[]}', None, MalformedJson, ""),
    "cut off": (b'{"inputs":[', None, MalformedJson, ""),
    "deep": (b'{"inputs":' + b"[" * 5000, None, MalformedJson, ""),
    "endless shape": (b'{"inputs":[{"name":"user_id","datatype":"UINT64","shape":[%b]}]}' % (b"9" * 5000), None, MalformedJson, ""),
    "many values": (b'{"inputs":[%b]}' % b",".join([b"{}"] * 300_000), None, TooLarge, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_is_refused(case: tuple[Any, bytes | None, type[ServiceError], str]) -> None:
    body, length, kind, field = case
    with pytest.raises(kind) as caught:
        decode(body, length)
    assert "zq9marker" not in str(caught.value.problem())
    if field:
        assert field in [problem.field for problem in caught.value.problems]


@pytest.mark.parametrize("last", [b"", b',{"name":1}'])
def test_no_number_of_tensors_takes_long_to_refuse(last: bytes) -> None:
    tensor = orjson.dumps(USER | {"data": [1]})
    body = b'{"inputs":[%b%b]}' % (b",".join([tensor] * 3_500), last)  # not more values than a long request has
    spent = []
    for _ in range(3):
        started = time.thread_time()
        with pytest.raises(InvalidRequest) as caught:
            decode(body)
        spent.append(time.thread_time() - started)
        assert caught.value.problems[0].message == "must hold at most 22"
    assert min(spent) < 0.02


def test_a_wrong_value_in_json_data_is_told_as_its_tensor() -> None:
    for data in ([-1], [2**64], [1.5], ["1"], [True], [[1, 2]], [], {"a": 1}, None):
        text = json.dumps({"inputs": [USER | {"data": data}]}).encode()
        with pytest.raises(InvalidRequest) as caught:
            tensors.check(decode(text), VOCABULARY)
        assert caught.value.problems[0].field == ("user_id" if isinstance(data, list) else "inputs[0].data"), data
