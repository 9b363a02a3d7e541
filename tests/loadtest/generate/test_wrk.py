"""What wrk says of a server is read, and bodies that it could not send are refused."""

from __future__ import annotations

import pytest

from loadtest.generate import wrk
from loadtest.servers.bare import bare_server


@pytest.mark.skipif(not wrk.IS_INSTALLED, reason="wrk is not installed (.ci/debian wrk)")
def test_replies_and_latencies_are_read() -> None:
    with bare_server(100) as server:
        reading = wrk.read(f"{server.url}/rank", [b'{"a": 1}', b'{"a": 2}'], 2, 1)
    assert reading.good_per_s > 10
    assert reading.bad_per_s == 0
    assert 0 < reading.p50_ms <= reading.p99_ms < 2000
    assert reading.seconds == pytest.approx(1, abs=0.9)


def test_a_body_with_a_line_break_is_refused() -> None:
    with pytest.raises(ValueError, match="line break"):
        wrk.read("http://127.0.0.1:9/rank", [b'{\n"a": 1}'], 1, 1)
