"""What these tests share: a service with the demo and its posts, and a tab of chromium on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.app.api.live import Live, demo


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The demo with its towers and posts. No test changes what it serves."""
    with demo(tmp_path_factory.mktemp("demo")) as live:
        yield live


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.e2e.explorer import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def tab(browser: Any, server: Live) -> Iterator[Any]:
    """A tab that complains of nothing and asks nobody but the service."""
    from tests.e2e.explorer import Explorer

    with Explorer(browser, server.url, viewport={"width": 1440, "height": 900}) as explorer:
        yield explorer
        assert explorer.complaints == []
        assert {url for url in explorer.asked if not url.startswith((server.url, "about:", "data:"))} == set()
