"""For all tests: how long a reliability test lasts, and what a shared machine needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import structlog

# Read when torch is loaded: two of its threads that spin while they wait for each other take twenty times the processor time of the work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# The commands that tests start are to buffer their output as a user's do: without buffers, faults at the end of a command stay unseen.
os.environ.pop("PYTHONUNBUFFERED", None)
hypothesis.settings.register_profile("shared machine", deadline=None)  # a neighbour's load is no fault of an example
hypothesis.settings.load_profile("shared machine")

# By default a traceback is drawn with the source of every frame, which takes longer than most tests.
plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[structlog.processors.add_log_level, plain])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--duration", type=float, default=3.0, help="seconds that each test of tests/reliability loads its server"
    )


@pytest.fixture(scope="session")
def duration(request: pytest.FixtureRequest) -> float:
    """Seconds of load in a reliability test: a few in `make test`, a minute in `make soak`."""
    return float(request.config.getoption("--duration"))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True, scope="module")
def threads_of_torch() -> Iterator[None]:
    """An engine sets them for the whole process: each file leaves as many as it has found, for bits depend on them."""
    torch = sys.modules.get("torch")
    before = 0 if torch is None else torch.get_num_threads()
    yield
    if torch is not None:
        torch.set_num_threads(before)
