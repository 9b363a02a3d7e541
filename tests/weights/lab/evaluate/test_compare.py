"""`python -m weights compare`: figures against their definitions, controls that must differ. Its links: tests/e2e/explore/test_links.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

pytest.importorskip("pyarrow")

from model.synthetic import random_ranker
from tests.weights.call import run
from tests.weights.lab.training.small_run import WORLD, small_config
from weights.actions import continuous_outputs
from weights.checkpoint import load_checkpoint, load_manifest, save_checkpoint
from weights.format.writer import replace_manifest
from weights.lab.agreement import score_weights
from weights.lab.evaluate.compare import Comparison, compare
from weights.lab.evaluate.predict import predict
from weights.lab.training.examples import Examples
from weights.lab.training.log import write_log
from weights.lab.world.simulate import World


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, world: World) -> Path:
    """Two checkpoints and a log. `worse` differs from `one` in half of its heads' weights."""
    out = tmp_path_factory.mktemp("compared")
    ranker = random_ranker(small_config(), 3)
    names = world.log.action_names
    for name in ("one", "worse"):
        save_checkpoint(
            out / name, ranker, name=name, action_names=names, score_weights={names[0]: 1.0, names[2]: -2.0},
            continuous=continuous_outputs(ranker.config.continuous_actions, dwell_index=0),
        )  # fmt: skip
        with torch.no_grad():
            ranker.heads.actions.weight.mul_(
                torch.rand(ranker.heads.actions.weight.shape, generator=torch.Generator().manual_seed(5)) < 0.5
            )
    write_log(out / "log.parquet", world.log)
    return out


def compared(directory: Path, world: World, first: str, second: str) -> Comparison:
    pair = load_checkpoint(directory / first), load_checkpoint(directory / second)
    return compare(pair, (world.log, world.log), 0, 60)


def test_a_checkpoint_is_like_itself(directory: Path, world: World) -> None:
    same = compared(directory, world, "one", "one")
    assert (same.pearson, same.spearman, same.kendall) == pytest.approx((1, 1, 1))
    assert set(same.overlap.values()) == {1.0}
    assert same.ndcg[0] == same.ndcg[1]
    assert all(each.calibration_errors[0] == each.calibration_errors[1] for each in same.actions.values())


def test_figures_are_what_they_say(directory: Path, world: World) -> None:
    found = compared(directory, world, "one", "worse")
    assert found.requests == 60
    assert 0.2 < found.kendall < 0.99
    assert 0.2 < found.correlation < 0.99
    assert found.overlap[1] < 1
    taus = [each.kendall for each in found.changed]
    assert taus == sorted(taus)
    assert len(taus) == 10
    assert taus[0] < found.kendall
    assert found.changed[0].best[0] in {post["post_id"] for post in found.changed[0].body["candidates"]}
    for each in found.actions.values():
        assert abs(each.means[0] - each.share) <= each.calibration_errors[0] + 1e-6, (
            "the bins' distances add up to no less"
        )
    assert len({each.calibration_errors for each in found.actions.values()}) > 3


def test_the_correlation_is_of_all_scores_of_the_requests(directory: Path, world: World) -> None:
    pair = load_checkpoint(directory / "one"), load_checkpoint(directory / "worse")
    examples = Examples(world.log, small_config())
    since = int(examples.times[-20])
    requests = np.flatnonzero(examples.times >= since)
    found = compare(pair, (world.log, world.log), since, len(requests))
    scores = [predict(one.ranker, examples, requests).probabilities @ score_weights(one.manifest) for one in pair]
    assert found.pearson == pytest.approx(np.corrcoef(*scores)[0, 1])


def test_the_command_writes_the_page_and_refuses_in_a_sentence(directory: Path, tmp_path: Path) -> None:
    def call(*more: object) -> tuple[int, str]:
        return run("compare", directory / "one", directory / "worse", "--log", directory / "log.parquet", *more)

    code, out = call("--out", tmp_path / "out", "--requests", 30)
    assert code == 0
    said, stored = json.loads(out.splitlines()[0]), json.loads((tmp_path / "out/figures.json").read_text())
    assert said["kendall"] == stored["kendall"]
    assert [each["name"] for each in stored["checkpoints"]] == ["one", "worse"]
    page = (tmp_path / "out/report.md").read_text()
    assert page.count("](http://127.0.0.1:8000/explore#") == 10 == len(stored["changed"])
    histories = [event for each in stored["changed"] for event in each["body"]["history"]]
    assert histories
    assert all(event["actions"] for event in histories), "a history is what the user engaged with"
    for since in ("2030-01-01", 1_893_456_000):
        code, out = call("--out", tmp_path / "none", "--since", since)
        assert (code, "no requests" in out) == (1, True)


def trained_until(directory: Path, name: str, until_ts: int | None, out: Path) -> Path:
    """A copy of a checkpoint whose manifest says until when it was trained."""
    copy = shutil.copytree(directory / name, out / name)
    training = {} if until_ts is None else {"until_ts": until_ts}
    replace_manifest(copy, structs.replace(load_manifest(copy), training=training, version="").versioned())
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("later", ["one", "worse"])
def test_requests_that_one_was_trained_on_do_not_count(
    later: str, directory: Path, world: World, tmp_path: Path
) -> None:
    times = world.log.impression_ts
    ends = {"one": int(times[len(times) // 2]), "worse": int(times[len(times) // 2])} | {later: WORLD.test_ts}
    pair = [trained_until(directory, name, until_ts, tmp_path) for name, until_ts in ends.items()]
    words = ("compare", *pair, "--log", directory / "log.parquet", "--out", tmp_path / "out", "--requests", 1_000_000)
    code, out = run(*words)
    assert (code, "Warning" in out) == (0, False), out
    unseen = len(np.unique(world.log.request_id[times >= WORLD.test_ts]))
    assert json.loads(out)["requests"] == unseen < world.log.requests
    code, out = run(*words, "--since", ends["one" if later == "worse" else "worse"])
    assert (code, out.count(f"{later} was trained until"), out.count("it may have learned")) == (0, 1, 1), out


def test_a_log_that_one_was_trained_on_is_refused(directory: Path, world: World, tmp_path: Path) -> None:
    ends = {"one": WORLD.test_ts, "worse": int(world.log.impression_ts[-1]) + 1}
    pair = [trained_until(directory, name, until_ts, tmp_path) for name, until_ts in ends.items()]
    code, out = run("compare", *pair, "--log", directory / "log.parquet", "--out", tmp_path / "out")
    assert (code, "give a newer log" in out) == (1, True), out
    assert not (tmp_path / "out").exists()


def test_one_that_does_not_say_when_it_was_trained_is_named(directory: Path, world: World, tmp_path: Path) -> None:
    pair = [
        trained_until(directory, name, until_ts, tmp_path)
        for name, until_ts in (("one", None), ("worse", WORLD.test_ts))
    ]
    words = ("compare", *pair, "--log", directory / "log.parquet", "--out", tmp_path / "out", "--requests", 10)
    code, out = run(*words)
    assert (code, out.count("one does not say until when it was trained")) == (0, 1), out
    code, out = run(*words, "--since", WORLD.test_ts)
    assert (code, "Warning" in out) == (0, False), out
