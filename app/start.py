"""Starts a process: settings from flags and environment, then serve."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Sequence

import structlog

from app.environment import load_settings
from app.exits import EXIT_FAILED, EXIT_USAGE
from app.fronts.role import Role
from app.settings import Settings, SettingsProblem
from app.telemetry import logs

NO_CHECKPOINT = (
    "it has no manifest.json; phoenix-ranker serve without a checkpoint serves the demo, phoenix-ranker import makes a checkpoint of a "
    "published one"
)

NO_THREAD = "can't start new thread"  # Python's words; it has no type of its own


def start(arguments: Sequence[str], program: str) -> int:
    """Exit code of the process: 0 after a drain, 1 without a checkpoint or a thread, 2 for settings that cannot be used."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a checkpoint to be read again
    try:
        role = Role.inherited()
        settings = load_settings(arguments)
        logs.configure(settings.logs)
        if role is None:
            log = structlog.get_logger("app")
            try:  # said before anything listens
                is_there = (settings.checkpoint / "manifest.json").is_file()
                problem = "" if is_there else f"is no checkpoint: {NO_CHECKPOINT}"
            except OSError as error:  # such as a folder that may not be entered
                problem = f"cannot be read: {error.strerror}"
            if problem:
                log.error("fatal", reason=f"{settings.checkpoint.absolute()} {problem}")
                return EXIT_FAILED
            if not logs.are_for_people(settings.logs):
                log.info("settings", **settings.effective())
        return run(settings, role, arguments)
    except SettingsProblem as error:
        _say(f"{program}: {error}")
        return EXIT_USAGE
    except RuntimeError as error:
        if NO_THREAD not in str(error):
            raise
        _say(f"{program}: {error}: the limit of processes (ulimit -u, or pids.max of the control group) is too low")
        os._exit(EXIT_FAILED)  # threads that have begun to load would not end


def _say(sentence: str) -> None:
    with contextlib.suppress(OSError):  # the exit code holds without a reader
        os.write(2, f"{sentence}\n".encode(errors="backslashreplace"))


def run(settings: Settings, role: Role | None, arguments: Sequence[str] = ()) -> int:
    """Serve until the end; the exit code. What is not needed is not imported: --help and a slip in a setting need no torch."""
    if role is None and settings.fronts:
        from app.fronts import supervisor

        return supervisor.run(settings, arguments)
    if role is not None and role.is_front:
        from app.fronts import front

        return front.run(settings, role)
    gc.disable()  # until the first load has ended
    from app import assembly

    gc.freeze()  # modules stay: walking them takes a quarter of a second
    try:
        return assembly.run(settings, role)
    except SystemExit as ended:  # uvicorn cannot listen; loading has begun meanwhile, in native code that nothing stops
        logs.process_sink().drain()
        os._exit(ended.code if isinstance(ended.code, int) else 1)
