"""Runs fronts around the faulty server's engine: `RANKER_FRONTS=2 python -m loadtest.soak.faulty_fronts --forward-ms=5`."""

from __future__ import annotations

import sys

from app.environment import load_settings
from app.fronts import supervisor
from loadtest.soak.servers import FAULTY


def main() -> int:
    """Run with the arguments of the faulty server; return the exit code."""
    return supervisor.run(load_settings([]), engine=[*FAULTY, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
