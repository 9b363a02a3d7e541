"""`python -m weights`: see `weights.cli`."""

from weights.commands.checkpoints import app

if __name__ == "__main__":
    app(prog_name="python -m weights")
