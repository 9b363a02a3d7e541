"""From a log to scores: the commands, and the round trip train → save → verify → load → engine → POST /rank."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from msgspec import structs
from starlette.testclient import TestClient

from app.main import create_app
from app.settings import Settings
from loadtest.server import wait_until
from model.config import TRUNK_OPTIONS
from model.presets import PRESETS, with_preset
from model.ranker import Ranker
from tests.support.asgi import ADDRESS
from tests.weights.call import call
from tests.weights.lab.training.small_run import exact_body, small_config
from weights.actions import DWELL_TIME, default_score_weights
from weights.checkpoint import load_checkpoint, load_manifest, save_checkpoint
from weights.format.manifest import ActionCalibration, ContinuousOutput
from weights.format.writer import replace_manifest
from weights.lab.commands.options import assigned_values, time_of
from weights.lab.evaluate.predict import predict
from weights.lab.training.examples import Examples
from weights.lab.training.settings import settings_table

WORLD_SETTINGS = ["users=40", "new_users=4", "authors=24", "days=10", "test_days=2", "slots=12"]
RUN_SETTINGS = ["epochs=0.2", "batch_contexts=16", "evaluate_every=5", "validation_requests=10", "counts_share=0.5"]
LOG = "the log"
TOLERANCE = 2e-5  # fp32, other order of sums


def settings(values: list[str]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world's log, the world's files and `config.json` beside it."""
    out = tmp_path_factory.mktemp("log")
    made = call("world", "--out", out, *settings(WORLD_SETTINGS))
    assert made.exit_code == 0, made.output
    (out / "config.json").write_text(json.dumps(small_config().to_dict()))
    return out / "log.parquet"


