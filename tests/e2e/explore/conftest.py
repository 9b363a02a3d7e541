"""What these tests share: chromium, and a tab of it on the service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.app.api.live import Live


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """One for these files alone: while it runs, its thread can run no event loop of another test."""
    from tests.e2e.explore.explorer import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def tab(browser: Any, server: Live) -> Iterator[Any]:
    """A tab that complains of nothing and asks nobody but the service."""
    from tests.e2e.explore.explorer import Explorer

    with Explorer(browser, server.url, viewport={"width": 1440, "height": 900}) as explorer:
        yield explorer
        assert explorer.complaints == []
        assert {url for url in explorer.asked if not url.startswith((server.url, "about:", "data:"))} == set()
