"""`python -m weights` from the command line: texts, exit codes, quiet pipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import goldens
from tests.weights.call import call
from weights.checkpoint import load_checkpoint

SOURCE = goldens.GOLDEN / "phoenix-jan-gqa" / "ranker"


def test_import_verify_inspect(tmp_path: Path) -> None:
    out = tmp_path / "Phoenix January"
    imported = call("import", SOURCE, "--out", out, "--tables", "bfloat16")
    assert imported.exit_code == 0, imported.output
    assert "3 layers of width 64, 19 actions" in imported.stdout
    verified = call("verify", out)
    assert verified.exit_code == 0
    assert "is valid: Phoenix-January" in verified.stdout
    assert verified.stderr == "", "no progress bar without a terminal"
    shown = call("inspect", out)
    assert shown.exit_code == 0
    assert "favorite" in shown.stdout
    manifest = json.loads(call("inspect", out, "--json").stdout)
    assert manifest["digest"] in verified.stdout
    assert manifest["digest"] in shown.stdout


def test_weights_on_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    imported = call("import", SOURCE, "--out", out, "--score-weights", "favorite=1,reply=-2.5")
    assert imported.exit_code == 0, imported.output
    assert "Score: favorite=1,reply=-2.5 " in imported.stdout
    assert load_checkpoint(out).manifest.score_weights == {"favorite": 1.0, "reply": -2.5}
    assert call("relabel", out, "--score-weights", "quote=3").exit_code == 0
    assert load_checkpoint(out).manifest.score_weights == {"quote": 3.0}
    refused = call("relabel", out, "--score-weights", "qoute=3")
    assert (refused.exit_code, "did you mean quote?" in refused.stderr) == (1, True)


def test_terms_that_a_manifest_cannot_hold_are_named(tmp_path: Path) -> None:
    """A set that X published also weighs continuous outputs, where a checkpoint has them."""
    out = tmp_path / "out"
    assert call("random", "--out", out).exit_code == 0
    for name in ("x-2026-09", "x-2026-10"):
        said = call("relabel", out, "--score-weights", name)
        assert said.exit_code == 0, said.output
        assert f"The checkpoint's score leaves out 0.004 · dwell_time (s) of {name}, because" in said.stdout
    for of_actions in ("default", "favorite=1"):
        assert "leaves out" not in call("relabel", out, "--score-weights", of_actions).stdout
    released = goldens.GOLDEN / "phoenix-mini" / "ranker"
    imported = call("import", released, "--out", tmp_path / "may", "--score-weights", "x-2026-09")
    assert "The checkpoint's score leaves out 0.004 · dwell_time (s) of x-2026-09" in imported.stdout


def test_score_weights_that_are_all_zero_are_never_silent(tmp_path: Path) -> None:
    assert call("random", "--out", tmp_path / "out").exit_code == 0
    assert call("inspect", tmp_path / "out").stderr == ""
    assert call("relabel", tmp_path / "out", "--score-weights", "favorite=0").exit_code == 0
    for command in ("verify", "inspect"):
        said = call(command, tmp_path / "out")
        assert said.exit_code == 0
        assert "every score of random is 0, because none of its actions has a weight" in said.stderr
    assert json.loads(call("inspect", tmp_path / "out", "--json").stdout)["score_weights"] == {"favorite": 0.0}
    assert call("verify", "weights/demo-towers").stderr == "", "towers have no scores of actions"


def test_names_from_a_file_that_are_not_known_are_pointed_out(tmp_path: Path) -> None:
    names = [f"custom_{index}" for index in range(19)]
    (tmp_path / "names.json").write_text(json.dumps(names))
    options = ("--name", "n", "--version", "1.2", "--actions", tmp_path / "names.json")
    result = call("import", SOURCE, "--out", tmp_path / "out", *options)
    assert result.exit_code == 0
    manifest = load_checkpoint(tmp_path / "out").manifest
    assert (manifest.name, manifest.version, list(manifest.action_names)) == ("n", "1.2", names)
    assert "every score of n is 0" in result.stderr
    assert "--score-weights ACTION=NUMBER" in result.stderr


def test_refusals_are_one_sentence_and_code_1(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[1, 2]")
    out = tmp_path / "out"
    for arguments in (
        ("verify", tmp_path),
        ("inspect", tmp_path / "nothing"),
        ("import", tmp_path, "--out", out),
        ("import", SOURCE.parent, "--out", out),
        ("import", SOURCE, "--out", out, "--name", "a b"),
        ("import", SOURCE, "--out", out, "--actions", tmp_path / "bad.json"),
        ("import", SOURCE, "--out", out, "--actions", tmp_path / "missing.json"),
        ("import", SOURCE, "--out", out, "--actions", tmp_path / "list.json"),
        ("import", SOURCE, "--out", out, "--score-weights", tmp_path / "list.json"),
        ("import", SOURCE, "--out", tmp_path),
        ("random", "--out", tmp_path),
    ):
        result = call(*arguments)
        assert result.exit_code == 1, arguments
        assert result.stdout == ""
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert not out.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify",),
        ("import", "x", "--out", "y", "--tables", "int8"),
        ("nothing",),
        ("random", "--out", 300 * "x"),
    ],
)
def test_wrong_usage_is_code_2(arguments: tuple[str, ...]) -> None:
    assert call(*arguments).exit_code == 2


@pytest.mark.parametrize(
    "command", ["import", "verify", "inspect", "relabel", "random", "fetch", "score", "corpus", "train", "eval"]
)
def test_every_command_has_help(command: str) -> None:
    assert call(command, "--help").exit_code == 0


def test_relabel_changes_names_and_leaves_the_weights(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert call("random", "--out", out).exit_code == 0
    before = load_checkpoint(out)
    (tmp_path / "weights.json").write_text('{"report": -1}')
    assert call("relabel", out, "--name", "night", "--score-weights", tmp_path / "weights.json").exit_code == 0
    after = load_checkpoint(out)
    assert (after.manifest.name, after.manifest.score_weights) == ("night", {"report": -1.0})
    assert after.manifest.version != before.manifest.version
    assert after.manifest.digest != before.manifest.digest
    assert after.manifest.files == before.manifest.files
    (tmp_path / "weights.json").write_text('{"nothing": 1}')
    assert call("relabel", out, "--score-weights", tmp_path / "weights.json").exit_code == 1
    (tmp_path / "names.json").write_text(json.dumps([[]] * 19))
    assert call("relabel", out, "--actions", tmp_path / "names.json").exit_code == 1
    (tmp_path / "names.json").write_text('["one"]')
    refused = call("relabel", out, "--actions", tmp_path / "names.json")
    assert refused.stderr == f"Checkpoint {out} is not written: needs 19 different action names, got 1 in 1.\n"
    assert load_checkpoint(out).manifest == after.manifest
    assert not list(out.glob(".*"))
