"""No body holds the event loop for long, whatever it holds: hostile shapes, and the worst that a search has found."""

from __future__ import annotations

import pytest

from loadtest.fuzz.slowest import LEGAL, LIMITS, SIZES, Recipe, cost, read

MOST = 7.0  # × orjson's reading of the largest legal request: 10 ms where that takes 1.4
POST = b'{"post_id":1,"author_id":1}'
EVENT = b'{"post_id":9223372036854775809,"author_id":"9223372036854775808","actions":["favorite","dwell"],"dwell_time":12.5}'
BAD_ID, BAD_TYPE = b'{"post_id":"01","author_id":1}', b'{"post_id":[],"author_id":1}'
MAP = b'{"favorite":0.123,%b}' % b",".join(b'"%d":0.123' % column for column in range(1, 18))
MAPPED = b'{"post_id":1,"author_id":1,"actions":%b}' % MAP

HOSTILE = {
    "bad ids": Recipe("candidate columns", (b"-1",)),
    "bad text ids": Recipe("candidate columns", (b'"x"',)),
    "a bad text id at the end": Recipe("candidate columns", (b'"1"',), b'"x"'),
    "ids of both kinds": Recipe("history columns", (b"0", b'"1"', b"1"), b"null"),
    "long integers": Recipe("candidate columns", (b"1" * 4000,)),
    "integers as long as they may be": Recipe("candidate columns", (b"1" * 128,)),
    "a long integer": Recipe("user", (b"9" * 4000,)),
    "empty objects": Recipe("candidates", (b"{}",)),
    "unknown fields": Recipe("candidates", (b'{"post_id":1,"author_id":1,"dwel":1}',)),
    "an unknown field at the end": Recipe("candidates", (POST,), b'{"post_id":1,"author_id":1,"x":1}'),
    "many keys": Recipe("object", (b'"k%":0',)),
    "many weights": Recipe("weights", (b'"k%":0',)),
    "many equal weights": Recipe("weights", (b'"favorite":0',)),
    "many wanted": Recipe("wanted", (b'"favorite"',)),
    "equal names": Recipe("one item's actions", (b'"0"',)),
    "bad actions": Recipe("one item's actions", (b'"x"',)),
    "a bad action at the end": Recipe("one item's actions", (b'"reply"',), b'"x"'),
    "action maps": Recipe("history", (b'{"post_id":1,"author_id":1,"actions":{"favorite":1,"reply":2}}',)),
    "full action maps": Recipe("history", (MAPPED,)),
    "full action maps, a bad id at the end": Recipe("history", (MAPPED,), BAD_ID, LIMITS.max_history - 1),
    "full action maps, one action twice": Recipe("actions", (MAP,), b'{"favorite":1,"0":1}'),
    "empty actions": Recipe("actions", (b"[]",)),
    "a bad id at the end": Recipe("history", (EVENT,), BAD_ID, LIMITS.max_history - 1),
    "a bad type at the end": Recipe("history", (EVENT,), BAD_TYPE, LIMITS.max_history - 1),
    "a bad type at the end of too many": Recipe("history", (EVENT,), BAD_TYPE),
    "ten bad ids": Recipe("history", (*[EVENT] * 203, BAD_ID), most=LIMITS.max_history),
    "floats": Recipe("history members", (b'"dwell_time":[0.1]',)),
    "colons": Recipe("name", (b":",)),
    "escaped colons": Recipe("name", (b"\\u003a",)),
    "line feeds and one escaped colon": Recipe("name", (b"\\n",), b"\\u003a"),
    "two bytes a character": Recipe("name", ("é".encode(),)),
    "a batch of numbers": Recipe("batch", (b"0",)),
    "a batch of lists": Recipe("batch", (b"[[]]",)),
} | {  # what `python -m loadtest.fuzz.slowest` has found, each slower than any above when it was
    "long numbers of zeros, and an escape": Recipe("candidate columns", (b"17799" + b"0" * 70,), b'"\\u0031"'),
    "the same in the history": Recipe("history columns", (b"17799177999" + b"0" * 73,), b'"\\u0031"'),
    "the same as actions": Recipe("one item's actions", (b"17799" + b"0" * 88, b'{"1e300":0.1}'), b'"\\u0031"'),
    "the same as a batch": Recipe("batch", (b"17799" + b"0" * 88, b'{"1e300":0.1}'), b'"\\u0031"'),
    "many odd columns": Recipe("history members", (b'"k%":"01"', b'"k%":"1"')),
    "short events, the last one wrong": Recipe("history", (b'{"author_id":"1","post_id":1}',), b'{"author_id":"x","post_id":1}'),
    "short candidates, the last one wrong": Recipe("candidates", (b'{"author_id":"1","post_id":1}',), b'{"post_id":[[]]}'),
    "columns of objects": Recipe("candidate columns", (b'{"author_id":{"0":0.1},"post_id":"1"}',), b'{"author_id":"\\u0031"}'),
    "nested objects as candidates": Recipe("candidates", (b'{"actions":"01","author_id":9223372036854775808,"post_id":{"1":0.1}}',)),
    "objects as actions": Recipe("one item's actions", (b'{"0":0.1}', b'{"18":[],"x":{"0":1,"favorite":2}}')),
} | {
    f"{frame} of {piece.decode()}": Recipe(frame, (piece,))
    for frame in ("bytes", "list", "text")
    for piece in (b"[", b"[]", b"[[[]]]", b'{"a":', b"\\u003a", b"0,", b"{},")
}  # fmt: skip


def is_in_time(body: bytes) -> bool:
    """The best of some tries, since others may use the machine; most bodies need one."""
    return any(cost(body, times) < MOST for times in (1, 3, 5, 5, 5, 5))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("recipe", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_body_holds_the_loop(recipe: Recipe, size: int) -> None:
    for max_values in (LIMITS.max_values, 10**9):
        assert is_in_time(recipe.body(size, max_values))


def test_the_largest_legal_request_is_read_in_time() -> None:
    read(LEGAL)
    assert is_in_time(LEGAL)


def test_without_its_guard_a_body_would_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with itself: how much dearer than orjson it is depends on the Python."""
    body = HOSTILE["many weights"].body(SIZES[-1], max_values=10**9)
    guarded = cost(body, times=5)
    monkeypatch.setattr("app.request.body.check_cost", lambda *_: None)
    assert cost(body, times=5) > 10 * guarded
