"""B11: connections, bodies being read and replies left unread have room for all callers together, and no more than that."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import repeat
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest

from app.budgets import CHUNK_BYTES, Budget
from app.engine.loading import LoadedRetrieval, RetrievalLoader
from app.errors import Overloaded
from app.interface import Changed
from app.limits import Limits
from loadtest.generate.payload import post, rank_body, rank_request
from loadtest.soak.fake_engine import FakeEngine
from model.retrieval.engine import Users
from model.retrieval.inputs import Answers, PostChange, PostRows, Query
from tests.app import retrieving
from tests.app.bounds import bounded, fix
from tests.reliability.live import Live, asked, closed, connect, live, one_reply, read_all, statuses, wait_until

HALF = (
    b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 500000\r\n\r\n"
    + b" " * 100_000
)


def budget(server: Live, name: str, series: str = "used") -> float:
    """One figure of a budget, as Prometheus sees it."""
    return server.sample(f"ranker_budget_{series}", budget=name)  # type: ignore[return-value]


def logged(server: Live, path: str, status: int) -> float:
    """Requests at this path that were counted, and so logged, with this status."""
    return server.sample("ranker_http_requests_total", method="POST", route=path, code=str(status)) or 0.0


def refusals(server: Live, name: str) -> float:
    return budget(server, name, "refusals_total")


def test_connections_beyond_the_budget_are_closed_as_they_come() -> None:
    with live(FakeEngine(), budgets={"connections": 3}, probes={"port": 0}) as server, ExitStack() as crowd:
        for _ in range(3):
            crowd.enter_context(connect(server.port))
        wait_until(lambda: budget(server, "connections") == 3)
        with connect(server.port) as late:
            assert read_all(late) == b""
        assert (refusals(server, "connections"), closed(server, "too_many")) == (1, 1)
        probes = server.server.listeners[1].socket.getsockname()[1]
        assert httpx.get(f"http://127.0.0.1:{probes}/livez").status_code == 200  # operators are not locked out
        crowd.close()
        wait_until(lambda: budget(server, "connections") == 0)
        with connect(server.port) as sock:
            assert asked(sock, rank_request(1)) == 200


@contextmanager
def half_sent(server: Live, count: int, path: bytes) -> Iterator[list[socket.socket]]:
    """Clients that have sent a fifth of their bodies."""
    with ExitStack() as crowd:
        found = [crowd.enter_context(connect(server.port)) for _ in range(count)]
        for sock in found:
            sock.sendall(HALF % path)
        yield found


@pytest.mark.parametrize("path", [b"/rank", b"/rank/batch", b"/retrieve"])
def test_bodies_beyond_the_budget_are_answered_429(path: bytes, tmp_path: Path) -> None:
    with live(
        FakeEngine(),
        retrieving.loader(tmp_path) if path == b"/retrieve" else None,
        limits=bounded(Limits(), buffered_bytes=250_000),
    ) as server:
        with half_sent(server, 6, path) as crowd:
            wait_until(lambda: refusals(server, "body_bytes") >= 4)
            assert 200_000 < budget(server, "body_bytes") <= 250_000
            replies = [b""] * 6
            for place, sock in enumerate(crowd):
                sock.settimeout(0.3)
                with suppress(TimeoutError):
                    replies[place] = sock.recv(4096)
            assert sorted(statuses(b"".join(replies))) == [429] * 4
            assert (logged(server, path.decode(), 429), logged(server, path.decode(), 499)) == (4, 0)
            with connect(server.port) as sock:
                sock.sendall(rank_request(1))
                assert statuses(one_reply(sock)) == [200]  # a small one still has room
        wait_until(lambda: budget(server, "body_bytes") == 0)


def test_every_way_a_body_ends_gives_its_room_back() -> None:
    batch = post("localhost", "/rank/batch", b"[%b]" % rank_body(1))
    long = post("localhost", "/rank", b" " * 300_000)
    requests = {
        rank_request(1, candidates=2000): 200, rank_request(-1): 422, post("localhost", "/rank", b"{"): 400, batch: 200, long: 400,
        post("localhost", "/rank", b" " * 2_000_000): 413,
    }  # fmt: skip
    with live(FakeEngine()) as server:
        for sent, status in requests.items():
            with connect(server.port) as sock:
                assert asked(sock, sent) == status
                wait_until(lambda: budget(server, "body_bytes") == 0)


def test_a_body_in_tiny_pieces_is_counted_with_what_each_piece_costs() -> None:
    chunked = b"POST /rank HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with live(FakeEngine()) as server, connect(server.port) as sock:
        sock.sendall(chunked)
        for reads in range(1, 21):  # the chunks of one read are one piece
            sock.sendall(b"1\r\n \r\n" * 10)
            wait_until(lambda: budget(server, "body_bytes") == reads * (10 + CHUNK_BYTES))  # noqa: B023


def test_who_leaves_replies_unread_longest_is_cut_off_for_others() -> None:
    """Room for one reply, and the rest of some: how much of each the kernel takes differs from machine to machine."""
    long = rank_request(1, candidates=4000)  # a reply of 581 041 bytes
    with live(FakeEngine()) as server, ExitStack() as crowd:
        server.server.observer.reply_bytes.limit = 600_000

        def leave_unread() -> socket.socket:
            sock = crowd.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(long * 14)
            return sock

        for _ in range(8):
            leave_unread()
            time.sleep(0.3)
            assert budget(server, "reply_bytes") <= 600_000
        assert closed(server, "reply_budget") == refusals(server, "reply_bytes") >= 1
        with connect(server.port) as sock:
            assert asked(sock, long) == 200
        crowd.close()
        wait_until(lambda: budget(server, "reply_bytes") == 0)


def test_what_was_unread_and_is_read_after_all_is_counted_no_more() -> None:
    with live(FakeEngine()) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        sock.settimeout(10)
        sock.sendall(rank_request(1, candidates=4000) * 14)
        wait_until(lambda: budget(server, "reply_bytes") > 0)
        replies = bytearray()
        while not replies.endswith(b"}") or len(statuses(replies)) < 14:
            replies += sock.recv(2**20)
        wait_until(lambda: budget(server, "reply_bytes") == 0)
        assert budget(server, "connections") == 1


def test_without_budgets_all_of_it_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""

    def take_anything(budget: Budget, amount: int) -> bool:
        budget.used += amount
        return True

    monkeypatch.setattr(Budget, "take", take_anything)
    with (
        live(FakeEngine(), limits=bounded(Limits(), buffered_bytes=250_000), budgets={"connections": 1}) as server,
        half_sent(server, 6, b"/rank"),
    ):
        wait_until(lambda: budget(server, "body_bytes") > 600_000)
        assert budget(server, "connections") == 6


STALLS = {"header_seconds": 1.25, "body_seconds": 600.0}


@pytest.mark.parametrize("path", ["/rank", "/rank/batch"])
@pytest.mark.parametrize(
    ("pieces", "size", "expected"), [(10, 5000, 200), (200, 100, 408)], ids=["progress", "trickle"]
)
def test_a_slow_body_is_read_as_long_as_it_makes_progress(pieces: int, size: int, expected: int, path: str) -> None:
    sent = post("localhost", path, rank_body(1) if path == "/rank" else b"[%b]" % rank_body(1))
    head, _, body = sent.partition(b"\r\n\r\n")
    body = b" " * (pieces * size) + body
    head = head.replace(b"Content-Length: ", b"Content-Length: %d\r\nX: " % len(body))
    with live(FakeEngine(), connections=STALLS) as server, connect(server.port) as sock:
        sock.sendall(head + b"\r\n\r\n")
        for start in range(0, pieces * size, size):
            if closed(server, "slow"):
                assert expected == 408
                break
            time.sleep(0.15)
            sock.sendall(body[start : start + size])
        else:
            sock.sendall(body[pieces * size :])
        assert statuses(one_reply(sock)) == [expected]
        wait_until(lambda: logged(server, path, expected) == 1, 5)  # behind the reply


def test_a_body_that_makes_progress_for_ever_is_refused_in_the_end() -> None:
    with live(FakeEngine(), connections=STALLS | {"body_seconds": 1.2}) as server, connect(server.port) as sock:
        sock.sendall((HALF % b"/rank")[:-100_000])
        began = time.monotonic()
        for _ in repeat(None, 300):
            sock.sendall(b" " * 300)
            time.sleep(0.1)
            if closed(server, "slow"):
                break
        assert time.monotonic() - began > 1.0
        assert statuses(one_reply(sock)) == [408]


def gated(load: RetrievalLoader, opened: threading.Event) -> RetrievalLoader:
    """Searches wait for this."""

    def loaded() -> LoadedRetrieval:
        found = load()
        search = found.engine.retrieve

        def retrieve(queries: Sequence[Query], users: Users) -> Answers:
            assert opened.wait(100)
            return search(queries, users)

        vars(found.engine)["retrieve"] = retrieve
        return found

    return loaded


CALLERS, HISTORY = 64, 2000
SEARCHES = {
    "limits": bounded(Limits(max_retrieved=10), max_excluded=10_000),
    "queue": {"max_wait_seconds": 0, "max_candidates": 1000, "max_requests": 4 * CALLERS},
}  # fmt: skip


def waiting(
    patch: pytest.MonkeyPatch, work: Path, history: int, **asked: object
) -> tuple[int, list[int], dict[str, int]]:
    """Bytes that requests for posts hold while they wait for their search, how each ended, and what is stated."""
    posts = {"post_id": list(range(1, history + 1)), "author_id": [1] * history}
    sent = post("localhost", "/recommend", orjson.dumps({"user_id": 1, "k": 10, "history": posts} | asked))
    opened = threading.Event()
    fix(patch, EXCLUDED_IDS=60_000, SCAN_REQUESTS=8, USER_VECTOR_BYTES=0)
    small = {"checkpoint": work / "towers-v1", "corpus": work / "corpus-v1"}
    with (
        live(FakeEngine(), gated(retrieving.loader(work), opened), retrieval=small, **SEARCHES) as server,
        ExitStack() as crowd,
    ):
        retrieval = server.service.retrieval
        callers = [crowd.enter_context(connect(server.port, 60)) for _ in range(CALLERS)]
        wait_until(lambda: budget(server, "connections") == CALLERS)
        gc.collect()
        tracemalloc.start()
        for caller in callers:
            caller.sendall(sent)
        wait_until(lambda: logged(server, "/recommend", 429) + retrieval.queue.admission.requests == CALLERS, 60)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        opened.set()
        ended = [statuses(one_reply(caller))[0] for caller in callers]
        stated = server.service.most_bytes()
    assert retrieval.excluded.used == 0
    return held, ended, stated


EXCLUDED = list(range(10_000, 18_000))


def test_searches_that_wait_hold_no_more_than_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, ended, stated = waiting(monkeypatch, tmp_path, HISTORY, exclude=EXCLUDED)
    assert sorted(ended) == [200] * 6 + [429] * (CALLERS - 6)
    assert held < stated["retrieval"] < 3_000_000


def test_without_the_budget_searches_that_wait_hold_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(Budget, "take", lambda budget, amount: budget.give(-amount) or True)
    held, ended, stated = waiting(monkeypatch, tmp_path, HISTORY, exclude=EXCLUDED)
    assert ended == [200] * CALLERS
    assert held > stated["retrieval"]


def test_a_long_history_is_not_kept_while_its_search_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (waiting(monkeypatch, tmp_path / str(n), n, exclude_history=False)[0] / CALLERS for n in (8, HISTORY))
    assert long < short + 4 * HISTORY, "what is beyond the windows is gone: ids alone would be 16 bytes an item"


def test_changes_of_posts_beyond_the_budget_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change = PostChange(np.array([1], np.uint64), PostRows(*(np.empty(0, np.uint64),) * 2, np.empty(0, np.int64), []))
    fix(monkeypatch, CHANGES=2)
    with live(FakeEngine(), retrieving.loader(tmp_path)) as server:

        async def several() -> list[object]:
            retrieval = server.service.retrieval
            return await asyncio.gather(*(retrieval.change(change) for _ in range(5)), return_exceptions=True)

        ended = server.call(several())
        assert [type(each) for each in ended] == [Changed] * 2 + [Overloaded] * 3
        assert (budget(server, "changes"), refusals(server, "changes")) == (0, 3)
        assert type(server.call(server.service.retrieval.change(change))) is Changed
