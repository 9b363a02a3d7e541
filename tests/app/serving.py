"""The whole application around a fake engine, and requests that are right. Not a test itself."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.testclient import TestClient

from app.factory import create_app
from app.metrics import Metrics
from app.service import Policies, RankingService
from app.settings import Settings
from tests.app.fakes import FakeEngine, loader

GOOD: dict[str, Any] = {
    "user_id": "1868434417286410240",
    "history": [
        {"post_id": 17, "author_id": 5, "actions": ["favorite", "2"], "product_surface": 3, "dwell_time": 12.5},
        {"post_id": "18", "author_id": 0, "actions": {"reply": 0.5}},
        {"post_id": 0, "author_id": 9},
    ],
    "candidates": [
        {"post_id": 90, "author_id": 7, "product_surface": 15, "created_at": 1779990000},
        {"post_id": "9223372036854775809", "author_id": "18446744073709551615"},
        {"post_id": 0, "author_id": 0},
    ],
    "impression_ts": 1780000000,
    "weights": {"favorite": 1.0, "report": -20},
    "top_k": 3,
    "actions_wanted": ["report", "favorite"],
    "request_id": "page-7",
}


def good(**changes: Any) -> dict[str, Any]:
    """A valid request with top-level fields replaced; `...` takes one out."""
    body = copy.deepcopy(GOOD) | changes
    return {name: value for name, value in body.items() if value is not ...}


@contextmanager
def served(
    engine: Any = None, settings: Settings | None = None, policies: Policies | None = None
) -> Iterator[tuple[TestClient, RankingService]]:
    """A client of an application that is ready. Faults of the server come back as replies."""
    service = RankingService(loader(engine or FakeEngine()), policies or Policies(), Metrics())
    app = create_app(settings or Settings(), service)
    with TestClient(app, raise_server_exceptions=False) as client:
        for _ in range(500):
            if client.get("/readyz").status_code == 200:
                break
            time.sleep(0.01)
        yield client, service
