"""Servers for the soak tests: the real service, or the service around a fake engine with planted faults."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import Any

from loadtest.servers.launch import Server, ranking_server

QUIET: dict[str, Any] = {"logs__level": "error", "environment": {"OMP_NUM_THREADS": "1"}}
FAULTY = (sys.executable, "-m", "loadtest.soak.faulty_server")
FRONTED = (sys.executable, "-m", "loadtest.soak.faulty_fronts")
RAISE, STICKY, HANG = 2**40, 2**40 + 1, 2**40 + 2  # users whose requests break the fake engine


def fake(*faults: str, **settings: Any) -> AbstractContextManager[Server]:
    """The service around the fake engine. `faults` are its arguments; for `settings` see `ranking_server`."""
    command = FRONTED if settings.get("fronts") else FAULTY
    return ranking_server(*command, *faults, **(QUIET | settings))


def real(**settings: Any) -> AbstractContextManager[Server]:
    """The service as a user starts it."""
    return ranking_server(**(QUIET | settings))
