"""Names below the root of the nightly turns: `weights.lab.loop` writes there, and `weights.forget`, which imports no lab, removes users.

Everything that a turn has made is in a directory of the turn's name, in each of `LOGS`, `TURNS` and `CHECKPOINTS`.
"""

from __future__ import annotations

LOGS, TURNS, CHECKPOINTS = "log", "turns", "checkpoints"
"""The directories below the root: joined nights, reports, and checkpoints, by the name of the turn."""
WORK, OUTCOME_NAME = "work", "outcome.json"
"""In a turn's directory of `TURNS`: what it works with, and what it has decided, which a turn has once it is finished."""
IMPRESSIONS, CONTEXTS = "impressions", "contexts"
"""The directories of a joined night, as of every log that has contexts as served."""
