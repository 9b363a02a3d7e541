"""The parent of several processes: binds the sockets, starts one engine process and the workers, and starts again what ends.

SIGTERM, SIGINT    all drain; workers end, then the engine process; a second signal, a second later or more, ends all at once
SIGHUP             the workers take the keys that their file holds now, if it can be used; the engine process loads the checkpoints and the
                   corpus again
a worker ends      it is started again; a process that stays stopped (SIGSTOP) is killed first
no worker starts   all end: with 2 if the settings cannot be used, else as the last one that failed several times in a row, with 1 if
                   a signal such as SIGKILL has ended it
the engine ends    it is started again and workers answer 503 meanwhile; or, with ENGINE_LOSS=exit, all end with 70
the first load fails   all end with 1
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import structlog

from app.exits import EXIT_ENGINE_LOST, EXIT_FAILED, EXIT_START, EXIT_USAGE, SAME_SIGNAL_SECONDS
from app.settings import Auth, Settings, SettingsProblem, config_of
from app.telemetry import logs

PREFIX = "phoenix-ranker-processes-"  # of the directory for temporary files
MARKER = "made-by-phoenix-ranker"  # in it: only a directory that holds this file is ever removed as a left one
SOCKET = "engine"  # beside the marker: the engine process's socket
PATHS_FILE = "loaded.json"  # beside the socket: what was loaded last
CONFIG_FILE = "settings.toml"  # beside the socket: the file of settings as it was at the start
KEYS_FILE = "keys.json"  # beside the socket: what the file of keys held when it could last be used
LEFT_FILES = {MARKER, SOCKET, PATHS_FILE, "loaded.partial", CONFIG_FILE, KEYS_FILE, "keys.partial"}
VARIABLE = "_RANKER_ROLE"  # not a setting: nobody sets it by hand
PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 0.05
SOON_SECONDS = 10.0  # a process that ends within this time of its start is started again after a pause
PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.5, 10.0  # doubled each time, up to the second
MOST_FAILURES = 3
WORKER_NICENESS = 10  # where processors are scarce, what was admitted is computed before more is read
LAST_SECONDS = 10.0  # how much longer than its drain a process may take to end
STOPPED_STATE = "T"  # of a process after SIGSTOP; under a debugger it has another letter

ORDERLY = {0, -signal.SIGTERM, -signal.SIGINT}
"""Exit codes of processes at the end. A signal ends a process by itself only before it serves, or after its last request."""

SENT = ORDERLY | {-signal.SIGHUP}
"""Exit codes that say nothing of what prevents a start: of signals that a process is sent and does not handle yet."""

log = structlog.get_logger("app.processes.parent")


class Role(msgspec.Struct, frozen=True):
    """What a process of the parent is told. `path`: of the engine process's socket. `worker`: its number, 0 for the engine process.
    `sockets`: the descriptors that workers listen on. `pipe`: the descriptor of a pipe to the parent, which a worker writes to once it
    listens, and the engine process once a worker is linked to it."""

    path: str
    parent: int
    pipe: int
    worker: int = 0
    sockets: tuple[int, ...] = ()


def inherited() -> Role | None:
    """This process's role, None for one that was started by hand. With a role it ends with its parent."""
    encoded_role = os.environ.pop(VARIABLE, None)
    if encoded_role is None:
        return None
    role = msgspec.json.decode(encoded_role, type=Role)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != role.parent:
        os._exit(EXIT_FAILED)  # the parent has ended meanwhile
    return role


def play(role: Role, settings: Settings) -> int:
    """Run the process of this role; return its exit code."""
    from app import server
    from app.telemetry.metrics import Metrics

    gc.freeze()
    if role.worker:
        os.nice(WORKER_NICENESS)
        from app.processes.remote import RemoteService

        ranker = RemoteService(settings, role.path, Metrics(), role.worker)
        sockets = [socket.socket(fileno=descriptor) for descriptor in role.sockets]
        return server.run(
            settings,
            ranker,
            sockets,
            announces=role.worker == 1,
            on_listening=lambda: os.write(role.pipe, b"1"),
        )
    from app.processes.engine_process import EngineProcess
    from app.service.local import create_ranker

    local = create_ranker(settings, Metrics())
    local.reloads.resume(Path(role.path).with_name(PATHS_FILE))
    local.watchdog.watch_loop(server.hung)
    engine = EngineProcess(local, settings, on_first_worker=lambda: os.write(role.pipe, b"1"))
    return server.run_engine(settings, engine, role.path)


