"""G1 to G3: several processes behind Debian's HAProxy with the shipped configuration."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from loadtest.servers import balancer
from loadtest.soak import cluster

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(balancer.PROGRAM is None, reason="haproxy is not installed: apt-get install haproxy"),
]


@pytest.fixture(scope="module")
def processes() -> Iterator[cluster.Processes]:
    with cluster.two_processes() as processes:
        yield processes


def test_g1_few_users_move_when_a_process_comes_and_no_score_changes(processes: cluster.Processes) -> None:
    for row in cluster.one_more(processes, 300):
        assert row.ok, row


def test_g1_is_red_when_requests_go_anywhere(processes: cluster.Processes) -> None:
    moved, hits, *_ = cluster.one_more(processes, 100, cluster.AT_RANDOM)
    assert not moved.ok
    assert not hits.ok


def test_g2_a_killed_process_loses_no_request(processes: cluster.Processes) -> None:
    row = cluster.deaths(processes, 1)
    assert row.ok, row


def test_g2_is_red_when_a_request_is_sent_once_but_no_more_is_lost_than_was_in_flight(
    processes: cluster.Processes,
) -> None:
    row = cluster.deaths(processes, 1, cluster.SENT_ONCE)
    assert 0 < row.figure <= 2 * cluster.CLIENTS, row  # a lost one's next may still meet the dying socket's queue


def test_g3_a_rolling_update_loses_no_request(processes: cluster.Processes) -> None:
    row = cluster.rolling(processes, (0, 1))
    assert row.ok, row


@pytest.mark.long  # half a minute of a core; that a lost request is seen is the control of G2
def test_g3_is_red_when_a_process_does_not_drain(processes: cluster.Processes) -> None:
    assert not cluster.rolling(processes, (0,), signal.SIGKILL, cluster.SENT_ONCE).ok
