"""Coroutine tests run on asyncio, the loop that the service has; a second try of a test has as much time as the first."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """pytest-timeout begins once for all tries, and stops at the first failure: a second try could hang for ever."""
    if getattr(item, "execution_count", 1) > 1:
        from pytest_timeout import _get_item_settings

        item.ihook.pytest_timeout_set_timer(item=item, settings=_get_item_settings(item))
