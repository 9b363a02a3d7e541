"""Starts servers by forking a process that has imported all they need, since torch alone costs a second and a half each time.

A server started in this way is a process of its own, in a session of its own, with its own descriptors, environment and arguments.
What it shares is what it would have imported. A supervisor that was forked forks its fronts and its engine process. Servers whose
environment differs in what counts as a process starts are started anew, as are those of `python -P -m`.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import IO, Any, NoReturn

from loadtest.machine import ROOT
from loadtest.servers.launch import start_process

MODULES = ("app", "loadtest.soak.faulty_server", "loadtest.soak.faulty_fronts")
EARLY = ("OMP_", "MKL_", "OPENBLAS_", "PYTHON", "LD_", "MALLOC_", "PATH")
"""Beginnings of the variables that count as a process starts or as it imports: a server with others is started anew."""
PR_SET_PDEATHSIG = 1
TEST = "PYTEST_CURRENT_TEST"  # where pytest says which test it runs; the mutation tool records lines by it


class Forked:
    """What `subprocess.Popen` is to a server: its process, which somebody else waits for and tells of."""

    def __init__(self, command: Sequence[str], told: int) -> None:
        self.args = list(command)
        self.returncode: int | None = None
        self._told = os.fdopen(told)
        self._lock = threading.Lock()
        self.pid = int(self._told.readline())

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None and not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                self.returncode = int(self._told.readline() or -signal.SIGKILL)
            return self.returncode

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        """To a process that still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and nobody has told yet
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Zygote:
    """The process that is forked, begun with the first server that wants it."""

    def __init__(self) -> None:
        self._environment: dict[str, str] = {}
        self._socket: socket.socket | None = None

    def prepare(self) -> None:
        """Once all tests are collected, and before one of them sets a variable: what modules set as they are imported is shared."""
        if not self._environment:
            self._environment = self.shared(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    @staticmethod
    def shared(environment: Mapping[str, str]) -> dict[str, str]:
        """Those variables that must be equal."""
        return {name: value for name, value in environment.items() if name.startswith(EARLY)}

    def start(self, command: Sequence[str], **options: Any) -> Any:
        """In place of `loadtest.servers.launch.start_process`."""
        environment = options.get("env") or {}
        if (
            not can_be_forked(command)
            or options.keys() != {"cwd", "env", "stdout", "stderr", "start_new_session"}
            or self.shared(environment) != self._environment
        ):
            return start_process(command, **options)
        return self._fork(command, options["stdout"], options["stderr"], options["cwd"], environment)

    def run(self, command: Sequence[str], timeout: float = 60.0, **variables: str) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` of `python -m ...` or `python -c ...` in our root, with these variables besides, its output captured."""
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            code = self._fork(command, output, errors, ROOT, {**os.environ, **variables}).wait(timeout)
            for file in (output, errors):
                file.seek(0)
            return subprocess.CompletedProcess(list(command), code, output.read(), errors.read())

    def begin(self, command: Sequence[str], output: IO[Any] | None = None) -> Forked:
        """As `subprocess.Popen` of what `run` takes, with a file for its output, which is nobody's by default."""
        with open(os.devnull, "w") as nobodys:
            return self._fork(command, output or nobodys, nobodys, ROOT, os.environ)

    def _fork(
        self, command: Sequence[str], output: IO[Any], errors: IO[Any], directory: Path, environment: Mapping[str, str]
    ) -> Forked:
        if self._socket is None:
            self.prepare()
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                start = [sys.executable, "-m", "tests.zygote", str(theirs.fileno())]
                variables = {**os.environ, **self._environment}
                variables.pop(TEST, None)  # each server has its own
                start_process(start, cwd=ROOT, env=variables, pass_fds=[theirs.fileno()])
        told, telling = os.pipe()
        asked = json.dumps([*command[1:3], command[3:], str(directory), dict(environment)])
        socket.send_fds(self._socket, [asked.encode()], [output.fileno(), errors.fileno(), telling])
        os.close(telling)
        return Forked(command, told)


zygote = Zygote()


def can_be_forked(command: Sequence[str]) -> bool:
    """Whether it is a Python that runs one of our modules, or a text."""
    return command[0] == sys.executable and (command[1] == "-c" or (command[1] == "-m" and command[2] in MODULES))


def forked(*modules: str) -> ForkServerContext:
    """Where processes are forked from one that has imported `modules`, begun anew if the one that runs has imported others."""
    context, server = get_context("forkserver"), forkserver._forkserver  # type: ignore[attr-defined]
    if server._preload_modules != list(modules):
        server._stop()
        context.set_forkserver_preload(list(modules))
    return context


def keep(output: int, errors: int, telling: int) -> None:
    """Fork the server, tell its id, wait, and tell its exit code. Returns in the server alone, which ends with whoever keeps it."""
    if server := os.fork():
        os.write(telling, b"%d\n" % server)
        os.write(telling, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]))
        os._exit(0)
    end_with_parent()
    os.setsid()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.closerange(3, 256)


def end_with_parent() -> None:
    """The kernel kills this process when its parent ends, in whatever way."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become(kind: str, what: str, arguments: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run as `python -m` or `python -c` would, and end: without freeing all that was imported, which takes as long as a start."""
    os.environ.clear()
    os.environ.update(environment)
    if "coverage" in sys.modules and (recorded := sys.modules["coverage"].Coverage.current()):
        recorded.switch_context(environment.get(TEST, ""))
    sys.argv[:] = [kind, *arguments]
    tempfile.tempdir = None
    code: object = 0
    try:
        if kind == "-c":
            exec(what, {"__name__": "__main__"})
        else:
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # wait for threads, as an interpreter does at its end
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(code)


def fork_children() -> None:
    """From now on this process, a supervisor, forks what it would start: each child leaves the parent's state before `exec`, and stays."""
    start = asyncio.create_subprocess_exec

    async def forked(*command: str, env: Mapping[str, str], pass_fds: Sequence[int]) -> asyncio.subprocess.Process:
        def child() -> None:
            for first, last in zip([2, *sorted(pass_fds)], [*sorted(pass_fds), 4096], strict=True):
                os.closerange(first + 1, last)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            atexit._clear()
            sys.modules["app.telemetry.logs"].process_sink.cache_clear()
            become(*command[1:3], command[3:], env)

        preparing = child if can_be_forked(command) else None
        return await start(*command, env=env, pass_fds=pass_fds, preexec_fn=preparing)

    vars(asyncio)["create_subprocess_exec"] = forked


def main(listening: socket.socket) -> None:
    """Fork whenever asked; returns at the end."""
    for name in ("app.assembly", "app.fronts.front", "app.fronts.supervisor", "pydantic.v1"):
        importlib.import_module(name)
    for name in MODULES[1:]:
        del sys.modules[importlib.import_module(name).__name__]  # it is run, not imported
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    gc.collect()
    gc.freeze()  # no server's collector looks at what was imported, which would copy all its pages
    while True:
        asked, descriptors, _, _ = socket.recv_fds(listening, 2**20, 3)
        if not asked:
            return
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    end_with_parent()
    kind, what, arguments, directory, environment = json.loads(asked)
    keep(*descriptors)
    listening.detach()
    os.chdir(directory)
    if environment.get("RANKER_FRONTS", "0") != "0":
        fork_children()
    become(kind, what, arguments, environment)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
