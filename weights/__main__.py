"""`python -m weights`: see `weights.cli`."""

from weights.cli import app

if __name__ == "__main__":
    app(prog_name="python -m weights")
