"""Texts as ids: hashed and refused alike by both readers, echoed as they came in every form of reply."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.app.request.test_codec as codec_tests
from app.request import inference, protobuf, tensors
from app.request.body import decode
from app.request.codec import Codec, Packed, load_library
from app.request.posts import read_change
from app.request.reply import ReplyFormat, render
from app.request.validate import Request, check, check_explain
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from loadtest.fuzz import bodies
from loadtest.generate.tensors import in_arrays
from model.inputs import Scores
from tests.app.fakes import FakeEngine, loaded
from tests.app.odd_bodies import mutated
from tests.app.request.sanitized_codec import frozen
from tests.app.request.test_codec import problems
from tests.app.serving import good
from weights.text_ids import text_id

MANIFEST = replace(loaded(FakeEngine()).checkpoint.manifest, ids="text", version="")
CONFIG, LIMITS, WORDS = MANIFEST.config, Limits(), Vocabulary.of(MANIFEST)
LIBRARY = load_library()
assert LIBRARY is not None
CODEC = Codec(LIBRARY, MANIFEST, WORDS, LIMITS)
FORM = ReplyFormat.of(MANIFEST)
WRITTEN = replace(FORM, codec=CODEC)
INTEGERS = Vocabulary.of(loaded(FakeEngine()).checkpoint.manifest)

ODD_TEXTS = [
    "",
    "a" * 128,
    "a" * 129,
    "é" * 64,
    "é" * 65,
    "\x00",
    "\x7f",
    '"',
    "\\",
    ",",
    '","',
    "0",
    "\u2028",
    "\U0001f600",
    "ids: 7",
]
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40) | st.sampled_from(ODD_TEXTS)

valid_texts = texts.filter(lambda text: 0 < len(text.encode()) <= 128)


def spelled(value: Any) -> Any:
    """The same body with texts where it has ids."""
    if isinstance(value, dict):
        return {
            name: named(inner)
            if (name.endswith("_id") and name != "request_id") or name == "explain"
            else spelled(inner)
            for name, inner in value.items()
        }
    return [*map(spelled, value)] if isinstance(value, list) else value


def named(id_: Any) -> Any:
    """A text for an integer, and for its decimal string another one."""
    if isinstance(id_, list):
        return [*map(named, id_)]
    return f"post:{id_:x}" if type(id_) is int else f"é{id_}" if type(id_) is str else id_


TEXTS = spelled(good(reply="objects"))
MASKED = {"post_id": ["h", "i"], "author_id": ["x", "y"], "actions": [5, 0]}
GOOD_ONES = [*map(orjson.dumps, (
    TEXTS,
    TEXTS | {"history": MASKED, "candidates": in_arrays(TEXTS["candidates"][:1] * 3), "weights": "x-2026-09", "score": "offset"},
    {"context": "0123456789abcdef" * 2, "candidates": TEXTS["candidates"]},
))]  # fmt: skip


plain = partial(codec_tests.plain, config=CONFIG, words=WORDS)
compiled = partial(codec_tests.compiled, config=CONFIG, made=CODEC)
differing = partial(codec_tests.differing, made=CODEC, manifest=MANIFEST, words=WORDS)


def asked(ids: list[str], **changes: Any) -> Request:
    posts = [{"post_id": id_, "author_id": "a"} for id_ in ids]
    body = TEXTS | {"candidates": posts} | changes
    return check(decode(json.dumps(body).encode(), LIMITS), WORDS)


def test_both_readers_hash_as_the_definition_says() -> None:
    chance = random.Random(0)
    drawn = [
        "".join(chr(chance.choice([65, 233, 0x4E2D, 0x1F600])) for _ in range(chance.randint(1, 32)))
        for _ in range(3000)
    ]
    exact = ["x" * size for size in range(1, 129)] + [chance.randbytes(60).hex()[:size] for size in range(1, 121)]
    for ids in (drawn[:1500], drawn[1500:], exact):
        raw = orjson.dumps({"user_id": ids[0], "candidates": {"post_id": ids, "author_id": ids[::-1]}})
        packed = CODEC.read(raw)
        assert isinstance(packed, Packed)
        request, context, candidates = packed.unpack(CONFIG)
        assert candidates.post_ids.tolist() == [text_id(id_) for id_ in ids]
        assert candidates.author_ids.tolist() == [text_id(id_) for id_ in ids[::-1]]
        assert context.user_id == text_id(ids[0])
        assert request.echo_ids == ids
        assert compiled(raw) == plain(raw)


def test_the_pages_test_vectors_are_right() -> None:
    page = (Path(__file__).parents[3] / "docs/api.md").read_text()
    vectors = re.findall(r"^\| `(.+)` \| `([0-9a-f]{16})` \|$", page, re.MULTILINE)
    assert len(vectors) == 6
    assert [f"{text_id(text):016x}" for text, _ in vectors] == [hash_ for _, hash_ in vectors]


@settings(max_examples=150, deadline=None)
@given(bodies.nearly_valid(), st.lists(texts, min_size=1, max_size=5))
def test_nearly_valid_bodies_are_read_alike_or_declined(value: Any, ids: list[str]) -> None:
    value = spelled(value)
    if value.get("candidates") and isinstance(value["candidates"], list) and isinstance(value["candidates"][0], dict):
        value["candidates"] = [{"post_id": id_, "author_id": ids[0]} for id_ in ids]
    raws = [json.dumps(value).encode(), json.dumps(value, ensure_ascii=False).encode()]
    assert differing(raws) == []


@pytest.mark.parametrize("count", [6000, pytest.param(5_000_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_mutated_bodies_are_read_alike_or_declined(count: int) -> None:
    assert all(CODEC.read(raw) is not None for raw in GOOD_ONES)
    assert differing(islice(mutated(2, GOOD_ONES), count)) == []


TAILS = b"|\x80|\x9f|\xa0|\xbf\xbf|\x80\x80|\x8f\xbf\xbf|\x90\x80\x80|\xbf\xbf\xbf\xbf|\x80a\x80".split(b"|")


@pytest.mark.parametrize("lead", range(0x80, 0x100))
def test_odd_bytes_are_taken_where_they_are_utf8(lead: int) -> None:
    for tail in TAILS:
        text = bytes([lead]) + tail
        raw = orjson.dumps(TEXTS | {"user_id": "@"}).replace(b'"@"', b'"%b"' % text)
        try:
            text.decode()
            is_text = True
        except UnicodeDecodeError:
            is_text = False
        assert (compiled(raw) is not None) == is_text
        assert compiled(raw) == plain(raw)


@pytest.mark.parametrize("value", [7, "", "a" * 129, "é" * 65, None, ["a"], 1.5, True])
@pytest.mark.parametrize("field", ["user_id", "post_id", "author_id"])
def test_what_is_no_text_is_refused(field: str, value: Any) -> None:
    body: dict[str, Any] = {"user_id": "u", "candidates": [{"post_id": "p", "author_id": "a"}]}
    (body if field == "user_id" else body["candidates"][0])[field] = value
    raw = orjson.dumps(body)
    assert CODEC.read(raw) is None
    place = field if field == "user_id" else f"candidates[0].{field}"
    assert problems(lambda: check(decode(raw, LIMITS), WORDS)) == [
        (place, "must be a text of 1 to 128 bytes of UTF-8, as all ids of this checkpoint are")
    ]


def test_a_text_is_refused_where_ids_are_integers() -> None:
    told = problems(lambda: check(decode(orjson.dumps(TEXTS), LIMITS), INTEGERS))
    assert len(told) == 10
    assert told[0] == (
        "user_id",
        "must be an unsigned 64-bit integer, as a JSON integer or a decimal string without leading zeros",
    )


def scored(count: int) -> Scores:
    numbers = np.random.default_rng(count).random((count, 3), np.float32)
    return Scores(numbers, numbers, numbers[:, :1].copy())


@settings(max_examples=150, deadline=None)
@given(st.lists(valid_texts, min_size=1, max_size=20), st.sampled_from(["objects", "columns"]), st.booleans())
def test_replies_echo_the_texts(ids: list[str], form: str, sorts: bool) -> None:
    tail: dict[str, Any] = {"history_used": 1, "timings_ms": {}}
    request = asked(ids, reply=form, top_k=len(ids) if sorts else 1)
    request = request if sorts else replace(request, top_k=None)
    raw = json.dumps(
        TEXTS | {"candidates": [{"post_id": id_, "author_id": "a"} for id_ in ids], "reply": form}, ensure_ascii=False
    )
    packed = CODEC.read(raw.encode())
    given = [request] if packed is None else [request, replace(packed.unpack(CONFIG)[0], top_k=request.top_k)]
    written = {b"".join(render(each, scored(len(ids)), use, **tail)) for each in given for use in (FORM, WRITTEN)}
    assert len(written) == 1
    rows = orjson.loads(written.pop())["candidates"]
    told = rows["post_id"] if form == "columns" else [row["post_id"] for row in rows]
    assert sorted(told) == sorted(ids) if sorts else told == ids


def test_an_echo_that_does_not_fit_is_declined() -> None:
    request, scores = asked(["a", "b"]), scored(2)
    ends = [np.array(pair, np.int64).tobytes() + b'"a","b",' for pair in ([4, 9], [-1, 8], [4, 4], [5, 3], [4, 2**62])]
    for sent in (*ends, b"x", b"\x00" * 15):
        assert (
            CODEC.write(replace(request, candidates=replace(request.candidates, sent=sent)), scores, b"", b"") is None
        )
    right = np.array([4, 8], np.int64).tobytes() + b'"a","b",'
    assert (
        CODEC.write(replace(request, candidates=replace(request.candidates, sent=right)), scores, b"", b"") is not None
    )


def test_posts_to_explain_are_found_by_their_text() -> None:
    body = TEXTS | {"explain": [TEXTS["candidates"][1]["post_id"]]}
    request, places = check_explain(decode(orjson.dumps(body), LIMITS), WORDS)
    assert places.tolist() == [1]
    assert request.history.sent == [event["post_id"] for event in TEXTS["history"]]
    body["explain"] = ["elsewhere"]
    assert problems(lambda: check_explain(decode(orjson.dumps(body), LIMITS), WORDS)) == [
        ("explain[0]", "must be the post_id of a candidate")
    ]


# tensors

COLUMNS = {
    "user_id": ["u"], "candidates.post_id": ["a,b", "é"], "candidates.author_id": ["x", "y"],
    "history.post_id": ["h"], "history.author_id": ["i"],
}  # fmt: skip


def packed_texts(values: list[str]) -> bytes:
    return b"".join(len(text.encode()).to_bytes(4, "little") + text.encode() for text in values)


def infer(columns: dict[str, Any] = COLUMNS, *, binary: bool = True, **options: Any) -> Request:
    inputs: list[dict[str, Any]] = []
    data = b""
    for name, values in columns.items():
        raw = b"" if not binary else values if isinstance(values, bytes) else packed_texts(values)
        tensor: dict[str, Any] = {"name": name, "datatype": "BYTES", "shape": [len(COLUMNS[name])]}
        inputs.append(tensor | ({"parameters": {"binary_data_size": len(raw)}} if binary else {"data": values}))
        data += raw if binary else b""
    text = orjson.dumps({"inputs": inputs} | options)
    typed = inference.decode(text + data, LIMITS, b"%d" % len(text) if binary else None)
    assert typed.user_id in ("u", "")
    return tensors.check(typed, WORDS)


@pytest.mark.parametrize("binary", [True, False])
def test_tensors_of_texts(binary: bool) -> None:
    request = infer(binary=binary, parameters={"binary_data_output": binary})
    assert request.user_id == text_id("u")
    assert request.candidates.post_ids.tolist() == [text_id("a,b"), text_id("é")]
    assert request.history.author_ids.tolist() == [text_id("i")]
    head, *rest = inference.render(request, scored(2), FORM, history_used=1, timings_ms={})
    output = orjson.loads(head)["outputs"][0]
    assert (output["name"], output["datatype"], output["shape"]) == ("post_id", "BYTES", [2])
    assert rest[0] == packed_texts(["a,b", "é"]) if binary else output["data"] == ["a,b", "é"]
    described = tensors.describe_model(MANIFEST)
    assert {each["datatype"] for each in described["inputs"] if each["name"].endswith("_id")} == {"BYTES"}
    assert described["outputs"][0]["datatype"] == "BYTES"


def test_tensors_of_texts_over_grpc() -> None:
    message = protobuf.CLASSES["ModelInferRequest"]()
    for name, values in COLUMNS.items():
        message.inputs.add(name=name, datatype="BYTES", shape=[len(values)])
        message.raw_input_contents.append(packed_texts(values))
    request = tensors.check(protobuf.tensors_of(message, LIMITS), WORDS)
    (reply,) = protobuf.reply(request, scored(2), FORM, history_used=1, timings_ms={})
    answer = protobuf.CLASSES["ModelInferResponse"].FromString(reply)
    assert answer.outputs[0].datatype == "BYTES"
    assert answer.raw_output_contents[0] == packed_texts(["a,b", "é"])


ONE = packed_texts(["x"])


@pytest.mark.parametrize("data", [
    b"", b"\x01\x00\x00", ONE, ONE * 3, ONE * 2 + b"\x00", ONE + b"\xff" * 4, ONE + b"\x01\x00\x00\x00\xff",
    ONE + b"\x03\x00\x00\x00\xed\xa0\x80",
])  # fmt: skip
def test_bytes_that_are_no_texts_are_refused(data: bytes) -> None:
    sentence = "must hold texts in UTF-8, each behind its length in 4 bytes, as many as its shape says"
    assert problems(lambda: infer(COLUMNS | {"candidates.author_id": data})) == [("candidates.author_id", sentence)]


def test_texts_that_are_no_ids_are_refused_in_tensors() -> None:
    for binary in (True, False):
        told = problems(lambda: infer(COLUMNS | {"candidates.author_id": ["", "a" * 129]}, binary=binary))  # noqa: B023
        assert [place for place, _ in told] == ["candidates.author_id[0]", "candidates.author_id[1]"]
    assert (
        problems(lambda: infer(COLUMNS | {"candidates.author_id": [1, 2]}, binary=False))[0][0]
        == "candidates.author_id"
    )
    inputs = [{"name": "user_id", "datatype": "UINT64", "shape": [1], "data": [1]}]
    typed = inference.decode(orjson.dumps({"inputs": inputs}), LIMITS, None)
    assert problems(lambda: tensors.check(typed, WORDS))[0] == ("user_id", "must be of the datatype BYTES")


# changes of a corpus


def test_changes_of_a_corpus_bring_texts() -> None:
    posts = [{"post_id": "p", "author_id": "a", "topic": "t"}, {"post_id": "q", "author_id": "a"}]
    change = read_change(orjson.dumps({"upsert": posts, "delete": ["r"]}), "text")
    assert change.upsert.texts == [("p", "a"), ("q", "a")]
    assert (change.delete_texts, change.delete.tolist()) == (["r"], [text_id("r")])
    assert change.upsert.post_ids.tolist() == [text_id("p"), text_id("q")]
    integers = read_change(b'{"delete": [5]}', "uint64")
    assert (integers.delete_texts, integers.upsert.texts) == ([], [])
    for body, ids, place in (({"delete": [5]}, "text", "delete[0]"), ({"delete": ["r"]}, "uint64", "delete[0]")):
        assert problems(lambda: read_change(orjson.dumps(body), ids))[0][0] == place  # type: ignore[arg-type]  # noqa: B023


def test_frozen_values_tell_a_difference() -> None:
    assert frozen([np.zeros(1)]) != frozen([np.ones(1)])
