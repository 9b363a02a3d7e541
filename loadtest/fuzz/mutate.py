"""Corrupts the values or the bytes of valid bodies, fast and seeded. Does not shrink failing bodies."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import orjson

from loadtest.fuzz.calls import JSON_TYPE, MARK, Call

VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**63, 2**64 - 1, 1.5, 1e300, -1e300, 1e-320, 16, 253_402_300_800, "", "0", "00", "-1",
    "18446744073709551616", "1.0", MARK, f"{MARK}\r\nx: y", "\x00", "\x1b[31m", "\u0663", "\U0001f600", "favorite", "report",
    "999", [], {}, [None], [[]], [MARK], {MARK: 1}, ["favorite"], {"favorite": 1}, {"favorite": MARK}, "9" * 400, MARK * 900,
)  # fmt: skip
KEYS = (
    "user_id", "history", "candidates", "impression_ts", "weights", "top_k", "actions_wanted", "request_id", "post_id",
    "author_id", "actions", "product_surface", "dwell_time", "created_at", "requests", "reply", MARK, "", "__class__", "post_id ",
    "k", "exclude", "exclude_history", "topics", "min_score", "max_age_seconds", "upsert", "delete", "topic",
)  # fmt: skip
PIECES = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"null", b"\\ud800", b"\xff", b"\xef\xbb\xbf", b"\x00", b'"a":1,"a":1,',
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"[" * 300, b"18446744073709551616", b"/*", b"0x1", b"\\u003a",
)  # fmt: skip
TYPES = (b"text/plain", b"application/json; charset=utf-16", b"", b"multipart/form-data; boundary=" + MARK.encode())
HEADERS = (
    (b"x-request-id", MARK.encode() + b"\x1b[0m"),
    (b"x-request-id", b"z" * 5000),
    (b"x-request-timeout-ms", b"60000"),
    (b"x-request-timeout-ms", MARK.encode()),
    (b"x-request-timeout-ms", b"9" * 400),
    (b"x-envoy-expected-rq-timeout-ms", b"nonsense"),
    (b"traceparent", b"00-" + b"0" * 32),
    (b"content-encoding", b"gzip"),
    (b"content-length", b"99999999999"),
    (b"authorization", b"Bearer " + MARK.encode()),
)
MAX_CHANGES = 3


class Mutator:
    """An endless, repeatable source of corrupted calls."""

    def __init__(self, seed: int, corpus: Sequence[bytes]) -> None:
        self.random = random.Random(seed)
        self.corpus = corpus

    def call(self) -> Call:
        """The next call. Mostly values are changed, sometimes bytes, headers or paths."""
        choice, random = self.random.random(), self.random
        body = random.choice(self.corpus)
        if choice < 0.08:
            return Call(body)
        if choice < 0.60:
            return Call(orjson.dumps(self.corrupted(orjson.loads(body))))
        if choice < 0.85:
            return Call(self.cut(body))
        if choice < 0.92:
            return Call(body, headers=(JSON_TYPE, random.choice(HEADERS)))
        if choice < 0.94:
            return Call(body, headers=((b"content-type", random.choice(TYPES)),))
        if choice < 0.98:
            items = b",".join([body, orjson.dumps(self.corrupted(orjson.loads(body)))])
            return Call(b'{"requests":[%b]}' % items if random.random() < 0.5 else b"[%b]" % items, path="/rank/batch")
        path = f"/{random.choice(('', 'rank/', 'admin/', '..%2f', MARK))}{random.getrandbits(40):x}"
        return Call(
            body, path=path, method=random.choice(("GET", "POST", "PUT", "M" + format(random.getrandbits(20), "X")))
        )

    def call_to(self, path: str, headers: tuple[tuple[bytes, bytes], ...]) -> Call:
        """The next call for another endpoint: a body as it is, or with changed values or bytes."""
        choice, body = self.random.random(), self.random.choice(self.corpus)
        if choice > 0.2:
            body = orjson.dumps(self.corrupted(orjson.loads(body))) if choice < 0.7 else self.cut(body)
        return Call(body, path=path, headers=headers)

    def _value(self) -> Any:
        return copy.deepcopy(self.random.choice(VALUES))

    def corrupted(self, value: Any) -> Any:
        """The JSON value with up to three places changed."""
        for _ in range(self.random.randint(1, MAX_CHANGES)):
            value = self._changed(value)
        return value

    def _changed(self, value: Any) -> Any:
        """Replace, remove or add a value in one place."""
        random = self.random
        inner = [key for key, item in _items(value) if isinstance(item, dict | list)]
        if inner and random.random() < 0.7:
            key = random.choice(inner)
            value[key] = self._changed(value[key])
        elif isinstance(value, dict):
            key = random.choice(KEYS if not value or random.random() < 0.4 else list(value))
            if random.random() < 0.2:
                value.pop(key, None)
            else:
                value[key] = self._value()
        elif isinstance(value, list):
            if value and random.random() < 0.7:
                value[random.randrange(len(value))] = self._value()
            else:
                value.append(self._value())
        else:
            return self._value()
        return value

    def cut(self, body: bytes) -> bytes:
        """The body with some bytes overwritten, inserted, removed or doubled."""
        random, corrupted = self.random, bytearray(body)
        for _ in range(random.randint(1, MAX_CHANGES)):
            place = random.randrange(len(corrupted) + 1)
            match random.randrange(4):
                case 0:
                    corrupted[place:place] = random.choice(PIECES)
                case 1:
                    corrupted[place : place + 1] = bytes([random.randrange(256)])
                case 2:
                    del corrupted[place : place + random.randint(1, 40)]
                case _:
                    corrupted[place:place] = corrupted[place : place + random.randint(1, 40)]
        return bytes(corrupted)


def _items(value: Any) -> Any:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()
