"""Which build of torch `make` installs: by the card, by what the operator says, and never by waiting long for an index."""

from __future__ import annotations

import os
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci/choose-torch"
CHOICE = runpy.run_path(str(SCRIPT))
choose, has_card = CHOICE["choose"], CHOICE["has_card"]
LIMIT_SECONDS = 0.5
GPU = "#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\n"
ILL = "#!/bin/sh\necho 'GPU 0: unable to determine its handle'; exit 9\n"
NO_CARD = "#!/bin/sh\necho 'No devices found.'\n"


def command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@contextmanager
def index_with_status(status: int) -> Iterator[str]:
    """An index on loopback that answers every path with one status."""

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/whl/cpu/torch/" else 500)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/whl/cpu"
        server.shutdown()


@contextmanager
def socket_that(answer: Callable[[socket.socket], None] | None) -> Iterator[str]:
    """An index whose connections are handed to `answer`; with None they wait to be accepted for ever."""

    def serve() -> None:
        with listener.accept()[0] as connection:
            answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/whl/cpu"


def trickle(connection: socket.socket) -> None:
    """A header byte at a time: each of them in time, all of them never."""
    try:
        for byte in b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100:
            connection.send(bytes([byte]))
            time.sleep(LIMIT_SECONDS / 5)
    except OSError:
        pass


def choose_on_linux(cpu_index: str, card: bool = False) -> tuple[str, str]:
    started = time.monotonic()
    build, index, line = choose("", card, "Linux", cpu_index, LIMIT_SECONDS)
    assert time.monotonic() - started < 4 * LIMIT_SECONDS
    assert line.startswith("Installing ")
    assert build == ("cuda" if card else "cpu")
    assert line.endswith("make TORCH_INDEX=… chooses another.")
    return index, line


def test_without_a_card_the_cpu_build_is_taken_where_its_index_answers() -> None:
    with index_with_status(200) as index:
        chosen, line = choose_on_linux(index)
        assert chosen == index
        assert f"torch for CPU from {index}: there is no NVIDIA card" in line
        assert choose_on_linux(index, card=True)[0] == ""
    for status in (403, 404, 503):
        with index_with_status(status) as index:
            assert choose_on_linux(index)[0] == ""


@pytest.mark.parametrize("answer", [None, trickle, socket.socket.close], ids=["silent", "trickling", "closing"])
def test_an_index_that_does_not_answer_is_given_up_in_time(answer: Callable[[socket.socket], None] | None) -> None:
    with socket_that(answer) as index:
        chosen, line = choose_on_linux(index)
    assert chosen == ""
    assert f"{index} does not answer" in line
    assert choose_on_linux(index)[0] == "", "the port is closed"


def test_what_the_operator_says_is_taken_unasked() -> None:
    with socket_that(None) as index:
        for card in (False, True):
            assert choose(index, card, "Linux", "http://127.0.0.1:9")[:2] == ("cpu", index)
    assert choose("https://pypi.org/simple", False, "Linux")[:2] == ("cuda", "https://pypi.org/simple")


def test_elsewhere_than_on_linux_pypi_has_no_cuda() -> None:
    build, index, line = choose("", False, "Darwin", "http://127.0.0.1:9")
    assert (build, index, "Darwin" in line) == ("cuda", "", True)


@pytest.mark.parametrize(
    ("nvidia_smi", "card"),
    [(GPU, True), (ILL, False), (NO_CARD, False), (None, False)],
    ids=["card", "ill", "no card", "none"],
)
def test_a_card_is_what_nvidia_smi_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvidia_smi: str | None, card: bool
) -> None:
    if nvidia_smi is not None:
        command(tmp_path / "nvidia-smi", nvidia_smi)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert has_card(root=tmp_path / "empty") is card


@pytest.mark.parametrize(
    ("path", "card"), [("dev/nvidia3", True), ("proc/driver/nvidia/gpus/0000:01:00.0", True), ("dev/nvidiactl", False)]
)
def test_a_card_is_what_the_driver_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, card: bool) -> None:
    (tmp_path / path).mkdir(parents=True)
    monkeypatch.setenv("PATH", "")
    assert has_card(root=tmp_path) is card


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The Makefile with an environment whose pip only writes down what it was asked."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed here")
    for path in ("Makefile", ".ci", "pyproject.toml", "docker", "app/client/pyproject.toml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copy
        copy(ROOT / path, tmp_path / path)
    python = f'#!/bin/sh\n[ "$1" = -m ] || exec "{sys.executable}" "$@"\necho "$@" >>asked\n{{ ! grep -q "$REFUSED" asked; }}\n'
    command(tmp_path / ".venv/bin/python", python)
    command(tmp_path / "bin/nvidia-smi", GPU)
    return tmp_path


def install(checkout: Path, *arguments: str, refused: str = "nothing") -> tuple[int, list[str]]:
    """`make serve` on a machine with a card, but for serving: its exit code, and what pip was asked for, option by option.

    From an installation that names `refused` on, pip fails.
    """
    environment = {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "REFUSED": refused}
    command = ["make", ".venv/.installed", *arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, timeout=60)
    asked = checkout / "asked"
    return done.returncode, asked.read_text().splitlines() if asked.exists() else []


HASHED = "--no-deps --require-hashes -r docker/"


def test_every_package_is_installed_with_its_hash_and_the_project_without_packages(checkout: Path) -> None:
    code, asked = install(checkout)
    assert code == 0
    installed = [line.split("--disable-pip-version-check ")[1] for line in asked if " install " in line]
    assert installed == [
        *(HASHED + name for name in ("requirements.lock", "torch-cuda.lock")),
        "--no-deps --no-build-isolation -e .",
        *(HASHED + name for name in ("requirements.lock", "torch-cuda.lock", "development.lock")),
        "--no-deps --no-build-isolation -e . -e app/client",
    ]
    assert asked[-1] == "-m pip check"


@pytest.mark.parametrize("refused", ["nothing", "torch-cpu.lock\\|torch=="])
def test_make_hands_the_index_to_pip_and_ends_where_that_lacks_the_build(checkout: Path, refused: str) -> None:
    code, asked = install(checkout, "TORCH_INDEX=http://torch.example/cpu", refused=refused)
    assert (code == 0) is (refused == "nothing")
    assert [line for line in asked if "torch-cpu.lock" in line or "torch==" in line]
    assert all("--extra-index-url http://torch.example/cpu" in line for line in asked if " install " in line)
    assert "torch-cuda.lock" not in " ".join(asked)


def test_make_installs_nothing_when_the_choice_fails(checkout: Path) -> None:
    (checkout / ".ci/choose-torch").write_text("raise SystemExit(1)")
    assert install(checkout) == (2, [])
