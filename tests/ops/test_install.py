"""The installer where only a mirror of PyPI can be reached, or nothing: it goes on, or it says what to do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from loadtest.machine import ROOT
from loadtest.server import free_port

SECONDS = 10.0  # within which a failure says what to do
PYPI = ("pypi.org", "files.pythonhosted.org")


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with uv, as the first step of the installer leaves it."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (folder / "bin/uv").symlink_to(Path(sys.executable).parent / "uv")
    return folder


@pytest.fixture(scope="module")
def only_pypi() -> Iterator[str]:
    """The address of a proxy that connects to PyPI and to nothing else."""
    port, loop = free_port(), asyncio.new_event_loop()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode().rpartition(":")[0]
        if host not in PYPI:
            writer.close()
            return
        there, away = await asyncio.open_connection(host, 443)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.gather(copy(reader, away), copy(there, writer))

    server = loop.run_until_complete(asyncio.start_server(tunnel, "127.0.0.1", port))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    loop.call_soon_threadsafe(server.close)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def install(venv: Path, *more: str, extras: str = "redis", **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.upper().startswith(("PIP_", "UV_", "TORCH"))}
    own |= {"PIP_CONFIG_FILE": os.devnull} | environment
    command = [".ci/install", str(venv), extras, *more]
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=110)


@pytest.mark.slow
def test_without_an_index_it_says_what_to_do(venv: Path) -> None:
    began = time.monotonic()
    done = install(venv, PIP_INDEX_URL=f"http://user:secret@127.0.0.1:{free_port()}/simple")
    assert time.monotonic() - began < SECONDS
    assert done.returncode == 1
    assert "The package index cannot be reached" in done.stderr
    assert "PIP_INDEX_URL=https://MIRROR/simple" in done.stderr
    assert "secret" not in done.stdout + done.stderr


@pytest.mark.slow
def test_where_only_pypi_is_reached_torch_comes_from_there(venv: Path, only_pypi: str) -> None:
    try:
        httpx.head("https://pypi.org/simple/", timeout=5)
    except httpx.TransportError:
        pytest.skip("PyPI cannot be reached")
    done = install(venv, "--dry-run", HTTPS_PROXY=only_pypi)
    assert done.returncode == 0, done.stderr
    assert "download.pytorch.org cannot be reached" in done.stderr
    assert " + torch==2.13.0\n" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("torch", "triton"), [("2.11.0", "3.6.0"), ("2.12.0", "3.7.0")])
def test_older_torch_comes_with_the_triton_that_it_wants(venv: Path, only_pypi: str, torch: str, triton: str) -> None:
    done = install(venv, "--dry-run", extras="dev", HTTPS_PROXY=only_pypi, TORCH=torch)
    if "The package index cannot be reached" in done.stderr:
        pytest.skip("PyPI cannot be reached")
    assert done.returncode == 0, done.stderr
    assert {f" + torch=={torch}", f" + triton=={triton}"} <= set(done.stderr.splitlines())


@pytest.mark.slow
def test_a_build_that_only_pytorch_has_is_not_replaced(venv: Path, only_pypi: str) -> None:
    done = install(venv, "--dry-run", HTTPS_PROXY=only_pypi, TORCH_BACKEND="cpu")
    if "The package index cannot be reached" in done.stderr:
        pytest.skip("PyPI cannot be reached")
    assert done.returncode == 1
    assert "only it has the torch build TORCH_BACKEND=cpu" in done.stderr
