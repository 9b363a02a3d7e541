"""Builds hostile bodies of a given size, measures what reading one costs, and searches for the slowest. Sends nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson
from hypothesis import HealthCheck, Phase, given, seed, settings, target
from hypothesis import strategies as st

from app.errors import ServiceError
from app.request import features
from app.request.body import BatchDecoder, decode
from app.request.validate import check
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from loadtest.machine import DEMO
from weights.checkpoint import load_manifest

MANIFEST = load_manifest(DEMO)
VOCABULARY = Vocabulary.of(MANIFEST)
LIMITS = Limits()
SIZES = (2**16, 2**19, LIMITS.max_body_bytes)

POST = b'{"post_id":1,"author_id":1}'
POSTS = b'"candidates":[%b]' % POST
FRAMES = {  # @: the units, in which % is a running number; #: the same number of 1s
    "bytes": b"@", "list": b"[@]", "object": b"{@}", "text": b'"@"', "batch": b'{"requests":[@]}', "user": b'{"user_id":@}',
    "members": b'{"user_id":1,%b,@}' % POSTS,
    "name": b'{"user_id":1,%b,"request_id":"@"}' % POSTS,
    "candidates": b'{"user_id":1,"candidates":[@]}',
    "candidate columns": b'{"user_id":1,"candidates":{"post_id":[@],"author_id":[@]}}',
    "history": b'{"user_id":1,%b,"history":[@]}' % POSTS,
    "both": b'{"user_id":1,"candidates":[@],"history":[@]}',
    "history columns": b'{"user_id":1,%b,"history":{"post_id":[@],"author_id":[@]}}' % POSTS,
    "history members": b'{"user_id":1,%b,"history":{"post_id":[1],"author_id":[1],@}}' % POSTS,
    "surfaces": b'{"user_id":1,"candidates":{"post_id":[#],"author_id":[#],"product_surface":[@]}}',
    "actions": b'{"user_id":1,%b,"history":{"post_id":[#],"author_id":[#],"actions":[@]}}' % POSTS,
    "one item's actions": b'{"user_id":1,%b,"history":[{"post_id":1,"author_id":1,"actions":[@]}]}' % POSTS,
    "one item's action map": b'{"user_id":1,%b,"history":[{"post_id":1,"author_id":1,"actions":{@}}]}' % POSTS,
    "weights": b'{"user_id":1,%b,"weights":{@}}' % POSTS,
    "wanted": b'{"user_id":1,%b,"actions_wanted":[@]}' % POSTS,
}  # fmt: skip
BATCHES = ("batch", "list")  # these are split without reading their values
EVENT = (
    b'{"post_id":9223372036854775809,"author_id":"1","product_surface":3,"actions":["favorite","7"],"dwell_time":12.5}'
)
CANDIDATE = b'{"post_id":9223372036854775809,"author_id":"1","product_surface":3,"created_at":1779990000}'
KEYS = (b"post_id", b"author_id", b"product_surface", b"created_at", b"actions", b"dwell_time", b"user_id", b"history", b"candidates",
        b"weights", b"requests", b"favorite", b"0", b"18", b"x", b"", b"k%")  # fmt: skip
VALUES = (b"0", b"1", b"-1", b"18446744073709551615", b"9223372036854775808", b"1e300", b"0.1", b"1779990000", b"null", b"true", b'""',
          b'"1"', b'"x"', b'"18446744073709551615"', b'"01"', b'"favorite"', b'"dwell_time"', b'"7"', b'"\\u0031"', b'":"', b"[]", b"{}",
          b"[[]]", b'{"favorite":1}', b'{"0":0.1}', b'{"0":1,"favorite":2}', b'["favorite","reply"]', b'["0"]', b"9" * 30,
          b"0." + b"1" * 30, b"1" * 400, "é".encode(), "😀".encode(),
          b"\\n", b"\\u003a", b":", b" ", b"\\ud83d\\ude00", b"x" * 60, b'"%"')  # fmt: skip
MOST_UNITS = (10**9, LIMITS.max_candidates, LIMITS.max_history, 1)
NUMBER = b"%07d"
BATCH = 300  # recipes per hypothesis run


@dataclass(frozen=True)
class Recipe:
    """How to fill a body: `units` in turn, at most `most` of them, then `last`, all inside a frame."""

    frame: str
    units: tuple[bytes, ...]
    last: bytes = b""
    most: int = MOST_UNITS[0]

    def body(self, size: int, max_values: int = LIMITS.max_values) -> bytes:
        """About the longest body with at most `size` bytes and `max_values` values."""
        low, high = 1, size
        while low < high:  # search the number of units
            middle = (low + high + 1) // 2
            if self._fits(middle, size, max_values):
                low = middle
            else:
                high = middle - 1
        return self._written(min(low, self.most))

    def _fits(self, count: int, size: int, max_values: int) -> bool:
        cycle = b",".join([*self.units, b""]).replace(b"%", NUMBER % 0)
        copies = -(-count // len(self.units)) * sum(map(FRAMES[self.frame].count, (b"@", b"#")))
        values, last = 0 if self.frame in BATCHES else _values(cycle), len(self.last) + 200
        return copies * len(cycle) + last < size and copies * values + last < max_values

    def _written(self, count: int) -> bytes:
        units = (list(self.units) * (count // len(self.units) + 1))[:count]
        if any(b"%" in unit for unit in self.units):
            units = [unit.replace(b"%", NUMBER % place) for place, unit in enumerate(units)]
        comma = b"" if self.frame in ("text", "name", "bytes") else b","
        joined = comma.join([*units, self.last] if self.last else units)
        ones = b",".join([b"1"] * (count + bool(self.last)))
        return FRAMES[self.frame].replace(b"#", ones).replace(b"@", joined)


values = st.sampled_from(VALUES)
members = st.builds(lambda key, value: b'"%b":%b' % (key, value), st.sampled_from(KEYS), values)
long = st.builds(lambda value, times: value * times, values, st.sampled_from((2, 8, 64)))
joined = st.lists(values, max_size=19).map(b",".join)
objects = st.builds(
    lambda added, ids: b"{%b}" % b",".join([b'"post_id":1', b'"author_id":1'][:ids] + added),
    st.lists(members, max_size=3), st.integers(0, 2),
)  # fmt: skip
units = st.one_of(
    values, members, long, joined.map(lambda items: b"[%b]" % items), objects, st.sampled_from((EVENT, CANDIDATE))
)
RECIPES = st.builds(
    Recipe, st.sampled_from(list(FRAMES)), st.lists(units, min_size=1, max_size=3).map(tuple), st.just(b"") | units,
    st.sampled_from(MOST_UNITS),
)  # fmt: skip


def _values(piece: bytes) -> int:
    return sum(map(piece.count, (b",", b"[", b"{", b"\\")))


def read(body: bytes) -> None:
    """Read a body as `POST /rank` does in one turn of the event loop. Raises ServiceError."""
    request = check(decode(body, LIMITS), VOCABULARY)
    features.context_of(request, MANIFEST.config)
    features.candidates_of(request, MANIFEST.config)


def split(body: bytes, decoder: BatchDecoder = BatchDecoder(LIMITS.max_batch_requests)) -> None:  # noqa: B008
    """Split a body as `POST /rank/batch` does."""
    decoder.split(body)


def legal() -> bytes:
    """A valid request near the size limits."""
    candidates = LIMITS.max_candidates
    history = min(LIMITS.max_history, (LIMITS.max_values - 5 * candidates - 10) // 8)
    ids = {"post_id": 2**63 + 1, "author_id": str(2**63), "product_surface": 3}
    event, candidate = ids | {"actions": ["favorite", "dwell"], "dwell_time": 12.5}, ids | {"created_at": 1779990000}
    return orjson.dumps({"user_id": 1, "history": [event] * history, "candidates": [candidate] * candidates})


def cost(body: bytes, times: int = 3) -> float:
    """How long a body holds the event loop on the slower path, in units of the time orjson needs for the largest legal request.

    Takes the best of `times` readings of this thread's processor time, in turns, so that a slow or busy machine changes little.
    """
    sides: tuple[Callable[[], object], ...] = (lambda: orjson.loads(LEGAL), lambda: read(body), lambda: split(body))
    best = [1e9] * len(sides)
    gc.disable()  # as in the service
    for _ in range(times):
        for side, call in enumerate(sides):
            started = time.thread_time()
            with suppress(ServiceError):
                call()
            best[side] = min(best[side], time.thread_time() - started)
    gc.enable()
    return max(best[1:]) / best[0]


LEGAL = legal()


def search(size: int, seconds: float, number: int = 0) -> list[tuple[float, Recipe]]:
    """The slowest recipe of each frame at a size with its cost, the slowest first. Another `number` is another search.

    hypothesis draws recipes and changes the most expensive ones. Runs batch after batch until the time is over.
    """
    worst: dict[str, tuple[float, Recipe]] = {}
    until = time.monotonic() + seconds

    def look(recipe: Recipe) -> None:
        if time.monotonic() > until:
            return
        body = recipe.body(size)
        found = cost(body, 1)
        if found > worst.get(recipe.frame, (0.0, recipe))[0]:
            found = cost(body, 7)  # measure again: the machine may have been slow
        target(found)
        worst[recipe.frame] = max(worst.get(recipe.frame, (0.0, recipe)), (found, recipe), key=lambda pair: pair[0])

    while time.monotonic() < until:
        chosen = settings(max_examples=BATCH, database=None, deadline=None, phases=[Phase.generate, Phase.target],
                          suppress_health_check=list(HealthCheck))  # fmt: skip
        seed(number)(chosen(given(RECIPES)(look)))()
        number += 1
    return sorted(worst.values(), key=lambda pair: -pair[0])


def shown(found: float, recipe: Recipe, size: int) -> dict[str, Any]:
    """A result as plain JSON values. One unit of cost is about 1.7 ms on one core of an EPYC."""
    units = [unit.decode() for unit in recipe.units]
    facts = {"frame": recipe.frame, "most": recipe.most, "units": units, "last": recipe.last.decode()}
    return {"bytes": size, "cost": round(found, 2), **facts}
