"""`python -m weights`; the commands are in `weights.commands` and `weights.lab.commands`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> None:
    """Run the command line. Exit if `model` is another package, such as a model.py in the working directory."""
    spec = importlib.util.find_spec("model")
    origin = spec.origin if spec else None
    if origin is None or Path(origin).parents[1] != Path(__file__).parents[1]:
        sys.exit(
            f"python -m weights: the package model is not ours but {origin or 'missing'}: start with python -P -m weights"
        )
    from weights.command_line import app
    from weights.commands.console import run

    run(app, "python -m weights")


if __name__ == "__main__":
    main()
