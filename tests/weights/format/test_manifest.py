"""What a manifest accepts and what it refuses, apart from any file beside it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import MAX_FACTOR
from weights.actions import (
    DWELL_TIME,
    STANDARD_ACTIONS,
    continuous_outputs,
    default_score_weights,
)
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
)


def content() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(MANIFEST.to_json())
    del values["digest"]
    return values


def test_it_comes_back() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST
    assert Manifest.from_json(signed(content())) == MANIFEST
    assert len(MANIFEST.version) == 12


@pytest.mark.parametrize(
    "change",
    [
        {"name": "y"},
        {"version": "2"},
        {"score_weights": {}},
        {"action_names": STANDARD_ACTIONS[::-1]},
        {"files": {"a.safetensors": FileEntry("1" * 64, 10)}},
        {"config": replace(MANIFEST.config, rope_base=500.0)},
    ],
)
def test_the_digest_covers_everything(change: dict[str, Any]) -> None:
    assert replace(MANIFEST, **change).digest != MANIFEST.digest


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(MANIFEST.to_json()) - 1), st.integers(1, 255))
def test_any_changed_byte_is_refused(place: int, flip: int) -> None:
    raw = bytearray(MANIFEST.to_json())
    raw[place] ^= flip
    with pytest.raises(CheckpointError):
        Manifest.from_json(bytes(raw))


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(content())), ANY_JSON)
def test_any_other_value_of_any_key_is_refused_in_print_or_is_well_formed(key: str, value: Any) -> None:
    raw = signed(content() | {key: value})
    problem = ""
    try:
        assert Manifest.from_json(raw).to_json() == raw
    except CheckpointError as error:
        problem = str(error)
    assert problem.isprintable()


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity", "1" * 5000])
@pytest.mark.parametrize("before", [b'"rope_base": 10000.0', b'"favorite": 1.0', b'"scale": 30.0'])
def test_a_number_that_is_not_finite_is_refused(before: bytes, number: str) -> None:
    raw = MANIFEST.to_json()
    assert before in raw
    with pytest.raises(CheckpointError, match="not valid JSON"):
        Manifest.from_json(raw.replace(before, before.split(b":")[0] + b": " + number.encode()))


@pytest.mark.parametrize(
    "file", ["../a.safetensors", "/a.safetensors", "a/b.safetensors", "a\\b.safetensors", ".a.safetensors", "a.pkl", "a.safetensors\n", ""]
)  # fmt: skip
def test_a_file_outside_of_the_directory_is_refused(file: str) -> None:
    values = content()
    values["files"][file] = {"sha256": "0" * 64, "bytes": 1}
    with pytest.raises(CheckpointError, match="plain"):
        Manifest.from_json(signed(values))


@pytest.mark.parametrize(("sha256", "length"), [("0" * 63, 1), ("A" * 64, 1), ("0" * 64 + "\n", 1), ("0" * 64, -1)])
def test_a_bad_digest_or_a_bad_length_alone_is_refused(sha256: str, length: int) -> None:
    values = content()
    values["files"]["a.safetensors"] = {"sha256": sha256, "bytes": length}
    with pytest.raises(CheckpointError, match="no SHA-256 in lower-case hex or a negative length"):
        Manifest.from_json(signed(values))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"name": "a b"}, "name 'a b' must be"),
        ({"version": "v\n1"}, "version"),
        ({"action_names": STANDARD_ACTIONS[:-1]}, "needs 19 different action names"),
        ({"action_names": ("favorite",) * 19}, "needs 19 different action names"),
        ({"action_names": ("7", *STANDARD_ACTIONS[1:])}, "a letter first"),
        ({"action_names": (None, [], *STANDARD_ACTIONS[2:])}, "a letter first"),
        ({"continuous": ()}, "needs 1 different continuous"),
        ({"continuous": (ContinuousOutput("x", float("inf"), ""),)}, "scale in 1e-30 … 1e.30, got inf"),
        ({"continuous": (ContinuousOutput("x", 1e39, ""),)}, "scale in 1e-30 … 1e.30, got 1e.39"),
        ({"continuous": (ContinuousOutput("x", 1.0, "far too long a unit"),)}, "bad name or unit"),
        ({"score_weights": {"nothing": 1.0}}, "no action of this checkpoint"),
        ({"score_weights": {"reply": float("nan")}}, "at most 1e.09 either way, got nan"),
        ({"score_weights": {"reply": 1e300}}, "at most 1e.09 either way, got 1e.300"),
        ({"score_weights": {"reply": 2**2000}}, "too large"),
        ({"tensors": {"x": TensorEntry("b.safetensors", "float32", (1,))}}, "not among the files"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        replace(MANIFEST, **change)


@pytest.mark.parametrize("weight", ["1", True, None, [1]])
def test_a_score_weight_that_is_no_number_is_refused(weight: Any) -> None:
    values = content()
    name = next(iter(values["score_weights"]))
    values["score_weights"][name] = weight
    with pytest.raises(CheckpointError, match=f"score weight '{name}' must be a number"):
        Manifest.from_json(signed(values))


def test_factors_and_weights_may_be_so_large() -> None:
    most = math.nextafter(1e9, 2e9)
    assert replace(MANIFEST, score_weights={"favorite": -1e9}).score_weights == {"favorite": -1e9}
    with pytest.raises(CheckpointError, match="must be at most 1e\\+09 either way"):
        replace(MANIFEST, score_weights={"favorite": most})
    for scale in (1 / MAX_FACTOR, MAX_FACTOR):
        assert replace(MANIFEST, continuous=(replace(DWELL_TIME, scale=scale),)).continuous[0].scale == scale
    for scale in (0.99 / MAX_FACTOR, 1.01 * MAX_FACTOR):
        with pytest.raises(CheckpointError, match="must have a scale in"):
            replace(MANIFEST, continuous=(replace(DWELL_TIME, scale=scale),))


def test_default_weights_reward_and_punish() -> None:
    weights = default_score_weights(STANDARD_ACTIONS)
    complaints = {"not_interested", "block_author", "mute_author", "report"}
    assert {name for name, weight in weights.items() if weight < 0} == complaints
    assert {"favorite", "reply", "repost", "quote"} <= {name for name, weight in weights.items() if weight > 0}


def test_outputs_of_an_unknown_model_have_numbers() -> None:
    assert continuous_outputs(2, dwell_index=1) == (ContinuousOutput("continuous_0", 1.0, ""), DWELL_TIME)
    assert continuous_outputs(0, dwell_index=0) == ()


def test_it_says_what_ids_are() -> None:
    text = replace(MANIFEST, ids="text", version="")
    assert Manifest.from_json(text.to_json()) == text
    assert text.digest != MANIFEST.digest
    assert "ids" not in content()
    with pytest.raises(CheckpointError, match="they are one of uint64, text"):
        replace(MANIFEST, ids="int32")  # type: ignore[arg-type]
