"""Where calls come from: hypothesis strategies for bodies, and schemathesis from `/openapi.json`. Slower than `mutate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode

from loadtest.fuzz.bodies import nearly_valid, valid
from loadtest.fuzz.calls import JSON_TYPE, Call

BATCH = 50  # examples drawn at a time


def drawn(strategy: SearchStrategy[Any], number: int, count: int = BATCH) -> list[Any]:
    """That many examples of a strategy; another number gives others."""
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def from_hypothesis(number: int) -> Iterator[Call]:
    """Endless bodies that are nearly right."""
    while True:
        for value in drawn(nearly_valid(), number):
            yield Call(_written(value))
        number += 1


def from_schemathesis(document: dict[str, Any], number: int) -> Iterator[Call]:
    """Endless calls of the ranking endpoints, that keep to the document and that do not."""
    schema = schemathesis.openapi.from_dict(document)
    posts = [found.ok() for found in schema.get_all_operations() if found.ok().method == "post"]  # type: ignore[union-attr]
    while True:
        for operation in posts:
            for mode in GenerationMode:
                for case in drawn(operation.as_strategy(generation_mode=mode), number):
                    yield _from_case(case)
        number += 1


def _from_case(case: Any) -> Call:
    given: dict[str, Any] = case.as_transport_kwargs(base_url="http://fuzz")
    raw = given.get("data", b"")
    body = raw if isinstance(raw, bytes) else str(raw).encode("utf-8", "surrogatepass")
    if "json" in given:
        body = _written(given["json"])
    names = ((str(name).lower(), str(value)) for name, value in given["headers"].items())
    headers = tuple(
        (name.encode(), value.encode("utf-8", "replace")) for name, value in names if name != "content-type"
    )
    return Call(body, path=case.formatted_path, method=case.method.upper(), headers=(JSON_TYPE, *headers))


def corpus(number: int) -> list[bytes]:
    """Good bodies, small ones, for the mutator."""
    return [_written(value) for value in drawn(valid, number)]


def _written(value: Any) -> bytes:
    """As JSON, also where an integer is too long for orjson."""
    return json.dumps(value, separators=(",", ":")).encode()
