"""The search for slow bodies finds what is planted, in a body of the size that was asked for."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from app.request import strict_json
from loadtest.fuzz.slowest import LEGAL, cost, search

SIZE = 2**16
SLOW = 8.0


def parse(body: bytes) -> Any:
    """Strict JSON, with a planted word that takes long, in the unit of costs: memory and processor are not slowed alike by neighbours."""
    for _ in range(20 if b"dwell_time" in body else 0):
        orjson.loads(LEGAL)
    return strict_json.parse(body)


def test_a_slow_word_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search(SIZE, 1.0)[0][0] < SLOW
    monkeypatch.setattr("app.request.body.parse", parse)
    for seconds in (1.0, 2.0, 4.0, 16.0):  # on a busy machine it tries fewer bodies in a second
        found, recipe = search(SIZE, seconds)[0]
        if found > SLOW:
            break
    body = recipe.body(SIZE)
    assert found > SLOW
    assert b"dwell_time" in body
    assert len(body) <= SIZE
    assert cost(body) > SLOW
