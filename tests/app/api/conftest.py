"""Every test of the API runs against one process and against several, unless it says why not: `@pytest.mark.one_process("why")`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import processes as support
from tests.support.log_lines import logs_as_before


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("one_process") is None:
        metafunc.parametrize("processes", ["one", "several"], indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def processes(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whether the services of a test are one process or several."""
    kind: str = getattr(request, "param", "one")
    support.has_several = kind == "several"
    yield kind
    support.has_several = False


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """Each test leaves the log of this process as it was."""
    with logs_as_before():
        yield
