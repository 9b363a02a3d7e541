"""`calibrate` and `train --kept`: after sampling one negative in five, probabilities are frequencies again, and orders stay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from starlette.testclient import TestClient

from app.main import create_app
from app.settings import Settings
from loadtest.server import DEMO
from model.create import EngineOptions
from tests.support.asgi import ADDRESS
from tests.weights.call import call
from weights.checkpoint import load_checkpoint, load_manifest
from weights.lab.evaluate.predict import predict
from weights.lab.scoring.scorer import Scorer
from weights.lab.training.examples import Examples
from weights.lab.training.log import Log, write_log
from weights.lab.world.settings import WorldSettings
from weights.lab.world.simulate import simulate

KEPT = 0.2
ENOUGH = 2500  # impressions with the action in either half: then chance moves the ratio by about 2 %


@pytest.fixture(scope="module")
def log() -> Log:
    return simulate(WorldSettings(seed=5, users=200, new_users=5, days=10, test_days=2, archive_days=8)).log


@pytest.fixture(scope="module")
def middle(log: Log) -> int:
    return int(log.impression_ts[7 * len(log) // 10])


@pytest.fixture(scope="module")
def sampled(log: Log, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log with one in five of the impressions without any action."""
    rng = np.random.default_rng(1)
    path = tmp_path_factory.mktemp("sampled") / "log.parquet"
    write_log(path, log.take(log.actions.any(1) | (rng.random(len(log)) < KEPT)))
    return path


