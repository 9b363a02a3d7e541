"""Coroutine tests run on asyncio, the loop that the service has."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
