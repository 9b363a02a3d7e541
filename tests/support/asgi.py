"""The application around a ranker, without a server: a client that calls it as a server would."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from app import schema
from app.api import rank
from app.api.caller import Bodies, KeyRing
from app.api.middleware import RequestMiddleware, on_http_exception
from app.columns import Words
from app.engine.loading import Loader
from app.service.ranker import LocalRanker
from tests.support import rankers

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
"""A request for the fake engine's checkpoint that uses every field."""


def good(**changes: Any) -> dict[str, Any]:
    """`GOOD` with top-level fields replaced; `...` takes one out."""
    body = copy.deepcopy(GOOD) | changes
    return {name: value for name, value in body.items() if value is not ...}


def in_columns(items: list[dict[str, Any]], **defaults: Any) -> dict[str, list[Any]]:
    """The columns form of posts as objects; a field that some lack gets its default there."""
    missing = {"product_surface": 0, "actions": 0, "dwell_time": 0, "created_at": 0} | defaults
    names = dict.fromkeys(name for item in items for name in item)
    return {name: [item.get(name, missing.get(name)) for item in items] for name in names}


def application(ranker: LocalRanker) -> FastAPI:
    """The ranking endpoints around this ranker, which starts and stops with the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ranker.start()
        await ranker.wait_ready()
        yield
        await ranker.stop(1.0)

    app = FastAPI(lifespan=lifespan, exception_handlers={HTTPException: on_http_exception})
    app.state.ranker, app.state.settings, app.state.words = ranker, ranker.settings, Words()
    app.state.keys = KeyRing(ranker.settings.auth)
    app.state.bodies = Bodies(ranker.settings.limits.buffered_bytes)
    app.include_router(rank.router)
    app.add_middleware(RequestMiddleware, metrics=ranker.metrics, bodies=app.state.bodies)
    return app


@contextmanager
def served(
    engine: Any = None, *, load: Loader | None = None, **groups: Any
) -> Iterator[tuple[TestClient, LocalRanker]]:
    """A client of the application around this engine, by default a `FakeEngine`. `groups` are of its settings."""
    ranker = rankers.create(engine, load=load, **groups)
    with TestClient(application(ranker), raise_server_exceptions=False) as client:
        yield client, ranker