@pytest.fixture(scope="module")
def calibrated(log: Log, middle: int, sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, calibrated on the sampled log once its histories have grown."""
    checkpoint = tmp_path_factory.mktemp("calibrated") / "demo"
    shutil.copytree(DEMO, checkpoint)
    first = sampled.parent / "first.parquet"
    write_log(first, read(sampled).before(middle))
    grown = int(log.impression_ts[4 * len(log) // 10])
    done = call("calibrate", checkpoint, "--log", first, "--since", grown, "--kept", KEPT)
    assert done.exit_code == 0, done.output
    return checkpoint


def read(path: Path) -> Log:
    from weights.lab.training.log import read_log

    return read_log(path)


@pytest.mark.slow
def test_predicted_is_observed_after_one_negative_in_five(log: Log, middle: int, calibrated: Path) -> None:
    loaded = load_checkpoint(calibrated)
    examples = Examples(log, loaded.manifest.config)
    requests = np.flatnonzero(examples.times >= middle)
    rows = np.concatenate([examples.rows(index) for index in requests.tolist()])
    happened = log.actions[rows]
    found = predict(loaded.ranker, examples, requests, corrections=loaded.manifest.corrections).probabilities
    own = predict(loaded.ranker, examples, requests).probabilities
    ratios = {
        name: (float(found[:, i].sum() / happened[:, i].sum()), float(own[:, i].sum() / happened[:, i].sum()))
        for i, name in enumerate(log.action_names)
        if happened[:, i].sum() >= ENOUGH
    }
    assert len(ratios) >= 3
    assert all(abs(after - 1) <= 0.05 for after, _ in ratios.values()), ratios


def test_the_service_and_the_scorer_give_the_calibrated_bits(
    log: Log, middle: int, calibrated: Path, tmp_path: Path
) -> None:
    corrections = load_manifest(calibrated).corrections
    assert corrections is not None
    example: dict[str, Any] = json.loads((DEMO / "example.json").read_text())
    replies = {}
    for name, path in {"own": DEMO, "calibrated": calibrated}.items():
        settings = Settings(checkpoint=path, threads=1, dtype="float32")
        with TestClient(create_app(settings), base_url=ADDRESS) as client:
            while client.get("/readyz").status_code != 200:
                pass
            whole = client.post("/rank", json=example).json()["candidates"]
            replies[name] = np.array([row["probabilities"] for row in whole], np.float32)
            alone = client.post("/rank", json=example | {"candidates": example["candidates"][3:4]}).json()
            assert alone["candidates"][0]["probabilities"] == whole[3]["probabilities"]
            post = example["candidates"][0]["post_id"]
            explained = client.post("/explain", json=example | {"explain": [post]}).json()["candidates"][0]
            assert explained["probabilities"] == whole[0]["probabilities"]
            assert explained["score"] == whole[0]["score"]
    own, after = replies["own"].astype(np.float64), replies["calibrated"]
    expected = 1 / (1 + np.exp(-(corrections.offsets + corrections.slopes * np.log(own / (1 - own)))))
    np.testing.assert_allclose(after, expected, atol=1e-6)
    assert np.abs(after - own).max() > 0.01
    for action in range(own.shape[1]):
        assert (
            np.argsort(own[:, action], kind="stable").tolist() == np.argsort(after[:, action], kind="stable").tolist()
        )
    few = log.take(log.impression_ts < log.impression_ts[2000])
    write_log(tmp_path / "few.parquet", few)
    scorer = Scorer(load_checkpoint(calibrated), EngineOptions(device="cpu", dtype="float32", threads=1))
    table = scorer.score_table(read_table(tmp_path / "few.parquet"))
    scorer.close()
    plain = Scorer(load_checkpoint(DEMO), EngineOptions(device="cpu", dtype="float32", threads=1))
    before = plain.score_table(read_table(tmp_path / "few.parquet"))
    plain.close()
    columns = [np.asarray(each["p.favorite"], np.float64) for each in (before, table)]
    place = log.action_names.index("favorite")
    logit = np.log(columns[0] / (1 - columns[0]))
    wanted = 1 / (1 + np.exp(-(corrections.offsets[place] + corrections.slopes[place] * logit)))
    np.testing.assert_allclose(columns[1], wanted, atol=1e-6)


def read_table(path: Path) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(path)


@pytest.mark.slow
def test_before_is_what_was_served_before(sampled: Path, middle: int, calibrated: Path, tmp_path: Path) -> None:
    again = shutil.copytree(calibrated, tmp_path / "again")
    done = call("calibrate", again, "--log", sampled, "--since", middle, "--kept", KEPT)
    loaded, log = load_checkpoint(calibrated), read(sampled)
    examples = Examples(log, loaded.manifest.config)
    requests = np.flatnonzero(examples.times >= middle)
    happened = log.since(middle).actions
    weights = np.where(happened.any(1), 1, 1 / KEPT)
    served = predict(loaded.ranker, examples, requests, corrections=loaded.manifest.corrections).probabilities
    for i, name in enumerate(log.action_names):
        if happened[:, i].any():
            before = float(weights @ served[:, i] / happened[:, i].sum())
            row = next(line for line in done.stdout.splitlines() if f" {name} " in line)
            assert row.split("│")[5].strip() == f"{before:.3f}", done.stdout


@pytest.mark.slow
def test_train_calibrates_where_negatives_were_sampled(sampled: Path, tmp_path: Path) -> None:
    small = ("--set", "epochs=0.02", "--set", "width=16", "--set", "validation_requests=8", "--set", "history_length=8")
    made, whole, few = {}, read(sampled), tmp_path / "few.parquet"
    write_log(few, whole.take(np.isin(whole.user_id, np.unique(whole.user_id)[:60])))
    for name, options in {"plain": (), "kept": ("--kept", KEPT)}.items():
        done = call("train", "--log", few, "--out", tmp_path / name, *small, *options)
        assert done.exit_code == 0, done.output
        made[name] = load_manifest(tmp_path / name)
    assert made["plain"].calibration == {}
    rare = made["kept"].calibration["share_via_copy_link"]
    assert (-1.7 < rare.offset < -0.01, rare.slope) == (True, 1.0), "with few positives only the sampling is corrected"
    assert made["kept"].tensors == made["plain"].tensors
    params = [json.loads((tmp_path / name / "manifest.json").read_text())["files"] for name in made]
    assert params[0] == params[1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--kept", "0"), "--kept must be a share above 0 and at most 1, got 0."),
        (("--kept", "2"), "--kept must be a share above 0 and at most 1, got 2."),
        (("--since", "2030-01-01"), "lies outside the log"),
    ],
)
def test_what_cannot_be_calibrated_is_said_in_a_sentence(
    sampled: Path, options: tuple[str, str], sentence: str, tmp_path: Path
) -> None:
    shutil.copytree(DEMO, tmp_path / "demo")
    before = (tmp_path / "demo/manifest.json").read_bytes()
    done = call("calibrate", tmp_path / "demo", "--log", sampled, *options)
    assert (done.exit_code, sentence in done.output.replace("\n", " ")) == (1, True), done.output
    assert (tmp_path / "demo/manifest.json").read_bytes() == before
