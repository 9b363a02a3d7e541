"""`python -m app`: settings from flags and environment, then serve."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import structlog

from app.environment import load_settings
from app.exits import EXIT_USAGE
from app.fronts.role import Role
from app.settings import Settings, SettingsProblem
from app.telemetry import logs


def main() -> int:
    """Exit code of the process: 0 after a drain, 2 for settings that cannot be used."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a checkpoint to be read again
    try:
        role = Role.inherited()
        settings = load_settings(sys.argv[1:])
        logs.configure(settings.logs)
        if role is None:
            structlog.get_logger("app").info("settings", **settings.effective())
        return run(settings, role)
    except SettingsProblem as error:
        with contextlib.suppress(OSError):  # the exit code holds without a reader
            os.write(2, f"python -m app: {error}\n".encode(errors="backslashreplace"))
        return EXIT_USAGE


def run(settings: Settings, role: Role | None) -> int:
    """Serve until the end; the exit code. What is not needed is not imported: --help and a slip in a setting need no torch."""
    if role is None and settings.fronts:
        from app.fronts import supervisor

        return supervisor.run(settings, sys.argv[1:])
    if role is not None and role.is_front:
        from app.fronts import front

        return front.run(settings, role)
    from app import assembly

    try:
        return assembly.run(settings, role)
    except SystemExit as ended:  # uvicorn cannot listen; loading has begun meanwhile, in native code that nothing stops
        logs.process_sink().drain()
        os._exit(ended.code if isinstance(ended.code, int) else 1)


if __name__ == "__main__":
    sys.exit(main())
