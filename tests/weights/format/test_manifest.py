"""What a manifest accepts and what it refuses, apart from any file beside it."""

from __future__ import annotations

import json
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from weights.actions import DWELL_TIME, STANDARD_ACTIONS, default_score_weights
from weights.errors import CheckpointError
from weights.format.manifest import ContinuousOutput, FileEntry, Manifest, TensorEntry, signed
from weights.synthetic.random_weights import mini_config

MANIFEST = Manifest(
    name="x",
    version="",
    config=mini_config(0, (5, 6, 7), continuous_actions=1),
    action_names=STANDARD_ACTIONS,
    continuous=(DWELL_TIME,),
    score_weights=default_score_weights(STANDARD_ACTIONS),
    files={"a.safetensors": FileEntry("0" * 64, 10)},
    tensors={"heads.norm": TensorEntry("a.safetensors", "float32", (128,))},
).versioned()


def content() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(MANIFEST.to_json())
    del values["digest"]
    return values


def test_it_comes_back_whatever_its_spaces() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert Manifest.from_json(json.dumps(json.loads(MANIFEST.to_json())).encode()) == MANIFEST
    text = replace(MANIFEST, ids="text", version="").versioned()
    assert Manifest.from_json(text.to_json()) == text
    assert text.digest != MANIFEST.digest
    trained = replace(MANIFEST, training={"rows": 100, "reasons": ["no dwell"]})
    assert Manifest.from_json(trained.to_json()) == trained


@pytest.mark.parametrize("shipped", ["demo", "demo-towers", "demo-posts"])
def test_the_digest_is_that_of_the_content_with_sorted_keys(shipped: str) -> None:
    values = json.loads(Path("weights", shipped, "manifest.json").read_bytes())
    stated = values.pop("digest")
    assert sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest() == stated


def test_an_empty_version_becomes_a_short_digest() -> None:
    draft = replace(MANIFEST, version="")
    assert draft.versioned().version == draft.digest[:12]
    assert MANIFEST.versioned() is MANIFEST
    with pytest.raises(CheckpointError):
        Manifest.from_json(draft.to_json())


@settings(max_examples=100)
@given(st.integers(0, len(MANIFEST.to_json()) - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_changes_nothing(place: int, flip: int) -> None:
    raw = bytearray(MANIFEST.to_json())
    raw[place] ^= flip
    with suppress(CheckpointError):
        assert Manifest.from_json(bytes(raw)) == MANIFEST


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@settings(max_examples=60)
@given(st.sampled_from(sorted(content())), ANY_JSON)
def test_any_value_of_any_key_is_refused_in_print_or_read_back(key: str, value: Any) -> None:
    problem = ""
    try:
        read = Manifest.from_json(signed(content() | {key: value}))
        assert Manifest.from_json(read.to_json()) == read
    except CheckpointError as error:
        problem = str(error)
    assert problem.isprintable()


@pytest.mark.parametrize("number", ["1e999", "NaN"])
@pytest.mark.parametrize("before", [b'"rope_base": 10000.0', b'"favorite": 1.0', b'"scale": 30.0'])
def test_a_number_that_is_not_finite_is_refused(before: bytes, number: str) -> None:
    raw = MANIFEST.to_json()
    assert before in raw
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Manifest.from_json(raw.replace(before, before.split(b":")[0] + b": " + number.encode()))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": "a/b"}, "version 'a/b' must be"),
        ({"action_names": ("0", *STANDARD_ACTIONS[1:])}, "action name '0' must be letters"),
        ({"continuous": ()}, "needs 1 different continuous outputs, got 0"),
        ({"continuous": (ContinuousOutput("0", 1.0, ""),)}, "bad name or unit"),
        ({"continuous": (ContinuousOutput("x", 1.0, "far too long a unit"),)}, "bad name or unit"),
        ({"continuous": (ContinuousOutput("x", float("nan"), ""),)}, "must have a scale in 1e-30 … 1e.30, got nan"),
        ({"continuous": (ContinuousOutput("x", 1e39, ""),)}, "must have a scale in 1e-30 … 1e.30, got 1e.39"),
        ({"score_weights": {"favorite": float("nan")}}, "score weight of favorite must be a number"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        replace(MANIFEST, **change)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("files", {"a.safetensors": {"sha256": "0" * 63, "bytes": 1}}, "matching regex"),
        ("files", {"a.safetensors": {"sha256": "0" * 64, "bytes": True}}, "Expected `int`, got `bool`"),
        ("tensors", {"x": {"file": "a.safetensors", "dtype": "float16", "shape": [1]}}, "Invalid enum value"),
        ("tensors", {"x": {"file": "a.safetensors", "dtype": "float32", "shape": [0]}}, "Expected `int` >= 1"),
        ("score_weights", {"favorite": "1"}, "Expected `float`, got `str`"),
        ("action_names", "favorite", "Expected `array`, got `str`"),
        ("ids", "int32", "Invalid enum value 'int32'"),
        ("model", "three towers", "a kind of model that this build does not know"),
        ("architecture", {"width": 1}, "describes a model that cannot be built: architecture lacks layers"),
    ],
)
def test_a_file_of_another_form_is_refused(key: str, value: Any, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        Manifest.from_json(signed(content() | {key: value}))
