"""What these tests share: a service with the demo and its posts."""

from __future__ import annotations

from collections.abc import Iterator

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
