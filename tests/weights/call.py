"""`python -m weights` in this process. Not a test itself."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from weights.command_line import app


def call(*arguments: object) -> Result:
    """What a command leaves: its `exit_code`, `stdout` and `stderr`, and `output`, which is both."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run(*arguments: object) -> tuple[int, str]:
    """The exit code of a command, and all that it said."""
    result = call(*arguments)
    return result.exit_code, result.stdout + result.stderr
