"""Exit codes, and what each tells who started the process. The table that goes with them is in `app.server`."""

EXIT_FAILED = 1  # the first load, or the drain
EXIT_USAGE = 2  # settings that cannot be used
EXIT_START = 3  # as uvicorn: cannot listen
EXIT_ENGINE_LOST = 70  # EX_SOFTWARE: start the process again
