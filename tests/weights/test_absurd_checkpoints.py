"""Well-signed checkpoints that ask for too much: a sentence, never a traceback, and no memory taken first."""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.create import EngineOptions, create_engine
from model.engine import EngineError
from tests.support.random_models import random_model
from tests.weights.small import sign, write_small
from weights.checkpoint import load_checkpoint
from weights.errors import CheckpointError
from weights.format.layout import expected_shapes, file_of
from weights.format.manifest import FileEntry, Manifest, TensorEntry
from weights.synthetic.random_weights import mini_config

ABSURD = (0, -1, 2, 2**15, 2**31, 2**40, 2**63, 2**64, 10**300, 1e-320, 1e-30, 1e30, 1e308, -1e308)
ALIKE = ("score_weights", "scales", "biases", "tensors")  # one piece of code reads all their entries, six or more
ROOM_BYTES = 150 * 2**20  # what all these loads together may add to the process: libraries and arenas


def numbers(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of every number in a JSON value."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(inner, (*path, key))
    elif type(value) in (int, float):
        yield path


def with_number(manifest: dict[str, Any], path: tuple[Any, ...], number: float) -> None:
    place: Any = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = type(place[path[-1]])(number) if number in (0, -1, 2) else number


def trials(manifest: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Every number of a manifest at every absurd value, but those of entries that are alike each at a sixth of them."""
    met: Counter[str] = Counter()
    for path in numbers(manifest):
        kind = next((name for name in ALIKE if name in path), "")
        yield from ((path, number) for number in (ABSURD[met[kind] % 6 :: 6] if kind else ABSURD))
        met[kind] += 1


def load_and_build(path: Path) -> str:
    """What the server would say: empty where it serves."""
    try:
        engine = create_engine(load_checkpoint(path).ranker, EngineOptions(device="cpu", threads=1))
        engine.warm_up()
        engine.close()
    except (CheckpointError, EngineError) as error:
        return str(error)
    return ""


def peak_bytes() -> int:
    """Most resident memory since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def try_all(work: Path) -> None:
    """Each of the trials, in a process of its own, for its memory."""
    write_small(work / "small", 5)
    text = (work / "small/manifest.json").read_text()
    assert load_and_build(work / "small") == ""
    peak_bytes()
    before, tried, served = peak_bytes(), 0, 0
    for path, number in trials(json.loads(text)):
        changed = json.loads(text)
        with_number(changed, path, number)
        if changed == json.loads(text):
            continue
        del changed["digest"]
        sign(work / "small", lambda values, changed=changed: (values.clear(), values.update(changed)))  # type: ignore[misc]
        said = load_and_build(work / "small")
        assert "\n" not in said, (path, number, said)
        tried, served = tried + 1, served + (not said)
    print(json.dumps({"tried": tried, "served": served, "added": peak_bytes() - before}))


@pytest.mark.slow
def test_no_manifest_number_takes_memory_or_gives_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.weights.test_absurd_checkpoints", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["tried"] > 500
    assert 0 < found["served"] < found["tried"] / 2
    assert found["added"] < ROOM_BYTES


def test_parameters_that_do_not_fit_are_refused_unread(tmp_path: Path) -> None:
    """Files of 752 GiB without a byte on the disk: right headers and lengths, no data."""
    config = replace(mini_config(0, (5, 6, 7), continuous_actions=0), width=65536, layers=1, widening=16.0)
    shapes = expected_shapes(config)
    for file in {file_of(name) for name in shapes}:
        header, end = {}, 0
        for name in (name for name in shapes if file_of(name) == file):
            start, end = end, end + 4 * math.prod(shapes[name])
            header[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        (tmp_path / file).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(tmp_path / file, 8 + len(text) + end)
    manifest = Manifest(
        name="sparse",
        version="1",
        config=config,
        action_names=tuple(f"action_{index}" for index in range(config.actions)),
        continuous=(),
        score_weights={},
        files={file_of(name): FileEntry("0" * 64, (tmp_path / file_of(name)).stat().st_size) for name in shapes},
        tensors={name: TensorEntry(file_of(name), "float32", shape) for name, shape in shapes.items()},
    )
    (tmp_path / "manifest.json").write_bytes(manifest.to_json())
    with pytest.raises(
        CheckpointError, match=r"params\.safetensors does not fit into memory: 752\.\d GiB of memory are needed"
    ):
        load_checkpoint(tmp_path, threads=1)


def test_a_context_that_does_not_fit_is_refused_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """33 thousand tokens of 1 MiB each in bf16: the largest context that the bounds allow, of parameters that are small."""
    config = mini_config(0, (5, 6, 7), continuous_actions=0)
    config = replace(config, width=2, layers=2, query_heads=64, kv_heads=64, head_width=1024, history_length=32767)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (60 * 2**30, resource.RLIM_INFINITY))
    ranker = random_model(config, 0)
    peak_bytes()
    before = peak_bytes()
    with pytest.raises(EngineError, match=r"does not fit: 80\.\d GiB of memory are needed, and \d.* are free"):
        create_engine(ranker, EngineOptions(device="cpu"))
    assert peak_bytes() - before < ROOM_BYTES


def test_a_model_without_finite_scores_is_refused_at_the_warm_up() -> None:
    ranker = random_model(mini_config(0, (5, 6, 7)), 0)
    ranker.heads.actions.weight.fill_(3e38)
    engine = create_engine(ranker, EngineOptions(device="cpu", threads=1))
    with pytest.raises(EngineError, match="not finite numbers"):
        engine.warm_up()
    engine.close()


if __name__ == "__main__":
    try_all(Path(sys.argv[1]))
