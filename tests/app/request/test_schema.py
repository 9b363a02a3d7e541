"""The declaration: a field of a candidate that is declared there alone is published, checked and read on every wire."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.zygote import zygote

SCHEMA = Path(__file__).parents[3] / "app/request/schema.py"
END = "\n\n\ndef _columns("
FIELD = """
    length: Annotated[
        Annotated[int, checked(None, "INT64", ge=0, le=600)] | UnsetType, about("Seconds that it lasts.", 30, 0)
    ] = UNSET"""
DRILL = """
import sys, types
from pathlib import Path
for name in [name for name in sys.modules if name.split(".")[0] in ("app", "tests", "loadtest")]:
    del sys.modules[name]  # the zygote has imported them with the schema as it is
schema = types.ModuleType("app.request.schema")
sys.modules["app.request.schema"] = schema
exec(Path(sys.argv[1]).read_text(), schema.__dict__)

from msgspec.json import schema_components

_, published = schema_components([schema.RankRequest], ref_template="{name}")
for model, kind in ("Candidate", "integer"), ("CandidateColumns", "array"):
    about = published[model]["properties"]["length"]
    assert (about["type"], about["description"][-22:]) == (kind, "Seconds that it lasts.")

import orjson, pytest
from app.errors import InvalidRequest
from app.request import inference, protobuf, tensors
from app.request.codec import Codec, load_library
from app.request.wires import OBJECTS
from app.settings import Limits
from dataclasses import replace
from tests.app.fakes import FakeEngine, loaded
from tests.app.serving import VOCABULARY

manifest, limits = loaded(FakeEngine()).checkpoint.manifest, Limits()
words = replace(VOCABULARY, codec=Codec(load_library(), manifest, VOCABULARY, limits))
POST = {"post_id": 90, "author_id": 7}

def read(candidates):
    body = orjson.dumps({"user_id": 1, "candidates": candidates})
    return OBJECTS.check(OBJECTS.decode(body, {}, limits, words), words)

def tensor(name, datatype, values):
    return {"name": name, "datatype": datatype, "shape": [len(values)], "data": values}

def infer(length):
    inputs = [tensor("user_id", "UINT64", [1]), tensor("candidates.length", "INT64", [length, 0])]
    inputs += [tensor(f"candidates.{name}", "UINT64", [90, 91]) for name in POST]
    return tensors.check(inference.decode(orjson.dumps({"inputs": inputs}), limits, None), words)

def grpc(length):
    message = protobuf.CLASSES["ModelInferRequest"]()
    for name, datatype, values in (
        ("user_id", "UINT64", [1]), ("candidates.post_id", "UINT64", [90, 91]), ("candidates.author_id", "UINT64", [7, 7]),
        ("candidates.length", "INT64", [length, 0]),
    ):
        message.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        message.raw_input_contents.append(b"".join(value.to_bytes(8, "little") for value in values))
    return tensors.check(protobuf.tensors_of(message, limits), words)

objects = lambda length: read([POST | {"length": length}, POST])
columns = lambda length: read({"post_id": [90, 91], "author_id": [7, 7], "length": [length, 0]})
for wire in objects, columns, infer, grpc:
    assert wire(30).numbers["length"].tolist() == [30, 0]
    with pytest.raises(InvalidRequest, match="must be an integer between 0 and 600"):
        wire(601)
assert "candidates.length" in {each["name"] for each in tensors.describe_model(manifest)["inputs"]}
"""


def drill(directory: Path, source: str) -> subprocess.CompletedProcess[str]:
    schema = directory / "schema.py"
    schema.write_text(source)
    return zygote.run([sys.executable, "-c", DRILL, str(schema)])


def test_a_field_of_candidates_is_declared_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")  # the drill serves one
    source = SCHEMA.read_text()
    assert source.count(END) == 1
    done = drill(tmp_path, source.replace(END, FIELD + END))
    assert done.returncode == 0, done.stderr
    assert drill(tmp_path, source).stderr.endswith("KeyError: 'length'\n"), "the check can fail"
