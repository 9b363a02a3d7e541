"""Starts the engine process and the fronts, restarts those that end, and stops all of them in order. Needs neither torch nor HTTP.

event                          what the supervisor does                                            exits with
SIGTERM, SIGINT                every process drains; the engine process ends after the last front  0; 1 after a timeout
a second such signal           kills all processes                                                 128 + signal
SIGHUP                         passes it to the engine process                                     –
a front ends                   restarts it; stops all if it cannot use its settings                its code
a process cannot be started    tries again after a pause                                           –
the engine process ends:
  the first load failed        fronts stop as after the drain delay                                1
  otherwise                    restarts it, or stops: see RANKER_ENGINE_LOSS                       70
cannot listen on an address    ends                                                                3

It holds all listening sockets of the fronts. So when a front ends, the next one accepts the connections that waited there.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from app.budgets import BACKLOG
from app.exits import EXIT_ENGINE_LOST, EXIT_FAILED, EXIT_START, EXIT_USAGE
from app.fronts.role import Role
from app.settings import Settings
from app.telemetry import logs

PREFIX, SOCKET = "ranker-engine-", "engine"  # names of a directory in the temporary one, and of the socket in it
MOST_PATH_BYTES, SUFFIX_BYTES = 107, 8  # of a Unix socket's path; of what `mkdtemp` puts behind the prefix
SOON_SECONDS = 1.0  # a front that lived less is restarted after a pause
PAUSE_SECONDS = 0.5  # also before retrying a start that the system refused
ENGINE_SECONDS = 5.0  # an engine process that lived less is not restarted
PATIENCE_SECONDS = 10.0  # beyond the time that draining may take

log = structlog.get_logger("app.fronts.supervisor")


@dataclass(frozen=True, slots=True)
class Spare:
    """A front that has imported everything and waits for its number."""

    process: asyncio.subprocess.Process
    assignment: int


class Supervisor:
    """Keeps the engine process and the fronts running. Used by its event loop only."""

    def __init__(self, settings: Settings, engine: Sequence[str], front: Sequence[str]) -> None:
        """`engine` and `front` are the commands of the two kinds of processes."""
        self.settings = settings
        self.exit_code = 0
        self._commands = engine, front
        self._listening: dict[int, list[socket.socket]] = {}
        self._fronts: dict[int, asyncio.subprocess.Process] = {}
        self._engine: asyncio.subprocess.Process | None = None
        self._started: list[asyncio.subprocess.Process] = []  # processes that may still run
        self._spare: Spare | None = None
        self._starting = asyncio.Lock()  # one spare at a time
        self._path = ""
        self._ending = asyncio.Event()
        self._sent: signal.Signals  # the signal that tells the fronts to end
        self._signals = 0

    async def run(self) -> int:
        """Run until a signal, or until a process ends that is not restarted; return the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end_by, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        if not self._listen():
            return EXIT_START
        try:
            _remove_left_behind()
            directory, lock = _locked_directory()
        except OSError as error:
            log.error("fatal", reason=f"The fronts' socket has no place below TMPDIR: {error}")
            return EXIT_USAGE
        self._path = os.path.join(directory, SOCKET)
        try:
            engine = loop.create_task(self._keep_engine())
            fronts = [loop.create_task(self._keep_front(number)) for number in self._listening]
            await self._ending.wait()
            await self._all_end(engine, fronts)
        finally:
            self._kill()
            await asyncio.gather(*(process.wait() for process in self._started))
            _remove(directory)
            os.close(lock)
        log.info("stopped", exit_code=self.exit_code)
        return self.exit_code

    def _listen(self) -> bool:
        numbers = range(1, self.settings.fronts + 1)
        self._listening = {number: [] for number in numbers}
        shared, grpc = self.settings.addresses(), self.settings.grpc.port
        for host, port in [*shared, *([(self.settings.host, grpc)] if grpc else [])]:
            try:
                found = _free(host, port)
                if (host, port) not in shared:
                    continue  # gRPC cannot use an existing socket: each front opens its own
                for number in numbers:
                    self._listening[number].append(_listener(host, found, BACKLOG))
            except OSError as error:
                log.error("cannot_listen", host=host, port=port, reason=error.strerror)
                return False
        return True

    # processes

    async def _start(self, command: Sequence[str], role: Role) -> asyncio.subprocess.Process:
        inherited = [descriptor for descriptors in role.listening.values() for descriptor in descriptors]
        if role.assignment is not None:
            inherited.append(role.assignment)
        process = await asyncio.create_subprocess_exec(*command, env=role.environment(), pass_fds=inherited)
        self._started = [other for other in self._started if other.returncode is None] + [process]
        return process

    async def _keep_engine(self) -> None:
        while True:
            began = time.monotonic()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # the socket of the engine process before
            try:
                self._engine = await self._start(self._commands[0], Role(self._path, os.getpid()))
            except OSError as error:
                await _pause(error)
                if self._ending.is_set():
                    return
                continue
            log.info("engine_started", process=self._engine.pid)
            if self._ending.is_set():
                _send(self._engine, signal.SIGTERM)
            code = await self._engine.wait()
            if self._ending.is_set():
                self._note(code if code == EXIT_ENGINE_LOST else _failed(code))
                return
            log.error("engine_ended", code=code)
            if code in (EXIT_FAILED, EXIT_USAGE, EXIT_START):
                self._end(code)
            elif self.settings.engine_loss == "exit" or time.monotonic() - began < ENGINE_SECONDS:
                self._end(EXIT_ENGINE_LOST)
            else:
                continue
            return

    async def _keep_front(self, number: int) -> None:
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                spare = await self._take_spare()
            except OSError as error:
                await _pause(error)
                continue
            if self._ending.is_set():
                return
            self._fronts[number] = spare.process
            with contextlib.suppress(BrokenPipeError):
                os.write(spare.assignment, b"%d" % number)
            os.close(spare.assignment)
            log.info("front_started", front=number, process=spare.process.pid)
            code = await spare.process.wait()
            del self._fronts[number]
            if self._ending.is_set():
                self._note(_failed(code))
                return
            log.error("front_ended", front=number, code=code)
            if code in (EXIT_USAGE, EXIT_START):
                self._end(code)
            elif time.monotonic() - began < SOON_SECONDS:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _take_spare(self) -> Spare:
        async with self._starting:
            taken, self._spare = self._spare or await self._start_spare(), None
            with contextlib.suppress(OSError):  # tried again, and logged, when the next one is needed
                self._spare = await self._start_spare()
        return taken

    async def _start_spare(self) -> Spare:
        reader, writer = os.pipe()
        try:
            listening = {number: [one.fileno() for one in sockets] for number, sockets in self._listening.items()}
            process = await self._start(self._commands[1], Role(self._path, os.getpid(), listening, reader))
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
        return Spare(process, writer)

    # ends

    def _reload(self) -> None:
        """Pass on SIGHUP. An engine process that does not listen yet would die of it, and reads the checkpoint anyway."""
        if self._engine is not None and os.path.exists(self._path):
            _send(self._engine, signal.SIGHUP)

    def _end_by(self, number: signal.Signals) -> None:
        """First signal: drain. Second: end at once."""
        self._signals += 1
        if self._signals > 1:
            self.exit_code = 128 + number
            self._kill()
        else:
            log.info("draining", delay_seconds=self.settings.drain.delay_seconds)
            self._end(0, signal.SIGTERM)

    def _end(self, code: int, sent: signal.Signals = signal.SIGUSR1) -> None:
        if not self._ending.is_set():
            self._note(code)
            self._sent = sent
            self._ending.set()

    async def _all_end(self, engine: asyncio.Task[None], fronts: list[asyncio.Task[None]]) -> None:
        """End all processes. Only fronts may hold listening sockets when they close them: else waiting connections are never accepted."""
        async with self._starting:
            for process in self._started:
                if process is not self._engine and process not in self._fronts.values():
                    _send(process, signal.SIGKILL)
                    await process.wait()
        for sockets in self._listening.values():
            for listener in sockets:
                listener.close()
        for process in self._fronts.values():
            _send(process, self._sent)
        if self._engine is not None:
            _send(self._engine, signal.SIGTERM)
        drain = self.settings.drain
        patience = drain.delay_seconds + 2 * drain.timeout_seconds + PATIENCE_SECONDS
        _, late = await asyncio.wait([engine, *fronts], timeout=patience)
        if late:
            log.error("drain_timeout", processes=len(late))
            self._note(EXIT_FAILED)

    def _note(self, code: int) -> None:
        """Set the exit code. A lost engine overrides all others; else the first failure stays."""
        self.exit_code = code if code == EXIT_ENGINE_LOST else self.exit_code or code

    def _kill(self) -> None:
        for process in self._started:
            _send(process, signal.SIGKILL)


