"""What tests of the pages share: the demo's service with its corpus, and a tab of chromium, imported where a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.process import DEMO, ROOT, Server, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    weights = ROOT / "weights"
    with serving(
        DEMO, threads=1, retrieval__checkpoint=weights / "demo-towers", retrieval__corpus=weights / "demo-posts"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.e2e.explorer import api, started

    with api.sync_playwright() as playwright, started(playwright) as browser:
        yield browser


@pytest.fixture(scope="module")
def tab(browser: Any, server: Server) -> Iterator[Any]:
    from tests.e2e.explorer import Explorer

    explorer = Explorer(browser, server.url, viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    yield explorer
    explorer.context.close()
    assert explorer.complaints == []
    assert {url for url in explorer.asked if not url.startswith((server.url, "about:", "data:"))} == set()
