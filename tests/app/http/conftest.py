"""A client of the application around a fake engine, for the tests that set nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with pytest.importorskip("tests.app.serving", reason="needs torch").served() as (client, _):
        yield client