@pytest.fixture(scope="module")
def trained(log: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A checkpoint that was trained on the log for a moment, and what the command printed."""
    out = tmp_path_factory.mktemp("trained") / "checkpoint"
    weights = ("--score-weights", "favorite=1,report=-20")  # eval grows trees for each action that a score is for
    options = ("--config", log.with_name("config.json"), *weights, *settings(RUN_SETTINGS))
    made = call("train", "--log", log, "--out", out, *options)
    assert made.exit_code == 0, made.output
    return out, made.stdout


@pytest.mark.slow
def test_log_train_eval_and_example_from_the_command_line(log: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    checkpoint, printed = trained
    looked = call("log", log)
    assert looked.exit_code == 0, looked.output
    assert looked.stdout.splitlines()[0] == printed.splitlines()[0]
    (tmp_path / "names.json").write_text(json.dumps({"users": {}, "authors": {}, "posts": {}}))
    manifest = json.loads(call("inspect", checkpoint, "--json").stdout)
    assert manifest["training"]["choices"], "the manifest says how it was trained"
    assert manifest["architecture"]["width"] == small_config().width
    words = ("eval", "--checkpoint", checkpoint, "--log", log, "--out", tmp_path / "r", "--ablation-requests", 5)
    late = call(*words, "--since", "2030-01-01")
    assert (late.exit_code, "2026-06-01 … 2026-06-10" in late.stderr) == (1, True), late.output
    result = call(*words)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].startswith("The model LOSES to "), "it has hardly been trained"
    assert f"--since {manifest['training']['until_ts']} " in (tmp_path / "r/report.md").read_text()
    made = call("example", checkpoint, "--log", log, "--names", tmp_path / "names.json")
    assert made.exit_code == 0, made.output
    assert call("verify", checkpoint).exit_code == 0


@pytest.mark.slow
def test_a_run_leaves_its_curve_and_the_report_draws_it(log: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    checkpoint, printed = trained
    looks = [json.loads(line) for line in (checkpoint / "training.jsonl").read_text().splitlines()]
    record = json.loads(call("inspect", checkpoint, "--json").stdout)["training"]["run"]
    assert looks[-1]["step"] == record["steps"] == record["most_steps"]
    assert record["best_validation_loss"] == pytest.approx(min(look["validation_loss"] for look in looks), abs=1e-5)
    assert record["ended"] == "all steps were done"
    assert f"Seed 1: {record['steps']} of at most {record['steps']} steps; all steps were done." in printed
    words = ("eval", "--checkpoint", checkpoint, "--log", log, "--out", tmp_path / "r", "--ablation-requests", 5)
    assert call(*words).exit_code == 0
    assert "<svg" in (tmp_path / "r/training.svg").read_text()
    assert "](training.svg)" in (tmp_path / "r/report.md").read_text()


def test_train_says_how_it_compares_on_its_own_validation(trained: tuple[Path, str]) -> None:
    assert "a second time" not in trained[1], "the share of counts was given"
    line = next(line for line in trained[1].splitlines() if line.startswith("On its own validation, "))
    assert all(f"{name} 0." in line for name in ("model", "popularity", "newest first", "counts"))


@pytest.mark.slow
def test_a_ranker_behind_counts_is_trained_once_more(log: Path, tmp_path: Path) -> None:
    few = settings([value for value in RUN_SETTINGS if not value.startswith("counts_share")])
    options = ("--log", log, "--config", log.with_name("config.json"), "--state", tmp_path / "state", *few)
    made = call("train", "--out", tmp_path / "ranker", *options)
    assert made.exit_code == 0, made.output
    again = "Counts are ahead on its own validation: once more, with 90% of each label from counts."
    assert again in made.stdout, "it has hardly been trained"
    assert "It may train a second time, " in made.stdout.partition("Seed 1: ")[0]
    said = next(line for line in made.stdout.splitlines() if "has the better validation loss and is kept" in line)
    training = json.loads(call("inspect", tmp_path / "ranker", "--json").stdout)["training"]
    losses = {name: training[f"{name}_run"]["best_validation_loss"] for name in ("first", "second")}
    kept = min(losses, key=lambda name: losses[name])
    assert (said.split()[1], training["run"]) == (kept, training[f"{kept}_run"])
    assert (training["settings"]["counts_share"] == 0.9) == (kept == "second")
    resumed = call("train", "--out", tmp_path / "resumed", *options, "--resume")
    assert resumed.exit_code == 0, resumed.output
    digests = {call("inspect", tmp_path / name, "--json").stdout for name in ("ranker", "resumed")}
    assert len(digests) == 1, "both runs were finished"
    (tmp_path / "state/second-run/state.pt").unlink()  # as if it was killed before the first evaluation of the second
    resumed = call("train", "--out", tmp_path / "after", *options, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert call("inspect", tmp_path / "after", "--json").stdout in digests


@pytest.mark.slow
def test_of_several_seeds_the_best_on_validation_is_kept(log: Path, tmp_path: Path) -> None:
    options = (
        "--config",
        log.with_name("config.json"),
        "--out",
        tmp_path / "best",
        "--seeds",
        2,
        "--state",
        tmp_path / "state",
        *settings(RUN_SETTINGS),
    )
    made = call("train", "--log", log, *options)
    assert made.exit_code == 0, made.output
    losses = dict(re.findall(r"Seed (\d): .*best validation loss is ([\d.]+)", made.stdout))
    kept = re.search(r"Seed (\d) has the best validation loss and is kept. An average is not", made.stdout)
    assert kept is not None
    assert losses[kept[1]] == min(losses.values())
    best = call("inspect", tmp_path / "best", "--json").stdout
    assert json.loads(best)["training"]["settings"]["seed"] == int(kept[1])
    shutil.rmtree(tmp_path / "state/seed-2")  # as if it was killed before the first evaluation of the second
    resumed = call("train", "--log", log, *options, "--resume", "--replace")
    assert resumed.exit_code == 0, resumed.output
    assert call("inspect", tmp_path / "best", "--json").stdout == best
    shutil.rmtree(tmp_path / "state")
    none = call("train", "--log", log, *options, "--resume", "--replace")
    assert (none.exit_code, "state.pt" in none.stderr) == (1, True), none.output


@pytest.mark.slow
def test_a_search_keeps_the_best_trial_on_validation(log: Path, tmp_path: Path) -> None:
    options = ("--config", log.with_name("config.json"), "--out", tmp_path / "best", "--search", 3)
    made = call("train", "--log", log, *options, *settings(RUN_SETTINGS))
    assert made.exit_code == 0, made.output
    losses = re.findall(r"best validation loss is ([\d.]+)", made.stdout)
    best = re.search(r"Trial (\d) of 3 has the best validation loss and is kept", made.stdout)
    assert best is not None
    assert losses[int(best[1]) - 1] == min(losses)
    training = json.loads(call("inspect", tmp_path / "best", "--json").stdout)["training"]
    first, *others = ({name for name in trial if name in training["settings"]} for trial in training["search"])
    assert first == set(), "the chosen settings are tried first"
    assert all(others)
    assert not set().union(*others) & {value.partition("=")[0] for value in RUN_SETTINGS}, "what is given stays"
    changed = {
        name: value for name, value in training["search"][int(best[1]) - 1].items() if name in training["settings"]
    }
    assert training["settings"] | changed == training["settings"]
    both = call("train", "--log", log, *options, "--replace", "--seeds", 2)
    assert (both.exit_code, "give one of them" in both.stderr) == (1, True), both.output


def test_tensorboard_shows_every_evaluation(log: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = (
        "--config",
        log.with_name("config.json"),
        "--out",
        tmp_path / "one",
        "--tensorboard",
        tmp_path / "events",
    )
    made = call("train", "--log", log, *options, *settings(RUN_SETTINGS))
    assert made.exit_code == 0, made.output
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    looks = [json.loads(line) for line in (tmp_path / "one/training.jsonl").read_text().splitlines()]
    for name in ("training_loss", "validation_loss", "learning_rate"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx({look["step"]: look[name] for look in looks}, abs=1e-6)


def test_a_checkpoint_goes_on_with_the_log_of_the_next_day(
    log: Path, trained: tuple[Path, str], tmp_path: Path
) -> None:
    few = settings(["epochs=0.05", "learning_rate=0.001"])
    words = ("train", "--log", log, "--start", trained[0], "--until", "all", "--out", tmp_path / "tomorrow", *few)
    made = call(*words, "--score-weights", "favorite=1")
    assert made.exit_code == 0, made.output
    tomorrow = load_checkpoint(tmp_path / "tomorrow").manifest
    assert tomorrow.config == load_checkpoint(trained[0]).manifest.config
    assert tomorrow.score_weights["favorite"] == 1


def test_what_start_was_trained_on_is_never_held_out(log: Path, tmp_path: Path) -> None:
    """Yesterday on the whole log, today with a day more: only that day says how good the ranker is."""
    table = pq.read_table(log)
    times = table["impression_ts"].to_numpy()
    today = int(times.max()) - 86_400
    pq.write_table(table.filter(pa.array(times < today)), tmp_path / "yesterday.parquet")
    seen = int(times[times < today].max()) + 1
    few = settings(["epochs=0.02", "validation_requests=4", "counts_share=0"])
    first = (
        "--config",
        log.with_name("config.json"),
        "--until",
        "all",
        "--out",
        tmp_path / "start",
        "--score-weights",
        "favorite=1",
    )
    made = call("train", "--log", tmp_path / "yesterday.parquet", *first, *few)
    assert made.exit_code == 0, made.output
    assert load_manifest(tmp_path / "start").training["until_ts"] == seen
    on = ("train", "--log", log, "--start", tmp_path / "start", *few)
    result = call(*on, "--out", tmp_path / "on")
    assert result.exit_code == 0, result.output
    assert f"was trained until 2026-06-09 (Unix seconds {seen})" in result.stdout
    assert "its own validation is too good" in result.stdout
    assert load_manifest(tmp_path / "on").training["until_ts"] == seen


def test_a_hold_out_that_start_was_trained_on_is_refused(log: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    until = load_manifest(trained[0]).training["until_ts"]
    words = ("train", "--log", log, "--start", trained[0], "--out", tmp_path / "on")
    earlier = call(*words, "--until", until - 1)
    assert (earlier.exit_code, "--until all" in earlier.stderr) == (1, True), earlier.output
    assert f"was trained until 2026-06-09 (Unix seconds {until})" in earlier.stderr.replace("\n", " ")
    table = pq.read_table(log)
    pq.write_table(table.filter(pa.array(table["impression_ts"].to_numpy() < until)), tmp_path / "old.parquet")
    old = call("train", "--log", tmp_path / "old.parquet", *words[3:])
    assert (old.exit_code, "nothing is left to hold out" in old.stderr.replace("\n", " ")) == (1, True), old.output
    judged = call("eval", "--checkpoint", trained[0], "--log", tmp_path / "old.parquet", "--out", tmp_path / "r")
    assert (judged.exit_code, "give a newer log" in judged.stderr.replace("\n", " ")) == (1, True), judged.output


def test_start_that_does_not_say_its_end_leaves_it_open(log: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(trained[0], start)
    replace_manifest(start, structs.replace(load_manifest(start), training={}, version="").versioned())
    few = settings(["epochs=0.02", "validation_requests=4"])
    made = call("train", "--log", log, "--start", start, "--out", tmp_path / "on", *few)
    assert made.exit_code == 0, made.output
    assert "does not say until when it was trained" in made.stdout
    assert re.search(r"phoenix-ranker eval .* --since \d+", made.stdout)
    judged = call("eval", "--checkpoint", tmp_path / "on", "--log", log, "--out", tmp_path / "r")
    assert (judged.exit_code, "give --since" in judged.stderr) == (1, True), judged.output


def test_a_checkpoint_that_goes_on_keeps_its_score(log: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    start = tmp_path / "start"
    shutil.copytree(trained[0], start)
    assert call("relabel", start, "--score-weights", "reply=2,report=-3").exit_code == 0
    manifest = load_manifest(start)
    calibration = {"reply": ActionCalibration(0.1, 1.0)}
    replace_manifest(start, structs.replace(manifest, calibration=calibration, version="").versioned())
    few = settings(["epochs=0.05", "learning_rate=0.001"])
    made = call("train", "--log", log, "--start", start, "--until", "all", "--out", tmp_path / "on", *few)
    assert made.exit_code == 0, made.output
    assert load_manifest(tmp_path / "on").score_weights == manifest.score_weights
    assert re.search(r"→ score: (2 reply, -3 report|-3 report, 2 reply) \(those of --start\)\n", made.stdout)
    assert "The calibration of" in made.stdout
    assert "is left out" in made.stdout


@pytest.mark.parametrize(
    "text", ["1700000000", "2023-11-14T22:13:20", "2023-11-14T22:13:20Z", "2023-11-15T00:13:20+02:00"]
)
def test_a_time_is_that_of_its_zone_or_utc(text: str) -> None:
    assert time_of(text) == 1_700_000_000


def test_settings_are_listed_and_all_of_them_can_be_given(log: Path) -> None:
    listed = call("train", "--settings")
    assert listed.exit_code == 0
    for name, default, values, meaning in settings_table():
        assert name in listed.stdout
        assert values.split(" and ")[0] in listed.stdout
        assert meaning.split(",")[0].split(":")[0][:20] in listed.stdout
        assert assigned_values([f"{name}={default}"]) == {name: default}
    looked = call("log", log, *settings(["epochs=1.5", "history_length=31", "has_post_age=false", "post_rows=4096"]))
    assert looked.stdout.splitlines()[-1] == "given: epochs=1.5, history_length=31, has_post_age=False, post_rows=4096"


@pytest.mark.slow
def test_train_names_the_terms_that_its_score_leaves_out(log: Path, tmp_path: Path) -> None:
    few = settings(["epochs=0.02", "validation_requests=4", "width=16"])
    made = call("train", "--log", log, "--out", tmp_path / "out", *few, "--score-weights", "x-2026-09")
    assert made.exit_code == 0, made.output
    assert "The checkpoint's score leaves out 0.004 · dwell_time (s) of x-2026-09, because" in made.stdout


def test_some_fields_of_the_architecture_are_enough_and_set_wins(log: Path, tmp_path: Path) -> None:
    fields = {"width": 32, "post_hashes": {"vocab_size": 99}, "user_hashes": {"vocab_size": 99}, "history_length": 40}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": fields}))
    options = ("--config", tmp_path / "config.json", "--out", tmp_path / "out")
    few = settings(["epochs=0.02", "validation_requests=4", "history_length=31", "user_rows=77"])
    trained = call("train", "--log", log, *options, *few)
    assert trained.exit_code == 0, trained.output
    manifest = load_checkpoint(tmp_path / "out").manifest
    assert manifest.score_weights == default_score_weights(manifest.action_names)
    config = manifest.config
    assert (config.width, config.post_hashes.vocab_size, config.layers, config.post_hashes.count) == (32, 99, 2, 2)
    assert (config.history_length, config.user_hashes.vocab_size) == (31, 77)
    (tmp_path / "config.json").write_text('{"architecture": 3}')
    refused = call("train", "--log", log, *options, "--replace")
    assert (refused.exit_code, refused.stderr) == (1, "The architecture in --config must be a JSON object.\n")


def test_score_weights_are_proposed_given_or_asked_for(log: Path, tmp_path: Path) -> None:
    table = pq.read_table(log)
    kept = [name for name in table.column_names if not name.startswith("action.")]
    flags = {"action.zapped": table["action.click"], "action.zoomed": table["action.favorite"]}
    for name, flag in flags.items():
        table = table.append_column(name, flag)
    pq.write_table(table.select([*kept, *flags]), tmp_path / "log.parquet")
    few = settings(["epochs=0.02", "validation_requests=4", "width=16"])
    options = ("--log", tmp_path / "log.parquet", "--out", tmp_path / "out", *few)
    asked = call("train", *options)
    assert asked.exit_code == 1
    assert asked.stderr.strip() == (
        "The score would be 0 for every post: choose its weights, for example --score-weights zapped=1."
    )
    assert "score: undecided" in call("log", tmp_path / "log.parquet").stdout
    assert call("train", *options, "--score-weights", "zapped=0").exit_code == 1
    given = call("train", *options, "--score-weights", "zoomed=2,zapped=-0.5")
    assert given.exit_code == 0, given.output
    assert "→ score: 2 zoomed, -0.5 zapped (--score-weights)\n" in given.stdout
    assert "undecided" not in given.stdout
    assert load_checkpoint(tmp_path / "out").manifest.score_weights == {"zoomed": 2.0, "zapped": -0.5}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_verifies_serves_and_isolates(
    name: str, log: Path, examples: Examples, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ("--config", log.with_name("config.json"), "--preset", name, "--out", out)
    trained = call("train", "--log", log, *options, *settings([*RUN_SETTINGS[1:], "epochs=0.15", "warmup_steps=1"]))
    assert trained.exit_code == 0, trained.output
    assert call("verify", out).exit_code == 0
    manifest = json.loads(call("inspect", out, "--json").stdout)
    config = with_preset(small_config(), name)
    assert manifest["architecture"] == json.loads(json.dumps(config.to_dict()))
    assert (name == "grok") == set(TRUNK_OPTIONS).isdisjoint(manifest["architecture"])
    indices = np.arange(len(examples) - 3, len(examples))
    expected = predict(load_checkpoint(out).ranker, examples, indices).probabilities
    bodies = [exact_body(examples, int(index)) for index in indices]
    with TestClient(create_app(Settings(checkpoint=out, dtype="float32", threads=1)), base_url=ADDRESS) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200, 120)
        answers = [client.post("/rank", json=body).json() for body in bodies]
        alone = client.post("/rank", json=bodies[-1] | {"candidates": bodies[-1]["candidates"][-1:]}).json()
        engine = client.get("/info").json()["engine"]
    found = np.array([row["probabilities"] for answer in answers for row in answer["candidates"]])
    assert np.abs(found - expected).max() < TOLERANCE
    assert found.std(0).max() > 1e-3, "scores that are all alike would show nothing"
    assert alone["candidates"][0]["probabilities"] == answers[-1]["candidates"][-1]["probabilities"]
    if name == "vanilla":
        assert "does not know this trunk's norm, " in engine["fallback"]


@pytest.mark.slow
def test_training_goes_on_from_a_checkpoint(log: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    start = trained[0]
    arguments = ("train", "--log", log, "--out", tmp_path / "out", "--start", start)
    result = call(*arguments, *settings([*RUN_SETTINGS[1:], "epochs=0.01", "learning_rate=1e-6"]))
    assert result.exit_code == 0, result.output
    before, after = (load_checkpoint(path).ranker.state_dict() for path in (start, tmp_path / "out"))
    moved = [float((after[name] - before[name]).abs().max()) for name in before]
    assert 0 < max(moved) < 1e-3
    refused = call(*arguments, "--replace", "--preset", "gemma")
    assert refused.exit_code == 1
    assert "--start comes with its own architecture" in refused.stderr


def test_the_dwell_is_learned_by_the_output_of_that_name(log: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    one = load_checkpoint(trained[0])
    head = one.ranker.heads.continuous.weight
    two = Ranker(replace(one.manifest.config, continuous_actions=2))
    two.load_state_dict(one.ranker.state_dict() | {"heads.continuous": torch.cat((-head, head), 1)})
    outputs = [ContinuousOutput("continuous_0", 1.0, ""), DWELL_TIME]
    save_checkpoint(tmp_path / "two", two, name="t", action_names=one.manifest.action_names, continuous=outputs)
    arguments = ("train", "--log", log, "--out", tmp_path / "out", "--start", tmp_path / "two")
    result = call(*arguments, *settings([*RUN_SETTINGS[1:], "epochs=0.05", "weight_decay=0"]))
    assert result.exit_code == 0, result.output
    after = load_checkpoint(tmp_path / "out")
    assert after.manifest.continuous == tuple(outputs)
    moved = (after.ranker.heads.continuous.weight - two.heads.continuous.weight).abs().amax(0)
    assert moved[0] == 0 < moved[1]


@pytest.mark.parametrize("odd", ["name", "place"])
def test_an_impossible_checkpoint_is_refused_before_training(odd: str, log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "log.txt").write_text("not a checkpoint's")
    place = ("--out", tmp_path if odd == "place" else out, "--replace", "--state", tmp_path / "state")
    options = ("--config", log.with_name("config.json"), "--name", "a b" if odd == "name" else "a")
    result = call("train", "--log", log, *options, *place, *settings(RUN_SETTINGS))
    assert result.exit_code == 1
    assert "is not written: " in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not out.exists()
    assert not (tmp_path / "state").exists(), "nothing was trained"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("batch_contexts=0", "batch_contexts must be at least 1 and at most 1,000,000, got 0"),
        ("max_candidates=0", "max_candidates must be at least 1 and at most 1,000,000, got 0"),
        ("evaluate_every=0", "evaluate_every must be at least 1 and at most 1,000,000, got 0"),
        ("warmup_steps=0", "warmup_steps must be at least 1 and at most 1,000,000, got 0"),
        ("patience=0", "patience must be at least 1 and at most 1,000,000, got 0"),
        ("epochs=nan", "epochs must be above 0 and at most 10,000, got nan"),
        ("epochs=0", "epochs must be above 0 and at most 10,000, got 0.0"),
        ("epochs=-1", "epochs must be above 0 and at most 10,000, got -1.0"),
        ("hidden_post_share=2", "hidden_post_share must be at least 0 and at most 1, got 2.0"),
        ("learning_rate=1e9", "learning_rate must be above 0 and at most 1, got 1000000000.0"),
        ("learning_rate=-1", "learning_rate must be above 0 and at most 1, got -1.0"),
        ("learning_rate=nan", "learning_rate must be above 0 and at most 1, got nan"),
        ("averaging=1", "averaging must be at least 0 and below 1, got 1.0"),
        ("dtype=float16", "dtype must be float32 or bfloat16, got 'float16'"),
        ("post_rows=0", "post_rows must be at least 2 and at most 2,147,483,647, got 0"),
        ("product_surfaces=0", "product_surfaces must be positive and at most 65536, got 0"),
    ],
)
def test_a_bad_setting_is_refused_by_name_before_the_log_is_read(
    value: str, reason: str, log: Path, tmp_path: Path
) -> None:
    for file in (log, tmp_path / "absent.parquet"):
        options = ("--config", log.with_name("config.json"), "--out", tmp_path / "out")
        for result in (
            call("train", "--log", file, *options, *settings([*RUN_SETTINGS, value])),
            call("log", file, *settings([value])),
        ):
            assert (result.exit_code, result.stderr) == (1, f"{reason}\n"), result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_every_number_has_bounds(log: Path) -> None:
    numbers = [(name, default) for name, default, _, _ in settings_table() if isinstance(default, int | float)]
    assert len(numbers) > 20
    for name, default in numbers:
        for far in ("-1", 10**30, *(("nan", "inf") if isinstance(default, float) else ())):
            result = call("log", log, "--set", f"{name}={far}")
            assert result.exit_code == 1, f"{name}={far}"
            assert re.fullmatch(rf"{name} must be (at least|above) .*, got .*\n", result.stderr), result.output


@pytest.mark.slow
def test_the_ends_of_the_bounds_train(log: Path, tmp_path: Path) -> None:
    ends = [
        "shared_events=0",
        "warmup_steps=1",
        "batch_contexts=1000000",
        "max_candidates=1",
        "patience=1",
        "threads=1",
    ]
    ends += [f"hidden_{kind}_share=1" for kind in ("user", "post", "author", "event")]
    ends += [
        "validation_requests=1",
        "evaluate_every=1000000",
        "dwell_weight=0",
        "epochs=2",
        "seed=18446744073709551615",
    ]
    options = ("--config", log.with_name("config.json"), "--out", tmp_path / "out")
    result = call("train", "--log", log, *options, *settings(ends))
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_a_training_without_a_finite_loss_leaves_no_checkpoint(log: Path, tmp_path: Path) -> None:
    wild = ["learning_rate=1", "weight_decay=100", "table_decay=100", "warmup_steps=1", "epochs=3", "batch_contexts=8"]
    options = ("--config", log.with_name("config.json"), "--out", tmp_path / "out")
    result = call("train", "--log", log, *options, *settings([*wild, "evaluate_every=1000", "validation_requests=10"]))
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("The validation loss was never a finite number")
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["add-to-cart", "a b", "", "1st", "é", "a" * 65])
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_an_impossible_action_name_is_refused_in_the_log(name: str, suffix: str, log: Path, tmp_path: Path) -> None:
    changed = {"action.report": f"action.{name}"}
    table, path = pq.read_table(log).slice(0, 200), tmp_path / f"log.{suffix}"
    table = table.rename_columns([changed.get(column, column) for column in table.column_names])
    write(path, table)
    told = (
        f"{path}: the action name {name[:64]!r} must be letters, digits and underscores, a letter first, at most 64\n"
    )
    for command in commands_that_read(path, tmp_path):
        result = call(*command)
        assert (result.exit_code, result.stderr) == (1, told), result.output


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_surface_out_of_range_is_refused_with_file_and_row(
    suffix: str, log: Path, trained: tuple[Path, str], tmp_path: Path
) -> None:
    table, path = pq.read_table(log), tmp_path / f"log.{suffix}"
    surfaces = table["product_surface"].to_pylist()
    surfaces[41] = 16
    place = table.column_names.index("product_surface")
    write(path, table.set_column(place, "product_surface", pa.array(surfaces)))
    row = "line" if suffix == "jsonl" else "row"
    told = f"{path}, {row} 42: product_surface must be an integer between 0 and 15\n"
    out = ("--log", path, "--out", tmp_path / "scores")
    known = (
        ("eval", "--checkpoint", trained[0], *out),
        ("score", "--checkpoint", trained[0], *out),
        ("train", "--log", path, "--out", tmp_path / "on", "--start", trained[0]),
        ("compare", trained[0], trained[0], *out),
        ("example", trained[0], "--log", path),
    )
    for command in (*commands_that_read(path, tmp_path), *known):
        result = call(*command)
        assert (result.exit_code, result.stderr) == (1, told), command
    assert call("log", path, "--set", "product_surfaces=17").exit_code == 0
    (tmp_path / "config.json").write_text('{"product_surfaces": 17}')
    few = settings(["epochs=0.02", "validation_requests=4", "width=16"])
    wider = ("train", "--log", path, "--out", tmp_path / "out", "--config", tmp_path / "config.json", *few)
    assert call(*wider).exit_code == 0
    scored = call("score", "--checkpoint", tmp_path / "out", "--log", path, "--out", tmp_path / "scored")
    assert scored.exit_code == 0, scored.output


def write(path: Path, table: pa.Table) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        path.write_text("\n".join(map(json.dumps, table.to_pylist())))


def commands_that_read(log: Path, directory: Path) -> tuple[tuple[object, ...], ...]:
    few = settings([*RUN_SETTINGS, "width=16"])
    return ("log", log), ("train", "--log", log, "--out", directory / "no", *few)


def test_posts_newer_than_all_impressions_are_pointed_out(log: Path, tmp_path: Path) -> None:
    table = pq.read_table(log)
    later = pa.array([time + 60 for time in table["impression_ts"].to_pylist()])
    place = table.column_names.index("created_at")
    pq.write_table(table.set_column(place, "created_at", later), tmp_path / "log.parquet")
    looked = call("log", tmp_path / "log.parquet")
    assert looked.exit_code == 0, looked.output
    line = next(line for line in looked.stdout.splitlines() if "no post ages" in line)
    assert line.split(" → ")[0].strip() == "every created_at is later than its impression_ts"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["train", "--log", "absent.parquet", "--out", "x"], "absent.parquet is not there"),
        (["train", "--log", "a", "--out", "x", "--resume"], "needs --state"),
        (
            ["train", "--log", "a", "--out", "x", "--start", "b", "--preset", "gemma"],
            "--start comes with its own architecture",
        ),
        (["train", "--log", "a", "--out", "x", "--start", "b", "--set", "layers=1"], "leave layers out of --set"),
        (["train", "--log", "absent.parquet", "--out", "x", "--until", "tomorrow"], "'tomorrow' is neither a day"),
        (["train", "--log", "absent.parquet", "--out", "x", "--config", "none.json"], "none.json cannot be read"),
        (["train", "--log", "absent.parquet", "--out", "x", "--set", "epoch=3"], "did you mean epochs?"),
        (["log", "absent.parquet"], "absent.parquet is not there"),
        (["world", "--out", "x", "--set", "sheep=3"], "no setting 'sheep'"),
        (["train", "--log", LOG, "--out", "x", "--set", "device=tpu"], "device must be cpu or cuda"),
        (["train", "--log", LOG, "--out", "x", "--set", "history_length=0"], "history_length must be positive"),
        (["train", "--log", LOG, "--out", "x", "--set", "has_post_age=perhaps"], "must be of type bool"),
        (["world", "--out", "x", "--set", "users=many"], "must be of type int"),
        (["eval", "--checkpoint", "x", "--out", "y"], "either --log or --world"),
    ],
)
def test_what_cannot_work_is_one_sentence_and_exit_code_1(
    arguments: list[str], reason: str, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*(log if word == LOG else word for word in arguments))
    assert result.exit_code == 1
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1
