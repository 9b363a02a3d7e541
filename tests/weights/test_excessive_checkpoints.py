"""Well-signed checkpoints that ask for too much: a sentence, never a traceback, and no memory taken first."""

from __future__ import annotations

import json
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.fuzz.checkpoints import sign_again, write_small
from loadtest.soak.excess import too_large, write_sparse
from model import memory
from model.config import ModelConfig
from model.create import EngineOptions, create_engine
from model.engine import EngineError
from model.synthetic import random_ranker
from tests.zygote import zygote
from weights.checkpoint import load_checkpoint
from weights.errors import CheckpointError
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


def peak_bytes() -> int:
    """Most resident memory since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def load_and_build(path: Path) -> str:
    """What the server would say: empty where it serves."""
    try:
        engine = create_engine(load_checkpoint(path).ranker, EngineOptions(device="cpu", threads=1))
        engine.warm_up()
        engine.close()
    except (CheckpointError, EngineError) as error:
        return str(error)
    return ""


def trials(manifest: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Every number of a manifest at every absurd value, but those of entries that are alike each at a sixth of them."""
    met: Counter[str] = Counter()
    for path in numbers(manifest):
        kind = next((name for name in ALIKE if name in path), "")
        yield from ((path, number) for number in (ABSURD[met[kind] % 6 :: 6] if kind else ABSURD))
        met[kind] += 1


def try_all(work: Path) -> None:
    """Each of the trials, in a process of its own, for its memory."""
    write_small(work / "small", 5)
    text = (work / "small/manifest.json").read_text()
    assert load_and_build(work / "small") == ""
    peak_bytes()
    before, served = peak_bytes(), 0
    tried = list(trials(json.loads(text)))
    assert {path[0] for path, _ in tried} >= {"architecture", "continuous", "score_weights", "files", "tensors"}
    assert all({number for path, number in tried if kind in path} == set(ABSURD) for kind in ALIKE)
    for path, number in tried:
        changed = json.loads(text)
        with_number(changed, path, number)
        if changed == json.loads(text):
            continue
        sign_again(
            work / "small",
            lambda values, changed=changed: (values.clear(), values.update(changed), values.pop("digest")),
        )
        said = load_and_build(work / "small")
        assert "\n" not in said, (path, number, said)
        served += not said
    print(json.dumps({"tried": len(tried), "served": served, "added": peak_bytes() - before}))


def test_no_number_of_a_manifest_takes_memory_or_ends_in_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.weights.test_excessive_checkpoints", str(tmp_path)]
    done = zygote.run(command, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["tried"] > 500
    assert 0 < found["served"] < found["tried"] / 2
    assert found["added"] < ROOM_BYTES


def wide_context() -> ModelConfig:
    """33 thousand tokens of 1 MiB each in bf16: the largest context that the bounds allow, of parameters that are small."""
    config = mini_config(0, (5, 6, 7), continuous_actions=0)
    return replace(config, width=2, layers=2, query_heads=64, kv_heads=64, head_width=1024, history_length=32767)


def test_an_engine_whose_context_does_not_fit_is_refused_before_it_takes_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 30 * 2**30)
    ranker = random_ranker(wide_context())
    peak_bytes()
    before = peak_bytes()
    with pytest.raises(EngineError, match=r"does not fit: 80\.\d GiB of memory are needed, and 30\.0 GiB are free"):
        create_engine(ranker, EngineOptions(device="cpu"))
    assert peak_bytes() - before < ROOM_BYTES


def test_without_the_check_it_would_take_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 200 * 2**30)
    engine = create_engine(random_ranker(wide_context()), EngineOptions(device="cpu", backend="native", threads=1))
    resource_limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, resource_limit[1]))
    try:
        with pytest.raises(MemoryError):
            engine.warm_up()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, resource_limit)
        engine.close()


def test_parameters_that_do_not_fit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    """A file of 752 GiB without a byte on the disk."""
    write_sparse(tmp_path / "sparse", too_large())
    with pytest.raises(
        CheckpointError, match=r"params\.safetensors does not fit into memory: 752\.\d GiB of memory are needed"
    ):
        load_checkpoint(tmp_path / "sparse", threads=1)


def test_a_model_without_finite_scores_is_refused_at_the_warm_up() -> None:
    ranker = random_ranker(mini_config(0, (5, 6, 7)))
    ranker.heads.actions.fill_(3e38)
    engine = create_engine(ranker, EngineOptions(device="cpu", threads=1))
    with pytest.raises(EngineError, match="not finite numbers"):
        engine.warm_up()
    engine.close()


if __name__ == "__main__":
    try_all(Path(sys.argv[1]))
