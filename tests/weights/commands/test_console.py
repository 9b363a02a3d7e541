"""What the commands share at the terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from weights.command_line import app
from weights.commands.console import progress_bar, refusals
from weights.commands.console import run as in_terminal
from weights.errors import CheckpointError


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (CheckpointError("No."), "No."),
        (OSError(28, "No space left"), "No space left"),
        (ModuleNotFoundError(name="pyarrow"), "pyarrow is not installed"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_1(
    error: Exception, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as left, refusals(OSError):
        raise error
    output = capsys.readouterr()
    assert left.value.exit_code == 1
    assert output.out == ""
    assert sentence in output.err
    assert output.err.count("\n") == 1


def test_a_seed_below_0_is_refused_by_every_command_that_has_one() -> None:
    commands = {
        name: one
        for name, one in typer.main.get_command(app).commands.items()
        if any(p.name == "seed" for p in one.params)
    }  # type: ignore[attr-defined]
    assert {"random", "train"} <= set(commands)
    for name in commands:
        refused = CliRunner().invoke(app, [name, "--seed", "-1"])
        assert (refused.exit_code, "'--seed'" in refused.output) == (2, True), refused.output


@pytest.mark.parametrize(
    "take",
    [lambda: np.empty(2**50), lambda: torch.empty(2**50)],
    ids=["numpy", "torch"],
)
def test_memory_that_runs_out_is_one_sentence(
    take: Callable[[], object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = typer.Typer()
    one.command()(take)
    monkeypatch.setattr(sys, "argv", ["weights"])
    with pytest.raises(SystemExit) as left:
        in_terminal(one, "weights")
    assert left.value.code == 1
    assert re.fullmatch(r"weights: not enough memory.*\n", capsys.readouterr().err)


def test_ctrl_c_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def take() -> None:
        raise KeyboardInterrupt

    one = typer.Typer()
    one.command()(take)
    monkeypatch.setattr(sys, "argv", ["weights"])
    with pytest.raises(SystemExit) as left:
        in_terminal(one, "weights")
    assert (left.value.code, capsys.readouterr().err) == (130, "weights: interrupted; nothing is left half written\n")


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(OSError, match="mine"), refusals():
        raise OSError("mine")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="not Linux")
def test_an_output_that_takes_nothing_is_one_sentence(tmp_path: Path) -> None:
    """In a process that has none of the libraries of training."""
    for name in ("pyarrow", "sklearn", "scipy", "jinja2"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name}')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    program = [sys.executable, "-m", "weights", "inspect", "weights/demo", "--json"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(program, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=90)
    assert (ended.returncode, ended.stderr) == (1, "python -m weights: [Errno 28] No space left on device\n")


def test_an_output_that_is_closed_is_no_reason_to_fail(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["weights", "inspect", "weights/demo"])
    monkeypatch.setattr(sys, "stdout", None)  # as Python finds it after `>&-`
    with pytest.raises(SystemExit) as left:
        in_terminal(app, "weights")
    assert (left.value.code, capsys.readouterr().err) == (0, "")


def test_a_terminal_has_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar(in_bytes=True) as update:
        update("Verifying", 1024, 2048)
    output = capsys.readouterr()
    assert output.out == ""
    assert "Verifying" in output.err
    assert "KiB" in output.err


def test_a_file_has_a_line_every_half_minute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with progress_bar() as update:
        for second in range(100):
            now = 1000.0 + second
            update("Training", second, 4000)
        now += 31  # the next part has its own remaining time
        update("Evaluating", 0, 10)
        now += 60
        update("Evaluating", 5, 10)
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.splitlines() == [
        "Training: 30 of 4000 (1%), 1 h 06 min left",
        "Training: 60 of 4000 (2%), 1 h 05 min left",
        "Training: 90 of 4000 (2%), 1 h 05 min left",
        "Evaluating: 0 of 10 (0%)",
        "Evaluating: 5 of 10 (50%), 1 min 00 s left",
    ]


def test_short_work_writes_nothing_into_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(in_bytes=True) as update:
        update("Verifying", 1024, 2048)
    assert capsys.readouterr() == ("", "")


def test_the_help_of_a_command_waits_for_no_torch() -> None:
    """Importing it takes seconds."""
    told = "import sys; from weights.command_line import app; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True).stdout == "False\n"
