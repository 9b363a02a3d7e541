"""Sources of calls: hypothesis strategies for bodies, and schemathesis from `/openapi.json`. Slower than `mutate`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode

from app.http.admin import POSTS, RELOAD
from loadtest.fuzz.bodies import changed_posts, nearly_valid, reloads, valid, wanted_posts, wanted_scores
from loadtest.fuzz.calls import JSON_TYPE, Call
from loadtest.fuzz.mutate import Mutator

BATCH = 50  # examples drawn at a time


def drawn(strategy: SearchStrategy[Any], number: int, count: int = BATCH) -> list[Any]:
    """`count` examples of a strategy. Another number gives other examples."""
    found: list[Any] = []
    chosen = settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate],
                      suppress_health_check=list(HealthCheck))  # fmt: skip

    def collect(value: Any) -> None:
        found.append(value)

    seed(number)(chosen(given(strategy)(collect)))()
    return found


def apart(source: Callable[..., Iterator[Call]], *arguments: Any) -> Iterator[Call]:
    """The calls of an endless source, made in another process, so that memory kept by hypothesis does not count as the service's, which
    may run in this process. Raises EOFError if the other process has ended."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    context.Process(target=_send, args=(theirs, source, arguments), daemon=True).start()
    theirs.close()
    while True:
        yield ours.recv()


def _send(pipe: Connection, source: Callable[..., Iterator[Call]], arguments: tuple[Any, ...]) -> None:
    with suppress(BrokenPipeError):  # the reader has gone
        for call in source(*arguments):  # the pipe holds a few of them
            pipe.send(call)


def from_hypothesis(number: int) -> Iterator[Call]:
    """Endless calls with nearly valid bodies."""
    while True:
        for value in drawn(nearly_valid(), number):
            yield Call(_written(value))
        number += 1


def from_schemathesis(document: dict[str, Any], number: int) -> Iterator[Call]:
    """Endless calls of the POST endpoints in the document, both valid and invalid."""
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


def from_pages(number: int, token: str) -> Iterator[Call]:
    """Endless calls of /retrieve, /recommend and the admin port, nine in ten of the latter with the token."""
    pages = {"/retrieve": wanted_posts, "/recommend": wanted_scores, POSTS: changed_posts, RELOAD: reloads}
    mutators = {path: Mutator(number, corpus(number, bodies)) for path, bodies in pages.items()}
    paths, random = list(pages), Random(number)
    while True:
        path = random.choices(paths, (12, 12, 1, 0.2))[0]
        bearer = () if random.random() < 0.1 else ((b"authorization", b"Bearer " + token.encode()),)
        admin = ((b"host", b"localhost"), *bearer) if path in (POSTS, RELOAD) else ()
        yield mutators[path].call_to(path, (JSON_TYPE, *admin))


@cache
def corpus(number: int, bodies: SearchStrategy[Any] = valid) -> Sequence[bytes]:
    """Small valid bodies for the mutator."""
    return tuple(_written(value) for value in drawn(bodies, number))


def _written(value: Any) -> bytes:
    """The value as JSON, even with an integer too large for orjson."""
    return json.dumps(value, separators=(",", ":")).encode()
