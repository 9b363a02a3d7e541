"""Tensors mean what the same request in JSON means, and nothing that is wrong with one passes. Replies: tests/app/api/test_infer.py."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.json import Decoder

from app import schema, tensors
from app.errors import InvalidRequest, MalformedJson, ServiceError, TooLarge
from app.features import CheckedRequest, check, context_of
from app.settings import Limits
from app.vocabulary import Vocabulary
from loadtest.generate.tensors import Inference, inference_of, masked
from tests.support import strategies
from tests.support.bodies import GOOD, good
from tests.support.fakes import ACTIONS, CONFIG, FakeEngine, fake_model
from weights.text_ids import text_id

MANIFEST = fake_model(FakeEngine()).checkpoint.manifest
TEXTS = fake_model(FakeEngine(), ids="text").checkpoint.manifest
WORDS = Vocabulary.of(MANIFEST)
LIMITS = Limits()
RANK = Decoder(schema.RankRequest)
ASKED = inference_of(GOOD, ACTIONS)


def read(asked: Inference, *, binary: bool = True, limits: Limits = LIMITS) -> CheckedRequest:
    body, headers = asked.body(binary=binary)
    given = tensors.read(body, next(iter(headers.values()), None), limits)
    return tensors.check(given, WORDS, CONFIG)


def parsed(body: bytes | dict[str, Any], length: int | str | None = None) -> tensors.TensorRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return tensors.read(data, None if length is None else str(length), LIMITS)


def problem(asked: Inference, *, binary: bool = True) -> tuple[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        read(asked, binary=binary)
    return caught.value.problems[0]


def told(value: Any) -> Any:
    """Arrays as their dtype, shape and bytes, so that two requests can be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple):
        return [*map(told, value)]
    fields = getattr(value, "__dataclass_fields__", None)
    return value if fields is None else {name: told(getattr(value, name)) for name in fields}


@pytest.mark.parametrize("binary", [True, False])
@settings(max_examples=60, deadline=None)
@given(body=strategies.valid)
def test_tensors_mean_what_json_means(binary: bool, body: dict[str, Any]) -> None:
    asked = schema.read(RANK, json.dumps(body | {"reply": "objects"}).encode(), LIMITS)
    found = read(inference_of(body, ACTIONS), binary=binary)
    checked = check(asked, WORDS, CONFIG)
    context = body.get("context") or told(context_of(asked, WORDS, CONFIG))
    assert told(found.context) == context
    assert told(found.candidates) == told(checked.candidates)
    assert told(found.options) == told(checked.options)
    assert all(column.flags.aligned for column in (found.candidates.post_ids, found.candidates.age_buckets))


@pytest.mark.parametrize("binary", [True, False])
def test_masks_of_bits_are_dense_actions(binary: bool) -> None:
    history = [{"post_id": 1, "author_id": 1, "actions": ["favorite", "report"]}, {"post_id": 2, "author_id": 2}]
    asked = inference_of(good(history=history), ACTIONS)
    bits = masked(asked)
    assert bits.inputs["history.actions"].dtype == np.uint64
    words = replace(bits, inputs=bits.inputs | {"history.actions": bits.inputs["history.actions"][:, None]})
    assert told(read(bits, binary=binary)) == told(read(words, binary=binary)) == told(read(asked, binary=binary))
    field, text = problem(with_input("history.actions", [8, 0])(asked), binary=binary)
    assert (field, text.split(" ")[-2:]) == ("history.actions", ["3", "actions"])


def test_features_of_actions_are_those_that_are_named() -> None:
    history = [{"post_id": 1, "author_id": 1, "actions": {"report": 0.5}}, {"post_id": 2, "author_id": 2}]
    asked = inference_of(good(history=history), ACTIONS)
    few = asked.inputs | {"history.actions": np.array([[0, 0.5], [0, 0]], "f4"), "weights": np.array([2.0, -3.0])}
    found = read(replace(asked, inputs=few, parameters={"actions": "favorite,2"}))
    assert found.context.actions.tolist() == [[0, 0, 0.5], [0, 0, 0]]  # type: ignore[union-attr]
    assert found.options.weights.tolist() == [2.0, 0.0, -3.0]


