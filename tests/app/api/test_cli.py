"""`phoenix-ranker` as its users call it: what it serves, what it says at a terminal, and how it refuses."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from app.cli import OF_WEIGHTS, PROGRAM, cli
from loadtest.machine import ROOT
from loadtest.server import DEMO
from weights import command_line

pytestmark = pytest.mark.one_process("it is about the command line")
COMMAND = (sys.executable, "-c", "from app.cli import main; main()")


def test_the_help_lists_the_commands_without_importing_them() -> None:
    weights = typer.main.get_command(command_line.app)
    for name in OF_WEIGHTS:
        command = weights.get_command(None, name)  # type: ignore[attr-defined]
        assert command is not None, name
    code = "import sys; from app.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    given = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    helped = subprocess.run(
        [sys.executable, "-c", code, "--help"], env=given, capture_output=True, text=True, timeout=60
    )
    assert helped.returncode == 0
    assert [
        name
        for name in typer.main.get_command(cli).list_commands(None)  # type: ignore[attr-defined]
        if not re.search(rf"^│ {name} ", helped.stdout, re.M)
    ] == []
    assert helped.stdout.splitlines()[-1] == "False"


SLIPS: list[tuple[list[str], int, str]] = [
    (["serve", "--nonsense"], 2, "--nonsense is not a setting; the nearest one is --"),
    (["serve", "--port", "x"], 2, "RANKER_PORT"),
    (["serve", "s3://models/v42"], 2, "s3://models/v42 is an address, and only a folder can be served: phoenix-ranker fetch s3:"),
    (["serve", "hf://a/b"], 2, "phoenix-ranker fetch hf://a/b --out DIR"),
    (["serve", "~/v42"], 2, "~/v42 begins with ~, which only a shell replaces"),
    (["serve", "--retrieval.corpus", "gs://a/b"], 2, "phoenix-ranker fetch gs://a/b --out DIR"),
    (["serve", "--config", "nowhere.toml"], 2, "nowhere.toml cannot be read: No such file or directory"),
    (["serve", "nowhere"], 1, f'{{"reason":"{ROOT}/nowhere is not a checkpoint: it has no manifest.json; phoenix-ranker '
     "serve without a checkpoint serves the demo"),
    (["serve", 256 * "x"], 1, "xx cannot be read: File name too long"),
    (["import"], 2, "phoenix-ranker import: Missing argument 'source'; see phoenix-ranker import --help"),
    (["trian"], 2, "Did you mean 'train'"),
    (["train", "--lgo", "x"], 2, "--log"),
    (["score", "--checkpoint", "c", "--log", "l", "--out", str(DEMO / "manifest.json")], 2, "Not a directory"),
    (["info", "nowhere"], 1, "nowhere"),
]  # fmt: skip
COMPLETE = {"_PHOENIX_RANKER_COMPLETE": "complete_bash"}
CALLS: dict[str, tuple[list[str], dict[str, str]]] = {
    **{" ".join(words): (words, {}) for words, *_ in SLIPS},
    "info": (["info", "--json"], {}),
    "version": (["--version"], {}),
    "help of serve": (["serve", "--help"], {}),
    "help of fetch": (["fetch", "--help"], {}),
    "info of the demo": (["info", str(DEMO), "--json"], {}),
    "info of posts": (["info", str(ROOT / "weights/demo-posts"), "--json"], {}),
    "a command": ([], {**COMPLETE, "COMP_CWORD": "1", "COMP_WORDS": f"{PROGRAM} co"}),
    "a command of corpus": ([], {**COMPLETE, "COMP_CWORD": "2", "COMP_WORDS": f"{PROGRAM} corpus im"}),
}
EACH_IN_A_FORK = """
import json, os, sys
import app.settings, app.telemetry.logs  # once for all, as below
from app.cli import main
folder, calls = sys.argv[1], json.loads(sys.argv[2])
for number, (words, variables) in enumerate(calls):
    if words[:1] != ["serve"]:  # which comes first
        import torch, weights.command_line  # once for all, which takes longer than the rest
    if not (child := os.fork()):
        for descriptor, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{number}.{name}", os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv[1:] = words
        os.environ.update(variables)
        try:
            main()
        except SystemExit as ended:
            if "torch" not in sys.modules:
                raise
            sys.stdout.flush()
            os._exit(ended.code or 0)  # torch takes a second to end
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
Ended = dict[str, tuple[int, str, str]]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The exit code of each call, and what it wrote to standard output and error."""
    folder = tmp_path_factory.mktemp("calls")
    given = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = [sys.executable, "-c", EACH_IN_A_FORK, str(folder), json.dumps([*CALLS.values()])]
    done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return {
        name: (int(code), (folder / f"{number}.out").read_text(), (folder / f"{number}.err").read_text())
        for number, (name, code) in enumerate(zip(CALLS, done.stdout.split(), strict=True))
    }


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code", "said"), SLIPS, ids=[" ".join(words[:2])[:20] for words, *_ in SLIPS])
def test_a_slip_is_one_sentence(ended: Ended, words: list[str], code: int, said: str) -> None:
    exit_code, output, error = ended[" ".join(words)]
    assert (exit_code, output) == (code, "")
    assert said in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_info_tells_of_this_installation_and_of_a_checkpoint(ended: Ended) -> None:
    here = json.loads(ended["info"][1])
    assert here["demo"] == str(DEMO)
    assert here["ranker kernel"] == "compiled at the first start"  # a checkout has no compiled kernels
    assert json.loads(ended["info of the demo"][1])["name"] == "demo"
    assert json.loads(ended["info of posts"][1])["posts"] > 1000


def test_the_version_is_printed(ended: Ended) -> None:
    assert ended["version"] == (0, f"phoenix-ranker {importlib.metadata.version('phoenix-ranking-server')}\n", "")


def test_the_help_of_serve_looks_like_that_of_the_others(ended: Ended) -> None:
    shown, other = ended["help of serve"][1], ended["help of fetch"][1]
    assert ended["help of serve"][0] == 0
    assert "Usage: phoenix-ranker serve [OPTIONS] [CHECKPOINT]" in shown
    for frame in ("╭─ Arguments ─", "╭─ Options ─"):
        assert frame in shown
        assert frame in other
    assert re.search(r"^╭─ Queue ─", shown, re.M)
    assert re.search(r"--queue\.max-requests +<int> +Most requests", shown)


def test_a_shell_completes_commands_and_options(ended: Ended) -> None:
    assert ended["a command"][1].split() == ["compare", "corpus"]
    assert "import" in ended["a command of corpus"][1]


def read_until(terminal: int, wanted: str, seconds: float) -> str:
    """What was written to a terminal until this stood there."""
    text, deadline = "", time.monotonic() + seconds
    while wanted not in text and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.slow
def test_a_terminal_gets_a_few_lines_with_address_and_example(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, "serve", "--port", "0", "--drain.delay-seconds", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    with os.fdopen(theirs, "wb") as terminal:
        server = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=terminal, stderr=terminal, start_new_session=True
        )
    try:
        said = read_until(ours, "Ctrl-C", 60)
        url = re.search(r"Phoenix ranking server: demo on (http://127\.0\.0\.1:\d+)", said)
        assert url, said
        assert re.search(rf"^  page  {url[1]}/explore\r$", said, re.M)
        assert re.search(rf"^  try   curl -s {url[1]}/rank .* -d @'{DEMO}/example\.json'\r$", said, re.M)
        assert said.count("Phoenix ranking server") == 1
        assert "max_candidates" not in said  # the settings' line is for logs
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
        os.close(ours)


def test_another_package_of_the_same_name_is_named_and_not_run(tmp_path: Path) -> None:
    (tmp_path / "weights.py").write_text("print('it ran')\n")
    options: dict[str, Any] = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    options |= {"capture_output": True, "text": True, "timeout": 60}
    ended = subprocess.run([sys.executable, "-m", "app"], **options)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"the package weights is not ours but {tmp_path}/weights.py" in ended.stderr
    assert ended.stderr.count("\n") == 1
    told = subprocess.run([sys.executable, "-P", "-m", "app", "--help"], **options)
    assert (told.returncode, "it ran" in told.stdout) == (0, False)
