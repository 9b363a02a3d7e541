"""Exit codes of the process. `app.server` has a table of what leads to each."""

EXIT_FAILED = 1  # the first load, or the drain
EXIT_USAGE = 2  # settings that cannot be used
EXIT_START = 3  # as uvicorn: cannot listen
EXIT_ENGINE_LOST = 70  # EX_SOFTWARE: start the process again
