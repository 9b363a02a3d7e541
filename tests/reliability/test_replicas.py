"""R6 and R7, short: replicas of one stream under changes and kills are equal, to the bit, and what is lost would be seen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from loadtest.servers.balancer import HAPROXY
from loadtest.servers.stream import RedisServer
from loadtest.soak import replicas
from loadtest.soak.replicas import Fleet, fleet, kills, lags, under_load
from tests.zygote import zygote

pytestmark = pytest.mark.skipif(
    not RedisServer.is_installed() or HAPROXY.program is None, reason="needs Debian's redis-server and haproxy"
)


@pytest.fixture(autouse=True, scope="module")
def cheaper() -> Iterator[None]:
    """Fewer users are compared, and corpora are built by a process that has imported torch."""

    def run(command: list[str | Path], **_: object) -> None:
        zygote.run([str(part) for part in command]).check_returncode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "USERS", 100)
        patch.setattr(replicas, "subprocess", SimpleNamespace(run=run))
        yield


@pytest.fixture(scope="module")
def running(cheaper: None) -> Iterator[Fleet]:
    """Replicas that outlive what their tests do to them: what is compared is the whole stream."""
    with fleet() as (made, _):
        yield made


@pytest.fixture
def shared(running: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Have the soak test take those replicas."""
    monkeypatch.setattr(replicas, "fleet", lambda: nullcontext((running, tmp_path)))
    return running


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("shared")
def test_r7_replicas_are_equal_after_kills_of_each_and_of_redis() -> None:
    for row in kills(2, 60, 250):
        assert row.ok, row.to_json()


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("shared")
def test_r6_a_change_reaches_every_replica_within_a_second() -> None:
    written, lag, searches = under_load(2, 500)
    for row in (written, lag):
        assert row.ok, row.to_json()
    assert (searches.tried, searches.failed) >= (800, 0), "milliseconds are judged by the long form"


@pytest.mark.timeout(240)
def test_r6_is_red_where_one_replica_stands_still(shared: Fleet) -> None:
    one = shared.running[0]
    one.pause()
    going_on = threading.Timer(2.0, one.resume)
    going_on.start()
    found = lags(shared, 1.0)
    going_on.join()
    assert np.percentile(found, 99) > 1.0


@pytest.mark.timeout(240)
@pytest.mark.usefixtures("shared")
def test_r7_is_red_without_an_entry() -> None:
    """The last one of these replicas, which are left with a change that their stream has lost."""
    lost, digests, differing = kills(1, 10, 250, spoil=True)
    assert not lost.ok
    assert lost.failed == 0
    assert lost.figure == 3, "each replica has made one more than the stream holds"
    assert digests.ok
    assert not differing.ok