@pytest.mark.parametrize("binary", [True, False])
def test_ids_may_be_texts(binary: bool) -> None:
    names = {"user_id": ["u:é"], "candidates.post_id": ["a,b", "c"], "candidates.author_id": ["d", "e"]}
    inputs, data = [], b""
    for name, texts in names.items():
        raw = b"".join(len(text.encode()).to_bytes(4, "little") + text.encode() for text in texts)
        data += raw if binary else b""
        given: dict[str, Any] = {"parameters": {"binary_data_size": len(raw)}} if binary else {"data": texts}
        inputs.append({"name": name, "datatype": "BYTES", "shape": [len(texts)], **given})
    text = orjson.dumps({"inputs": inputs})
    found = tensors.check(parsed(text + data, len(text) if binary else None), Vocabulary.of(TEXTS), CONFIG)
    assert found.context.user_id == text_id("u:é")  # type: ignore[union-attr]
    assert found.post_ids == ["a,b", "c"]
    assert found.candidates.post_ids.tolist() == [text_id("a,b"), text_id("c")]
    bad = text.replace(b'"shape":[2]', b'"shape":[3]')
    with pytest.raises(InvalidRequest):
        tensors.check(parsed(bad + data, len(bad) if binary else None), Vocabulary.of(TEXTS), CONFIG)


def test_a_text_that_is_no_id_is_told_as_its_tensor() -> None:
    posts = {"name": "candidates.post_id", "datatype": "BYTES", "shape": [2], "data": ["a", ""]}
    authors = posts | {"name": "candidates.author_id", "data": ["a", "b"]}
    asked = parsed({"inputs": [USER | {"datatype": "BYTES", "data": ["u"]}, posts, authors]})
    with pytest.raises(InvalidRequest, match=r"candidates.post_id\[1\]: must be a text"):
        tensors.check(asked, Vocabulary.of(TEXTS), CONFIG)


Change = Callable[[Inference], Any]


def with_input(name: str, values: Any, kind: str = "u8") -> Change:
    return lambda asked: replace(asked, inputs=asked.inputs | {name: np.array(values, kind)})


def with_parameters(**parameters: Any) -> Change:
    return lambda asked: replace(asked, parameters=asked.parameters | parameters)


def without(name: str) -> Change:
    return lambda asked: replace(asked, inputs={key: array for key, array in asked.inputs.items() if key != name})


