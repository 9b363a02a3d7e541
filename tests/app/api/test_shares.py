"""What the requests of all keys share, over HTTP: one key that takes all it can get leaves room to the others."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.settings import Auth, Limits
from app.shares import Shares
from tests.app.api.live import BODY, Live, head, listening, read_reply, until
from tests.support.bodies import good
from tests.support.fakes import FakeEngine, Gate

NAMES = ("greedy", "modest")
AUTH = Auth(keys={name: hashlib.sha256(name.encode()).hexdigest() for name in NAMES})  # type: ignore[dict-item]


def of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


@contextmanager
def stalled(live: Live, size: int, count: int = 70, **headers: str) -> Iterator[None]:
    """Uploads of this many bytes that lack their last byte."""
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(closing(live.connect()))
            client.sendall(head(headers=headers, length=size) + (size - 1) * b" ")
        yield


def send(live: Live, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    with live.connect(20) as client:
        client.sendall(head(path=path, headers=headers, length=len(body)) + body)
        status, _, content = read_reply(client)
        return status, content


def test_uploads_of_one_key_that_stall_leave_room_to_another() -> None:
    with listening(auth=AUTH, limits=Limits(max_body_bytes=100_000)) as live:
        with stalled(live, 99_000, **of("greedy")):
            until(lambda: send(live, "/rank", 90_000 * b" ", of("greedy"))[0] == 429)
            for size in (len(BODY), 90_000):
                assert send(live, "/rank", BODY.ljust(size), of("modest"))[0] == 200
        until(lambda: send(live, "/rank", BODY.ljust(90_000), of("greedy"))[0] == 200)


@pytest.mark.parametrize("size", [60_000, 99_000])
def test_uploads_that_stall_leave_room_for_one_small_body(size: int) -> None:
    room = Limits(max_body_bytes=100_000)
    with (
        listening(limits=room) as live,
        stalled(live, size, 130),
        stalled(live, 1_500, 70),
        stalled(live, len(BODY), 70),
    ):
        until(lambda: send(live, "/rank", BODY.ljust(70_000), {})[0] == 429)
        for _ in range(20):
            assert send(live, "/rank", BODY, {})[0] == 200


def test_batches_of_one_key_leave_room_to_another() -> None:
    gate = Gate()
    one = json.dumps([good(candidates=[{"post_id": n + 1, "author_id": 1} for n in range(8)])] * 4).encode()
    with listening(FakeEngine(before=gate), auth=AUTH, limits=Limits(max_candidates=8)) as live:  # 128 in all batches
        results: dict[str, list[bytes]] = {name: [] for name in NAMES}

        def call(name: str) -> None:
            results[name].append(send(live, "/rank/batch", one, of(name))[1])

        greedy = [threading.Thread(target=call, args=("greedy",)) for _ in range(8)]
        modest = threading.Thread(target=call, args=("modest",))
        try:
            for thread in greedy:
                thread.start()
            until(lambda: live.figure("ranker_queue_candidates") >= 64)  # half of the room is what one key may hold
            modest.start()
            until(lambda: live.figure("ranker_queue_candidates") >= 64 + 32)
        finally:
            gate.opened.set()
        for thread in (*greedy, modest):
            thread.join(20)
        refused = {name: sum(content.count(b"overloaded") for content in results[name]) > 0 for name in NAMES}
        assert refused == {"greedy": True, "modest": False}


def test_explanations_of_one_key_leave_turns_to_another() -> None:
    body = json.dumps(good(explain=[90], history=good()["history"][:1])).encode()
    with listening(auth=AUTH, explore={"enabled": True}) as live:
        stop = threading.Event()
        statuses: dict[str, list[int]] = {name: [] for name in NAMES}

        def loop() -> None:
            while not stop.is_set():
                statuses["greedy"].append(send(live, "/explain", body, of("greedy"))[0])

        threads = [threading.Thread(target=loop) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: 429 in statuses["greedy"])
            statuses["modest"] = [send(live, "/explain", body, of("modest"))[0] for _ in range(5)]
        finally:
            stop.set()
            for thread in threads:
                thread.join(20)
        assert set(statuses["modest"]) == {200}
        assert 200 in statuses["greedy"]


def test_the_wait_for_a_turn_to_explain_is_waiting_in_the_queue() -> None:
    body = json.dumps(good(explain=[90], history=good()["history"][:1])).encode()
    with listening(FakeEngine(before=lambda items: time.sleep(0.1)), auth=AUTH, explore={"enabled": True}) as live:
        with ThreadPoolExecutor() as pool:
            sent = [pool.submit(send, live, "/explain", body, of(name)) for name in NAMES]
            waits = [json.loads(each.result()[1])["timings_ms"]["queue"] for each in sent]
        assert max(waits) > 150, "each takes two turns of the engine"


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 400), st.booleans())))
def test_a_newcomer_finds_room_whatever_others_hold(steps: list[tuple[str, int, bool]]) -> None:
    shares = Shares(1000, 0.5)
    held: dict[str, list[int]] = {}
    for key, count, gives_back in steps:
        if gives_back and held.get(key):
            shares.take(key, -held[key].pop())
        elif shares.has_room(key, count):
            shares.take(key, count)
            held.setdefault(key, []).append(count)
        assert shares.used == sum(map(sum, held.values())) <= 1000
    keys = sum(bool(counts) for counts in held.values())
    if all(len(counts) != 1 for counts in held.values()):  # one request of a key that has no other only needs room
        assert shares.has_room("newcomer", 1000 // (2 + keys) // 2)


@pytest.mark.parametrize("other", ["Bearer of-a-gateway", "Basic Zm9vOmJhcg=="])
def test_a_gateways_authorization_does_not_hide_a_valid_key(other: str) -> None:
    with listening(auth=AUTH) as live:
        assert send(live, "/rank", BODY, {"authorization": other, "x-api-key": "modest"})[0] == 200
        assert send(live, "/rank", BODY, {"authorization": "Bearer modest", "x-api-key": "of-a-gateway"})[0] == 200
        status, content = send(live, "/rank", BODY, {"authorization": other, "x-api-key": "wrong"})
        assert status == 401
        assert b"Authorization: Bearer KEY" in content
        assert b"X-API-Key: KEY" in content
