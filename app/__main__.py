"""`python -m app`: settings from flags and environment, then serve. Not for anything that a test would want to call."""

from __future__ import annotations

import sys

import structlog

from app import logs
from app.settings import SettingsProblem, load_settings

EXIT_USAGE = 2


def main() -> int:
    """Exit code of the process: 0 after a drain, 2 for settings that cannot be used."""
    try:
        settings = load_settings(sys.argv[1:])
        logs.configure(settings.logs)
        structlog.get_logger("app").info("settings", **settings.effective())
        from app.factory import create_app  # late: --help and a slip in a setting need no torch
        from app.server import serve

        return serve(create_app(settings), settings)
    except SettingsProblem as error:
        print(f"python -m app: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
