"""The generator keeps its schedule, loses no reply, and shows the waiting that a closed loop hides."""

import asyncio
import time

import numpy as np
import pytest

from loadtest.generate.generator import closed_loop, measured, open_loop, schedule
from loadtest.generate.http_client import FAILURES, Client, precise_loop
from loadtest.generate.payload import post
from loadtest.generate.samples import server_timing
from tests.loadtest.toy_server import ToyServer


def run(coroutine):
    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(coroutine)


def payloads(count):
    return [post("toy", "/rank", str(row).encode()) for row in range(count)]


async def load(server, make_loop, **options):
    """A loop's samples, and how busy the generator was."""
    async with server.serving(), Client("127.0.0.1", server.port, **options) as client:
        return await measured(make_loop(client))


def open_run(server, due, **options):
    return load(server, lambda client: open_loop(client, payloads(len(due)), due), **options)


def failures(samples):
    return {FAILURES[code] for code in samples.failure.tolist()}


def test_poisson_arrivals_have_exponential_gaps_and_constant_ones_equal_gaps():
    gaps = np.diff(schedule("poisson", 1_000, 100))
    assert gaps.mean() == pytest.approx(0.001, rel=0.02)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.02)
    assert np.diff(schedule("constant", 400, 2)) == pytest.approx(np.full(799, 0.0025))
    assert not np.array_equal(schedule("poisson", 100, 1, seed=1)[:20], schedule("poisson", 100, 1, seed=2)[:20])
    with pytest.raises(ValueError, match="positive"):
        schedule("constant", 0, 1)


def test_every_request_is_sent_once_and_answered_once():
    server = ToyServer(headers=["X-Context-Cache: hit", "Server-Timing: parse;dur=0.25, queue;dur=1.5, forward;dur=2"])
    samples, busy = run(open_run(server, schedule("poisson", 500, 1)))
    assert sorted(server.received, key=int) == [str(row).encode() for row in range(len(samples))]
    assert set(samples.status.tolist()) == {200}
    assert set(samples.cache.tolist()) == {1}
    assert samples.stages_ms[0, :3].tolist() == [0.25, 1.5, 2.0]
    assert np.isnan(samples.stages_ms[0, 3])
    assert 0 < busy.cpu_share < 1.2


def test_arrivals_do_not_slow_down_when_the_server_does():
    """It answers none before it has all: who waits for an answer before the next request waits for ever."""
    due = schedule("constant", 200, 0.5)
    samples, _ = run(open_run(ToyServer(hold=len(due)), due))
    assert samples.status.tolist() == [200] * len(due)
    assert samples.sent.max() <= samples.done.min()
    assert (samples.fired >= due).all()


def test_waiting_for_a_connection_counts_as_latency():
    samples, _ = run(open_run(ToyServer(delay_seconds=0.05), schedule("constant", 100, 0.2), max_connections=1))
    assert np.median(samples.service_seconds) < samples.latency_seconds.max() / 2
    assert samples.latency_seconds.max() > 0.6


def test_a_stall_is_hidden_by_a_closed_loop_and_shown_by_the_open_one():
    """Coordinated omission, with the closed loop as the negative control: the same server, the same stall of 0.6 s in 2 s."""

    def stalled(make_loop):
        server = ToyServer(delay_seconds=0.002)

        def make(client):
            server.loop.call_later(0.5, server.stall, 0.6)
            return make_loop(client)

        samples, _ = run(load(server, make))
        return (samples.latency_seconds > 0.3).mean()

    closed = stalled(lambda client: closed_loop(client, payloads(20_000), clients=1, seconds=2))
    due = schedule("constant", 200, 2)
    opened = stalled(lambda client: open_loop(client, payloads(len(due)), due))
    assert closed < 0.05  # one slow request among hundreds
    assert opened > 0.1  # of the users, who came at their time, a sixth waited so long


def test_timeouts_resets_and_refusals_are_samples():
    due = schedule("constant", 100, 0.3)
    samples, _ = run(open_run(ToyServer(delay_seconds=5), due, timeout_seconds=0.2))
    assert failures(samples) == {"timeout"}
    assert set(samples.status.tolist()) == {0}
    assert samples.latency_seconds.max() < 4
    samples, _ = run(open_run(ToyServer(close_after=10), due))
    assert failures(samples) == {"", "reset"}
    assert (samples.status == 200).sum() == 10

    async def nobody():
        server = ToyServer()
        async with server.serving():
            pass
        async with Client("127.0.0.1", server.port) as client:
            return await open_loop(client, payloads(len(due)), due)

    assert failures(run(nobody())) == {"connect"}


def test_rejections_carry_their_retry_after():
    samples, _ = run(open_run(ToyServer(status=429, headers=["Retry-After: 1"]), schedule("constant", 100, 0.2)))
    assert set(samples.status.tolist()) == {429}
    assert samples.retry_after.all()


def test_a_closed_loop_heeds_the_retry_after():
    server = ToyServer(status=429, headers=["Retry-After: 0.2"])
    samples, _ = run(load(server, lambda client: closed_loop(client, payloads(1_000), clients=2, seconds=0.5)))
    assert 4 <= len(samples) <= 6


def test_a_lagging_generator_says_so():
    """Negative control: a loop that is blocked for 30 ms at a time cannot keep the schedule."""
    due = schedule("constant", 200, 0.2)
    blocked = {"on_done": lambda row: time.sleep(0.03)}
    _, busy = run(load(ToyServer(), lambda client: open_loop(client, payloads(len(due)), due, **blocked)))
    assert busy.is_bottleneck


def test_a_pipelining_client_gets_each_reply_on_few_connections_and_one_without_keep_alive_opens_many():
    async def ask(**options):
        server = ToyServer(delay_seconds=0.05)
        async with server.serving(), Client("127.0.0.1", server.port, **options) as client:
            replies = await asyncio.gather(*(client.ask(payload) for payload in payloads(32)))
            return {reply.status for reply in replies}, client.opened, len({reply.port for reply in replies})

    assert run(ask(max_connections=2, depth=16)) == ({200}, 2, 2)
    assert run(ask(max_connections=4, keep_alive=False)) == ({200}, 32, 32)


def test_what_is_pipelined_behind_a_lost_connection_fails():
    async def ask():
        server = ToyServer(close_after=1)
        async with server.serving(), Client("127.0.0.1", server.port, max_connections=1, depth=4) as client:
            return [reply.failure for reply in await asyncio.gather(*(client.ask(each) for each in payloads(4)))]

    assert run(ask()).count("reset") >= 2


def test_server_timing_reads_what_is_there():
    assert server_timing('parse;dur=0.1, queue;desc="x";dur=4, odd, bad;dur=x') == {"parse": 0.1, "queue": 4.0}
