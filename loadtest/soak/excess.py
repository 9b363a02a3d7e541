"""F9 to F11: checkpoints that are too large, reloads without memory or threads, bad kernel files; each followed by SIGTERM."""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from loadtest.generate.payload import rank_request
from loadtest.machine import ROOT
from loadtest.matrix import Row
from loadtest.servers.launch import Server
from loadtest.soak.clients import ask_all
from loadtest.soak.oracle import NAMES, admin_settings, fingerprint, swap, two_checkpoints
from loadtest.soak.servers import real
from model.config import ModelConfig
from model.native.build import build_kernel
from weights.format.layout import expected_shapes, file_of
from weights.format.manifest import FileEntry, Manifest, TensorEntry
from weights.synthetic.random_weights import mini_config

EXIT_SECONDS = 5.0  # without a drain delay and without open requests
GIVEN_UP_SECONDS = 3.0  # also the limit of the load at start
PATIENCE_SECONDS = 12.0  # for a load that should have been given up
MOST_ADDED_MIB = 64.0
REFUSED = 422
SPARE_MIB = (2, 12, 20, 45)  # for the threads and memory of a reload: less than it needs, or than must stay free


def write_sparse(path: Path, config: ModelConfig) -> None:
    """Write a checkpoint of this architecture as sparse files: right headers and lengths, but no data."""
    path.mkdir()
    shapes = expected_shapes(config)
    for file in {file_of(name) for name in shapes}:
        header, end = {}, 0
        for name in (name for name in shapes if file_of(name) == file):
            start, end = end, end + 4 * math.prod(shapes[name])
            header[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        (path / file).write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(path / file, 8 + len(text) + end)
    files = {file_of(name): FileEntry("0" * 64, (path / file_of(name)).stat().st_size) for name in shapes}
    tensors = {name: TensorEntry(file_of(name), "float32", shape) for name, shape in shapes.items()}
    names = tuple(f"action_{index}" for index in range(config.actions))
    (path / "manifest.json").write_bytes(Manifest("sparse", "1", config, names, (), {}, files, tensors).to_json())


def too_large() -> ModelConfig:
    """A model with 752 GiB of parameters."""
    return replace(mini_config(0, (5, 6, 7), continuous_actions=0), width=65536, layers=1, widening=16.0)


def endless() -> ModelConfig:
    """A model with a table of a terabyte, which is mapped, but takes minutes to read once."""
    return mini_config(0, (2**31 - 1, 6, 7), continuous_actions=0)


def scores(server: Server) -> bytes:
    """Fingerprint of the reply to one request, without timings; empty unless it is 200."""
    [reply] = ask_all(server.port, [rank_request(7)], keep_bodies=True)
    return fingerprint(reply) if reply.status == 200 else b""


def reload(port: object, name: str) -> int:
    """Status of a reload, retried for `PATIENCE_SECONDS` while it is 409; 0 without a reply."""
    status, until = 409, time.monotonic() + PATIENCE_SECONDS
    while status == 409 and time.monotonic() < until:
        status = swap(port, name, PATIENCE_SECONDS)
        time.sleep(0.05)
    return status


def end(server: Server) -> bool:
    """Send SIGTERM; return whether the process exits with 0 in time."""
    server.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    return server.process.wait(60) == 0 and time.monotonic() - began < EXIT_SECONDS


def checkpoints(runs: int, **settings: object) -> Row:
    """F9: a too large checkpoint is refused before it takes memory, an endless load is given up, others load, SIGTERM ends the server."""
    failed, added = 0, 0.0
    with two_checkpoints() as root:
        write_sparse(root / "large", too_large())
        write_sparse(root / "endless", endless())
        chosen = {**admin_settings(root), "reload__timeout_seconds": GIVEN_UP_SECONDS, **settings}
        port = chosen["admin__port"]
        for _ in range(runs):
            with real(**chosen) as server:
                before = scores(server)
                held = server.reset_peak()
                began = time.monotonic()
                right = [reload(port, "large") == REFUSED, reload(port, "endless") == REFUSED]
                right.append(time.monotonic() - began < PATIENCE_SECONDS)
                right += [scores(server) == before != b""]
                added = max(added, (server.status("VmHWM") - held) / 1024)
                right += [reload(port, NAMES[1]) == 200, scores(server) not in (before, b"")]
                hanging = threading.Thread(target=reload, args=(port, "endless"), daemon=True)
                hanging.start()
                time.sleep(0.3)
                right.append(end(server))
                failed += not all(right)
    what = "checkpoints that ask for too much: 422, then others load, SIGTERM: 0"
    return Row("F9", what, runs, failed, added, MOST_ADDED_MIB, "MiB added")


def starved_reloads(runs: int, spare_mib: tuple[int, ...] = SPARE_MIB) -> Row:
    """F10: a reload with too little address space for its threads and memory is refused, and the old version keeps serving."""
    tried, failed = 0, 0
    with two_checkpoints() as root:
        chosen = admin_settings(root)
        for spare in spare_mib * runs:
            with real(**chosen) as server:
                before = scores(server)
                limit = 1024 * server.status("VmSize") + spare * 2**20
                resource.prlimit(server.process.pid, resource.RLIMIT_AS, (limit, limit))
                status = reload(chosen["admin__port"], NAMES[1])
                tried += status != 200
                after = scores(server)
                right = after == before if status == REFUSED else status == 200 and after not in (before, b"")
                failed += not (right and end(server))
    what = f"a reload with {spare_mib[0]} to {spare_mib[-1]} MiB of addresses left: the old one serves, SIGTERM: 0"
    return Row("F10", what, tried, failed, failed, 0, "failed")


KERNEL_FAULTS: dict[str, Callable[[Path], object]] = {
    "cut": lambda library: _replace(library, library.read_bytes()[: library.stat().st_size // 2]),
    "empty": lambda library: _replace(library, b""),
    "foreign": lambda library: _replace(library, b"something else" * 10_000),
    "unwritable": lambda library: None,  # its directory cannot be created either
}


def kernels(faults: tuple[str, ...] = tuple(KERNEL_FAULTS)) -> Row:
    """F11: a server with a bad kernel file still starts the native engine, reports the fault, and exits with 0 on SIGTERM."""
    failed = 0
    with kernel_at_home() as (home, library):
        whole = library.read_bytes()
        for fault in faults:
            KERNEL_FAULTS[fault](library)
            place = "/proc/no-home" if fault == "unwritable" else str(home)
            with real(environment={"OMP_NUM_THREADS": "1", "HOME": place}) as server:
                info = server.target.info()
                right = info["backend"] == "native" and "kernel_file" in info["engine"] and scores(server) != b""
                failed += not (right and end(server))
            _replace(library, whole)
    what = f"a kernel file that is {', '.join(faults)}: built anew, SIGTERM: 0"
    return Row("F11", what, len(faults), failed, failed, 0, "failed")


def excess(runs: int) -> list[Row]:
    """All rows; `runs` repeats the first two."""
    return [checkpoints(runs), starved_reloads(runs), kernels()]


@contextmanager
def kernel_at_home() -> Iterator[tuple[Path, Path]]:
    """A home directory with the compiled libraries, and the path of the kernel in it."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        kept = home / ".cache" / "phoenix-ranking-server"
        kept.mkdir(parents=True, mode=0o700)
        shutil.copy2(build_kernel(source=ROOT / "app/request/native/codec.cpp").path, kept)
        yield home, Path(shutil.copy2(build_kernel().path, kept))


def _replace(library: Path, content: bytes) -> None:
    library.unlink()
    library.write_bytes(content)
    library.chmod(0o500)