class Child:
    """One process that is kept running. `number`: of the worker, 0 for the engine process."""

    def __init__(self, parent: Parent, number: int) -> None:
        self.parent = parent
        self.number = number
        self.pause = PAUSE_SECONDS
        self.failures = 0  # ends in a row before it was in use, or soon after its start with a positive exit code
        self.start_at = 0.0
        self.stopped_since: float | None = None  # monotonic seconds
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: int | None = None  # the descriptor from which the parent reads that it is in use
        self._is_in_use = False

    def start(self) -> None:
        """Start it. Raises OSError or MemoryError where the system cannot do that now."""
        parent = self.parent
        shared = [listener.fileno() for listener in parent.sockets] if self.number else []
        self.start_at = time.monotonic()
        command = [sys.executable, "-m", "app", *parent.arguments]
        # A process group of its own: a terminal's signals reach the parent alone. Not a session: Linux may share processors out by session
        # (`sched_autogroup`), and then the niceness of a worker would not count.
        self._close_pipe()
        self.pipe, writer = os.pipe()
        try:
            os.set_blocking(self.pipe, False)
            role = Role(parent.path, os.getpid(), writer, self.number, tuple(shared))
            environment = {**os.environ, VARIABLE: msgspec.json.encode(role).decode()}
            descriptors = [parent.folder, writer, *shared]
            self.process = subprocess.Popen(command, env=environment, pass_fds=descriptors, process_group=0)
        finally:
            os.close(writer)

    def _close_pipe(self) -> None:
        if self.pipe is not None:
            os.close(self.pipe)
        self.pipe, self._is_in_use = None, False

    def is_in_use(self) -> bool:
        """Whether the process, a worker's, listens, or that of the engine has a worker linked; also if it did before its end."""
        if not self._is_in_use and self.pipe is not None:
            with contextlib.suppress(BlockingIOError):
                self._is_in_use = bool(os.read(self.pipe, 1))
        return self._is_in_use

    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.ended() is None

    def ended(self) -> int | None:
        """Its exit code, None while it runs."""
        return None if self.process is None else self.process.poll()

    def again(self) -> None:
        """Start it again when it is due."""
        now = time.monotonic()
        ended_soon = now < self.start_at + SOON_SECONDS
        self.pause = min(MOST_PAUSE_SECONDS, 2 * self.pause) if ended_soon else PAUSE_SECONDS
        code = self.ended() or 0
        failed = code not in SENT and (not self.is_in_use() or (ended_soon and code > 0))
        self.failures = self.failures + 1 if failed else 0
        self.process, self.start_at = None, now + (self.pause if ended_soon else 0.0)

    def end_stopped(self, seconds: float) -> None:
        """Kill it if it has been stopped by a signal for that long: its callers would wait for ever."""
        if self.process is None:
            return
        now = time.monotonic()
        if state_of(self.process.pid) != STOPPED_STATE:
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = now
        elif now > self.stopped_since + seconds:
            self.stopped_since = None
            log.error("stopped_process_killed", worker=self.number)
            self.process.kill()

    def send(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.process is not None and self.runs():
            self.process.send_signal(number)

    def wait(self, until: float) -> int:
        """Wait for its end, and kill it after `until`; return its exit code."""
        if self.process is None:
            return 0
        try:
            return self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.error("killed", worker=self.number)
            self.process.kill()
            return self.process.wait() or EXIT_FAILED


class Parent:
    """Keeps the processes running until a signal."""

    def __init__(
        self, settings: Settings, arguments: Sequence[str], sockets: Sequence[socket.socket], folder: int
    ) -> None:
        """`folder`: the descriptor of the directory of the processes. Its own path may be too long for the address of a socket."""
        self.settings = settings
        self.arguments = arguments
        self.sockets = sockets
        self.folder = folder
        self.path = f"/proc/self/fd/{folder}/{SOCKET}"
        self.signals: list[int] = []
        self._at_once_from = 0.0  # monotonic seconds from which a second signal ends all
        self.engine = Child(self, 0)
        self.workers = [Child(self, number) for number in range(1, settings.workers + 1)]

    def run(self) -> int:
        """Run until the end; return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda sent, _: self.signals.append(sent))
        code = 0
        while not code and not {signal.SIGTERM, signal.SIGINT} & {*self.signals}:
            code = self._look()
            if signal.SIGHUP in self.signals:
                self.signals.remove(signal.SIGHUP)
                for child in (self.engine, *(self.workers if self._has_copied_keys() else ())):
                    child.send(signal.SIGHUP)
            time.sleep(LOOK_SECONDS)
        stopped = self._stop()
        return code or stopped

    def _has_copied_keys(self) -> bool:
        """Copy the keys that their file holds now for the workers. False, and the log says why, if it cannot be used: the old ones stay."""
        try:
            copied_keys(self.settings.auth, self.folder)
        except (OSError, SettingsProblem) as error:
            log.error("keys_refused", reason=str(error))
            return False
        return True

    def _look(self) -> int:
        """Start what should run. Return an exit code where all should end."""
        for child in (self.engine, *self.workers):
            code = child.ended()
            if code is not None:
                log.error("process_ended", worker=child.number, exit_code=code)
                if child is self.engine and code == EXIT_FAILED and self._forget_reload():
                    child.again()
                elif child is self.engine and (
                    code in (EXIT_FAILED, EXIT_USAGE, EXIT_START) or self.settings.engine_loss == "exit"
                ):
                    return code if 0 < code < EXIT_ENGINE_LOST else EXIT_ENGINE_LOST
                else:
                    child.again()
                    if code and self._no_worker_starts(code):
                        return code if code > 0 else EXIT_FAILED
            child.end_stopped(self.settings.queue.stall_exit_seconds)
            if child.process is None and time.monotonic() >= child.start_at:
                try:
                    child.start()
                except (OSError, MemoryError) as error:  # no process, descriptor or memory now: what runs goes on
                    log.error("process_not_started", worker=child.number, reason=str(error))
                    child.again()
        return 0

    def _no_worker_starts(self, code: int) -> bool:
        """Whether to give up: no worker listens, and each has failed so often that the next would too, however long its start takes.
        `code`: the exit code of the last one. One failure is enough for settings that cannot be used."""
        most = 1 if code == EXIT_USAGE else MOST_FAILURES
        listens = any(worker.process is not None and worker.is_in_use() for worker in self.workers)
        return not listens and all(worker.failures >= most for worker in self.workers)

    def _forget_reload(self) -> bool:
        """Have the next engine process load what the settings name. False if the one that failed did so too."""
        try:
            Path(self.path).with_name(PATHS_FILE).unlink()
        except FileNotFoundError:
            return False
        log.error("reload_not_kept", reason="what was loaded last cannot be loaded again")
        return True

    def _stop(self) -> int:
        """Drain all; the engine process ends after the workers. Return 1 where one did not end in order."""
        drain, now = self.settings.drain, time.monotonic()
        self._at_once_from = now + SAME_SIGNAL_SECONDS
        until = now + drain.delay_seconds + drain.timeout_seconds + LAST_SECONDS
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end_at_once)
        for listener in self.sockets:
            listener.close()  # the workers have them: when those accept no more, a new connection is refused
        for worker in self.workers:
            worker.send(signal.SIGTERM)
        # The engine process serves the workers until they have gone. One that has none yet would end at once, so it is told once it has.
        while (
            not self.engine.is_in_use() and any(worker.runs() for worker in self.workers) and time.monotonic() < until
        ):
            time.sleep(LOOK_SECONDS)
        self.engine.send(signal.SIGTERM)
        codes = [worker.wait(until) for worker in self.workers]
        codes.append(self.engine.wait(until + LAST_SECONDS))
        if {*codes} <= ORDERLY:
            return 0
        log.error("processes_ended_with", exit_codes=codes)
        return EXIT_FAILED

    def _end_at_once(self, number: int, frame: object) -> None:
        if time.monotonic() < self._at_once_from:
            return  # one signal, sent to this process and to its group
        for child in (self.engine, *self.workers):
            child.send(signal.SIGKILL)
        os._exit(128 + number)


def run(settings: Settings, arguments: Sequence[str]) -> int:
    """Serve with several processes until the end; return the exit code."""
    from app.server import bind_logged, raise_file_limit

    raise_file_limit()
    try:
        sockets = bind_logged(settings.host, settings.port)
    except OSError:
        return EXIT_START
    with contextlib.ExitStack() as at_end:
        try:
            folder = at_end.enter_context(directory())
        except OSError as error:
            log.error("fatal", reason=f"no directory for temporary files can be used: {error.strerror}")
            return EXIT_START
        try:
            arguments = [*with_copied_config(arguments, folder), *copied_keys(settings.auth, folder)]
        except OSError as error:  # such as for a pipe, which can be read once
            log.error("fatal", reason=f"the file of settings or that of keys cannot be copied: {error}")
            return EXIT_START
        code = Parent(settings, arguments, sockets, folder).run()
    logs.drain()
    return code


def with_copied_config(arguments: Sequence[str], folder: int) -> Sequence[str]:
    """The arguments, with a copy of the file of settings in this directory in place of it: whoever edits the file meanwhile, a process that
    is started again has the settings of the others. Raises OSError, SettingsProblem."""
    config, others = config_of(arguments, os.environ)
    if not config:
        return arguments
    copy = f"/proc/self/fd/{folder}/{CONFIG_FILE}"
    shutil.copyfile(config, copy)
    return ["--config", copy, *others]


def copied_keys(auth: Auth, folder: int) -> list[str]:
    """Copy the keys that their file holds now into this directory, where only its owner may read them; the arguments that name the copy in
    place of the file, none without one. A process that is started again has the keys of the others so. Raises OSError, SettingsProblem."""
    if auth.keys_file is None:
        return []
    keys = {name: digest.hex() for name, digest in auth.read().items()}
    copy = Path(f"/proc/self/fd/{folder}/{KEYS_FILE}")
    partial = copy.with_suffix(".partial")
    partial.touch(0o600)
    partial.write_bytes(msgspec.json.encode(keys))
    partial.rename(copy)
    return [f"--auth.keys-file={copy}"]


@contextlib.contextmanager
def directory() -> Iterator[int]:
    """Yield the descriptor of a new directory that is removed at the end. It holds nothing but a marker. Raises OSError.

    It is locked while this process or a child of it lives. Directories with our marker and without that lock were left by a parent that
    was killed; they are removed.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            remove_left(left)
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    descriptor = locked(path)
    try:
        (path / MARKER).touch()  # only now: another parent that starts meanwhile removes no directory without it
        yield descriptor
    finally:
        os.close(descriptor)
        shutil.rmtree(path, ignore_errors=True)


def remove_left(path: Path) -> None:
    """Remove a directory of ours whose parent has ended. Raises OSError, also where that parent lives."""
    if path.is_symlink() or path.stat().st_uid != os.geteuid() or not {MARKER} <= {*os.listdir(path)} <= LEFT_FILES:
        return
    descriptor = locked(path)
    try:
        shutil.rmtree(path)
    finally:
        os.close(descriptor)


def locked(path: str | Path) -> int:
    """Open and lock a directory; the descriptor. Raises OSError where another process has locked it, or where it is gone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.stat(path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def state_of(pid: int) -> str:
    """The letter of a process's state in /proc, empty where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
