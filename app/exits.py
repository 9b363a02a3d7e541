"""Exit codes of the process, and when a second signal counts. `app.server` has a table of what leads to each."""

EXIT_FAILED = 1  # the first load, or the drain
EXIT_USAGE = 2  # settings that cannot be used
EXIT_START = 3  # as uvicorn: cannot listen; the parent of several processes: no directory for temporary files
EXIT_ENGINE_LOST = 70  # EX_SOFTWARE: start the process again

# make and supervisors signal both a process and its group: signals this close together are one
SAME_SIGNAL_SECONDS = 1.0
