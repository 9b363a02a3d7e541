"""Bodies of requests that were good once, and odd ways to write an id. Not a test itself."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from app.errors import InvalidRequest, MalformedJson, ServiceError
from loadtest.fuzz.mutate import Mutator
from loadtest.fuzz.sources import corpus

USER_IDS: dict[bytes, type[ServiceError] | None] = {
    b"0": None, b"-0": None, b"18446744073709551615": None, b'"18446744073709551615"': None, b'"\\u0031"': None,
    b"18446744073709551616": InvalidRequest, b'"18446744073709551616"': InvalidRequest, b"1.0": InvalidRequest,
    b"-0.0": InvalidRequest, b"1e2": InvalidRequest, b"true": InvalidRequest, b"null": InvalidRequest, b'"01"': InvalidRequest,
    b'"1 "': InvalidRequest, b'"\\u0661"': InvalidRequest, b"9" * 300: InvalidRequest,
    b"-1": InvalidRequest, b"1.5": InvalidRequest, b'""': InvalidRequest, b'"+7"': InvalidRequest, b'" 7"': InvalidRequest,
    b'"1e3"': InvalidRequest, b'"1\\u00002"': InvalidRequest, b"[1]": InvalidRequest, b'"' + b"9" * 5000 + b'"': InvalidRequest,
    b"9" * 5000: MalformedJson, b"1e999": MalformedJson, b"01": MalformedJson, b"NaN": MalformedJson, b"1.": MalformedJson,
    b'"\\ud800"': MalformedJson, b'"\xff"': MalformedJson, b'"\xed\xa0\x80"': MalformedJson, b'"1\x00"': MalformedJson,
    b'1,"user_id":1': MalformedJson, b'1,"\\u0075ser_id":1': MalformedJson, b'1,"weights":{"0":1,"0":1}': MalformedJson,
    b'1,"weights":{"0":1,"\\u0030":1}': MalformedJson,
    b'1,"request_id":":","user_id":1': MalformedJson, b'1,"request_id":"\\u003a","user_id":1': MalformedJson,
    b'1,"request_id":":"': None, b'1,"request_id":"\\u003A\\/"': None, b'1,"request_id":"\\\\u003a"': InvalidRequest,
}  # fmt: skip


def doubled(raw: bytes, chance: random.Random) -> bytes:
    """The body with one scalar member written twice."""
    member = chance.choice(list(re.finditer(rb'"\w+":(?:\d+|"\w*")', raw)))
    return raw[: member.start()] + member[0] + b"," + raw[member.start() :]


def mutated(seed: int, good_ones: Sequence[bytes] = ()) -> Iterator[bytes]:
    """Endless bodies that were good once: changed values, changed bytes, doubled keys."""
    good_ones, chance = list(good_ones) or corpus(seed), random.Random(seed)
    mutator = Mutator(seed, good_ones)
    while True:
        yield mutator.call().body
        yield doubled(chance.choice(good_ones), chance)