def _wait_without_threads(loop: asyncio.AbstractEventLoop) -> None:
    """Wait for each process by a descriptor, as asyncio does from Python 3.12 on: it might be refused a thread for each."""
    if sys.version_info < (3, 12):
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or an old kernel
            os.close(os.pidfd_open(os.getpid()))
            asyncio.set_child_watcher(watcher := asyncio.PidfdChildWatcher())
            watcher.attach_loop(loop)


def _locked_directory() -> tuple[str, int]:
    """Return a private directory for the socket, and a descriptor whose lock ends with this process, however it ends. Raises OSError."""
    if len(os.fsencode(os.path.join(tempfile.gettempdir(), PREFIX, SOCKET))) + SUFFIX_BYTES > MOST_PATH_BYTES:
        raise OSError(f"TMPDIR is too long a path: {tempfile.gettempdir()}")
    while True:
        directory = tempfile.mkdtemp(prefix=PREFIX)  # 0700
        lock = os.open(directory, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(directory):
            return directory, lock
        os.close(lock)  # another supervisor has just removed it as left behind


def _remove_left_behind() -> None:
    """Remove the directories of our supervisors that were killed: nobody locks them."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, locked, or gone by now
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(directory)
            finally:
                os.close(lock)


def _remove(directory: str | Path) -> None:
    """Remove the socket and the names beside it, and their directory if nothing else is in it."""
    for suffix in ("", ".json", ".partial"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(directory, SOCKET + suffix))
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


async def _pause(error: OSError) -> None:
    log.error("cannot_start", reason=error.strerror)
    await asyncio.sleep(PAUSE_SECONDS)


def _failed(code: int) -> int:
    """Turn the exit code of a process that was told to end into ours. A process that had not begun dies of the signal."""
    return 0 if code in (0, -signal.SIGTERM, -signal.SIGUSR1) else EXIT_FAILED


def _free(host: str, port: int) -> int:
    """Return the port, or a free one for 0. Raises OSError if somebody listens there: only fronts of one service share a port."""
    with socket.socket(_family(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        found: int = probe.getsockname()[1]
        return found


def _listener(host: str, port: int, backlog: int) -> socket.socket:
    return socket.create_server((host, port), family=_family(host), backlog=backlog, reuse_port=True)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def run(settings: Settings, arguments: Sequence[str] = (), engine: Sequence[str] | None = None) -> int:
    """Serve with several fronts until the end; return the exit code.

    `arguments` are the settings on the command line; `engine` replaces the command of our own engine process.
    """
    logs.configure(settings.logs)
    safe = (
        () if Path(__file__).parents[2] == Path.cwd() else ("-P",)
    )  # else an app.py in the working directory would start
    front = [sys.executable, *safe, "-m", "app", *arguments]
    with asyncio.Runner() as runner:
        _wait_without_threads(runner.get_loop())
        return runner.run(Supervisor(settings, engine or front, front).run())
