"""Sums over processes: exact, in one series each, and what a process counted stays when it has gone."""

from __future__ import annotations

import random

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry, Gauge

from app.budgets import Budget
from app.telemetry.metrics import Metrics
from app.telemetry.sums import Deltas, Family, Sums

SECONDS = (0.0004, 0.004, 0.04, 3.0)


def count(metrics: Metrics, draw: random.Random) -> None:
    """Something of each kind, as requests do."""
    code = draw.choice(("200", "429"))
    metrics.http_requests.labels("POST", "/rank", code).inc()
    metrics.http_seconds.labels("POST", "/rank").observe(draw.choice(SECONDS))
    metrics.rejected.labels("queue_full").inc(draw.randrange(3))
    metrics.reply_probabilities.record(("favorite", "reply"), np.full((2, 2), draw.random(), np.float32))


def ranker(exposition: bytes) -> list[str]:
    """The lines of our own series: those of the interpreter and the process differ from one to the next."""
    return [line for line in exposition.decode().splitlines() if "ranker_" in line]


def told(families: list[Family]) -> list[Family]:
    """As the other side of a link has them."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(families), type=list[Family])


def test_the_sums_of_several_processes_are_those_of_one_that_did_all() -> None:
    draw, again = random.Random(1), random.Random(1)
    one, own, sums = Metrics(), Metrics(), Sums()
    others = [Metrics() for _ in range(3)]
    deltas = [Deltas(metrics.registry) for metrics in others]
    for turn in range(300):
        metrics = (own, *others)[turn % 4]
        count(metrics, draw)
        count(one, again)
        if turn % 7 == 0:
            sums.add(turn % 3, told(deltas[turn % 3].take()))
    for number, delta in enumerate(deltas):
        sums.add(number, told(delta.take()))
    found, expected = ranker(sums.render(own.registry)), ranker(one.render())
    assert sorted(_rounded(found)) == sorted(_rounded(expected))
    assert any("_bucket" in line for line in found)


def _rounded(lines: list[str]) -> list[str]:
    """Sums of floats depend on the order in the last digit."""
    return [
        f"{line.rpartition(' ')[0]} {float(line.rpartition(' ')[2]):.9g}" if line[0] != "#" else line for line in lines
    ]


def test_buckets_of_a_series_stand_in_their_order() -> None:
    metrics, sums = Metrics(), Sums()
    metrics.http_seconds.labels("GET", "/livez").observe(0.1)
    sums.add(1, Deltas(metrics.registry).take())
    lines = ranker(sums.render(Metrics().registry))
    edges = [
        line.split('le="')[1].split('"')[0] for line in lines if "duration_seconds_bucket{" in line and "/livez" in line
    ]
    assert len(edges) == 19
    assert [float(edge) for edge in edges] == sorted(float(edge) for edge in edges)


def test_what_a_process_counted_stays_and_its_gauges_go() -> None:
    own, other, sums = CollectorRegistry(), Metrics(), Sums()
    Gauge("process_open_fds", "Descriptors.", registry=own).set(5)
    other.http_requests.labels("POST", "/rank", "200").inc(3)
    sums.add("front", Deltas(other.registry).take())
    before = sums.render(own).decode()
    sums.forget("front")
    after = sums.render(own).decode()
    assert 'ranker_http_requests_total{code="200",method="POST",route="/rank"} 3.0' in before
    assert 'ranker_http_requests_total{code="200",method="POST",route="/rank"} 3.0' in after
    [value] = [float(line.split()[1]) for line in before.splitlines() if line.startswith("process_open_fds ")]
    assert value > 5
    assert "process_open_fds 5.0" in after


def test_what_fronts_take_of_their_budgets_is_added_up() -> None:
    sums = Sums()
    for front, used in ((1, 3), (2, 4)):
        metrics = Metrics()
        assert metrics.watch_budget("connections", Budget(10)).take(used)
        sums.add(front, Deltas(metrics.registry).take())
    lines = sums.render(Metrics().registry).decode().splitlines()
    assert 'ranker_budget_used{budget="connections"} 7.0' in lines
    assert 'ranker_budget_limit{budget="connections"} 20.0' in lines


def test_only_what_changed_is_told_until_somebody_new_adds_up() -> None:
    metrics = Metrics()
    deltas = Deltas(metrics.registry)
    metrics.http_requests.labels("POST", "/rank", "200").inc()
    deltas.take()
    names = {family.name for family in deltas.take()}
    assert "ranker_http_requests" not in names
    metrics.http_requests.labels("POST", "/rank", "200").inc(2)
    [family] = [family for family in deltas.take() if family.name == "ranker_http_requests"]
    assert [value for _, _, value in family.samples] == [2.0]
    deltas.tell_all()
    [family] = [family for family in deltas.take() if family.name == "ranker_http_requests"]
    assert [value for _, _, value in family.samples] == [0.0]
