"""Every command of `python -m weights` and `phoenix-ranker`: those on checkpoints and corpora, and the lab's."""

from weights.commands import checkpoints, corpus
from weights.commands.console import app
from weights.lab.commands import evaluation, joining, loop, scoring, towers, training

__all__ = [
    "app",
    "checkpoints",
    "corpus",
    "evaluation",
    "joining",
    "loop",
    "scoring",
    "towers",
    "training",
]  # each adds its commands to `app`
