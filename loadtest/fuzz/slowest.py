"""`python -m loadtest.fuzz.slowest`: searches for the bodies that hold the event loop longest, of each size, and prints the worst.

A genetic search: recipes of bodies are changed at random and mixed, and those that take long are kept. Nothing is sent anywhere.
"""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated

import orjson
import typer

from app.errors import ServiceError
from app.request import features
from app.request.body import BatchDecoder, decode
from app.request.validate import check
from app.request.vocabulary import Vocabulary
from app.settings import Limits
from loadtest.machine import ROOT
from weights.checkpoint import load_manifest

MANIFEST = load_manifest(ROOT / "weights/demo")
VOCABULARY = Vocabulary.of(MANIFEST)
LIMITS = Limits()
SIZES = (2**16, 2**19, LIMITS.max_body_bytes)
SEPARATORS = b",[{\\"

POST = b'{"post_id":1,"author_id":1}'
POSTS = b'"candidates":[%b]' % POST
FRAMES = {  # @: the units, in which % is a running number; #: as many ones
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
BATCHES = ("batch", "list")  # they are split without their values being read
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
POPULATION = 30
FRESH_SHARE = 0.15


@dataclass(frozen=True)
class Recipe:
    """A body that fills a size: the units in turn, at most so many, then the last one, all of them in a frame."""

    frame: str
    units: tuple[bytes, ...]
    last: bytes = b""
    most: int = MOST_UNITS[0]

    def body(self, size: int, max_values: int = LIMITS.max_values) -> bytes:
        """The longest body of at most that many bytes and values, nearly."""
        low, high = 1, size
        while low < high:  # how many units
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


def _values(piece: bytes) -> int:
    return sum(map(piece.count, (b",", b"[", b"{", b"\\")))


def read(body: bytes) -> None:
    """What `POST /rank` does with a body in one turn of the event loop. Raises ServiceError."""
    request = check(decode(body, LIMITS, VOCABULARY), VOCABULARY)
    features.context_of(request, MANIFEST.config)
    features.candidates_of(request, MANIFEST.config)


def split(body: bytes, decoder: BatchDecoder = BatchDecoder(LIMITS.max_batch_requests)) -> None:  # noqa: B008
    """What `POST /rank/batch` does with one."""
    decoder.split(body)


def legal() -> bytes:
    """A request of about the largest size that is served."""
    candidates = LIMITS.max_candidates
    history = min(LIMITS.max_history, (LIMITS.max_values - 5 * candidates - 10) // 8)
    ids = {"post_id": 2**63 + 1, "author_id": str(2**63), "product_surface": 3}
    event, candidate = ids | {"actions": ["favorite", "dwell"], "dwell_time": 12.5}, ids | {"created_at": 1779990000}
    return orjson.dumps({"user_id": 1, "history": [event] * history, "candidates": [candidate] * candidates})


def cost(body: bytes, times: int = 3) -> float:
    """How long a body holds the event loop, on the worse path, in units of what orjson takes to read the largest legal request.

    Processor time of this thread, of each the best of some times in turn: the same on a slow machine and beside other work.
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


def search(size: int, seconds: float, seed: int = 0) -> list[tuple[float, Recipe]]:
    """The slowest recipe of each frame at that size with its cost, the slowest first."""
    rng, until = random.Random(seed), time.monotonic() + seconds
    best: dict[str, tuple[float, Recipe]] = {}
    crowd = [(0.0, _fresh(rng)) for _ in range(POPULATION)]
    while time.monotonic() < until:
        parents = sorted([*crowd, *best.values()], key=lambda pair: -pair[0])[:POPULATION]
        recipes = [_child(rng, [recipe for _, recipe in parents]) for _ in range(POPULATION)]
        crowd = []
        for recipe in recipes:
            body = recipe.body(size)
            found = cost(body, 1)
            if found > best.get(recipe.frame, (0.0, recipe))[0]:
                found = cost(body, 7)  # was it the machine?
            crowd.append((found, recipe))
            best[recipe.frame] = max(best.get(recipe.frame, crowd[-1]), crowd[-1], key=lambda pair: pair[0])
    return sorted(best.values(), key=lambda pair: -pair[0])


def _fresh(rng: random.Random) -> Recipe:
    return Recipe(
        rng.choice(list(FRAMES)), tuple(_unit(rng) for _ in range(rng.randint(1, 3))), rng.choice((b"", _unit(rng))),
        rng.choice(MOST_UNITS),
    )  # fmt: skip


def _unit(rng: random.Random) -> bytes:
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(VALUES)
    if kind < 0.4:
        return rng.choice((EVENT, CANDIDATE))
    if kind < 0.45:
        return b"[%b]" % b",".join(rng.choices(VALUES, k=rng.randint(0, 19)))
    if kind < 0.6:
        return b'"%b":%b' % (rng.choice(KEYS), rng.choice(VALUES))
    names = {b"post_id", b"author_id", *rng.choices(KEYS, k=rng.randint(0, 3))} - {rng.choice(KEYS)}
    return b"{%b}" % b",".join(b'"%b":%b' % (name, rng.choice(VALUES)) for name in sorted(names))


def _child(rng: random.Random, parents: list[Recipe]) -> Recipe:
    if rng.random() < FRESH_SHARE:
        return _fresh(rng)
    recipe, other = rng.choice(parents), rng.choice(parents)
    units = list(recipe.units)
    place = rng.randrange(len(units))
    match rng.randrange(8):
        case 0:
            return replace(recipe, frame=rng.choice(list(FRAMES)))
        case 1:
            return replace(recipe, last=rng.choice((b"", _unit(rng), *other.units)))
        case 2:
            return replace(recipe, most=rng.choice(MOST_UNITS))
        case 3:
            units[place] = rng.choice((_unit(rng), *other.units))
        case 4:
            units.append(rng.choice((_unit(rng), *other.units)))
        case 5 if len(units) > 1:
            del units[place]
        case _:
            units[place] = _changed(rng, units[place])
    return replace(recipe, units=tuple(units))


def _changed(rng: random.Random, unit: bytes) -> bytes:
    """Some value in it is another one, or longer."""
    old, new = rng.choice([value for value in VALUES if value in unit] or [b""]), rng.choice(VALUES)
    if old and rng.random() < 0.7:
        return unit.replace(old, new, 1)
    start = rng.randrange(len(unit) + 1)
    return (unit[:start] + new * rng.choice((1, 1, 8, 64)) + unit[start:])[:4096]


def main(
    seconds: Annotated[float, typer.Option(help="Time for all sizes together.")] = 300.0,
    seed: Annotated[int, typer.Option(help="Another seed, another search.")] = 0,
    worst: Annotated[int, typer.Option(help="How many to print of each size.")] = 10,
) -> None:
    """One JSON line a recipe, the slowest first. The unit of their costs is about 1.7 ms on one core of an EPYC."""
    for size in SIZES:
        for found, recipe in search(size, seconds / len(SIZES), seed)[:worst]:
            shown = {"frame": recipe.frame, "most": recipe.most}
            shown |= {"units": [unit.decode() for unit in recipe.units], "last": recipe.last.decode()}
            print(json.dumps({"bytes": size, "cost": round(found, 2)} | shown, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    typer.run(main)
