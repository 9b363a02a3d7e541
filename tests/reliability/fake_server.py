"""Another name of `loadtest.soak.faulty_server`, by which `tests/app/server/test_process.py` starts it."""

import sys

from loadtest.soak.faulty_server import main

if __name__ == "__main__":
    sys.exit(main())
