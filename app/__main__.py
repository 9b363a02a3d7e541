"""`python -m app`: starts the service, unless the packages that it needs are somebody else's."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from app.exits import EXIT_USAGE


def main(arguments: Sequence[str] = (), program: str = "python -m app") -> int:
    """Exit code of the process. A model.py or weights.py in the working directory is named and not run.

    Until the server handles SIGTERM and SIGINT itself, either ends the process with 0. By default process 1, as in a container, ignores
    the first, and the second is a traceback.
    """
    # a closed one of 0, 1 and 2 is opened: libuv aborts if it gets it for its own
    while (held := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(held, True)
    os.close(held)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    for name in ("model", "weights"):
        found = importlib.util.find_spec(name)
        origin = found.origin if found else None
        if origin is None or Path(origin).parents[1] != Path(__file__).parents[1]:
            advice = "start with python -P -m app, which leaves the working directory out, or with phoenix-ranker serve"
            os.write(2, f"{program}: the package {name} is not ours but {origin or 'missing'}: {advice}\n".encode())
            return EXIT_USAGE
    from app.start import start

    return start(arguments, program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