WRONG: dict[str, tuple[Change, str]] = {
    "no user": (without("user_id"), "user_id"),
    "no candidates": (without("candidates.post_id"), "candidates.post_id"),
    "no authors": (without("candidates.author_id"), "candidates.author_id"),
    "history without authors": (without("history.author_id"), "history.author_id"),
    "two users": (with_input("user_id", [1, 2]), "user_id"),
    "a user beside a handle": (with_parameters(context="0" * 32), "parameters.context"),
    "no handle": (with_parameters(context="zq9marker"), "parameters.context"),
    "user as INT64": (with_input("user_id", [1], "i8"), "user_id"),
    "user of three axes": (with_input("user_id", [[[1]]]), "user_id"),
    "unequal": (with_input("candidates.author_id", [1, 2, 3, 4]), "candidates.author_id"),
    "surface too high": (with_input("candidates.product_surface", [0, 16, 0], "i8"), "candidates.product_surface[1]"),
    "surface negative": (with_input("history.product_surface", [0, 0, -1], "i8"), "history.product_surface[2]"),
    "created too late": (with_input("candidates.created_at", [2**60, 0, 0], "i8"), "candidates.created_at[0]"),
    "dwell NaN": (with_input("history.dwell_time", [0, np.nan, 0], "f4"), "history.dwell_time[1]"),
    "dwell infinite": (with_input("history.dwell_time", [0, 0, np.inf], "f4"), "history.dwell_time[2]"),
    "dwell negative": (with_input("history.dwell_time", [-1, 0, 0], "f4"), "history.dwell_time[0]"),
    "action too large": (with_input("history.actions", [[0] * 3, [0, 0, 2e6], [0] * 3], "f4"), "history.actions[1]"),
    "action NaN": (with_input("history.actions", [[0] * 3, [0] * 3, [np.nan, 0, 0]], "f4"), "history.actions[2]"),
    "too few actions": (with_input("history.actions", np.zeros((3, 2)), "f4"), "history.actions"),
    "no actions": (with_parameters(actions=""), "weights"),
    "weights as FP32": (with_input("weights", [1, 2, 3], "f4"), "weights"),
    "weight infinite": (with_input("weights", [1, np.inf, 3], "f8"), "weights[1]"),
    "weights twice": (with_parameters(weights="default"), "parameters.weights"),
    "unknown tensor": (with_input("zq9marker", [1]), "inputs[11].name"),
    "unknown action": (with_parameters(actions="favorite,zq9marker,report"), "parameters.actions[1]"),
    "an action twice": (with_parameters(actions="favorite,0,report"), "parameters.actions"),
    "unknown wanted": (with_parameters(actions_wanted="zq9marker"), "parameters.actions_wanted[0]"),
    "top_k zero": (with_parameters(top_k=0), "parameters.top_k"),
    "top_k text": (with_parameters(top_k="zq9marker"), "parameters.top_k"),
    "impression in milliseconds": (with_parameters(impression_ts=1_780_000_000_000), "parameters.impression_ts"),
    "timeout endless": (with_parameters(timeout=2**63), "parameters.timeout"),
    "a misspelt parameter": (with_parameters(zq9marker=1), "parameters"),
    "bad id": (lambda asked: replace(asked, request_id="zq9marker\n"), "id"),
}  # fmt: skip


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(("change", "field"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_named_and_not_shown(change: Change, field: str, binary: bool) -> None:
    read(ASKED, binary=binary)  # the request is right but for the change
    found, text = problem(change(ASKED), binary=binary)
    is_json_null = not binary and not all(np.isfinite(array).all() for array in change(ASKED).inputs.values())
    assert found == (field.partition("[")[0] if is_json_null else field)
    assert "zq9marker" not in found + text


def test_no_candidates_is_no_request() -> None:
    nobody = {name: array[:0] if name.startswith("candidates") else array for name, array in ASKED.inputs.items()}
    assert problem(Inference(nobody, {})) == ("candidates", "must not be empty")


def test_shapes_say_how_long_a_request_is() -> None:
    for limit in ("max_candidates", "max_history"):
        with pytest.raises(TooLarge):
            read(ASKED, limits=Limits(**{limit: 2}))


@pytest.mark.parametrize("shape", [[2**62, 0], [2**63 - 1, 1]])
@pytest.mark.parametrize("actions", ["", "favorite"])
@pytest.mark.parametrize("datatype", ["FP32", "UINT64"])
@pytest.mark.parametrize("binary", [True, False])
def test_a_shape_beyond_memory_is_invalid(shape: list[int], actions: str, datatype: str, binary: bool) -> None:
    header = ASKED.header(binary=False)
    tensor: dict[str, Any] = {"name": "history.actions", "datatype": datatype, "shape": shape}
    data: dict[str, Any] = {"parameters": {"binary_data_size": 0}} if binary else {"data": []}
    tensor |= data
    header["inputs"] = [tensor, *(given for given in header["inputs"] if given["name"] != "history.actions")]
    header["parameters"] = {"actions": actions}
    text = orjson.dumps(header)
    with pytest.raises(InvalidRequest):
        tensors.check(parsed(text, len(text) if binary else None), WORDS, CONFIG)


@pytest.mark.parametrize("kind", ["u8", "f4"])
@pytest.mark.parametrize("binary", [True, False])
def test_no_actions_may_be_named(binary: bool, kind: str) -> None:
    inputs = ASKED.inputs | {"history.actions": np.zeros((3, 0), kind)}
    found = read(
        Inference({name: inputs[name] for name in inputs if name != "weights"}, {"actions": ""}), binary=binary
    )
    assert found.context.actions.tolist() == [[0, 0, 0]] * 3  # type: ignore[union-attr]


@st.composite
def odd_headers(draw: st.DrawFn) -> dict[str, Any]:
    """A valid request in JSON, with up to three values replaced by odd ones, or by others of its own."""
    body = copy.deepcopy(ASKED.header(binary=False))
    parts = [body, body["parameters"], *body["inputs"]]
    for _ in range(draw(st.integers(1, 3))):
        part = draw(st.sampled_from(parts))
        name = draw(st.sampled_from([*part, "parameters", "outputs", "id"]))
        own = st.sampled_from([part.get(key) for part in parts for key in part])
        part[name] = copy.deepcopy(draw(strategies.odd | own))
    return body


@settings(max_examples=200, deadline=None)
@given(body=odd_headers(), rest=st.binary(max_size=9), has_length=st.booleans())
def test_no_odd_request_is_a_fault(body: dict[str, Any], rest: bytes, has_length: bool) -> None:
    text = json.dumps(body).encode()
    with suppress(ServiceError):
        given = tensors.read(text + rest if has_length else text, str(len(text)) if has_length else None, LIMITS)
        tensors.check(given, WORDS, CONFIG)


# what other servers of the protocol pass over

HEADER = ASKED.header(binary=False)
USER: dict[str, Any] = {"name": "user_id", "datatype": "UINT64", "shape": [1]}


def test_a_name_may_be_null() -> None:
    assert parsed(changed(id=None)).request_id is None
    assert parsed(changed(id="")).request_id is None


def changed(**fields: Any) -> dict[str, Any]:
    return HEADER | fields


PASSED_OVER: dict[str, dict[str, Any]] = {
    "KServe's model_name": changed(model_name="fake"),
    "null": changed(model_name=None, outputs=None),
    "an unknown field": changed(raw_output_contents=[], x={"y": [1]}),
    "empty parameters": changed(inputs=[given | {"parameters": {}} for given in HEADER["inputs"]]),
    "null parameters": changed(inputs=[given | {"parameters": None} for given in HEADER["inputs"]]),
    "MLServer's content type": changed(
        inputs=[given | {"parameters": {"content_type": "np"}} for given in HEADER["inputs"]],
        parameters=HEADER["parameters"] | {"content_type": "np", "headers": {"a": "b"}},
    ),
    "MLServer's columns": changed(
        inputs=[
            given | {"shape": [*given["shape"], 1]} if len(given["shape"]) == 1 else given for given in HEADER["inputs"]
        ]
    ),
    "Triton's sequences": changed(
        parameters=HEADER["parameters"]
        | {"sequence_id": 7, "sequence_start": True, "sequence_end": False, "priority": 1}
    ),
}


@pytest.mark.parametrize("body", PASSED_OVER.values(), ids=PASSED_OVER.keys())
def test_what_other_servers_pass_over_is_passed_over(body: dict[str, Any]) -> None:
    assert told(tensors.check(parsed(body), WORDS, CONFIG)) == told(read(ASKED, binary=False))


def test_a_history_without_items_may_have_no_data() -> None:
    """KServe's SDK writes `null` for the data of an empty tensor."""
    empty = [
        {
            "name": f"history.{name}",
            "datatype": "UINT64",
            "shape": [0],
            "data": None,
            "parameters": {"binary_data_size": 0},
        }
        for name in ("post_id", "author_id")
    ]
    inputs = [given for given in HEADER["inputs"] if not given["name"].startswith("history.")]
    text = orjson.dumps(changed(inputs=[*inputs, *empty]))
    assert len(tensors.check(parsed(text, len(text)), WORDS, CONFIG).context) == 0


def test_outputs_are_those_that_are_wanted_each_in_its_form() -> None:
    wanted = [{"name": "score", "parameters": {"binary_data": True, "content_type": "np"}}, {"name": "post_id"}]
    assert parsed(changed(outputs=wanted)).outputs == {"score": True, "post_id": False}
    some = [{"name": "rank"}, {"name": "score", "parameters": {"binary_data": False}}]
    binary = changed(outputs=some, parameters={"binary_data_output": True})
    assert parsed(binary).outputs == {"rank": True, "score": False}
    assert parsed(HEADER).outputs == dict.fromkeys(("post_id", "score", "rank", "probabilities", "continuous"), False)
    for bad in ([{"name": "zq9marker"}], [{"name": "rank"}, {"name": "rank"}]):
        with pytest.raises(InvalidRequest) as caught:
            parsed(changed(outputs=bad))
        assert "zq9marker" not in str(caught.value.problems)


WHOLE = orjson.dumps({"inputs": [USER | {"parameters": {"binary_data_size": 8}}]})
BAD: dict[str, tuple[bytes | dict[str, Any], int | str | None, type[ServiceError], str]] = {
    "no data": ({"inputs": [USER]}, None, InvalidRequest, "inputs[0]"),
    "both": ({"inputs": [USER | {"data": [1], "parameters": {"binary_data_size": 0}}]}, None, InvalidRequest, "inputs[0]"),
    "binary without the header": (WHOLE + bytes(8), None, MalformedJson, ""),
    "binary missing": (WHOLE, len(WHOLE), InvalidRequest, "inputs"),
    "binary cut off": (WHOLE + bytes(7), len(WHOLE), InvalidRequest, "inputs"),
    "binary too long": (WHOLE + bytes(9), len(WHOLE), InvalidRequest, "inputs"),
    "header too long": (WHOLE, len(WHOLE) + 1, InvalidRequest, "Inference-Header-Content-Length"),
    "header no number": (WHOLE + bytes(8), "zq9marker", InvalidRequest, "Inference-Header-Content-Length"),
    "header negative": (WHOLE + bytes(8), -1, InvalidRequest, "Inference-Header-Content-Length"),
    "no inputs": ({"outputs": []}, None, InvalidRequest, "inputs"),
    "null": (b"null", None, InvalidRequest, ""),
    "shape negative": ({"inputs": [USER | {"shape": [-1], "data": [1]}]}, None, InvalidRequest, "inputs[0].shape[0]"),
    "shape endless": ({"inputs": [USER | {"shape": [2**63], "data": [1]}]}, None, InvalidRequest, "inputs[0].shape[0]"),
    "shape of text": ({"inputs": [USER | {"shape": ["zq9marker"], "data": [1]}]}, None, InvalidRequest, "inputs[0].shape[0]"),
    "shared memory": (
        {"inputs": [USER | {"parameters": {"shared_memory_region": "zq9marker"}}]}, None, InvalidRequest, "inputs[0]",
    ),
    "a tensor twice": ({"inputs": [USER | {"data": [1]}, USER | {"data": [2]}]}, None, InvalidRequest, "inputs[1].name"),
    "cut off": (b'{"inputs":[', None, MalformedJson, ""),
    "many values": (b'{"inputs":[%b]}' % b",".join([b"{}"] * 300_000), None, TooLarge, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_is_refused(case: tuple[Any, int | str | None, type[ServiceError], str]) -> None:
    body, length, kind, field = case
    with pytest.raises(kind) as caught:
        parsed(body, length)
    assert "zq9marker" not in str(caught.value.problem())
    if field:
        assert caught.value.problems[0].field == field


@pytest.mark.parametrize("last", [b"", b',{"name":1}'])
def test_no_number_of_tensors_takes_long_to_refuse(last: bytes) -> None:
    tensor = orjson.dumps(USER | {"data": [1]})
    body = b'{"inputs":[%b%b]}' % (b",".join([tensor] * 3_500), last)  # not more values than a long request has
    spent = []
    for _ in range(3):
        started = time.thread_time()
        with pytest.raises(InvalidRequest):
            parsed(body)
        spent.append(time.thread_time() - started)
    assert min(spent) < 0.02


@pytest.mark.parametrize("data", [[-1], [2**64], [1.5], ["1"], [[1, 2]], [[[1]]], [], 1])
def test_a_wrong_value_in_json_data_is_told_as_its_tensor(data: Any) -> None:
    inputs = [USER | {"data": data}, *(given for given in HEADER["inputs"] if given["name"] != "user_id")]
    with pytest.raises(InvalidRequest) as caught:
        tensors.check(parsed(changed(inputs=inputs)), WORDS, CONFIG)
    assert caught.value.problems[0].field == "user_id"
