"""`python -m weights`; the commands are in `weights.commands`."""

from weights.commands.checkpoints import app

if __name__ == "__main__":
    app(prog_name="python -m weights")
