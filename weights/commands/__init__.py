"""The command line: `python -m weights`."""
