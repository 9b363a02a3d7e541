"""A client of the application around a fake engine, for the tests that set nothing; a server with a module's `SETTINGS`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with pytest.importorskip("tests.app.serving", reason="needs torch").served() as (client, _):
        yield client


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    from tests.app.serving import listening

    with listening(settings=request.module.SETTINGS) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Any) -> Iterator[httpx.Client]:
    from tests.app.serving import port_of

    with httpx.Client(base_url=f"http://127.0.0.1:{port_of(server)}") as client:
        yield client
