"""`python -m app`: starts the service. It says so where a package that the service needs is missing, or is another one of the same name.

Each process imports only what it needs."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from app.exits import EXIT_FAILED, EXIT_USAGE

NO_THREAD = "can't start new thread"  # Python's words; it has no type of its own


def main(arguments: Sequence[str] = (), program: str = "python -m app") -> int:
    """Exit code of the process. A model.py or weights.py in the working directory is named and not run.

    Until the server handles signals itself, SIGTERM and SIGINT end the process with 0 and SIGHUP does nothing. By default process 1, as
    in a container, ignores the first, and the second is a traceback.
    """
    # Open those of the descriptors 0, 1 and 2 that are closed: libuv aborts if it gets one of them for its own use.
    while (held := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(held, True)
    os.close(held)
    for number in (signal.SIGTERM, signal.SIGINT):
        # not sys.exit: Python drops what a handler raises while a callback of the garbage collector runs, and imports run many
        signal.signal(number, lambda *_: os._exit(0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for name in ("model", "weights"):
        spec = importlib.util.find_spec(name)
        origin = spec.origin if spec else None
        if origin is None or Path(origin).parents[1] != Path(__file__).parents[1]:
            advice = "start with python -P -m app, which leaves the working directory out, or with phoenix-ranker serve"
            say(f"{program}: the package {name} is not ours but {origin or 'missing'}: {advice}")
            return EXIT_USAGE
    code = start(arguments, program)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            number, signal.SIG_IGN
        )  # the end has its code: a late signal, such as a supervisor's to all processes, changes none
    return code


def start(arguments: Sequence[str], program: str) -> int:
    """Exit code of the process: 0 after a drain, 1 without a checkpoint or a thread, 2 for settings that cannot be used."""
    import structlog

    from app.settings import SettingsProblem, load_settings, problem_of
    from app.telemetry import logs

    try:
        settings = load_settings(arguments, program=program, with_posts=True)
        role = None
        if settings.workers > 1:
            from app.processes import parent

            role = parent.inherited()
        logs.configure(settings.logs, worker=None if role is None else role.worker)
        log = structlog.get_logger("app")
        if role is not None:  # the checkpoint of the settings is not looked at: another one may have been loaded since
            return parent.play(role, settings)
        if problem := problem_of(settings.checkpoint):  # said before anything listens
            log.error("fatal", reason=f"{settings.checkpoint.absolute()} {problem}")
            return EXIT_FAILED
        if not logs.are_for_people(settings.logs):
            log.info("settings", **settings.effective())
        if settings.workers > 1:
            return parent.run(settings, arguments)
        gc.disable()  # until the first load has ended
        from app import server

        gc.freeze()  # modules stay: walking them takes a quarter of a second
        return server.run(settings)
    except SettingsProblem as error:
        say(f"{program}: {error}")
        return EXIT_USAGE
    except RuntimeError as error:
        if NO_THREAD not in str(error):
            raise
        say(f"{program}: {error}: the limit of processes (ulimit -u, or pids.max of the control group) is too low")
        os._exit(EXIT_FAILED)  # threads that have begun to load would not end


def say(sentence: str) -> None:
    """Write to standard error; the exit code holds without a reader."""
    with contextlib.suppress(OSError):
        os.write(2, f"{sentence}\n".encode(errors="backslashreplace"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
